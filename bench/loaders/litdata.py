"""LitData: the records in its chunks, read by StreamingDataset and StreamingDataLoader from the local folder.

Its shuffle is of whole chunks and inside each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import ragged
from bench.loaders import own_format
from bench.loaders.base import Job, need
from bench.loaders.workers import Workers


@dataclass
class LitData(own_format.Converted, Workers):
    """`num_workers` processes, 0 for none; chunks of at least `chunk_bytes`, or of one record where that is larger."""

    chunk_bytes: int = 64 << 20

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
            **self.options(job),
            **({} if request.shards.sizes is None else {"collate_fn": ragged.collate}),
        )

    def route(self) -> str | None:
        return f"chunks of {self.chunk_bytes >> 20} MiB, {self.num_workers} workers, chunks and inside them shuffled"
