"""Virtual disks with a single queue, which a thread of the host serves: what they take, and who hears of what they
brought. From /proc and /sys; what cannot be found out is 0 or -1, and nothing here raises for it."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from gdsstream.storage import disks_of_device
from gdsstream.topology import parse_cpu_list


@lru_cache(maxsize=1)
def single_queue_requests(sysfs: str = "/sys") -> int:
    """How many requests a disk of this machine takes at once, where every one is a virtio disk with a single queue: a
    thread of the host copies what they bring, so that more under way adds nothing to their rate. The fewest of all; 0
    where one is not, where there is none, or sysfs does not tell."""
    try:
        disks = [disk for disk in Path(sysfs, "block").iterdir() if (disk / "device").exists()]
        if not all(disk.name.startswith("vd") and _queues(disk) == 1 for disk in disks):
            return 0
        return min((int((disk / "queue" / "nr_requests").read_text()) for disk in disks), default=0)
    except (OSError, ValueError):
        return 0


@lru_cache(maxsize=64)
def interrupt_cpu(device: int, *, sysfs: str = "/sys", procfs: str = "/proc") -> int:
    """The CPU that takes the interrupts of the virtio disk below a file's `st_dev`, where this process may use it.

    -1 where there are several disks below or none, the disk is no virtio disk or has several queues, its interrupt
    goes to no single CPU, or the system does not tell. What irqbalance moves later is not followed.
    """
    try:
        (disk,) = disks_of_device(device, sysfs=sysfs)
        if _queues(disk) != 1:
            return -1
        name = os.path.basename(os.path.realpath(disk / "device"))
        # Of its own, of all its queues together, or of the device (without message-signalled interrupts).
        names = [f"{name}-req.0", f"{name}-virtqueues", name] if name.startswith("virtio") else []
        interrupts = [irq for name in names for irq in sorted(Path(procfs, "irq").glob(f"*/{name}"))]
        (cpu,) = parse_cpu_list((interrupts[0].parent / "effective_affinity_list").read_text())
    except (OSError, ValueError, IndexError):
        return -1
    return cpu if cpu in os.sched_getaffinity(0) else -1


def _queues(disk: Path) -> int:
    return len(list((disk / "mq").iterdir()))


__all__ = ["interrupt_cpu", "single_queue_requests"]
