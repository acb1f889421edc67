"""What `gdsstream topo --json` says, in plain values; its schema is schemas/topo.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdsstream.affinity import Device, groups, label, links_below_best, matrix, nearest, spread
from gdsstream.machine import Machine, PciDevice, Stack


def topo_data(machine: Machine) -> dict[str, Any]:
    """Everything that `topo` found; names as in its tables, sizes in bytes."""
    everything: list[Device] = [*machine.gpus, *machine.drives, *machine.nics]

    def near(device: Device, among: Sequence[Device]) -> dict[str, Any]:
        best = nearest(machine, device, among)
        return {"path": best.path, "names": list(best.names), "first": list(best.first)}

    return {
        "root": machine.tree.root,
        "virtual": machine.virtual,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "uuid": gpu.uuid,
                "bar1_bytes": gpu.bar1_bytes,
                **_pci_data(gpu.pci),
                "nearest_drives": near(gpu, machine.drives),
                "nearest_nics": near(gpu, machine.nics),
            }
            for gpu in machine.gpus
        ],
        "drives": [
            {
                "name": drive.name,
                "model": drive.model,
                "bytes": drive.nbytes,
                "transport": drive.transport,
                **_pci_data(drive.pci),
                "mounted_at": list(machine.mounted_at(drive)),
                "nearest_gpus": near(drive, machine.gpus),
            }
            for drive in machine.drives
        ],
        "stacks": [_stack_data(machine, stack) for stack in machine.stacks],
        "nics": [
            {
                "name": nic.name,
                "rdma": nic.rdma,
                "interfaces": list(nic.interfaces),
                "up": nic.up,
                "gbit_per_s": nic.gbit_per_s,
                **_pci_data(nic.pci),
                "nearest_gpus": near(nic, machine.gpus),
            }
            for nic in machine.nics
        ],
        "nodes": [
            {
                "index": node.index,
                "cpus": node.cpus,
                "memory_bytes": node.memory_bytes,
                "distances": {str(to): span for to, span in node.distances.items()},
            }
            for node in machine.nodes
        ],
        "groups": [
            {"gpus": list(one.gpus), "drives": list(one.drives), "nics": list(one.nics)} for one in groups(machine)
        ],
        "paths": {
            label(row): {label(column): path for column, path in zip(everything, line, strict=True)}
            for row, line in zip(everything, matrix(machine, everything, everything), strict=True)
        },
        "links_below_best": links_below_best(machine),
        "unreadable": [{"path": path, "reason": why} for path, why in machine.tree.failures],
    }


def _pci_data(device: PciDevice | None) -> dict[str, Any]:
    link = device.link if device else None
    return {
        "pci": device.address if device else None,
        "numa_node": device.numa_node if device else None,
        "parents": list(device.parents) if device else [],
        "link": None
        if link is None
        else {
            "gt_per_s": link.speed,
            "width": link.width,
            "max_gt_per_s": link.max_speed,
            "max_width": link.max_width,
            "bytes_per_s": link.bytes_per_s,
            "max_bytes_per_s": link.max_bytes_per_s,
        },
    }


def _stack_data(machine: Machine, stack: Stack) -> dict[str, Any]:
    how = spread(machine, stack)
    return {
        "name": stack.name,
        "kind": stack.kind,
        "bytes": stack.nbytes,
        "members": list(stack.members),
        "disks": list(stack.disks),
        "degraded": stack.degraded,
        "chunk_bytes": stack.chunk_bytes,
        "mounted_at": list(machine.mounted_at(stack)),
        "longest_path": how.path,
        "parts": [list(part) for part in how.parts],
        "apart": how.apart,
    }


__all__ = ["topo_data"]
