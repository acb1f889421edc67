"""Which drives, network cards and GPUs sit near each other: pairs, the best of them, and sets that are torn apart.

All of it is worked out from a `Machine`, without asking the system again. Near means: by path class first (PIX before
PXB and so on), then by the firmware's distance between the NUMA nodes, then by the number of PCIe ports on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from gdsstream.machine import Drive, Gpu, Machine, Nic, Stack
from gdsstream.machine.numa import distance
from gdsstream.machine.pci import CLASSES, PathClass, PciDevice, bridges_between, path_class

Device = Gpu | Drive | Nic

# Below a switch that they share, two devices reach each other without the processor.
_BELOW_A_SWITCH: tuple[PathClass, ...] = ("PIX", "PXB")


@dataclass(frozen=True, slots=True)
class Nearest:
    """Those of some devices that are nearest to one.

    Attributes:
        path: the class of the path to them; None if there are none, or the device has no place on PCI.
        names: all with that class and, among them, the shortest NUMA distance, in their order.
        first: those of `names` with the fewest PCIe ports between.
    """

    path: PathClass | None
    names: tuple[str, ...]
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs, drives and cards below one PCIe switch, which reach each other without the processor."""

    gpus: tuple[str, ...]
    drives: tuple[str, ...]
    nics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the drives of a set are from each other.

    Attributes:
        path: the class of the longest path between two of them; None for a set without two drives on PCI.
        parts: the drives by what they share: a switch, else a host bridge, else a NUMA node.
        apart: whether some sit on other NUMA nodes than the rest, so that no GPU is near to them all.
    """

    path: PathClass | None
    parts: tuple[tuple[str, ...], ...]
    apart: bool


def label(device: Device) -> str:
    """What a device is called in tables: "GPU0", "nvme0n1", "mlx5_0"."""
    return f"GPU{device.index}" if isinstance(device, Gpu) else device.name


def between(machine: Machine, a: Device, b: Device) -> PathClass | None:
    """The class of the path between two devices; None where one of them has no place on PCI."""
    if a.pci is None or b.pci is None:
        return None
    return path_class(a.pci, b.pci, nodes=len(machine.nodes))


def matrix(machine: Machine, rows: Sequence[Device], columns: Sequence[Device]) -> list[list[PathClass | None]]:
    """The class of every pair."""
    return [[between(machine, row, column) for column in columns] for row in rows]


def nearest(machine: Machine, device: Device, among: Sequence[Device]) -> Nearest:
    """Those of `among` that are nearest to `device`."""
    ranked = [(_rank(machine, device.pci, one.pci), label(one)) for one in among if device.pci and one.pci]
    if not ranked:
        return Nearest(None, (), ())
    best = min(rank for rank, _ in ranked)
    names = tuple(name for rank, name in ranked if rank[:2] == best[:2])
    return Nearest(CLASSES[best[0]], names, tuple(name for rank, name in ranked if rank == best))


def _rank(machine: Machine, a: PciDevice, b: PciDevice) -> tuple[int, int, int]:
    return (
        CLASSES.index(path_class(a, b, nodes=len(machine.nodes))),
        distance(machine.nodes, a.numa_node, b.numa_node),
        len(bridges_between(a, b)),
    )


def groups(machine: Machine) -> list[Group]:
    """GPUs, drives and cards that share a switch, in the order of the GPUs; groups of one kind alone are left out."""
    devices: list[Device] = [*machine.gpus, *machine.drives, *machine.nics]
    found = []
    for part in _parts(machine, devices, _BELOW_A_SWITCH):
        group = Group(
            tuple(label(one) for one in part if isinstance(one, Gpu)),
            tuple(label(one) for one in part if isinstance(one, Drive)),
            tuple(label(one) for one in part if isinstance(one, Nic)),
        )
        if sum(bool(kind) for kind in (group.gpus, group.drives, group.nics)) > 1:
            found.append(group)
    return found


def spread(machine: Machine, stack: Stack) -> Spread:
    """How far the drives of a set are from each other."""
    drives = [drive for drive in map(machine.drive, stack.disks) if drive and drive.pci]
    paths = [path for a, b in combinations(drives, 2) if (path := between(machine, a, b))]
    if not paths:
        return Spread(None, (), False)
    worst = max(paths, key=CLASSES.index)
    # Split by the longest kind of path there is: what is left together is nearer than that.
    near = CLASSES[: CLASSES.index(worst)]
    parts = _parts(machine, drives, near) if worst not in _BELOW_A_SWITCH else [drives]
    return Spread(worst, tuple(tuple(label(one) for one in part) for part in parts), worst == "SYS")


def links_below_best(machine: Machine) -> list[str]:
    """A sentence for each device whose link lost lanes or speed; GPUs that merely sleep are left out."""
    found = []
    devices: list[Device] = [*machine.gpus, *machine.drives, *machine.nics]
    for one in devices:
        link = one.pci.link if one.pci else None
        if one.pci is None or link is None or not (link.narrow or (link.slow and not isinstance(one, Gpu))):
            continue
        found.append(
            f"{label(one)} ({one.pci.address}) runs at {link.text()} where {link.text(best=True)} is possible: "
            "reseat it, or see whether its slot shares lanes"
        )
    return found


def _parts(machine: Machine, devices: Iterable[Device], near: Sequence[PathClass]) -> list[list[Device]]:
    """The devices, put together where the path between them is one of `near`.

    To share a root port, a host bridge or a node is the same for all that do, so that one of a part speaks for it.
    """
    parts: list[list[Device]] = []
    for device in devices:
        if device.pci is None:
            continue
        mine = next((part for part in parts if between(machine, device, part[0]) in near), None)
        if mine is None:
            parts.append([device])
        else:
            mine.append(device)
    return parts


__all__ = [
    "Device",
    "Group",
    "Nearest",
    "Spread",
    "between",
    "groups",
    "label",
    "links_below_best",
    "matrix",
    "nearest",
    "spread",
]
