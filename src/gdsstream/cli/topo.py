"""`gdsstream topo`: the machine's GPUs, drives, cards and nodes, and the PCIe between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gdsstream.cli import cells
from gdsstream.cli.cells import size
from gdsstream.cli.output import Block, Cell, Column, Lines, Marked, Report, Status, Table, emit, json_option
from gdsstream.machine.names import runs

if TYPE_CHECKING:
    from gdsstream.affinity import Nearest
    from gdsstream.machine import Drive, Machine, PciDevice
    from gdsstream.machine.pci import Link, PathClass

_LEGEND = (
    "PIX: at most one PCIe switch between them; PXB: several switches; PHB: through the host bridge;\n"
    "NODE: between host bridges of one NUMA node; SYS: between NUMA nodes; -: not on PCI"
)
_CLASS_STATUS = {"PIX": Status.OK, "PXB": Status.OK, "SYS": Status.WARNING}


@click.command("topo")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False),
    default="/",
    help="Look at the sys and proc trees recorded below this folder instead of this machine's.",
)
@json_option
def command(root: str, as_json: bool) -> None:
    """Which drives, network cards and GPUs sit near each other, and where a set is torn apart.

    Everything is read from sysfs: no root rights, no lspci and no driver are needed. GPUs are numbered by PCI
    address, as nvidia-smi does (CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID).

    The path between two devices is classed as `nvidia-smi topo` does, from near to far: PIX, PXB, PHB, NODE, SYS. GPUs
    and drives below one switch (PIX, PXB) reach each other without the processor, which is where GPUDirect Storage
    gains most.
    """
    from gdsstream.machine import probe

    emit(report(probe(root)), as_json=as_json)


def report(machine: Machine) -> Report:
    """What `topo` says about a machine."""
    from gdsstream.cli.topo_json import topo_data

    return Report("topo", topo_data(machine), _blocks(machine))


# --- for people -----------------------------------------------------------------------------------------------------


def _blocks(machine: Machine) -> list[Block]:
    from gdsstream.affinity import groups

    blocks: list[Block] = [_gpus(machine), _drives(machine)]
    if machine.stacks:
        blocks.append(_stacks(machine))
    blocks.append(_nics(machine))
    if len(machine.nodes) > 1:
        blocks.append(_nodes(machine))
    if shared := groups(machine):
        rows = [[runs(group.gpus), runs(group.drives), runs(group.nics)] for group in shared]
        columns = [Column(name, wrap=True) for name in ("GPUs", "drives", "NICs")]
        blocks.append(Table(columns, rows, title="Below one PCIe switch"))
    if machine.gpus:
        blocks.append(_matrix(machine))
    if notes := _notes(machine):
        blocks.append(Lines(notes, title="Notes"))
    return blocks


def _gpus(machine: Machine) -> Table:
    from gdsstream.affinity import nearest

    rows = []
    for gpu in machine.gpus:
        drives, nics = nearest(machine, gpu, machine.drives), nearest(machine, gpu, machine.nics)
        rows.append(
            [
                str(gpu.index),
                _short(gpu.name),
                *_place(gpu.pci),
                _link(gpu.pci.link, sleeps=True),
                _near(drives),
                _near(nics),
            ]
        )
    columns: list[Column | str] = [
        Column("GPU", "right"),
        Column("name", wrap=True),
        "PCI",
        Column("node", "right"),
        "link",
        Column("nearest drives", wrap=True),
        Column("nearest NICs", wrap=True),
    ]
    asleep = any(gpu.pci.link and gpu.pci.link.slow and not gpu.pci.link.narrow for gpu in machine.gpus)
    note = "An idle GPU slows its link down to save power; under load it speeds up again." if asleep else ""
    return Table(columns, rows, title="GPUs", note=note, empty="no NVIDIA GPU on the PCI bus")


def _drives(machine: Machine) -> Table:
    from gdsstream.affinity import nearest

    rows: list[list[Cell]] = []
    for drive in machine.drives:
        best = nearest(machine, drive, machine.gpus)
        rows.append(
            [
                drive.name,
                _short(drive.model or drive.transport),
                size(drive.nbytes),
                *(_place(drive.pci) if drive.pci else ("-", _node(drive.numa_node))),
                _link(drive.pci.link if drive.pci else None),
                _near(best, "GPU"),
                _used(machine, drive),
            ]
        )
    columns: list[Column | str] = [
        "drive",
        Column("model", wrap=True),
        Column("size", "right"),
        "PCI",
        Column("node", "right"),
        "link",
        Column("nearest GPUs", wrap=True),
        Column("used by", wrap=True),
    ]
    return Table(columns, rows, title="Drives", empty="no disks in /sys/class/block")


def _stacks(machine: Machine) -> Table:
    from gdsstream.affinity import spread

    rows: list[list[Cell]] = []
    for stack in machine.stacks:
        how = spread(machine, stack)
        state: Cell = f"{stack.degraded} missing" if stack.degraded else how.path or "-"
        if stack.degraded or how.apart:
            state = Marked(str(state), Status.WARNING)
        mounted = ", ".join(machine.mounted_at(stack)) or "-"
        rows.append([stack.name, stack.kind, size(stack.nbytes), runs(stack.members), state, mounted])
    columns: list[Column | str] = [
        "set",
        "level",
        Column("size", "right"),
        Column("members", wrap=True),
        "longest path",
        Column("mounted at", wrap=True),
    ]
    return Table(columns, rows, title="RAID sets and mapped volumes")


def _nics(machine: Machine) -> Table:
    from gdsstream.affinity import nearest

    rows: list[list[Cell]] = []
    for nic in machine.nics:
        rate = f"{nic.gbit_per_s:g} Gb/s" if nic.gbit_per_s else "-" if nic.up else "down"
        place = _place(nic.pci) if nic.pci else ("-", "-")
        link = _link(nic.pci.link if nic.pci else None)
        rows.append(
            [nic.name, ", ".join(nic.interfaces), rate, *place, link, _near(nearest(machine, nic, machine.gpus), "GPU")]
        )
    columns: list[Column | str] = [
        "NIC",
        "interfaces",
        Column("rate", "right"),
        "PCI",
        Column("node", "right"),
        "link",
        Column("nearest GPUs", wrap=True),
    ]
    return Table(columns, rows, title="Network cards", empty="none on PCI")


def _nodes(machine: Machine) -> Table:
    rows = []
    for node in machine.nodes:
        here = [f"GPU{gpu.index}" for gpu in machine.gpus if gpu.pci.numa_node == node.index]
        here += [drive.name for drive in machine.drives if drive.numa_node == node.index]
        here += [nic.name for nic in machine.nics if nic.pci and nic.pci.numa_node == node.index]
        far = " ".join(str(node.distances.get(other.index, "-")) for other in machine.nodes)
        rows.append([str(node.index), node.cpus, size(node.memory_bytes), far, runs(here)])
    columns: list[Column | str] = [
        Column("node", "right"),
        Column("cores", wrap=True),
        Column("memory", "right"),
        "distances",
        Column("devices", wrap=True),
    ]
    return Table(columns, rows, title="NUMA nodes")


def _matrix(machine: Machine) -> Table:
    from gdsstream.affinity import Device, label, matrix

    rows: list[Device] = [*machine.gpus, *machine.drives, *machine.nics]
    cells = matrix(machine, rows, machine.gpus)
    marked = [[label(row), *(_class(path) for path in line)] for row, line in zip(rows, cells, strict=True)]
    columns: list[Column | str] = ["GPU", *(str(gpu.index) for gpu in machine.gpus)]
    return Table(columns, marked, title="Paths to each GPU", note=_LEGEND, gap=1 if len(machine.gpus) > 12 else 2)


def _notes(machine: Machine) -> list[Cell]:
    from gdsstream.affinity import links_below_best, spread

    notes: list[Cell] = []
    for stack in machine.stacks:
        how = spread(machine, stack)
        if how.apart:
            parts = " | ".join(runs(part) for part in how.parts)
            notes.append(
                Marked(
                    f"- {stack.name} ({stack.kind}): its members sit on different NUMA nodes ({parts}): whichever GPU "
                    "reads it, part of the bytes cross between nodes. For one GPU, make a set of the drives near it.",
                    Status.WARNING,
                )
            )
        if stack.degraded:
            text = (
                f"{stack.name} ({stack.kind}): {stack.degraded} member(s) missing; see mdadm --detail /dev/{stack.name}"
            )
            notes.append(Marked(f"- {text}", Status.WARNING))
    notes += [Marked(f"- {text}", Status.WARNING) for text in links_below_best(machine)]
    if machine.virtual:
        notes.append(
            "- This is a virtual machine: the PCIe tree is what the hypervisor shows, and may not be the hardware's."
        )
    notes += [Marked(f"- {path} could not be read: {why}", Status.WARNING) for path, why in machine.tree.failures]
    return notes


# --- cells ----------------------------------------------------------------------------------------------------------


def _class(path: PathClass | None) -> Cell:
    if path is None:
        return "-"
    return Marked(path, _CLASS_STATUS[path]) if path in _CLASS_STATUS else path


def _near(best: Nearest, prefix: str = "") -> Cell:
    if best.path is None:
        return "-"
    text = f"{runs([name.removeprefix(prefix) for name in best.names])} ({best.path})"
    if len(best.first) < len(best.names):
        text += f", first {runs([name.removeprefix(prefix) for name in best.first])}"
    return Marked(text, Status.WARNING) if best.path == "SYS" else text


def _place(device: PciDevice) -> tuple[str, str]:
    return device.address.removeprefix("0000:"), _node(device.numa_node)


def _node(node: int | None) -> str:
    return "-" if node is None else str(node)


def _link(one: Link | None, *, sleeps: bool = False) -> Cell:
    text = cells.link(one)
    return Marked(text, Status.WARNING) if one and (one.narrow or (one.slow and not sleeps)) else text


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ")


def _used(machine: Machine, drive: Drive) -> str:
    sets = [stack.name for stack in machine.stacks if drive.name in stack.disks]
    return ", ".join([*sets, *machine.mounted_at(drive)]) or "-"


__all__ = ["command", "report"]
