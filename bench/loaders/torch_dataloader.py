"""torch.utils.data.DataLoader over the same shards: through gdsstream.ShardDataset, or a dataset as people write them.

`memmap` maps the shards and returns a row of one as a tensor; `pread` reads a row from the file. Batches are copied to
the device with `.to(device, non_blocking=True)`. Workers live from the first epoch on, so that only the first one waits
for their start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import ragged
from bench.config import BenchConfigError
from bench.loaders import own_format
from bench.loaders.base import Job, need
from bench.loaders.workers import Workers
from bench.record_shards import Places, RecordShards

if TYPE_CHECKING:
    import torch

_DATASETS = ("memmap", "pread", "shards")


class _Records:
    """A map-style dataset of the shards' records; every process opens the files for itself."""

    def __init__(self, shards: RecordShards) -> None:
        self._paths = shards.paths
        self._places = Places(shards)

    def __len__(self) -> int:
        return len(self._places)


class MappedRecords(_Records):
    """Pieces of mappings."""

    _files: list[Any] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        if self._files is None:
            self._files = [np.memmap(path, dtype=np.uint8, mode="c") for path in self._paths]
        shard, offset, size = self._places[index]
        return torch.from_numpy(self._files[shard][offset : offset + size])


class FileRecords(_Records):
    """Records read from the files, which stay open."""

    _files: list[int] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        if self._files is None:
            self._files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._paths]
        shard, offset, size = self._places[index]
        record = bytearray(size)
        view = memoryview(record)
        done = 0
        while done < size:
            count = os.preadv(self._files[shard], [view[done:]], offset + done)
            if not count:
                raise OSError(f"{self._paths[shard]} ends within record {index}")
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
            collate_fn=ragged.collate if request.shards.sizes is not None else None,
        )

    def route(self) -> str | None:
        pinned = "pinned, " if self._loader.pin_memory else ""
        return f"{self.dataset}, {self.num_workers} workers, {pinned}full shuffle"
