"""gdsstream.ShardLoader over the shards as they are.

A sample is one iterator: several epochs go through it without a pause, which is a setting of the loader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders.base import Job, Unavailable, need
from bench.loaders.knobs import Knobs

if TYPE_CHECKING:
    import torch


@dataclass
class Shards(Knobs):
    """See Knobs; the others are ShardLoader's own. `host_cache_bytes` None: all shards, where the backend is mapped."""

    shuffle: str = "full"
    borrow: bool = False
    prefetch_batches: int | None = None
    host_cache_bytes: int | None = None

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch", "mlperf"})

    _loader: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    @property
    def pins_page_cache(self) -> bool:
        return self.backend == "mapped"

    def prepare(self, job: Job) -> None:
        gdsstream = need("gdsstream", "gdsstream")
        request = job.epoch
        assert request is not None
        self._job = job
        knobs = self.knobs("prefetch_batches", "host_cache_bytes")
        if self.backend == "mapped":
            knobs.setdefault("host_cache_bytes", sum(os.path.getsize(path) for path in job.paths))
        try:
            self._loader = gdsstream.ShardLoader(
                list(job.paths),
                request.batch_size,
                self.shuffle,
                seed=request.seed,
                device=job.device,
                borrow=self.borrow,
                **knobs,
            )
        except gdsstream.BackendUnavailableError as error:
            raise Unavailable(str(error)) from error

    def epochs(self, count: int) -> Iterator[torch.Tensor]:
        self._loader.epochs = count
        yield from self._loader

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._loader = None

    def delivers(self) -> str:
        return "lease" if self.borrow else "owned"

    def route(self) -> str | None:
        return f"{self._loader.route}; {self.shuffle} shuffle"
