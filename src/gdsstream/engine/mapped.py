"""registered page cache -> GPU: no CPU copy, for what is read again and again.

A file is mapped, brought into memory and registered with the driver when it is opened (23 GB/s, once); every read
after that is one DMA at the link's limit. Registered pages cannot be evicted, so that the sum is bounded by
`host_cache_bytes`, and that by what the machine has free. On the CPU the kernel copies out of the mapping.
"""

from __future__ import annotations

import torch

from gdsstream import _native
from gdsstream.config import StreamConfig
from gdsstream.engine.base import SourceFile
from gdsstream.engine.budget import free_bytes
from gdsstream.engine.lanes import MAPPED
from gdsstream.engine.staged import StagedEngine
from gdsstream.errors import MemoryBudgetError


class MappedEngine(StagedEngine):
    """Maps and registers the files it opens, within `host_cache_bytes`, which what `open_windows` holds counts for too.

    `fallback` says what becomes of a file that cannot be: one that does not fit is read on the staged route, and one
    whose pages the driver refuses to register is copied into pinned memory, where true (backend "auto"). Where false
    they are MemoryBudgetError and BackendUnavailableError (backend "mapped", which never falls back).
    """

    name = "mapped"

    def __init__(self, device: torch.device, config: StreamConfig, *, fallback: bool = False) -> None:
        super().__init__(device, config)
        self._fallback = fallback

    def lane_of(self, file: SourceFile, native: _native.File) -> int:
        wanted = native.nbytes
        in_use = self.mapped_bytes
        room = min(self.config.host_cache_bytes - in_use, free_bytes())
        if wanted > room:
            if self._fallback:
                return super().lane_of(file, native)
            raise MemoryBudgetError(
                f"{file.path}: mapping it takes {wanted} bytes, {room} are left (host_cache_bytes="
                f"{self.config.host_cache_bytes}, {in_use} in use); raise host_cache_bytes, or use "
                'backend="staged"'
            )
        self._native.map(native, allow_copy=self._fallback)
        return MAPPED


__all__ = ["MappedEngine", "free_bytes"]
