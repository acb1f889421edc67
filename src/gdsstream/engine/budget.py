"""How much host memory may still be pinned: what the machine and the control group can spare.

The kernel counts page cache as available, since it can evict it, and keeps counting pages of files that are
registered, which it cannot. A control group counts page cache as used, although it evicts that before it refuses.
Both are put right here.
"""

from __future__ import annotations

from pathlib import Path

from gdsstream import _native

# Left for everybody else when the budget is taken from free memory.
_RESERVE_FRACTION = 0.1


def free_bytes(*, procfs: str = "/proc", cgroupfs: str = "/sys/fs/cgroup") -> int:
    """Memory that may be pinned: nine tenths of what is available in the machine and in the control group, less the
    page cache that this process has registered."""
    available = [_meminfo(procfs), _cgroup(cgroupfs)]
    known = [value for value in available if value is not None]
    return max(0, int(min(known) * (1 - _RESERVE_FRACTION)) - _native.unevictable_bytes()) if known else 0


def _meminfo(procfs: str) -> int | None:
    try:
        lines = (Path(procfs) / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _cgroup(cgroupfs: str) -> int | None:
    """Limit minus use of this control group (version 2; version 1's memory controller); None without a limit."""
    for folder, limit_name, usage_name, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit = (Path(cgroupfs) / folder / limit_name).read_text().strip()
            if limit != "max":
                usage = int((Path(cgroupfs) / folder / usage_name).read_text())
                evictable = _evictable(Path(cgroupfs) / folder / "memory.stat", prefix)
                return max(0, int(limit) - max(0, usage - evictable))
        except (OSError, ValueError):
            continue
    return None


def _evictable(path: Path, prefix: str) -> int:
    """Page cache of files on disks, in bytes; 0 where the control group does not tell."""
    try:
        entries = dict(line.split() for line in path.read_text().splitlines())
        return sum(int(entries.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return 0


__all__ = ["free_bytes"]
