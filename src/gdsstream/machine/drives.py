"""Disks, and what is stacked on them: NVMe namespaces with their controllers, md sets, device-mapper volumes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gdsstream.machine.names import natural
from gdsstream.machine.pci import PciDevice, address_of
from gdsstream.machine.tree import Tree

_BLOCK = "/sys/class/block"
_SECTOR_BYTES = 512  # the unit of "size", whatever the device's own blocks are
_HIDDEN = re.compile(r"(loop|ram|zram|sr|fd|nbd)\d+|nvme\d+c\d+n\d+")  # the latter: one path of a multipath namespace


@dataclass(frozen=True, slots=True)
class Drive:
    """One disk.

    Attributes:
        name: the block device, such as "nvme0n1".
        number: "259:0".
        model: as the drive says; None where it does not.
        nbytes: its size.
        transport: "pcie", "rdma", "tcp" and the like for NVMe; else "virtio", "scsi", "other".
        pci: what it hangs on; None for a fabric, or where the system does not tell.
        numa_node: of the controller.
    """

    name: str
    number: str
    model: str | None
    nbytes: int | None
    transport: str
    pci: PciDevice | None
    numa_node: int | None

    @property
    def nvme(self) -> bool:
        """Whether it is an NVMe namespace."""
        return self.name.startswith("nvme")


@dataclass(frozen=True, slots=True)
class Stack:
    """A device made of others: an md set or a device-mapper volume.

    Attributes:
        name, number, nbytes: as for a drive.
        kind: "raid0", "raid1" and so on, else the mapper's "LVM", "CRYPT", "mpath"; "unknown" if it does not tell.
        members: what it is directly made of.
        disks: the drives below it all, each once.
        degraded: how many members of an md set are missing.
        chunk_bytes: of a striped md set.
    """

    name: str
    number: str
    nbytes: int | None
    kind: str
    members: tuple[str, ...]
    disks: tuple[str, ...]
    degraded: int
    chunk_bytes: int | None

    @property
    def raid(self) -> bool:
        """Whether it is an md set."""
        return self.name.startswith("md")


def scan(tree: Tree, devices: dict[str, PciDevice]) -> tuple[list[Drive], list[Stack]]:
    """Disks and stacks, in the order of their names; no partitions, loop devices or empty slots."""
    drives, stacks = [], []
    for name in sorted(tree.listdir(_BLOCK), key=natural):
        folder = f"{_BLOCK}/{name}"
        if _HIDDEN.fullmatch(name) or tree.exists(f"{folder}/partition"):
            continue
        if tree.exists(f"{folder}/md") or tree.exists(f"{folder}/dm"):
            stacks.append(_stack(tree, name))
        elif (nbytes := _size(tree, name)) != 0 and tree.exists(f"{folder}/device"):
            drives.append(_drive(tree, name, nbytes, devices))
    return drives, stacks


def _size(tree: Tree, name: str) -> int | None:
    sectors = tree.read_int(f"{_BLOCK}/{name}/size")
    return None if sectors is None else sectors * _SECTOR_BYTES


def _drive(tree: Tree, name: str, nbytes: int | None, devices: dict[str, PciDevice]) -> Drive:
    folder = tree.readlink(f"{_BLOCK}/{name}") or ""
    device = tree.readlink(f"{folder}/device") or ""
    if re.search(r"/nvme-subsys\d+$", device):
        # With multipath the namespace hangs on a subsystem without a place; its controllers have one.
        controllers = [one for one in tree.listdir(device) if re.fullmatch(r"nvme\d+", one)]
        device = tree.readlink(f"{device}/{controllers[0]}") or "" if controllers else ""
    address = address_of(device)
    pci = devices.get(address) if address else None
    node = tree.read_int(f"{device}/numa_node")
    return Drive(
        name=name,
        number=tree.read(f"{folder}/dev") or "",
        model=tree.read(f"{device}/model") or None,
        nbytes=nbytes,
        transport=_transport(tree, name, device),
        pci=pci,
        numa_node=pci.numa_node if pci else node if node is not None and node >= 0 else None,
    )


def _transport(tree: Tree, name: str, device: str) -> str:
    if name.startswith("nvme"):
        return tree.read(f"{device}/transport") or ("pcie" if address_of(device) else "unknown")
    return "virtio" if name.startswith("vd") else "scsi" if name.startswith("sd") else "other"


def _stack(tree: Tree, name: str) -> Stack:
    folder = f"{_BLOCK}/{name}"
    kind = tree.read(f"{folder}/md/level")
    if kind is None:
        kind = (tree.read(f"{folder}/dm/uuid") or "").partition("-")[0]
    return Stack(
        name=name,
        number=tree.read(f"{folder}/dev") or "",
        nbytes=_size(tree, name),
        kind=kind or "unknown",
        members=tuple(sorted(tree.listdir(f"{folder}/slaves"), key=natural)),
        disks=tuple(sorted(_disks(tree, name), key=natural)),
        degraded=tree.read_int(f"{folder}/md/degraded") or 0,
        chunk_bytes=tree.read_int(f"{folder}/md/chunk_size") or None,
    )


def _disks(tree: Tree, name: str, depth: int = 8) -> set[str]:
    """The disks below `name`; a partition's is the device that its folder lies in."""
    if tree.exists(f"{_BLOCK}/{name}/partition"):
        name = (tree.readlink(f"{_BLOCK}/{name}") or "").split("/")[-2]
    below = tree.listdir(f"{_BLOCK}/{name}/slaves") if depth else []
    return {disk for one in below for disk in _disks(tree, one, depth - 1)} if below else {name}


__all__ = ["Drive", "Stack", "scan"]
