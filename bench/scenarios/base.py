"""What a verb contributes: a job for the loaders, one sample's work, and the check of what it delivered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Job, Loader

if TYPE_CHECKING:
    import torch


class VerificationError(Exception):
    """A loader delivered other bytes than the files hold; the message names the first difference."""


class Workload(ABC):
    """One scenario on one set of files."""

    verb: str
    job: Job
    #: What is counted besides bytes, and how many of them one sample delivers.
    unit: str
    units: int

    @property
    @abstractmethod
    def sample_bytes(self) -> int:
        """Bytes that one sample delivers, the numerator of GB/s."""

    @abstractmethod
    def run(self, loader: Loader) -> Any:
        """The call that loads. Timed."""

    @abstractmethod
    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        """Everything that was delivered, for the consumer."""

    @abstractmethod
    def verify(self, delivered: Any) -> None:
        """Compare every byte. Untimed. Raises VerificationError."""

    def finish(self, delivered: Any) -> None:
        """End the timed region as loaders/base.py defines it."""
        if self.job.cuda:
            import torch

            torch.cuda.synchronize(self.job.device)
        else:
            consume(self.tensors(delivered))


def consume(tensors: list[torch.Tensor]) -> int:
    """Read every byte of CPU tensors once: the wrap-around sum of their 64-bit words, of single bytes where they are
    not aligned to words. torch's own loop, on all its threads."""
    import torch

    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        words = flat.numel() // 8 * 8
        if flat.data_ptr() % 8 or flat.storage_offset() % 8:
            words = 0
        if words:
            total += int(flat[:words].view(torch.int64).sum())
        if words < flat.numel():
            total += int(flat[words:].sum(dtype=torch.int64))
    return total & (1 << 64) - 1
