"""What storage and GPU are, beyond their names: the drives below the test files, the GPU's link, and NUMA nodes.

From gdsstream's own probes of sysfs (gdsstream.machine, gdsstream.storage); what the system does not tell is None. A
virtual machine shows the PCIe tree that its hypervisor made up, and `virtual` says that it is one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdsstream.machine import Machine
    from gdsstream.machine.pci import Link, PciDevice
    from gdsstream.storage import StorageInfo

#: GT/s a lane -> generation of PCIe.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_IDENTITY = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")


def collect(directory: Path, device: str) -> dict[str, Any]:
    """The keys `storage`, `gpu_link`, `gpu_numa_node`, `numa_nodes` and `virtual` of the environment; empty without
    gdsstream, whose probes these are."""
    try:
        from gdsstream import machine, storage
        from gdsstream.errors import ReadError
    except ImportError:
        return {}
    found = machine.probe()
    try:
        info = storage.describe(directory)
    except ReadError:
        info = None
    return describe(found, info, _gpu(found, device))


def describe(machine: Machine, info: StorageInfo | None, gpu: PciDevice | None) -> dict[str, Any]:
    """The same of a machine that was probed, of what the files are on, and of the GPU."""
    return {
        "storage": None if info is None else _storage(machine, info),
        "gpu_link": None if gpu is None or gpu.link is None else _link(gpu.link),
        "gpu_numa_node": None if gpu is None else gpu.numa_node,
        "numa_nodes": len(machine.nodes),
        "virtual": machine.virtual,
    }


def host_id() -> str | None:
    """Tells two hosts, and two boots of one, apart without naming them; None where the system has no such ids."""
    try:
        found = [Path(path).read_text(encoding="ascii").strip() for path in _IDENTITY]
    except (OSError, UnicodeDecodeError):
        return None
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def _gpu(machine: Machine, device: str) -> PciDevice | None:
    if not device.startswith("cuda"):
        return None
    from gdsstream import GdsStreamError, _native
    from gdsstream.devices import parse_device

    try:
        address = _native.pci_bus_id(parse_device(device).index or 0)
    except (GdsStreamError, RuntimeError):
        return None
    return machine.pci.get(address.lower())


def _storage(machine: Machine, info: StorageInfo) -> dict[str, Any]:
    stack = next((each for each in machine.stacks if each.name == info.device), None)
    drives = []
    for name in info.disks:
        drive = machine.drive(name)
        link = drive.pci.link if drive is not None and drive.pci is not None else None
        drives.append(
            {
                "name": name,
                "model": drive.model if drive is not None else None,
                "transport": drive.transport if drive is not None else None,
                "link": None if link is None else _link(link),
                "numa_node": drive.numa_node if drive is not None else None,
            }
        )
    return {
        "device": info.device,
        "raid_level": info.raid_level,
        "chunk_bytes": stack.chunk_bytes if stack is not None else None,
        "members": list(info.members),
        "drives": drives,
        "numa_node": info.numa_node,
    }


def _link(link: Link) -> dict[str, Any]:
    """As it runs now, which an idle GPU does slowly, and at its best."""
    return {
        "generation": _generation(link.speed),
        "width": link.width,
        "max_generation": _generation(link.max_speed),
        "max_width": link.max_width,
    }


def _generation(speed: float | None) -> int | None:
    return None if speed is None else _GENERATIONS.get(speed)
