"""NVIDIA DALI: its numpy reader, to the CPU or, with GPUDirect Storage's library, straight to the GPU.

A sample is a file for it, so that each record becomes an .npy file. Its shuffle is of the files before every epoch. It
has read its first `prefetch_queue_depth` batches before it is asked for any, and so before its clock starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bench.loaders import own_format
from bench.loaders.base import Job, Unavailable, need, need_cuda

if TYPE_CHECKING:
    import torch


@dataclass
class Dali(own_format.Converted):
    """`reader`: cpu (a copy to the GPU follows) or gpu (cuFile). At most `most_files` records are made files of."""

    reader: str = "cpu"
    num_threads: int = 8
    prefetch_queue_depth: int = 2
    most_files: int = 150_000

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch", "mlperf"})

    _iterator: Any = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        if self.reader == "gpu":
            need_cuda(job, "DALI's GPU reader")
        shards = own_format.request_of(job).shards
        if shards.sizes is not None:
            raise Unavailable("its iterator for torch needs samples of one shape, and these records differ in size")
        count = shards.num_records
        if count > self.most_files:
            raise Unavailable(f"a record is a file for its numpy reader, and {count} are more than most_files")

    def convert(self, job: Job) -> None:
        need("nvidia.dali", "nvidia-dali-cuda130")
        self._directory = own_format.folder(job, f"dali-{id(self)}")
        for number, row in enumerate(own_format.rows(job)):
            path = self._directory / f"{number:09d}.npy"
            np.save(path, row)
            self._files.append(str(path))

    def prepare(self, job: Job) -> None:
        dali = need("nvidia.dali", "nvidia-dali-cuda130")
        plugin = need("nvidia.dali.plugin.pytorch", "nvidia-dali-cuda130")
        request = own_format.request_of(job)

        def pipeline() -> Any:
            data = dali.fn.readers.numpy(
                device=self.reader,
                files=self._files,
                shuffle_after_epoch=True,
                seed=request.seed,
                name="records",
                pad_last_batch=False,
            )
            return data.gpu() if job.cuda and self.reader == "cpu" else data

        built = dali.pipeline_def(pipeline)(
            batch_size=request.batch_size,
            num_threads=self.num_threads,
            device_id=int(job.device.partition(":")[2] or 0) if job.cuda else None,
            prefetch_queue_depth=self.prefetch_queue_depth,
        )
        policy = plugin.LastBatchPolicy.PARTIAL
        self._iterator = plugin.DALIGenericIterator(
            [built], ["x"], reader_name="records", last_batch_policy=policy, auto_reset=True
        )

    def epochs(self, count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            ended = False
            try:
                for batch in self._iterator:
                    yield batch[0]["x"]
                ended = True
            finally:
                # It cannot begin anew before its epoch has ended, and has begun the next one when it has.
                while not ended:
                    ended = next(self._iterator, None) is None

    def close(self) -> None:
        self._iterator = None
        super().close()

    def route(self) -> str | None:
        return f"numpy reader to the {self.reader}, {self.num_threads} threads, files shuffled"
