"""torch.save and fsync, file after file, and torch.load without unpickling code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench import fsyncs
from bench.loaders.base import Done, Job, Loader, Saving

if TYPE_CHECKING:
    import torch


@dataclass
class TorchSave(Loader):
    """No options."""

    verbs: ClassVar[frozenset[str]] = frozenset({"write"})

    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        self._job = job

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        import torch

        for stem, tensors in shards.items():
            path = folder / f"{stem}.pt"
            torch.save(dict(tensors), path)
            fsyncs.file(path)
        fsyncs.directory(folder)
        return Done()

    def restore(self, folder: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        assert self._job is not None
        found: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.pt")):
            found.update(torch.load(path, map_location=self._job.device, weights_only=True))
        return found

    def route(self) -> str | None:
        assert self._job is not None
        return f"{'pageable copy of the GPU -> ' if self._job.cuda else ''}page cache (zip, with CRC32), then fsync"
