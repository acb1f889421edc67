"""PCI devices from sysfs: where each hangs, its NUMA node, its link, and how far two of them are apart.

A device's real path in sysfs spells out the bridges above it, from the host bridge down:

    /sys/devices/pci0000:2b/0000:2b:00.0/0000:2c:00.0/0000:2d:00.0/0000:2e:00.0
                 host bridge  root port    switch: up   switch: down  the device

so that the path between two devices goes up to the last bridge that both paths share, and down again. Path classes
are those of `nvidia-smi topo`: PIX, at most one switch between them; PXB, several switches, no host bridge; PHB,
through the host bridge; NODE, between host bridges of one NUMA node; SYS, between NUMA nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gdsstream.machine.tree import Tree

PathClass = Literal["X", "PIX", "PXB", "PHB", "NODE", "SYS"]
CLASSES: tuple[PathClass, ...] = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")

NVIDIA = 0x10DE
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_DEVICES = "/sys/bus/pci/devices"
# Bits a lane carries of each transfer: 8b/10b up to 5 GT/s, 128b/130b up to 32, flits of 242 in 256 bytes at 64.
_ENCODING = ((5.0, 8 / 10), (32.0, 128 / 130), (128.0, 242 / 256))


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link: GT/s and lanes; None where the system does not tell.

    `max_speed` and `max_width` are what both of its ends can do, where both are known.
    """

    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None

    @property
    def bytes_per_s(self) -> float | None:
        """What the lanes carry now, after the encoding; packet headers take another few per cent."""
        return _rate(self.speed, self.width)

    @property
    def max_bytes_per_s(self) -> float | None:
        """The same at the link's best."""
        return _rate(self.max_speed, self.max_width)

    @property
    def narrow(self) -> bool:
        """Whether it runs on fewer lanes than it could: a card that sits badly, or a slot that shares its lanes."""
        return self.width is not None and self.max_width is not None and self.width < self.max_width

    @property
    def slow(self) -> bool:
        """Whether it runs below its best speed; idle GPUs do so to save power, and speed up under load."""
        return self.speed is not None and self.max_speed is not None and self.speed < self.max_speed

    def text(self, *, best: bool = False) -> str:
        """ "32 GT/s x16", as it runs or at its best; "?" for what the system does not tell."""
        speed, width = (self.max_speed, self.max_width) if best else (self.speed, self.width)
        return f"{'?' if speed is None else f'{speed:g}'} GT/s x{'?' if width is None else width}"


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One PCI function.

    Attributes:
        address: "0000:3b:00.0", in lower case.
        kind: the class code, such as 0x010802 for NVMe.
        vendor, device: ids.
        numa_node: None where the system does not tell.
        link: None for what has no PCIe link of its own.
        parents: what is above it, from the host bridge ("pci0000:2b") down to the port it hangs on.
    """

    address: str
    kind: int
    vendor: int
    device: int
    numa_node: int | None
    link: Link | None
    parents: tuple[str, ...]

    @property
    def base_class(self) -> int:
        """The upper byte of the class code: 1 storage, 2 network, 3 display, 6 bridge."""
        return self.kind >> 16

    @property
    def ids(self) -> str:
        """ "10de:2335", for lookups."""
        return f"{self.vendor:04x}:{self.device:04x}"


def scan(tree: Tree) -> dict[str, PciDevice]:
    """Every PCI function by address, in the order of addresses."""
    found: dict[str, PciDevice] = {}
    for name in sorted(tree.listdir(_DEVICES), key=address_key):
        where = tree.readlink(f"{_DEVICES}/{name}")
        if where is None or not _ADDRESS.fullmatch(name):
            continue
        found[name] = _device(tree, where)
    return found


def _device(tree: Tree, where: str) -> PciDevice:
    *above, address = chain(where)
    node = tree.read_int(f"{where}/numa_node")
    return PciDevice(
        address=address,
        kind=tree.read_int(f"{where}/class") or 0,
        vendor=tree.read_int(f"{where}/vendor") or 0,
        device=tree.read_int(f"{where}/device") or 0,
        numa_node=node if node is not None and node >= 0 else None,
        link=_link(tree, where),
        parents=tuple(above),
    )


def chain(sysfs_path: str) -> tuple[str, ...]:
    """The host bridges and PCI addresses in a device's real path, from the top down; other parts are left out."""
    return tuple(part for part in sysfs_path.split("/") if _ADDRESS.fullmatch(part) or _HOST_BRIDGE.fullmatch(part))


