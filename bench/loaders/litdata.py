"""LitData: the records in its chunks, read by StreamingDataset and StreamingDataLoader from the local folder.

Its shuffle is of whole chunks and inside each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders import own_format
from bench.loaders.base import Job, Loader, need

if TYPE_CHECKING:
    import torch


@dataclass
class LitData(Loader):
    """`num_workers` processes, 0 for none; chunks of at least `chunk_bytes`, or of one record where that is larger."""

    num_workers: int = 8
    pin_memory: bool = True
    prefetch_factor: int = 2
    chunk_bytes: int = 64 << 20

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch"})

    _directory: Path | None = field(default=None, init=False, repr=False)
    _files: list[str] = field(default_factory=list, init=False, repr=False)
    _loader: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def convert(self, job: Job) -> None:
        import torch

        need("litdata", "litdata")
        cache = need("litdata.streaming.cache", "litdata")
        self._directory = own_format.folder(job, f"litdata-{id(self)}")
        each = max(1, self.chunk_bytes // own_format.request_of(job).shards.record_bytes)
        writer = cache.Cache(str(self._directory), chunk_size=each)
        for number, row in enumerate(own_format.rows(job)):
            writer[number] = torch.from_numpy(row)
        writer.done()
        writer.merge()
        self._files = own_format.files_in(self._directory)

    def prepare(self, job: Job) -> None:
        library = need("litdata", "litdata")
        request = own_format.request_of(job)
        self._job = job
        dataset = library.StreamingDataset(str(self._directory), shuffle=True, drop_last=False, seed=request.seed)
        self._loader = library.StreamingDataLoader(
            dataset,
            batch_size=request.batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and job.cuda,
            persistent_workers=self.num_workers > 0,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
        )

    def epochs(self, count: int) -> Iterator[torch.Tensor]:
        assert self._job is not None
        for _ in range(count):
            yield from own_format.to_device(self._loader, self._job)

    def paths(self, job: Job) -> list[str]:
        return self._files

    def close(self) -> None:
        self._loader = None
        own_format.remove(self._directory)
        self._directory, self._files = None, []

    def route(self) -> str | None:
        return f"chunks of {self.chunk_bytes >> 20} MiB, {self.num_workers} workers, chunks and inside them shuffled"
