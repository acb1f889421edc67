"""What links carry by their specification, in bytes a second: PCIe, network cards, RAID sets. Pure.

A link's rate is what its lanes carry; what arrives is less, since every packet has a head. The shares below are those
of the largest packets that are common, so that they are ceilings: no setting of software gets above them.

PCIe   lanes x GT/s x encoding (`machine.pci.Link`), and of each packet 256 bytes of data in 280: framing and sequence
       number 4, header 16 (64-bit addresses), LCRC 4 (PCI Express Base Specification, transaction and data link layer).
       32 GT/s x16: 63.0 -> 57.6 GB/s, of which pinned copies to an H200 reach 55.5.
RDMA   line rate, and of each packet 4096 bytes in 4178: RoCE v2 adds 82 (preamble and gap 20, Ethernet with checksum
       18, IPv4 20, UDP 8, BTH 12, ICRC 4).
other  1448 bytes in 1538: TCP with timestamps in Ethernet frames of 1500.
RAID   what holds data, at the pace of the slowest drive: all drives of raid0, raid1 and raid10, all but one of raid4
       and raid5, all but two of raid6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

from gdsstream.machine.drives import Drive
from gdsstream.machine.nics import Nic
from gdsstream.machine.pci import Link, PciDevice

PCIE_SHARE = 256 / 280
RDMA_SHARE = 4096 / 4178
TCP_SHARE = 1448 / 1538
_PARITY = {"raid4": 1, "raid5": 1, "raid6": 2}


def pcie_rate(link: Link | None, *, awake: bool = False) -> float | None:
    """Bytes a second of data over a PCIe link; `awake`: at its best speed, which an idle GPU does not show."""
    if link is None:
        return None
    speed = link.max_speed if awake and link.max_speed is not None else link.speed
    # Lanes do not come back by waking up.
    raw = Link(speed, link.width if link.width is not None else link.max_width, None, None).bytes_per_s
    return None if raw is None else raw * PCIE_SHARE


def nic_rate(nic: Nic) -> float | None:
    """Bytes a second of data through a card: the slower of its line and its PCIe link."""
    if nic.gbit_per_s is None:
        return None
    line = nic.gbit_per_s * 1e9 / 8 * (RDMA_SHARE if nic.rdma else TCP_SHARE)
    bus = pcie_rate(nic.pci.link) if nic.pci else None
    return line if bus is None else min(line, bus)


def set_rate(drives: Sequence[Drive], level: str | None) -> tuple[float | None, str]:
    """Bytes a second from some drives together, and how that was worked out; None where one of them does not tell."""
    rates = [pcie_rate(drive.pci.link) if drive.pci else None for drive in drives]
    known = [rate for rate in rates if rate is not None]
    if not drives or len(known) < len(drives):
        silent = [drive.name for drive, rate in zip(drives, rates, strict=True) if rate is None]
        return None, f"{', '.join(silent)}: no PCIe link to be seen" if silent else "no drive to be seen"
    holding = max(1, len(drives) - _PARITY.get(level or "", 0))
    slowest = min(known)
    each = f"{slowest / 1e9:.2f} GB/s of its PCIe link"
    if len(drives) == 1:
        return slowest, each
    return holding * slowest, f"{level or 'all drives'}: {holding} x {each}"


def way_up(drives: Sequence[Drive], devices: Mapping[str, PciDevice]) -> tuple[float | None, str]:
    """Bytes a second from drives up to the processor, and the port that holds them back most.

    Each port passes what the ports below it bring, at most at the rate of its own link. None, and no port, where a
    drive does not tell, and where no port has less than the drives below it.
    """
    own = {drive.pci.address: pcie_rate(drive.pci.link) for drive in drives if drive.pci}
    if len(own) < len(drives) or None in own.values():
        return None, ""
    below: dict[str, set[str]] = {}
    for drive in drives:
        chain = (*drive.pci.parents, drive.pci.address) if drive.pci else ()
        for parent, child in pairwise(chain):
            below.setdefault(parent, set()).add(child)
    lost: dict[str, float] = {}

    def carried(node: str) -> float:
        if node in own:
            return own[node] or 0.0
        brought = sum(carried(child) for child in sorted(below[node]))
        limit = (pcie_rate(devices[node].link) if node in devices else None) or inf
        if limit < brought:
            lost[node] = brought - limit
        return min(brought, limit)

    total = sum(carried(top) for top in {drive.pci.parents[0] for drive in drives if drive.pci and drive.pci.parents})
    return (total, max(lost, key=lambda port: lost[port])) if lost else (None, "")


__all__ = ["PCIE_SHARE", "RDMA_SHARE", "TCP_SHARE", "nic_rate", "pcie_rate", "set_rate", "way_up"]
