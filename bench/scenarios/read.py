"""Verb `read`: the whole checkpoint into tensors, as when a model is loaded."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from bench.files import BenchFiles, TensorInfo
from bench.loaders.base import Job, Loader
from bench.scenarios.base import VerificationError, Workload

if TYPE_CHECKING:
    import torch

_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.device.type == "cpu":
        # Five times as fast as torch.equal, whose bytes go through one thread and a comparison each.
        return bool(_memcmp(found.data_ptr(), wanted.data_ptr(), found.numel()) == 0)
    import torch

    return bool(torch.equal(found, wanted))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Read(Workload):
    """Every tensor of every file, verified against the generator's pool rather than against another reader."""

    verb = "read"
    unit = "tensors"

    def __init__(self, files: BenchFiles, device: str) -> None:
        import torch

        self.files = files
        self.job = Job(files.paths, files.data_bytes, device)
        self.units = len(files.tensors)
        self._pool = torch.from_numpy(files.pool).to(device)

    @property
    def sample_bytes(self) -> int:
        return self.job.data_bytes

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
            self._verify_tensor(info, delivered[info.name])

    def _verify_tensor(self, info: TensorInfo, tensor: torch.Tensor) -> None:
        import torch

        if tuple(tensor.shape) != info.shape or str(tensor.dtype) != f"torch.{_DTYPES[info.dtype]}":
            raise VerificationError(
                f"{info.name} is {tensor.dtype} {tuple(tensor.shape)}, the file says {info.dtype} {info.shape}"
            )
        if tensor.device.type != torch.device(self.job.device).type:
            raise VerificationError(f"{info.name} is on {tensor.device}, not on {self.job.device}")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start, place, count in self.files.expected(info):
            found, wanted = data[start : start + count], self._pool[place : place + count]
            if not _same(found, wanted):
                where = start + int((found != wanted).to(torch.uint8).argmax())
                path = self.files.paths[info.file]
                raise VerificationError(f"{info.name} differs from byte {where} on (file {path}, offset {info.offset})")
