"""safetensors.torch.save_file and fsync, file after file: what most code does today, made safe from a loss of power.

The library itself waits for nothing; without the fsync it would be timed for filling the page cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench import fsyncs
from bench.loaders.base import Done, Job, Loader, Saving, need

if TYPE_CHECKING:
    import torch


@dataclass
class SafetensorsSave(Loader):
    """No options: the library has none."""

    verbs: ClassVar[frozenset[str]] = frozenset({"write"})

    _library: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        self._library = need("safetensors.torch", "safetensors")
        self._job = job

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        for stem, tensors in shards.items():
            path = folder / f"{stem}.safetensors"
            self._library.save_file(dict(tensors), path)
            fsyncs.file(path)
        fsyncs.directory(folder)
        return Done()

    def restore(self, folder: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert self._job is not None
        found: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            found.update(self._library.load_file(path, device=self._job.device))
        return found

    def delivers(self) -> str:
        return "owned" if self._job is not None and self._job.cuda else "file mapping"

    def route(self) -> str | None:
        assert self._job is not None
        return f"{'pageable copy of the GPU -> ' if self._job.cuda else ''}page cache, then fsync"
