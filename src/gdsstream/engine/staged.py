"""storage -> pinned ring -> GPU, or storage -> CPU memory: the route for a first pass, and for what is read once.

Each file goes by one of two lanes. Through the page cache, many threads copy; that wins for what is cached already,
in memory, or on a network. Past it, O_DIRECT at depth; that wins on a local disk, where filling the cache costs a copy
and evicts what others use.
"""

from __future__ import annotations

import os
from functools import lru_cache

from gdsstream import _native, storage
from gdsstream.engine.base import SourceFile
from gdsstream.engine.lanes import DIRECT, PAGE_CACHE
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import ConfigError

# A read through the cache costs one copy more than O_DIRECT, a read of what is cached costs no disk at all: with half
# of a file cached the two come out about even on disks of 3 GB/s and up.
_CACHED_ENOUGH = 0.5
_LANE_ALIGNMENT_BYTES = 4096
# Below this a file is over before a disk's queue is full, and readahead serves it as well.
_SMALL_FILE_BYTES = 1 << 20


class StagedEngine(NativeEngine):
    """Reads into a pinned ring and copies from there; on the CPU it reads into the destination itself."""

    name = "staged"

    def lane_of(self, file: SourceFile, native: _native.File) -> int:
        choice = self.config.direct_io
        if choice is None:
            return DIRECT if self._prefers_direct(file, native) else PAGE_CACHE
        if choice and native.nbytes and not direct_possible(file.path, file.stamp.device):
            raise ConfigError(
                f"{file.path}: direct_io=True, but its filesystem refuses O_DIRECT in blocks of "
                f"{_LANE_ALIGNMENT_BYTES} bytes; use direct_io=None or False"
            )
        return DIRECT if choice else PAGE_CACHE

    def _prefers_direct(self, file: SourceFile, native: _native.File) -> bool:
        return (
            native.nbytes >= _SMALL_FILE_BYTES
            and _local_disk(os.path.dirname(file.path), file.stamp.device)
            and native.resident_fraction() < _CACHED_ENOUGH
            and direct_possible(file.path, file.stamp.device)
        )


@lru_cache(maxsize=1024)
def _local_disk(directory: str, device: int) -> bool:
    """Whether files there lie on a disk of this machine: asked once for each directory and device number."""
    del device
    info = storage.describe(directory)
    return not info.is_memory and not info.is_network


_direct_possible: dict[int, bool] = {}


def direct_possible(path: str, device: int) -> bool:
    """Whether O_DIRECT in 4 KiB blocks works on this filesystem: tried once for each device number."""
    if device not in _direct_possible:
        memory, offset = _native.file_alignment(path)
        _direct_possible[device] = max(memory, offset) <= _LANE_ALIGNMENT_BYTES and _native.direct_io_works(path)
    return _direct_possible[device]


__all__ = ["StagedEngine", "direct_possible"]
