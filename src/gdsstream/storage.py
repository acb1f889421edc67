"""What a file sits on: filesystem, mount, block device and RAID members, O_DIRECT and page cache.

Everything but the file itself is read from /proc and /sys, whose trees differ between kernels and are cut down in
containers: what cannot be found out is None, and nothing here raises for it.
"""

from __future__ import annotations

import importlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gdsstream.errors import ConfigError, ReadError

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
# fmt: off
NETWORK_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "pvfs2",
    "smb3", "smbfs", "virtiofs", "wekafs",
})
# fmt: on
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """What `describe` found out; None where the system does not tell.

    Attributes:
        path: the real path, links resolved.
        filesystem: its type, such as "xfs"; "unknown" if no mount was found.
        mount_point: where that filesystem is mounted.
        source: what is mounted there: a device, an export, "tmpfs".
        mount_options: of the mount and of the filesystem, without repeats.
        is_memory: the files live in memory (tmpfs and the like): reading them says nothing about a disk.
        is_network: the files come over a network, or through a fuse daemon that may do anything.
        memory_alignment, offset_alignment: bytes, what O_DIRECT asks of addresses, and of offsets and lengths.
        direct_io: whether an O_DIRECT read worked; None if it was not tried (not a regular file). False in memory.
        device: the block device of the filesystem, such as "md0", "dm-3" or "nvme0n1p2".
        rotational: a spinning disk; for a stack, whether any of its disks is one.
        raid_level: such as "raid0", of the first md device found on the way down.
        members: the devices at the bottom of a stack (md, dm), partitions as such; empty for a plain device.
        disks: the physical disks below it all, each once; a plain device's own disk.
        numa_node: the node that every one of the disks hangs on; None if unknown or not the same.
    """

    path: str
    filesystem: str
    mount_point: str | None
    source: str | None
    mount_options: tuple[str, ...]
    is_memory: bool
    is_network: bool
    memory_alignment: int
    offset_alignment: int
    direct_io: bool | None
    device: str | None
    rotational: bool | None
    raid_level: str | None
    members: tuple[str, ...]
    disks: tuple[str, ...]
    numa_node: int | None


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str  # "major:minor"
    point: str
    options: tuple[str, ...]
    filesystem: str
    source: str


def describe(path: str | os.PathLike[str], *, sysfs: str = "/sys", procfs: str = "/proc") -> StorageInfo:
    """Find out what `path` (a file or a directory) sits on.

    Raises:
        ReadError: the path cannot be reached; `errno` says why.
    """
    real = os.path.realpath(path)
    status = _stat(real)
    return _describe(real, _number(status.st_dev), Path(sysfs), procfs, tried=True)


def describe_recorded(path: str | os.PathLike[str], *, sysfs: str, procfs: str) -> StorageInfo:
    """What `path` sits on, by recorded trees alone: the path belongs to the machine they come from, not to this one.

    Its mount is found by its name, and O_DIRECT is not tried.
    """
    real = os.path.normpath(os.path.join("/", path))
    mount = find_mount(real, "", procfs=procfs)
    return _describe(real, mount.device if mount else "0:0", Path(sysfs), procfs, tried=False)


def _describe(real: str, number: str, sysfs: Path, procfs: str, *, tried: bool) -> StorageInfo:
    mount = find_mount(real, number, procfs=procfs)
    filesystem = mount.filesystem if mount else "unknown"
    is_memory = filesystem in MEMORY_FILESYSTEMS
    block = None if is_memory else _find_block(number, mount, sysfs)
    leaves = list(dict.fromkeys(_leaves(block))) if block else []
    disks = _disks(leaves)
    is_file = tried and os.path.isfile(real)
    memory_alignment, offset_alignment = _alignment(real if is_file else None, [block, *disks] if block else [])
    spinning = [_read_int(disk / "queue/rotational") for disk in disks]
    nodes = {_numa_node(disk, sysfs) for disk in disks}
    return StorageInfo(
        path=real,
        filesystem=filesystem,
        mount_point=mount.point if mount else None,
        source=mount.source if mount else None,
        mount_options=mount.options if mount else (),
        is_memory=is_memory,
        is_network=filesystem in NETWORK_FILESYSTEMS or filesystem.startswith("fuse."),
        memory_alignment=memory_alignment,
        offset_alignment=offset_alignment,
        direct_io=_try_direct_io(real, max(memory_alignment, offset_alignment), is_memory) if is_file else None,
        device=block.name if block else None,
        rotational=any(spinning) if any(spinning) or (spinning and None not in spinning) else None,
        raid_level=_raid_level(block) if block else None,
        members=tuple(sorted((leaf.name for leaf in leaves if leaf != block), key=_natural)),
        disks=tuple(sorted((disk.name for disk in disks), key=_natural)),
        numa_node=nodes.pop() if len(nodes) == 1 else None,
    )


