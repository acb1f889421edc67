"""What a verb contributes: a job for the loaders, one sample's work, and the check of what it delivered."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.loaders.base import Job, Loader

if TYPE_CHECKING:
    import torch

    from bench.measure import Sample


class VerificationError(Exception):
    """A loader delivered other bytes than the files hold; the message names the first difference."""


class Alone(NamedTuple):
    """Compute that runs while bytes arrive: its seconds by itself, and how many bytes arrive meanwhile."""

    seconds: float
    nbytes: int


class Workload(ABC):
    """One scenario on one set of files. A sample is `before`, `run` (timed), `finish` (timed), `after`, `verify`."""

    verb: str
    job: Job
    #: What is counted besides bytes, and how many of them one sample delivers.
    unit: str
    units: int
    #: Whether compute is a part of a sample (`alone`).
    computes: bool = False

    @property
    @abstractmethod
    def sample_bytes(self) -> int:
        """Bytes that one sample delivers, the numerator of GB/s."""

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        """What a round measures of a loader beside its sample, by name; `number` is the round, -1 the first load.

        Not a part of the sample. Raises VerificationError.
        """
        del loader, number
        return {}

    @abstractmethod
    def run(self, loader: Loader) -> Any:
        """The call that loads. Timed."""

    @abstractmethod
    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        """Everything that was delivered, for the consumer."""

    def amount(self, delivered: Any) -> tuple[int, int]:
        """Bytes and units of this sample, where loaders' samples differ."""
        del delivered
        return self.sample_bytes, self.units

    def own_seconds(self, delivered: Any) -> float | None:
        """What a sample took by the clock of the program that was measured, instead of this one's."""
        del delivered
        return None

    def least_device_bytes(self) -> int:
        """What the disk has to read for one sample, from an empty page cache; 0 where that cannot be told."""
        return 0

    def after(self, loader: Loader, delivered: Any) -> dict[str, float]:
        """Figures of the sample that was just taken, by name. Untimed."""
        del loader, delivered
        return {}

    def details(self, loader: Loader) -> dict[str, Any]:
        """What is found out of a loader once, in its first load, for the record's derived figures."""
        del loader
        return {}

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any] | None:
        """What the scenario makes of a loader's samples that count, for the record."""
        del samples
        return None

    def alone(self) -> Alone:
        """Measure the compute that a sample contains, without any loader, where `computes` says that there is any."""
        raise NotImplementedError(f"verb {self.verb!r} computes nothing")

    @abstractmethod
    def verify(self, delivered: Any) -> None:
        """Compare every byte. Untimed. Raises VerificationError."""

    def spoil(self, delivered: Any) -> None:
        """Make what was verified wrong, a byte of every page, before its memory is used again: a loader that writes
        nothing into it the next time would deliver the right bytes otherwise. Untimed; for memory that is owned."""
        import torch

        with torch.inference_mode():  # where tensors of that mode may be changed, too
            for tensor in self.tensors(delivered):
                flat = tensor.detach().reshape(-1).view(torch.uint8)
                flat[:: mmap.PAGESIZE].bitwise_not_()

    def close(self) -> None:
        """Remove what was written for this workload alone."""
        return None

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
