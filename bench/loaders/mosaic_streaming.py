"""MosaicML streaming: the records in MDS shards, read by StreamingDataset in torch's DataLoader from the local folder.

Its shuffle is the default one, of shards and of the samples in blocks that span several of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders import own_format
from bench.loaders.base import Job, Loader, need

if TYPE_CHECKING:
    import torch


@dataclass
class MosaicStreaming(Loader):
    """`num_workers` processes, 0 for none; MDS shards of `shard_bytes`, or of one record where that is larger."""

    num_workers: int = 8
    pin_memory: bool = True
    prefetch_factor: int = 2
    shard_bytes: int = 64 << 20
    shuffle_algo: str = "py1e"

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch"})

    _directory: Path | None = field(default=None, init=False, repr=False)
    _files: list[str] = field(default_factory=list, init=False, repr=False)
    _loader: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def convert(self, job: Job) -> None:
        library = need("streaming", "mosaicml-streaming")
        self._directory = own_format.folder(job, f"mosaic-{id(self)}")
        column = f"ndarray:uint8:{own_format.request_of(job).shards.record_bytes}"
        with library.MDSWriter(out=str(self._directory), columns={"x": column}, size_limit=self.shard_bytes) as mds:
            for row in own_format.rows(job):
                mds.write({"x": row})
        self._files = own_format.files_in(self._directory)

    def prepare(self, job: Job) -> None:
        import torch

        library = need("streaming", "mosaicml-streaming")
        request = own_format.request_of(job)
        self._job = job
        dataset = library.StreamingDataset(
            local=str(self._directory),
            batch_size=request.batch_size,
            shuffle=True,
            shuffle_algo=self.shuffle_algo,
            shuffle_seed=request.seed,
            num_canonical_nodes=1,
        )
        self._loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=request.batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and job.cuda,
            persistent_workers=self.num_workers > 0,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
            worker_init_fn=_unwarned,
        )

    def epochs(self, count: int) -> Iterator[torch.Tensor]:
        assert self._job is not None
        for _ in range(count):
            yield from own_format.to_device((batch["x"] for batch in self._loader), self._job)

    def paths(self, job: Job) -> list[str]:
        return self._files

    def close(self) -> None:
        self._loader = None
        own_format.remove(self._directory)
        self._directory, self._files = None, []

    def route(self) -> str | None:
        return f"MDS of {self.shard_bytes >> 20} MiB, {self.num_workers} workers, shuffle {self.shuffle_algo}"


def _unwarned(worker: int) -> None:
    """In a worker: its arrays are read-only, of which torch warns although they are only copied."""
    del worker
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
