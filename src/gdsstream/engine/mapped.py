"""registered page cache -> GPU: no CPU copy, for what is read again and again.

A file is mapped, brought into memory and registered with the driver when it is opened (23 GB/s, once); every read
after that is one DMA at the link's limit. Registered pages cannot be evicted, so that the sum is bounded by
`host_cache_bytes`, and that by what the machine has free. On the CPU the kernel copies out of the mapping.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import torch

from gdsstream import _native
from gdsstream.config import StreamConfig
from gdsstream.engine.base import SourceFile
from gdsstream.engine.native import MAPPED
from gdsstream.engine.staged import StagedEngine
from gdsstream.errors import MemoryBudgetError

# Left for everybody else when the budget is taken from free memory.
_RESERVE_FRACTION = 0.1


class MappedEngine(StagedEngine):
    """Maps and registers the files it opens, within `host_cache_bytes`.

    `fallback` says what becomes of a file that does not fit: it is read on the staged route where true (backend
    "auto"), and MemoryBudgetError where false (backend "mapped", which never falls back).
    """

    name = "mapped"

    def __init__(self, device: torch.device, config: StreamConfig, *, fallback: bool = False) -> None:
        super().__init__(device, config)
        self._fallback = fallback
        self._mapped_bytes = 0

    def lane_of(self, file: SourceFile, native: _native.File) -> int:
        wanted = native.nbytes
        room = min(self.config.host_cache_bytes - self._mapped_bytes, free_bytes())
        if wanted > room:
            if self._fallback:
                return super().lane_of(file, native)
            raise MemoryBudgetError(
                f"{file.path}: mapping it takes {wanted} bytes, {room} are left (host_cache_bytes="
                f"{self.config.host_cache_bytes}, {self._mapped_bytes} in use); raise host_cache_bytes, or use "
                'backend="staged"'
            )
        self._native.map(native)
        self._mapped_bytes += wanted
        # The pages go with the file object, whoever drops it last: a transfer may outlive its caller's list.
        weakref.finalize(native, _give_back, weakref.ref(self), wanted)
        return MAPPED

    def stats(self) -> dict[str, int | float]:
        """As NativeEngine.stats, and `mapped_bytes`: files that are mapped and registered now."""
        return {**super().stats(), "mapped_bytes": self._mapped_bytes}


def _give_back(engine: weakref.ref[MappedEngine], nbytes: int) -> None:
    alive = engine()
    if alive is not None:
        alive._mapped_bytes -= nbytes


def free_bytes(*, procfs: str = "/proc", cgroupfs: str = "/sys/fs/cgroup") -> int:
    """Memory that may be pinned: nine tenths of what is available in the machine and in the control group."""
    available = [_meminfo(procfs), _cgroup(cgroupfs)]
    known = [value for value in available if value is not None]
    return int(min(known) * (1 - _RESERVE_FRACTION)) if known else 0


def _meminfo(procfs: str) -> int | None:
    try:
        lines = (Path(procfs) / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _cgroup(cgroupfs: str) -> int | None:
    """Limit minus use of this control group (version 2; version 1's memory controller); None without a limit."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (Path(cgroupfs) / limit_name).read_text().strip()
            if limit != "max":
                return max(0, int(limit) - int((Path(cgroupfs) / usage_name).read_text()))
        except (OSError, ValueError):
            continue
    return None


__all__ = ["MappedEngine", "free_bytes"]