def residency(path: str | os.PathLike[str], offset: int = 0, nbytes: int | None = None) -> float:
    """The fraction, 0 to 1, of a file's bytes from `offset` on that are in the page cache; 0 for an empty range.

    Args:
        path: a regular file.
        offset: first byte.
        nbytes: how many; None, or more than there are, means to the end of the file.

    Raises:
        ReadError: the file cannot be reached, or the kernel does not tell.
        ConfigError: a negative offset or length.
    """
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise ConfigError(f"offset and nbytes must not be negative, got {offset} and {nbytes}")
    left = max(0, _stat(os.fspath(path)).st_size - offset)
    nbytes = left if nbytes is None else min(nbytes, left)
    if nbytes == 0:
        return 0.0
    try:
        return int(_native().resident_bytes(os.fspath(path), offset, nbytes)) / nbytes
    except OSError as error:
        text = f"the page-cache residency of {os.fspath(path)} cannot be read: {error}"
        raise ReadError(text, error.errno) from error


def disks_of_device(device: int, *, sysfs: str = "/sys") -> list[Path]:
    """The sysfs directories of the physical disks below a device number (an `st_dev`), each once; empty where sysfs
    does not know it, as with network and overlay filesystems."""
    block = _find_block(_number(device), None, Path(sysfs))
    return _disks(_leaves(block)) if block else []


def _native() -> Any:
    """The native module, when something needs it: the rest of this file works where it cannot be loaded."""
    return importlib.import_module("gdsstream._native")


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise ReadError(f"{path} cannot be reached: {error.strerror}; check the path", error.errno) from error


# --- mounts ---------------------------------------------------------------------------------------------------------


def read_mounts(procfs: str = "/proc") -> list[Mount]:
    """The mounts of this process, in the order in which they were made; empty where /proc does not tell."""
    mounts = []
    text = _read(Path(procfs) / "self/mountinfo") or ""
    for line in text.splitlines():
        # id parent major:minor root point options [tags...] - type source super-options
        head, _, tail = line.partition(" - ")
        left, right = head.split(" "), tail.split(" ")
        if len(left) < 6 or len(right) < 2:
            continue
        options = [*left[5].split(","), *(right[2].split(",") if len(right) > 2 else [])]
        unique = tuple(dict.fromkeys(option for option in options if option))
        mounts.append(Mount(left[2], _unescape(left[4]), unique, right[0], _unescape(right[1])))
    return mounts


