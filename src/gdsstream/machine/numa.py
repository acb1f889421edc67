"""NUMA nodes from sysfs: cores, memory, and how far they are from each other."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gdsstream.machine.tree import Tree
from gdsstream.topology import parse_cpu_list

_NODES = "/sys/devices/system/node"
_LOCAL, _REMOTE = 10, 20  # what firmware says where it says no more: here, and elsewhere


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node.

    Attributes:
        index: its number.
        cpus: the kernel's list, such as "0-15,64-79".
        num_cpus: how many those are.
        memory_bytes: None where the system does not tell.
        distances: to each node by number, 10 being itself.
    """

    index: int
    cpus: str
    num_cpus: int
    memory_bytes: int | None
    distances: dict[int, int]


def scan(tree: Tree) -> list[NumaNode]:
    """The nodes in the order of their numbers; empty where the kernel knows of none."""
    numbers = sorted(int(name[4:]) for name in tree.listdir(_NODES) if re.fullmatch(r"node\d+", name))
    nodes = []
    for number in numbers:
        folder = f"{_NODES}/node{number}"
        cpus = tree.read(f"{folder}/cpulist") or ""
        try:
            num_cpus = len(parse_cpu_list(cpus))
        except ValueError:
            num_cpus = 0
        total = re.search(r"MemTotal:\s*(\d+) kB", tree.read(f"{folder}/meminfo") or "")
        spans = (tree.read(f"{folder}/distance") or "").split()
        # The kernel lists the nodes that exist, in their order.
        distances = {to: int(span) for to, span in zip(numbers, spans, strict=False) if span.isdigit()}
        nodes.append(NumaNode(number, cpus, num_cpus, int(total[1]) * 1024 if total else None, distances))
    return nodes


def distance(nodes: list[NumaNode], a: int | None, b: int | None) -> int:
    """The firmware's distance between two nodes: 10 for one and the same, or if either is unknown on one node alone."""
    if a is None or b is None:
        return _LOCAL if len(nodes) <= 1 else _REMOTE
    by_index = {node.index: node.distances for node in nodes}
    return by_index.get(a, {}).get(b, _LOCAL if a == b else _REMOTE)


__all__ = ["NumaNode", "distance", "scan"]
