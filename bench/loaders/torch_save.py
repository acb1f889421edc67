"""torch.save and fsync, file after file, and torch.load without unpickling code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from bench.loaders.shard_files import ShardFiles

if TYPE_CHECKING:
    import torch


@dataclass
class TorchSave(ShardFiles):
    """No options."""

    suffix: ClassVar[str] = ".pt"

    def write(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        import torch

        torch.save(tensors, path)

    def read(self, path: Path, device: str) -> dict[str, torch.Tensor]:
        import torch

        found: dict[str, torch.Tensor] = torch.load(path, map_location=device, weights_only=True)
        return found

    def route(self) -> str | None:
        return f"{self.from_device()}page cache (zip, with CRC32), then fsync"
