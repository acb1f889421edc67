"""safetensors.torch.load_file, file after file: what most code does today.

On the CPU it returns tensors over a private file mapping that is read when it is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Job, Loader, need

if TYPE_CHECKING:
    import torch


@dataclass
class Safetensors(Loader):
    """No options: the library has none."""

    _load_file: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        self._load_file = need("safetensors.torch", "safetensors").load_file
        self._job = job

    def load(self) -> dict[str, torch.Tensor]:
        assert self._job is not None
        tensors: dict[str, torch.Tensor] = {}
        for path in self._job.paths:
            tensors.update(self._load_file(path, device=self._job.device))
        return tensors

    def delivers(self) -> str:
        return "owned" if self._job is not None and self._job.cuda else "file mapping"

    def route(self) -> str | None:
        assert self._job is not None
        return "mmap -> pageable copy -> GPU" if self._job.cuda else "private file mapping, read when touched"
