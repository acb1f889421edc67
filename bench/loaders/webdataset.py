"""WebDataset: the records as members of tar files, read in sequence.

Its shuffle is of whole shards and of a buffer of samples. Tar files are shared out to the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import ragged
from bench.loaders import own_format
from bench.loaders.base import Job, need
from bench.loaders.workers import Workers

if TYPE_CHECKING:
    import torch


@dataclass
class WebDataset(own_format.Converted, Workers):
    """`num_workers` processes, 0 for none; `shuffle_records` in the buffer of each, fewer where they are large."""

    shuffle_records: int = 1000
    shuffle_bytes: int = 1 << 30

    def convert(self, job: Job) -> None:
        need("webdataset", "webdataset")
        self._directory = own_format.folder(job, f"webdataset-{id(self)}")
        self._files = own_format.write_tars(job, self._directory)

    def prepare(self, job: Job) -> None:
        library = need("webdataset", "webdataset")
        request = own_format.request_of(job)
        self._job = job
        workers = min(self.num_workers, len(self._files))
        held = own_format.held(job, self.shuffle_records, self.shuffle_bytes)
        dataset = (
            library.WebDataset(self._files, shardshuffle=len(self._files), seed=request.seed, empty_check=False)
            .shuffle(held, initial=held)
            .map(_record)
            .batched(request.batch_size, collation_fn=_stack if request.shards.sizes is None else ragged.collate)
        )
        self._loader = library.WebLoader(
            dataset,
            batch_size=None,
            **self.options(job, workers),
        )

    def route(self) -> str | None:
        return f"tar, {self.num_workers} workers, whole shards and buffers of {self.shuffle_records} records shuffled"


def _record(sample: dict[str, Any]) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(sample[own_format.MEMBER]), dtype=torch.uint8)


def _stack(samples: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(samples)
