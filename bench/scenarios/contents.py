"""What the test files hold, on the device: to compare tensors with, byte for byte, and to fill tensors from.

It comes from the generator's pool rather than from another reader.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from bench.files import BenchFiles, TensorInfo
from bench.scenarios.base import VerificationError

if TYPE_CHECKING:
    import torch

_DTYPES = {"BF16": "bfloat16", "F32": "float32"}

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Contents:
    """The contents of `files` on `device`."""

    def __init__(self, files: BenchFiles, device: str) -> None:
        import torch

        self._files, self._device = files, torch.device(device)
        self._pool = torch.from_numpy(files.pool).to(device)

    def check(self, info: TensorInfo, tensor: torch.Tensor) -> None:
        """Compare dtype, shape, device and every byte. Raises VerificationError."""
        import torch

        if tuple(tensor.shape) != info.shape or str(tensor.dtype) != f"torch.{_DTYPES[info.dtype]}":
            raise VerificationError(
                f"{info.name} is {tensor.dtype} {tuple(tensor.shape)}, the file says {info.dtype} {info.shape}"
            )
        if tensor.device.type != self._device.type:
            raise VerificationError(f"{info.name} is on {tensor.device}, not on {self._device}")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start, place, count in self._files.expected(info):
            # On another GPU where a loader brings tensors to several.
            found, wanted = data[start : start + count].to(self._pool.device), self._pool[place : place + count]
            if not _same(found, wanted):
                where = start + int((found != wanted).to(torch.uint8).argmax())
                path = self._files.paths[info.file]
                raise VerificationError(f"{info.name} differs from byte {where} on (file {path}, offset {info.offset})")

    def fill(self, info: TensorInfo, tensor: torch.Tensor) -> None:
        """Put into `tensor`, which is contiguous, what the files hold under `info`."""
        import torch

        data = tensor.detach().view(-1).view(torch.uint8)
        for start, place, count in self._files.expected(info):
            data[start : start + count].copy_(self._pool[place : place + count])


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.device.type == "cpu":
        # Five times as fast as torch.equal, whose bytes go through one thread and a comparison each.
        return bool(_memcmp(found.data_ptr(), wanted.data_ptr(), found.numel()) == 0)
    import torch

    return bool(torch.equal(found, wanted))
