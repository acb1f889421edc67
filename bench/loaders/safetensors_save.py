"""safetensors.torch.save_file and fsync, file after file: what most code does today, made safe from a loss of power.

The library itself waits for nothing; without the fsync it would be timed for filling the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders.base import Job, need
from bench.loaders.shard_files import ShardFiles

if TYPE_CHECKING:
    import torch


@dataclass
class SafetensorsSave(ShardFiles):
    """No options: the library has none."""

    suffix: ClassVar[str] = ".safetensors"

    _library: Any = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        self._library = need("safetensors.torch", "safetensors")
        super().prepare(job)

    def write(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        self._library.save_file(tensors, path)

    def read(self, path: Path, device: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._library.load_file(path, device=device)
        return found

    def delivers(self) -> str:
        return "owned" if self._job is not None and self._job.cuda else "file mapping"

    def route(self) -> str | None:
        return f"{self.from_device()}page cache, then fsync"
