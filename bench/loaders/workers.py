"""What loaders of torch's DataLoader kind share: worker processes, and batches of host memory that go to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders.base import Job, Loader

if TYPE_CHECKING:
    import torch

    from bench.ragged import Ragged


@dataclass
class Workers(Loader):
    """`num_workers` processes, 0 for none, each `prefetch_factor` batches ahead.

    A subclass's `prepare` sets `_loader` and `_job`.
    """

    num_workers: int = 8
    pin_memory: bool = True
    prefetch_factor: int = 2

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch", "mlperf"})

    _loader: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def options(self, job: Job, workers: int | None = None) -> dict[str, Any]:
        """What a DataLoader is given; `workers` None: as many as were asked for."""
        count = self.num_workers if workers is None else workers
        return {
            "num_workers": count,
            "pin_memory": self.pin_memory and job.cuda,
            "persistent_workers": count > 0,
            "prefetch_factor": self.prefetch_factor if count else None,
        }

    def batches(self) -> Iterable[torch.Tensor | Ragged]:
        """One epoch, in host memory."""
        batches: Iterable[torch.Tensor | Ragged] = self._loader
        return batches

    def epochs(self, count: int) -> Iterator[torch.Tensor | Ragged]:
        assert self._job is not None
        for _ in range(count):
            for batch in self.batches():
                # On the current stream, as a training loop does.
                yield batch.to(self._job.device, non_blocking=True)

    def close(self) -> None:
        # Left to the end of the process, torch waits five seconds for each worker that was to stay.
        for loader in _torch_loaders(self._loader):
            iterator: Any = getattr(loader, "_iterator", None)  # of workers that stay from one epoch to the next
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        self._loader = None
        super().close()


def _torch_loaders(loader: Any) -> list[Any]:
    """The torch loaders in what a library calls its loader: itself, or the stages of a pipeline around one."""
    return [loader, *getattr(loader, "pipeline", ())] if loader is not None else []
