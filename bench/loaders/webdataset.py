"""WebDataset: the records as members of tar files, read in sequence.

Its shuffle is of whole shards and of a buffer of samples. Tar files are shared out to the workers.
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
class WebDataset(Loader):
    """`num_workers` processes, 0 for none; `shuffle_records` in the buffer of each, fewer where they are large."""

    num_workers: int = 8
    pin_memory: bool = True
    prefetch_factor: int = 2
    shuffle_records: int = 1000
    shuffle_bytes: int = 1 << 30

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch"})

    _directory: Path | None = field(default=None, init=False, repr=False)
    _files: list[str] = field(default_factory=list, init=False, repr=False)
    _loader: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def convert(self, job: Job) -> None:
        library = need("webdataset", "webdataset")
        self._directory = own_format.folder(job, f"webdataset-{id(self)}")
        numbers = iter(range(job_records(job)))
        for shard, table in enumerate(own_format.request_of(job).shards.tables()):
            path = str(self._directory / f"records-{shard:05d}.tar")
            with library.TarWriter(path, encoder=False) as tar:
                for row in table:
                    tar.write({"__key__": f"{next(numbers):012d}", "bin": row.tobytes()})
        self._files = own_format.files_in(self._directory)

    def prepare(self, job: Job) -> None:
        library = need("webdataset", "webdataset")
        request = own_format.request_of(job)
        self._job = job
        workers = min(self.num_workers, len(self._files))
        held = max(2, min(self.shuffle_records, self.shuffle_bytes // request.shards.record_bytes))
        dataset = (
            library.WebDataset(self._files, shardshuffle=len(self._files), seed=request.seed, empty_check=False)
            .shuffle(held, initial=held)
            .map(_record)
            .batched(request.batch_size, collation_fn=_stack)
        )
        self._loader = library.WebLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            pin_memory=self.pin_memory and job.cuda,
            persistent_workers=workers > 0,
            prefetch_factor=self.prefetch_factor if workers else None,
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
        return f"tar, {self.num_workers} workers, whole shards and buffers of {self.shuffle_records} records shuffled"


def job_records(job: Job) -> int:
    return own_format.request_of(job).shards.num_records


def _record(sample: dict[str, Any]) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8)


def _stack(samples: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(samples)
