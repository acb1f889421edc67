"""The machine: GPUs, drives, network cards and NUMA nodes, and the PCIe between them, from sysfs and procfs.

One file for each kind of thing, each with a `scan` of a `Tree`; `probe` puts them together. Nothing here needs a GPU,
a driver or root rights, and everything works on a recorded tree.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from gdsstream.machine import drives, gpus, mounts, nics, numa, pci
from gdsstream.machine.drives import Drive, Stack
from gdsstream.machine.gpus import Gpu
from gdsstream.machine.nics import Nic
from gdsstream.machine.numa import NumaNode
from gdsstream.machine.pci import PciDevice
from gdsstream.machine.tree import Tree


@dataclass(frozen=True, slots=True)
class Machine:
    """What `probe` found, each list in the order of its names or addresses.

    Attributes:
        tree: where it was read; its `failures` are what could not be.
        pci: every PCI function by address.
        gpus, drives, stacks, nics, nodes: see there; stacks are md sets and device-mapper volumes.
        mounts: mount points of drives, partitions and stacks, by "major:minor" and by name.
        virtual: whether a hypervisor made this machine up; its PCIe tree then is not the hardware's.
    """

    tree: Tree
    pci: dict[str, PciDevice]
    gpus: list[Gpu]
    drives: list[Drive]
    stacks: list[Stack]
    nics: list[Nic]
    nodes: list[NumaNode]
    mounts: dict[str, tuple[str, ...]]
    virtual: bool

    def drive(self, name: str) -> Drive | None:
        """The drive of that name."""
        return next((drive for drive in self.drives if drive.name == name), None)

    def mounted_at(self, device: Drive | Stack) -> tuple[str, ...]:
        """Where the device or one of its partitions is mounted."""
        partition = re.compile(re.escape(device.name) + r"p?\d+")
        names = [device.number, device.name, *(key for key in self.mounts if partition.fullmatch(key))]
        return tuple(dict.fromkeys(point for name in names for point in self.mounts.get(name, ())))


def probe(root: str | os.PathLike[str] = "/") -> Machine:
    """Look at this machine, or at the tree recorded below `root`. Raises nothing: see `Tree.failures`."""
    tree = Tree(root)
    devices = pci.scan(tree)
    disks, stacks = drives.scan(tree, devices)
    return Machine(
        tree=tree,
        pci=devices,
        gpus=gpus.scan(tree, devices),
        drives=disks,
        stacks=stacks,
        nics=nics.scan(tree, devices),
        nodes=numa.scan(tree),
        mounts=mounts.mounted(tree),
        virtual=re.search(r"^flags\s*:.*\bhypervisor\b", tree.read("/proc/cpuinfo") or "", re.MULTILINE) is not None,
    )


__all__ = ["Drive", "Gpu", "Machine", "Nic", "NumaNode", "PciDevice", "Stack", "Tree", "probe"]