def address_of(sysfs_path: str) -> str | None:
    """The PCI function that whatever lies at this real path hangs on, if there is one."""
    above = [part for part in chain(sysfs_path) if _ADDRESS.fullmatch(part)]
    return above[-1] if above else None


def address_key(address: str) -> tuple[int, ...]:
    """Sorts addresses as numbers: domains may have more than four digits."""
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-fA-F]+", address))


def _link(tree: Tree, where: str) -> Link | None:
    def ends(attribute: str) -> tuple[float | None, float | None]:
        """At the device, and at the port above it."""
        return (
            _number(tree.read(f"{where}/{attribute}")),
            _number(tree.read(f"{where.rpartition('/')[0]}/{attribute}")),
        )

    speed, _ = ends("current_link_speed")
    width, _ = ends("current_link_width")
    best_speed, best_width = _least(ends("max_link_speed")), _least(ends("max_link_width"))
    if speed is None and best_speed is None and best_width is None:
        return None
    return Link(speed, _lanes(width), best_speed, _lanes(best_width))


def _number(text: str | None) -> float | None:
    """The number that "16.0 GT/s PCIe" and "16" begin with; None for "Unknown"."""
    match = re.match(r"\d+(\.\d+)?", text or "")
    return float(match[0]) if match and float(match[0]) > 0 else None


def _lanes(width: float | None) -> int | None:
    # 255 is what a port without a link says.
    return int(width) if width is not None and width <= 64 else None


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None and value < 255), default=None)


def _rate(speed: float | None, width: int | None) -> float | None:
    if speed is None or width is None:
        return None
    share = next((share for limit, share in _ENCODING if speed <= limit), _ENCODING[-1][1])
    return speed * 1e9 * share / 8 * width


def path_class(a: PciDevice, b: PciDevice, *, nodes: int = 1) -> PathClass:
    """How the bytes go from `a` to `b`, in the classes of `nvidia-smi topo`.

    `nodes` is the number of NUMA nodes of the machine: on one node alone, devices that name no node are on that one.
    """
    if a.address == b.address:
        return "X"
    common = shared(a, b)
    if not common:
        same = a.numa_node == b.numa_node if None not in (a.numa_node, b.numa_node) else nodes <= 1
        return "NODE" if same else "SYS"
    if _HOST_BRIDGE.fullmatch(common[-1]):
        return "PHB"
    # Below the bridge that both share, a device behind the same switch has one port of that switch above it at most.
    between = max(len(one.parents) - len(common) for one in (a, b))
    return "PIX" if between <= 1 else "PXB"


def shared(a: PciDevice, b: PciDevice) -> tuple[str, ...]:
    """What is above both, from the host bridge down."""
    common = []
    for one, other in zip(a.parents, b.parents, strict=False):
        if one != other:
            break
        common.append(one)
    return tuple(common)


def bridges_between(a: PciDevice, b: PciDevice) -> tuple[str, ...]:
    """The ports that bytes pass between the two, in that order; a switch that only forwards counts with its ports.

    Without the host bridges: where two devices share none, or only a host bridge, the way goes up to both root ports.
    """
    common = shared(a, b)
    top = () if not common or _HOST_BRIDGE.fullmatch(common[-1]) else (common[-1],)
    up = tuple(one for one in reversed(a.parents[len(common) :]) if not _HOST_BRIDGE.fullmatch(one))
    down = tuple(one for one in b.parents[len(common) :] if not _HOST_BRIDGE.fullmatch(one))
    return (*up, *top, *down)


__all__ = [
    "CLASSES",
    "NVIDIA",
    "Link",
    "PathClass",
    "PciDevice",
    "address_key",
    "address_of",
    "bridges_between",
    "chain",
    "path_class",
    "scan",
    "shared",
]
