"""InstantTensor: all files in one call, copy=True (its default), so that the tensors outlive the context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Job, Loader, need, need_cuda

if TYPE_CHECKING:
    import torch


@dataclass
class InstantTensor(Loader):
    """`backend` is a name of its Backend enumeration; None lets it choose (MMAP in memory, URING or AIO on disk)."""

    backend: str | None = None
    concurrency: int | None = None
    chunk_size: int | None = None
    io_depth: int | None = None

    _library: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)
    _used: str | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        need_cuda(job, "InstantTensor")

    def prepare(self, job: Job) -> None:
        self._library = need("instanttensor", "instanttensor")
        self._job = job

    def load(self) -> dict[str, torch.Tensor]:
        assert self._job is not None
        backend = None if self.backend is None else self._library.Backend[self.backend]
        with self._library.safe_open(
            list(self._job.paths),  # it sorts the list in place
            framework="pt",
            device=self._job.device,
            backend=backend,
            concurrency=self.concurrency,
            chunk_size=self.chunk_size,
            io_depth=self.io_depth,
        ) as handle:
            self._used = str(handle.backend.name)
            return dict(handle.tensors())

    def route(self) -> str | None:
        return None if self._used is None else f"backend {self._used}, device ring, cloned"
