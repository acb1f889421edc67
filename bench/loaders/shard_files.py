"""What libraries that save one file at a time share: each shard a file, fsynced, and the folder last."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench import fsyncs
from bench.loaders.base import Done, Job, Loader, Saving

if TYPE_CHECKING:
    import torch


@dataclass
class ShardFiles(Loader):
    """A subclass says how one file is written and read, and what it is called."""

    verbs: ClassVar[frozenset[str]] = frozenset({"write"})
    suffix: ClassVar[str]

    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        self._job = job

    @abstractmethod
    def write(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        """Save one file, without fsync."""

    @abstractmethod
    def read(self, path: Path, device: str) -> dict[str, torch.Tensor]:
        """Its tensors, on the device."""

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        for stem, tensors in shards.items():
            path = folder / f"{stem}{self.suffix}"
            self.write(dict(tensors), path)
            fsyncs.file(path)
        fsyncs.directory(folder)
        return Done()

    def restore(self, folder: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert self._job is not None
        found: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob(f"*{self.suffix}")):
            found.update(self.read(path, self._job.device))
        return found

    def from_device(self) -> str:
        """How the bytes get to the page cache, for `route`."""
        assert self._job is not None
        return "pageable copy of the GPU -> " if self._job.cuda else ""
