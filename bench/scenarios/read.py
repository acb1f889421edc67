"""Verb `read`: the whole checkpoint into tensors, as when a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.files import BenchFiles
from bench.loaders.base import Job, Loader
from bench.scenarios.base import VerificationError, Workload
from bench.scenarios.contents import Contents

if TYPE_CHECKING:
    import torch


class Read(Workload):
    """Every tensor of every file, verified against the generator's pool rather than against another reader."""

    verb = "read"
    unit = "tensors"

    def __init__(self, files: BenchFiles, device: str) -> None:
        self.files = files
        self.job = Job(files.paths, files.data_bytes, device)
        self.units = len(files.tensors)
        self._contents = Contents(files, device)

    @property
    def sample_bytes(self) -> int:
        return self.job.data_bytes

    def least_device_bytes(self) -> int:
        return self.sample_bytes

    def run(self, loader: Loader) -> dict[str, torch.Tensor]:
        return loader.load()

    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        return list(delivered.values())

    def verify(self, delivered: Any) -> None:
        expected = self.files.tensors
        if delivered.keys() != expected.keys():
            missing, extra = sorted(expected.keys() - delivered.keys()), sorted(delivered.keys() - expected.keys())
            example = (missing + extra)[0]
            raise VerificationError(
                f"{len(missing)} tensors are missing and {len(extra)} are not in the files, such as {example}"
            )
        for info in expected.values():
            self._contents.check(info, delivered[info.name])
