"""gdsstream's own engines: all ios of a sample in one submit, read by native threads.

`backend` staged reads through a pinned ring, or with `direct_io` past the page cache at depth; mapped copies from a
registered page cache; cufile goes through kvikio. On the CPU the engine reads into the destination itself. `threads`
and `depth` are the engine's num_threads and io_depth. With `own_choice` it decides about them itself, and gets ios
that follow each other as one stretch, to be cut as it likes; without, each io is an extent, which it cuts only past the
page cache, into reads of at most 512 KiB.

The engine does not tell when a single io was complete, so that there are no latencies. It reads only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.loaders.base import Job, Unavailable, need
from bench.loaders.transfer_route import Route

if TYPE_CHECKING:
    from bench.transfer_ops import Ops

_LEAST_CHUNK = 64 << 10
_PAGE = 4096


@dataclass
class EngineReads(Route):
    """`own_choice` True leaves threads, depth and chunk to the engine, and the scenario's are not looked at."""

    backend: str = "staged"
    reader: str | None = None
    direct_io: bool | None = None
    own_choice: bool = True

    _engine: Any = field(default=None, init=False, repr=False)
    _files: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)

    @property
    def pins_page_cache(self) -> bool:
        return self.backend == "mapped"

    def check(self, job: Job) -> None:
        super().check(job)
        assert job.transfer is not None
        if job.transfer.write:
            raise Unavailable("gdsstream's engines read only; tensors are written by gdsstream.save_file")

    def start(self) -> None:
        gdsstream = need("gdsstream", "gdsstream")
        checkpoint = need("gdsstream.checkpoint", "gdsstream")
        engine = need("gdsstream.engine", "gdsstream")
        try:
            self._engine = engine.open_engine(self.backend, device=self.job.device, **self._knobs())
        except (gdsstream.BackendUnavailableError, gdsstream.ConfigError) as error:
            raise Unavailable(str(error)) from error
        self._files = [SimpleNamespace(path=path, stamp=checkpoint.FileStamp.of(path)) for path in self.job.paths]
        try:
            if hasattr(self._engine, "open"):
                self._files = self._engine.open(self._files)
            if hasattr(self._engine, "prepare"):
                self._engine.prepare()
        except gdsstream.GdsStreamError as error:
            raise Unavailable(str(error)) from error
        self.memory()

    def _knobs(self) -> dict[str, Any]:
        knobs: dict[str, Any] = {"direct_io": self.direct_io, "reader": self.reader}
        if not self.own_choice:
            largest = int(self.ops().nbytes.max())
            knobs["num_threads"], knobs["io_depth"] = self.num_threads, self.in_flight
            knobs["chunk_size"] = max(_LEAST_CHUNK, -(-largest // _PAGE) * _PAGE)
            if self.backend == "staged":
                knobs["staging_bytes"] = max(96 << 20, 8 * knobs["chunk_size"])
        if self.backend == "mapped":
            knobs["host_cache_bytes"] = sum(map(os.path.getsize, self.job.paths)) + (64 << 20)
        return {key: value for key, value in knobs.items() if value is not None}

    def transfer(self, ops: Ops) -> None:
        memory = self.memory()
        whole = list(ops.stretches()) if self.own_choice else ops.rows
        size = ops.uniform or 0
        # Records of one size that lie end to end in memory are what `gather` is made for.
        if len(whole) == len(ops) and size * len(ops) == ops.memory_bytes and hasattr(self._engine, "gather"):
            rows = memory[: ops.memory_bytes].view(len(ops), size)
            self._engine.gather(self._files, ops.file, ops.offset, size, rows).wait()
            return
        columns = np.array(whole, dtype=np.int64).T
        zeros = np.zeros(len(whole), dtype=np.int32)
        extents = SimpleNamespace(
            file=columns[0].astype(np.int32),
            file_offset=np.ascontiguousarray(columns[1]),
            nbytes=np.ascontiguousarray(columns[2]),
            buffer=zeros,
            buffer_offset=np.ascontiguousarray(columns[3]),
            group=zeros,
            buffer_bytes=(ops.memory_bytes,),
            num_groups=1,
        )
        self._engine.submit(self._files, extents, [memory]).wait()

    def close(self) -> None:
        super().close()
        self._files = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def route(self) -> str:
        return f"{self._engine.route}, all ios in one submit"

    def details(self) -> dict[str, Any]:
        chosen = {"threads": None, "depth": None} if self.own_choice else {}
        # Its ring is always page-locked where there is a GPU, whatever the scenario's buffers are.
        return {**super().details(), **chosen, "latency_of": None, "registered": None}

    def pinned_bytes(self) -> int | None:
        if not self.job.cuda:
            return 0
        stats = self._engine.stats()
        return int(stats.get("staging_bytes", 0)) + int(stats.get("mapped_bytes", 0))
