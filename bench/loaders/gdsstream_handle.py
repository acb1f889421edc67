"""gdsstream.safe_open with a host cache: a handle that is opened once and read again and again.

Opening it fills and registers the cache, which is the start-up column; loads re-read through the handle. The registered
pages cannot be evicted, so there is no cold load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Job, Loader, Unavailable, need

if TYPE_CHECKING:
    import torch


@dataclass
class Handle(Loader):
    """`host_cache_bytes` None: room for the whole checkpoint."""

    backend: str = "mapped"
    host_cache_bytes: int | None = None

    pins_page_cache = True

    _handle: Any = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        gdsstream = need("gdsstream", "gdsstream")
        # Headers and page rounding come on top of the tensors.
        budget = self.host_cache_bytes if self.host_cache_bytes is not None else job.data_bytes + (64 << 20)
        try:
            self._handle = gdsstream.safe_open(
                list(job.paths), framework="pt", device=job.device, backend=self.backend, host_cache_bytes=budget
            )
            self._handle.__enter__()
        except gdsstream.BackendUnavailableError as error:
            raise Unavailable(str(error)) from error

    def load(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = self._handle.tensors()
        return tensors

    def close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
            self._handle = None

    def route(self) -> str | None:
        return str(self._handle.route)
