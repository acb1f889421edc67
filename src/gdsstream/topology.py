"""Which NUMA node a GPU hangs on, and which cores are near: from sysfs."""

from __future__ import annotations

import os
from pathlib import Path


def gpu_numa_node(pci_bus_id: str, *, sysfs: str = "/sys") -> int:
    """The NUMA node of a PCI device ("0000:3b:00.0"), or -1 where the system does not tell or has one node only."""
    try:
        node = int((Path(sysfs) / "bus/pci/devices" / pci_bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return -1
    nodes = list((Path(sysfs) / "devices/system/node").glob("node[0-9]*"))
    return node if len(nodes) > 1 else -1


def node_cpus(node: int, *, sysfs: str = "/sys") -> list[int]:
    """The cores of a NUMA node that this process may use; empty (no preference) if there are none, or for node -1."""
    if node < 0:
        return []
    try:
        text = (Path(sysfs) / f"devices/system/node/node{node}/cpulist").read_text()
        cpus = parse_cpu_list(text)
    except (OSError, ValueError):
        return []
    return sorted(cpus & os.sched_getaffinity(0))


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's list format: "0-3,8,10-11". Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


__all__ = ["gpu_numa_node", "node_cpus", "parse_cpu_list"]
