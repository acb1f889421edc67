"""Run:ai Model Streamer: all files in one call.

On a GPU each tensor is copied to the device by the library, on the CPU it is a view of the streamer's buffer. That
buffer is used again only when the checkpoint is larger than the memory limit (40 GB unless configured); in that case,
and only then, the tensors are cloned here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Job, Loader, need

if TYPE_CHECKING:
    import torch

_DEFAULT_LIMIT = 40_000_000_000


@dataclass
class RunaiStreamer(Loader):
    """`concurrency` None keeps RUNAI_STREAMER_CONCURRENCY or the library's default."""

    concurrency: int | None = None

    _library: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "WARNING")
        if self.concurrency is not None:
            os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(self.concurrency)
        self._library = need("runai_model_streamer", "runai-model-streamer")
        self._job = job

    def load(self) -> dict[str, torch.Tensor]:
        assert self._job is not None
        limit = int(os.environ.get("RUNAI_STREAMER_MEMORY_LIMIT", str(_DEFAULT_LIMIT)))
        reused = not self._job.cuda and 0 <= limit < self._job.data_bytes
        with self._library.SafetensorsStreamer() as streamer:
            streamer.stream_files(list(self._job.paths), device=self._job.device)
            return {name: tensor.clone() if reused else tensor for name, tensor in streamer.get_tensors()}

    def route(self) -> str | None:
        return "threads -> pageable buffer" + (" -> GPU" if self._job is not None and self._job.cuda else "")
