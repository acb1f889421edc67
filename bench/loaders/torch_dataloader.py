"""torch.utils.data.DataLoader over the same shards: through gdsstream.ShardDataset, or a dataset as people write them.

`memmap` maps the shards and returns a row of one as a tensor; `pread` reads a row from the file. Batches are copied to
the device with `.to(device, non_blocking=True)`. Workers live from the first epoch on, so that only the first one waits
for their start.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.config import BenchConfigError
from bench.loaders import own_format
from bench.loaders.base import Job, need
from bench.loaders.workers import Workers
from bench.record_shards import DATA_OFFSET, RecordShards

if TYPE_CHECKING:
    import torch

_DATASETS = ("memmap", "pread", "shards")


class _Records:
    """A map-style dataset of the shards' records; every process opens the files for itself."""

    def __init__(self, shards: RecordShards) -> None:
        self._shards = shards
        self._starts = np.concatenate(([0], np.cumsum(shards.rows))).tolist()

    def __len__(self) -> int:
        return self._shards.num_records

    def _place(self, index: int) -> tuple[int, int]:
        """Shard, and row in it."""
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]


class MappedRecords(_Records):
    """Rows of mappings."""

    _tables: list[Any] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        if self._tables is None:
            self._tables = list(self._shards.tables())
        shard, row = self._place(index)
        return torch.from_numpy(self._tables[shard][row])


class FileRecords(_Records):
    """Rows read from the files, which stay open."""

    _files: list[int] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        if self._files is None:
            self._files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._shards.paths]
        shard, row = self._place(index)
        size = self._shards.record_bytes
        record = bytearray(size)
        view = memoryview(record)
        done = 0
        while done < size:
            count = os.preadv(self._files[shard], [view[done:]], DATA_OFFSET + row * size + done)
            if not count:
                raise OSError(f"{self._shards.paths[shard]} ends within record {index}")
            done += count
        return torch.frombuffer(record, dtype=torch.uint8)

    def __del__(self) -> None:
        for descriptor in self._files or ():
            os.close(descriptor)


@dataclass
class TorchDataLoader(Workers):
    """`dataset`: memmap, pread or shards; `num_workers` processes, 0 for none, each `prefetch_factor` batches ahead."""

    dataset: str = "memmap"
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.dataset not in _DATASETS:
            raise BenchConfigError(f"'dataset' is {self.dataset!r}; valid: {', '.join(_DATASETS)}")

    @property
    def pins_page_cache(self) -> bool:
        return self.dataset == "memmap"

    def prepare(self, job: Job) -> None:
        import torch

        request = own_format.request_of(job)
        self._job = job
        records: Any
        if self.dataset == "shards":
            records = need("gdsstream", "gdsstream").ShardDataset(list(job.paths))
        else:
            records = (MappedRecords if self.dataset == "memmap" else FileRecords)(request.shards)
        self._loader = torch.utils.data.DataLoader(
            records,
            batch_size=request.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(request.seed),
            **self.options(job),
        )

    def route(self) -> str | None:
        pinned = "pinned, " if self._loader.pin_memory else ""
        return f"{self.dataset}, {self.num_workers} workers, {pinned}full shuffle"
