"""MosaicML streaming: the records in MDS shards, read by StreamingDataset in torch's DataLoader from the local folder.

Its shuffle is the default one, of shards and of the samples in blocks that span several of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import ragged
from bench.loaders import own_format
from bench.loaders.base import Job, need
from bench.loaders.workers import Workers

if TYPE_CHECKING:
    import torch


@dataclass
class MosaicStreaming(own_format.Converted, Workers):
    """`num_workers` processes, 0 for none; MDS shards of `shard_bytes`, or of one record where that is larger."""

    shard_bytes: int = 64 << 20
    shuffle_algo: str = "py1e"

    def convert(self, job: Job) -> None:
        library = need("streaming", "mosaicml-streaming")
        self._directory = own_format.folder(job, f"mosaic-{id(self)}")
        shards = own_format.request_of(job).shards
        column = f"ndarray:uint8:{shards.record_bytes}" if shards.sizes is None else "ndarray:uint8"
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
            **self.options(job),
            worker_init_fn=_unwarned,
            collate_fn=None if request.shards.sizes is None else _collate,
        )

    def batches(self) -> Iterable[torch.Tensor | ragged.Ragged]:
        return (batch["x"] for batch in self._loader)

    def route(self) -> str | None:
        return f"MDS of {self.shard_bytes >> 20} MiB, {self.num_workers} workers, shuffle {self.shuffle_algo}"


def _collate(samples: Sequence[dict[str, Any]]) -> dict[str, ragged.Ragged]:
    import torch

    return {"x": ragged.collate([torch.from_numpy(sample["x"]) for sample in samples])}


def _unwarned(worker: int) -> None:
    """In a worker: its arrays are read-only, of which torch warns although they are only copied."""
    del worker
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
