"""How many bytes the devices say that they moved: a cross-check of what the files hold.

A block device counts what is read from it and written to it (/sys/class/block/<device>/stat, in sectors of 512 bytes),
and a GPU what it receives over PCIe where its driver says so, headers included (280 bytes for 256 on an H200). Both are
read right before and after the timed region of every sample, and both count whatever else the machine does in that
time. A RAID, a mapped volume or the like is counted at the disks and partitions that it consists of. Memory and network
filesystems, overlays and what a virtual machine's host has in its own cache are not to be seen here; `source` says so
where there is no device.

A read from an empty page cache for which the device read less than the files hold was answered by something in between,
such as a cache below the filesystem, or a filesystem that compresses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import nvml

_SECTOR = 512
_READ, _WRITTEN = 2, 6  # the fields of `stat` that count sectors
_SYS = Path("/sys")
# Headers are in the files and not in the tensors; a device never reads less for a whole file.
_SLACK = 0.99


class Count(NamedTuple):
    """Of all disks and of the GPU, since whenever; None where it is not counted."""

    read: int | None
    written: int | None
    gpu_received: int | None


class Moved(NamedTuple):
    """Bytes during one sample; None where it is not counted."""

    read: int | None
    written: int | None
    gpu_received: int | None

    def fewer_read_than(self, nbytes: int) -> bool:
        """Whether the disks read less than `nbytes`, as far as they are counted."""
        return self.read is not None and self.read < nbytes * _SLACK


class Counters:
    """The counters of the disks below `directory`, and of the GPU that `device` is."""

    def __init__(self, directory: Path, device: str, *, sys: Path = _SYS) -> None:
        self._stats, where = _stats(directory, sys)
        self._received, link = _gpu(device)
        self.source = "; ".join(filter(None, [where, link]))

    def read(self) -> Count:
        """What has been moved until now."""
        fields = [path.read_text(encoding="ascii").split() for path in self._stats]
        read, written = (
            sum(int(each[column]) for each in fields) * _SECTOR if fields else None for column in (_READ, _WRITTEN)
        )
        return Count(read, written, self._received())

    def between(self, before: Count, now: Count, nbytes: int) -> Moved:
        """What was moved in between, by a sample of `nbytes`.

        The GPU's counter is a short one: what it received is None for samples that could take it round more than once.
        """
        read, written = _difference(before.read, now.read), _difference(before.written, now.written)
        if before.gpu_received is None or now.gpu_received is None or nbytes > nvml.COUNTER // 2:
            return Moved(read, written, None)
        return Moved(read, written, (now.gpu_received - before.gpu_received) % nvml.COUNTER)


def _difference(before: int | None, after: int | None) -> int | None:
    """None also where a counter began anew."""
    return after - before if before is not None and after is not None and after >= before else None


def _stats(directory: Path, sys: Path) -> tuple[list[Path], str]:
    """The counters below a directory, and what they are called, or why there are none."""
    from bench import environment

    found = environment.filesystem(directory)
    kind, source = (found["type"], found["source"]) if found else ("unknown filesystem", "")
    number = os.stat(directory).st_dev
    top = sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not top.exists() and source.startswith("/dev/"):
        # Of filesystems with device numbers of their own, such as btrfs.
        top = sys / "class" / "block" / os.path.basename(os.path.realpath(source))
    if not top.exists():
        return [], f"no block device is counted: {directory} is on {kind}"
    leaves = sorted({path.resolve() for path in _leaves(top)})
    names = ", ".join(path.name for path in leaves)
    return [path / "stat" for path in leaves], f"block device {names}"


def _leaves(device: Path) -> list[Path]:
    """The disks or partitions that a block device consists of: itself, unless it has others below it."""
    below = device / "slaves"
    names = sorted(below.iterdir()) if below.is_dir() else []
    return [leaf for path in names for leaf in _leaves(path)] or [device]


def _gpu(device: str) -> tuple[Callable[[], int | None], str]:
    """What the GPU has received until now, and what that is called, or why it is not counted."""
    if not device.startswith("cuda"):
        return lambda: None, ""
    try:
        gpu = nvml.open_device()
        gpu.received_bytes()
    except nvml.NvmlError as error:
        reason = f"PCIe is not counted: {error}"
        return lambda: None, reason
    return lambda: _counted(gpu), "PCIe by NVML"


def _counted(gpu: nvml.Device) -> int | None:
    """A driver that stops counting makes a sample without this figure, and no failed one."""
    try:
        return gpu.received_bytes()
    except nvml.NvmlError:
        return None
