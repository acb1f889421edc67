"""The ceiling of each station that bytes pass between a path and a device, and the station that binds.

    drives -> (switches) -> file system, or network card -> host memory -> (NUMA hop) -> PCIe link -> GPU memory

A chain is as fast as its slowest station: min(drives, network, PCIe, GPU memory). Each station has up to two figures:
what its links carry by their specification (`link_rates`), and what bare reads and copies reached here (`ceilings`).
Where there are both, what was measured counts: a specification knows nothing of the flash behind a link. And a
specification that is lower than what was measured through it does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from gdsstream import _native, ceilings, storage
from gdsstream.affinity import links_below_best
from gdsstream.ceilings import MIB, Measured
from gdsstream.devices import device_name, driver_replaced, memory_rate, parse_device
from gdsstream.errors import MemoryBudgetError
from gdsstream.link_rates import nic_rate, pcie_rate, set_rate, way_up
from gdsstream.machine import Machine, PciDevice, probe
from gdsstream.machine.names import runs
from gdsstream.machine.numa import distance
from gdsstream.rates import Rate
from gdsstream.rates import Station as RateName
from gdsstream.sample_files import SampleFiles
from gdsstream.storage import StorageInfo
from gdsstream.topology import node_cpus

#: A file has to have that much, so that a few threads have a block each.
LEAST_BYTES = 8 * MIB
_SECONDS = 15.0
# What the reads of the file system pass.
_THROUGH = ("drives", "switches", "network")


@dataclass(frozen=True, slots=True)
class Station:
    """One station; rates in bytes a second.

    Attributes:
        name: "drives", "switches", "file system", "network", "page cache", "NUMA hop", "PCIe link", "GPU memory".
        which: the devices.
        specified: by its specification; None where there is none.
        formula: how that was worked out, or why there is none.
        measured: what was reached here; None where it was not measured.
        why_not: why it was not.
        counts: whether bytes pass it that come from the storage, so that it can bind.
    """

    name: str
    which: str
    specified: float | None = None
    formula: str = ""
    measured: Measured | None = None
    why_not: str = ""
    counts: bool = True

    @property
    def limit(self) -> float | None:
        """What counts: measured, else specified."""
        return self.measured.rate if self.measured else self.specified


@dataclass(frozen=True, slots=True)
class Limits:
    """The stations between a path and a device, in the order in which bytes pass them.

    Attributes:
        path, device: as asked for.
        info: what the path sits on.
        stations: all of them.
        read_bytes: what was read from the storage for it, at most.
        notes: what a reader of the figures should know.
    """

    path: str
    device: str
    info: StorageInfo
    stations: tuple[Station, ...]
    read_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def binding(self) -> Station | None:
        """The slowest station that counts; None where nothing is known of any."""
        return self.ranking[0] if self.ranking else None

    @property
    def ranking(self) -> list[Station]:
        """The stations that count and of which something is known, the slowest first."""
        return sorted((one for one in self.stations if one.counts and one.limit), key=lambda one: one.limit or 0.0)

    def station(self, name: str) -> Station | None:
        """The station of that name."""
        return next((one for one in self.stations if one.name == name), None)

    def rates(self) -> dict[RateName, Rate]:
        """What was measured of storage and link, for `rates.rates_for`; what was not measured is not there."""
        names: dict[RateName, str] = {"storage": "file system", "link": "PCIe link"}
        found = {rate: self.station(name) for rate, name in names.items()}
        return {
            rate: Rate(one.measured.rate, f"measured: {one.measured.how}", "measured")
            for rate, one in found.items()
            if one is not None and one.measured is not None
        }


@dataclass(frozen=True, slots=True)
class Target:
    """Where the bytes go: `pci` of a GPU, its `name`, and its memory's rate by its driver, with the formula."""

    device: torch.device
    pci: PciDevice | None = None
    name: str = ""
    memory: tuple[float, str] | None = None

    @property
    def label(self) -> str:
        """ "cuda:0, H200"."""
        return f"{self.device}, {self.name.removeprefix('NVIDIA ')}" if self.name else str(self.device)


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured, by station, and why not where it was not."""

    found: Mapping[str, Measured] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


def limits(path: str | os.PathLike[str], device: torch.device | str | int, *, seconds: float = _SECONDS) -> Limits:
    """Look at the machine, and measure what can be: `seconds` for the storage, a few more for copies.

    Reads at most `ceilings.storage_bytes` from the files at `path`, and drops them from the page cache on the way.

    Raises ReadError where the path cannot be reached or read, ConfigError for too small files and for devices that
    cannot be, BackendUnavailableError where there is no CUDA.
    """
    where = parse_device(device)
    sample = SampleFiles(path, LEAST_BYTES)
    info = storage.describe(sample.files[0][0])
    machine = probe()
    target = Target(where)
    if where.type == "cuda" and not driver_replaced():
        pci = machine.pci.get(_native.pci_bus_id(where.index).lower())
        target = Target(where, pci, device_name(where), memory_rate(where))
    found = stations(machine, info, target, _measure(sample, info, machine, target, seconds))
    read = 0 if info.is_memory else ceilings.storage_bytes(sample)
    return Limits(os.fspath(path), str(where), info, found, read, tuple(_notes(machine, info, sample, target.pci)))


def stations(machine: Machine, info: StorageInfo, target: Target, measured: Measurements) -> tuple[Station, ...]:
    """The stations of a machine, with their specifications and with what was measured."""
    found: list[Station] = []

    through = measured.found.get("file system")

    def add(name: str, which: str, specified: float | None, formula: str, *, counts: bool = True) -> None:
        if name in _THROUGH and through is not None and specified is not None and specified < through.rate:
            formula, counts = f"{formula}: exceeded, so not what it is", False
        one, why = measured.found.get(name), measured.missing.get(name, "")
        found.append(Station(name, which, specified, formula, one, why, counts))

    drives = [drive for drive in map(machine.drive, info.disks) if drive]
    if info.is_network:
        nics = [nic for nic in machine.nics if nic.up]
        nics = [nic for nic in nics if nic.rdma] or nics
        rates = [rate for rate in map(nic_rate, nics) if rate is not None]
        formula = (
            f"{len(rates)} of them, if all are used: line rate less headers" if rates else "no card tells its rate"
        )
        add("network", runs([nic.name for nic in nics]), sum(rates) or None, formula)
    elif not info.is_memory:
        add("drives", _drives(info), *set_rate(drives, info.raid_level))
        rate, port = way_up(drives, machine.pci)
        if rate is not None:
            add("switches", port, rate, "what the drives' ports share on the way to the processor")
    add("file system", f"{info.filesystem} on {info.mount_point or '?'}", None, "")
    if not info.is_memory:
        add("page cache", "what is cached", None, "", counts=False)
    if target.device.type == "cuda":
        hop = _hop(machine, info, target.pci)
        if hop is not None:
            apart = distance(machine.nodes, *hop)
            add("NUMA hop", f"node {hop[0]} to {hop[1]}", None, f"the system tells the distance only ({apart})")
        link = target.pci.link if target.pci else None
        formula = f"{link.text(best=True)}, 256 bytes of data in 280" if link else "no PCIe link to be seen"
        add("PCIe link", target.label, pcie_rate(link, awake=True), formula)
        rate, formula = target.memory or (None, "the driver does not tell clock and width")
        add("GPU memory", target.label, rate, formula)
    return tuple(found)


def _drives(info: StorageInfo) -> str:
    drives = runs(info.disks)
    return drives if not info.device or info.disks == (info.device,) or not info.disks else f"{info.device} ({drives})"


def _hop(machine: Machine, info: StorageInfo, gpu: PciDevice | None) -> tuple[int, int] | None:
    """The nodes of drives and GPU, where they are known and differ."""
    if gpu is None or gpu.numa_node is None or info.numa_node is None or len(machine.nodes) < 2:
        return None
    return (info.numa_node, gpu.numa_node) if info.numa_node != gpu.numa_node else None


def _measure(
    sample: SampleFiles,
    info: StorageInfo,
    machine: Machine,
    target: Target,
    seconds: float,
) -> Measurements:
    device, gpu = target.device, target.pci
    found: dict[str, Measured] = {}
    missing: dict[str, str] = {}
    if info.is_memory:
        found["file system"] = ceilings.cached(sample)
    else:
        direct = bool(info.direct_io) and max(info.memory_alignment, info.offset_alignment) <= 4096
        found["file system"] = ceilings.storage(sample, direct=direct, seconds=seconds)
        found["page cache"] = ceilings.cached(sample)
        for name in ("drives", "network", "switches"):
            missing[name] = "see the file system"
    if device.type != "cuda" or driver_replaced():
        return Measurements(found, missing)

    def attempt(name: str, measure: Callable[[], Measured | None], why_not: str = "") -> None:
        try:
            one = measure()
        except (RuntimeError, MemoryBudgetError) as error:  # torch's own: no room, or no pinned memory
            missing[name] = str(error).splitlines()[0]
            return
        if one is None:
            missing[name] = why_not
        else:
            found[name] = one

    near = node_cpus(gpu.numa_node) if gpu and gpu.numa_node is not None else []
    attempt("PCIe link", lambda: ceilings.pinned_copy(device, cpus=near))
    attempt("GPU memory", lambda: ceilings.device_copy(device))
    if (hop := _hop(machine, info, gpu)) is not None:
        attempt("NUMA hop", lambda: ceilings.node_copy(*hop), "no core of both nodes is ours")
    return Measurements(found, missing)


def _notes(machine: Machine, info: StorageInfo, sample: SampleFiles, gpu: PciDevice | None) -> list[str]:
    notes = []
    mine = {*info.disks, *(f"GPU{one.index}" for one in machine.gpus if gpu and one.pci.address == gpu.address)}
    notes += [text for text in links_below_best(machine) if text.split(" ", 1)[0] in mine]
    if info.is_memory:
        notes.append(f"{info.filesystem} is in memory: this says nothing of a disk")
    if info.is_network:
        notes.append("which cards the mount uses is not to be seen from here; the server and its drives are unknown")
    if info.raid_level == "raid1":
        notes.append("raid1 reads one stream from one drive; only several at once use them all")
    if sample.sparse:
        names = ", ".join(os.path.basename(name) for name in sample.sparse[:3])
        notes.append(f"{names}: has fewer blocks than bytes (holes, or compressed), which reads faster")
    if machine.virtual:
        notes.append(
            "this is a virtual machine: links are what the hypervisor shows, and drives are shared with others"
        )
    return notes


__all__ = ["LEAST_BYTES", "Limits", "Measurements", "Station", "Target", "limits", "stations"]