def find_mount(real: str, device: str, *, procfs: str = "/proc") -> Mount | None:
    """The mount that `real`, on device "major:minor", belongs to.

    The longest mount point above the path, of those with the path's device number. Where none has it (btrfs and
    overlayfs give files another number than their mount) the longest alone decides. Of several mounts on one point
    the last hides the others.
    """
    above = [mount for mount in read_mounts(procfs) if _is_below(real, mount.point)]
    matching = [mount for mount in above if mount.device == device] or above
    return max(reversed(matching), key=lambda mount: len(mount.point), default=None)


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    """mountinfo writes blanks and backslashes as three octal digits, byte by byte."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)


# --- block devices --------------------------------------------------------------------------------------------------


def _find_block(number: str, mount: Mount | None, sysfs: Path) -> Path | None:
    """The sysfs directory of the block device: by the file's own number, the mount's, its source or its layers."""
    for candidate in dict.fromkeys((number, mount.device if mount else number)):
        link = sysfs / "dev/block" / candidate
        if link.exists():
            return Path(os.path.realpath(link))
    if mount is None:
        return None
    if mount.source.startswith("/dev/"):
        # btrfs and others show an anonymous device number; a mapper name is a link to dm-N.
        for name in (os.path.basename(mount.source), os.path.basename(os.path.realpath(mount.source))):
            link = sysfs / "class/block" / name
            if link.exists():
                return Path(os.path.realpath(link))
    for option in mount.options:
        # overlayfs: the layer that is written to; from inside a container its path usually leads nowhere.
        if mount.filesystem == "overlay" and option.startswith("upperdir="):
            try:
                device = os.stat(option.removeprefix("upperdir=")).st_dev
            except OSError:
                continue
            link = sysfs / "dev/block" / _number(device)
            if link.exists():
                return Path(os.path.realpath(link))
    return None


def _below(block: Path) -> list[Path]:
    """The devices a stacked one (md, dm) is made of; a partition of such a one is made of the whole."""
    if (block / "partition").exists():
        return [block.parent] if _slaves(block.parent) else []
    return _slaves(block)


def _slaves(block: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(block / "slaves"), key=_natural)
    except OSError:
        return []
    return [Path(os.path.realpath(block / "slaves" / name)) for name in names]


def _leaves(block: Path, depth: int = 8) -> Iterator[Path]:
    below = _below(block) if depth else []
    for one in below:
        yield from _leaves(one, depth - 1)
    if not below:
        yield block


def _disk(block: Path) -> Path:
    return block.parent if (block / "partition").exists() else block


def _disks(leaves: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(_disk(leaf) for leaf in leaves))


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _raid_level(block: Path, depth: int = 8) -> str | None:
    if level := _read(block / "md/level"):
        return level
    found = (_raid_level(one, depth - 1) for one in (_below(block) if depth else []))
    return next((level for level in found if level), None)


def _numa_node(disk: Path, sysfs: Path) -> int | None:
    """The node of the first ancestor that has one: the controller's PCI device."""
    starts = [Path(os.path.realpath(disk / "device"))]
    # With NVMe multipath the disk hangs on a subsystem without a place; its controllers have one.
    if starts[0].name.startswith("nvme-subsys"):
        starts += [Path(os.path.realpath(link)) for link in sorted(starts[0].glob("nvme[0-9]*")) if link.is_symlink()]
    root = Path(os.path.realpath(sysfs))
    for start in starts:
        for directory in (start, *start.parents):
            if directory == root or root not in directory.parents:
                break
            node = _read_int(directory / "numa_node")
            if node is not None:
                return node if node >= 0 else None
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    try:
        return int(_read(path) or "")
    except ValueError:
        return None


# --- direct I/O -----------------------------------------------------------------------------------------------------


def _alignment(file: str | None, blocks: list[Path]) -> tuple[int, int]:
    """(memory, offset) in bytes: what statx says, else the largest logical block on the way down, else a page."""
    if file is not None:
        try:
            memory, offset = _native().file_alignment(file)
            if memory > 0 and offset > 0:
                return int(memory), int(offset)
        except (ImportError, OSError):
            pass
    sizes = [_read_int(_disk(block) / "queue/logical_block_size") or 0 for block in blocks]
    largest = max(sizes, default=0) or _PAGE
    return largest, largest


def _try_direct_io(path: str, alignment: int, is_memory: bool) -> bool:
    """Read one aligned block with O_DIRECT. Not in memory: tmpfs opens so and copies all the same."""
    if is_memory:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Anonymous mappings start on a page, which satisfies every alignment in use.
        with mmap.mmap(-1, max(alignment, _PAGE)) as block:
            os.preadv(fd, [block], 0)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


__all__ = [
    "MEMORY_FILESYSTEMS",
    "NETWORK_FILESYSTEMS",
    "Mount",
    "StorageInfo",
    "describe",
    "describe_recorded",
    "disks_of_device",
    "find_mount",
    "read_mounts",
    "residency",
]
