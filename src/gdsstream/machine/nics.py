"""Network cards: RDMA devices with their interfaces, and plain interfaces on PCI."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gdsstream.machine.names import natural
from gdsstream.machine.pci import PciDevice, address_of
from gdsstream.machine.tree import Tree

_RDMA = "/sys/class/infiniband"
_NET = "/sys/class/net"


@dataclass(frozen=True, slots=True)
class Nic:
    """One card, or one function of it.

    Attributes:
        name: the RDMA device ("mlx5_0"), else the interface ("eth0").
        rdma: whether it is an RDMA device.
        interfaces: its network interfaces.
        pci: its PCI function; None for one that is not on PCI.
        gbit_per_s: the rate of its fastest port, 10^9 bits a second; None if it is down or does not tell.
        up: whether a port of it is up.
    """

    name: str
    rdma: bool
    interfaces: tuple[str, ...]
    pci: PciDevice | None
    gbit_per_s: float | None
    up: bool


def scan(tree: Tree, devices: dict[str, PciDevice]) -> list[Nic]:
    """RDMA devices, then the interfaces on PCI that belong to none of them; both in the order of their names."""
    interfaces: dict[str, list[str]] = {}
    for name in sorted(tree.listdir(_NET), key=natural):
        address = address_of(tree.readlink(f"{_NET}/{name}/device") or "")
        if address is not None:
            interfaces.setdefault(address, []).append(name)
    nics = []
    for name in sorted(tree.listdir(_RDMA), key=natural):
        address = address_of(tree.readlink(f"{_RDMA}/{name}/device") or "") or ""
        own = tuple(interfaces.pop(address, ()))
        nics.append(Nic(name, True, own, devices.get(address), *_ports(tree, name)))
    for address, names in interfaces.items():
        nics.extend(Nic(name, False, (name,), devices.get(address), *_interface(tree, name)) for name in names)
    return nics


def _ports(tree: Tree, name: str) -> tuple[float | None, bool]:
    rates = []
    for port in tree.listdir(f"{_RDMA}/{name}/ports"):
        folder = f"{_RDMA}/{name}/ports/{port}"
        rate = re.match(r"\d+(\.\d+)?", tree.read(f"{folder}/rate") or "")  # "200 Gb/sec (4X HDR)"
        if "ACTIVE" in (tree.read(f"{folder}/state") or ""):
            rates.append(float(rate[0]) if rate else 0.0)
    return (max(rates) or None, True) if rates else (None, False)


def _interface(tree: Tree, name: str) -> tuple[float | None, bool]:
    up = tree.read(f"{_NET}/{name}/operstate") == "up"
    # A virtual card says -1, and one that is down refuses to say: neither is a failure.
    speed = re.match(r"\d+", tree.read(f"{_NET}/{name}/speed") or "") if up else None
    return (int(speed[0]) / 1000 if speed else None), up


__all__ = ["Nic", "scan"]
