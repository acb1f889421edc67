"""What the scenarios of a dataset's batches share: samples of epochs, compute behind each batch, and the check.

A sample is whole epochs one after the other, as many as take about `sample_seconds`, or a part of one epoch where that
takes more than twice as long: it ends while the loader reads ahead, whose time that is. The first load says how many.
Of a cold cache it is one epoch at most: the second could come from the cache that the first one filled. Each batch is
copied, by the current stream, into memory that is verified after the clock has stopped (sinks.py): every byte of it,
and that an epoch has each record once and in another order than stored. So batches are given back while the epoch goes
on, as in training, and those that are only valid until the next one is asked for can be measured too.

Compute follows each batch on the same stream, less of it where a batch is not full. The host stays at most one step
ahead of the device, as a training loop that looks at its loss a step later. The same steps on a resident batch, right
before, are compute alone. The stall of a step is the time from one step's end to the next one's beginning on the
device.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench import stats
from bench.clock import Clock
from bench.compute import Compute
from bench.loaders.base import EpochRequest, GatherRequest, Job, Loader
from bench.record_shards import RecordShards
from bench.scenarios import sinks
from bench.scenarios.base import Alone, VerificationError, Workload
from bench.scenarios.sinks import Copies, Pass

if TYPE_CHECKING:
    import torch

    from bench.measure import Sample

_GIB = 1 << 30
# An order of fewer may be that of the files by chance.
_SHUFFLED_RECORDS = 32
# The share of records behind which their successor in the files comes.
_MOST_IN_ORDER = 0.9
_QUIET_SECONDS, _QUIET_STEP = 5.0, 0.05
_ALONE_STEPS, _ALONE_S = 100, 2.0
_WARM_UP, _WARM_UP_S = 3, 0.3


class Length(NamedTuple):
    """Of a sample: whole epochs, or batches of the first one."""

    epochs: int
    batches: int | None


class Batches(Workload):
    """A dataset in batches. A subclass writes the dataset, and makes of the samples what it wants to know."""

    unit = "records"
    #: A first load ends after so many samples' time, or a whole epoch where that takes less.
    first_samples = 5
    #: Batches that a sample has at least.
    least_batches = 2

    def __init__(
        self,
        shards: RecordShards,
        pool: npt.NDArray[np.uint8],
        device: str,
        *,
        batch_size: int,
        seed: int,
        sample_seconds: float,
        sample_bytes: int | None,
        compute_s: float,
        one_epoch: bool = False,
        request: GatherRequest | None = None,
    ) -> None:
        self._shards, self._batch = shards, batch_size
        self._directory = shards.directory.parent
        self._sample_seconds, self._one_epoch = sample_seconds, one_epoch
        self.units = shards.num_records
        self._clock = Clock(device)
        self.job = Job(
            shards.paths,
            shards.data_bytes,
            device,
            request=request,
            epoch=EpochRequest(shards, self._directory, batch_size, seed),
        )
        least = self.least_batches * batch_size
        self._sink = sinks.make(shards, pool, sample_bytes or self._default_sample(), least, device)
        self._lengths: dict[int, Length] = {}  # by the loader's id
        self._first_s: dict[int, float] = {}
        self._length = Length(1, None)
        self._workers_cpu = 0.0
        self.computes = compute_s > 0
        self._compute_s = compute_s
        self._compute: Compute | None = None
        if self.computes:
            with self._clock.side():
                self._compute = Compute(device, self._clock, self.products_s(compute_s))
        self._clock.synchronize()

    def products_s(self, compute_s: float) -> float:
        """How much of a step's compute are matrix products."""
        return compute_s

    def _default_sample(self) -> int:
        """As much as takes half a second or more at the link's rate, where the device has room for it."""
        if not self.job.cuda:
            return _GIB
        import torch

        return min(32 * _GIB, torch.cuda.get_device_properties(self.job.device).total_memory // 4)

    @property
    def sample_bytes(self) -> int:
        return self._shards.data_bytes

    def close(self) -> None:
        del self._sink
        shutil.rmtree(self._directory)

    # ---- a sample

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        first = Length(1, None if self._sink.epochs else self._sink.records // self._batch)
        self._length = self._lengths.get(id(loader), first)
        figures = {}
        if self.computes and number >= 0:
            figures["compute_s"] = self._step_alone()
        self._workers_cpu = _workers_cpu_seconds()
        return figures

    def run(self, loader: Loader) -> Pass:
        first = id(loader) not in self._lengths
        most = self.first_samples * self._sample_seconds if first else float("inf")
        began = time.perf_counter()
        found = Pass(loader.epochs(self._length.epochs))
        with self._current():
            for batch in found.stream:
                if not found.batches:
                    self._wait()
                    found.first_s = time.perf_counter() - began
                self._take(batch, found)
                if len(found.batches) == self._length.batches:
                    break
                if time.perf_counter() - began > most and len(found.batches) >= self.least_batches:
                    break
            else:
                found.ended = True
        found.seconds = time.perf_counter() - began
        return found

    def finish(self, delivered: Pass) -> None:
        with self._current():
            self._wait()

    def _take(self, batch: Any, found: Pass) -> None:
        """A step: the copy of the batch, and the compute. Raises VerificationError."""
        copies = self._sink.place(batch, found)
        if self._compute is not None:
            found.steps.append(self._step(copies, found.batches[-1][0] / self._batch, found.steps))
            return
        for room, part in copies:
            room.copy_(part, non_blocking=True)

    def _step(self, copies: Copies, share: float, before: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        assert self._compute is not None
        begin = self._clock.mark()
        for room, part in copies:
            room.copy_(part, non_blocking=True)
        self._compute.run(share)
        end = self._clock.mark()
        if before and self._clock.cuda:
            before[-1][1].synchronize()
        return begin, end

    def _step_alone(self) -> float:
        """Seconds of a step on a batch that is on the device already."""
        count = self._length.batches or self._length.epochs * self.units // self._batch
        copies = self._sink.resident(self._batch)
        steps: list[tuple[Any, Any]] = []
        with self._current():
            for _ in range(_at_most(_WARM_UP, _WARM_UP_S / self._compute_s)):
                self._step(copies, 1.0, [])
            self._wait()
            began = time.perf_counter()
            for _ in range(_at_most(min(count, _ALONE_STEPS), _ALONE_S / self._compute_s)):
                steps.append(self._step(copies, 1.0, steps))
            self._wait()
            return (time.perf_counter() - began) / len(steps)

    def alone(self) -> Alone:
        return Alone(self._step_alone(), self._batch * self._shards.record_bytes)

    def _current(self) -> AbstractContextManager[None]:
        """The stream of the samples: the current one, or where there is compute, one that no library blocks."""
        return self._clock.side() if self.computes else nullcontext()

    def _wait(self) -> None:
        """Until the current stream has done what was queued; not what is read ahead on others."""
        if self._clock.cuda:
            import torch

            torch.cuda.current_stream(self.job.device).synchronize()

    def _lasting(self, first: Pass) -> Length:
        """How long the samples of a loader are, by its first load."""
        beyond = first.seconds - first.first_s
        rate = (first.records - self._batch) / beyond if len(first.batches) > 1 else first.records / first.seconds
        wanted = max(int(rate * self._sample_seconds), self.least_batches * self._batch)
        if self._sink.epochs and 2 * wanted >= self.units:
            most = 1 if self._one_epoch else self._sink.epochs
            return Length(min(max(wanted // self.units, 1), most), None)
        return Length(1, min(wanted, self._sink.records, self.units) // self._batch)

    # ---- after it

    def tensors(self, delivered: Pass) -> list[torch.Tensor]:
        return self._sink.tensors(delivered)

    def amount(self, delivered: Pass) -> tuple[int, int]:
        return delivered.bytes, delivered.records

    def after(self, loader: Loader, delivered: Pass) -> dict[str, float]:
        workers_cpu = _workers_cpu_seconds() - self._workers_cpu
        if not delivered.ended:
            getattr(delivered.stream, "close", lambda: None)()
            _wait_for_workers()
        if id(loader) not in self._lengths:
            self._lengths[id(loader)] = self._lasting(delivered)
            self._first_s[id(loader)] = delivered.first_s
        figures = {
            "bytes": delivered.bytes,
            "batches": len(delivered.batches),
            "epochs": delivered.records / self.units,
            "first_batch_s": delivered.first_s,
            "first_epoch_first_batch_s": self._first_s[id(loader)],
            "workers_cpu_s": workers_cpu,
        }
        if self.computes:
            gaps = [self._clock.seconds(one[1], other[0]) for one, other in pairwise(delivered.steps)]
            figures["stall_s"] = sum(gaps) / max(len(gaps), 1)
        return figures

    def verify(self, delivered: Pass) -> None:
        if not delivered.records:
            raise VerificationError("no batch was delivered")
        numbers = self._sink.check(delivered)
        due = self._length.epochs * self.units
        if delivered.ended and len(numbers) != due:
            raise VerificationError(f"{len(numbers)} records were delivered in {self._length.epochs} epochs, not {due}")
        for begin in range(0, len(numbers), self.units):
            self._verify_epoch(numbers[begin : begin + self.units])

    def _verify_epoch(self, numbers: npt.NDArray[np.int64]) -> None:
        """A whole epoch, or its beginning: no record twice, and not in the order of the files."""
        if numbers.min() < 0 or numbers.max() >= self.units:
            raise VerificationError(f"a record has the number {numbers.max()}, and there are {self.units}")
        times = np.bincount(numbers)
        if times.max() > 1:
            raise VerificationError(f"record {times.argmax()} was delivered {times.max()} times in an epoch")
        if len(numbers) >= _SHUFFLED_RECORDS and (np.diff(numbers) == 1).mean() > _MOST_IN_ORDER:
            raise VerificationError("the records come in the order of the files: they are not shuffled")

    def described(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What every scenario of batches derives."""
        cpu = [(sample.cpu_s + sample.figures["workers_cpu_s"]) / (sample.bytes / 1e9) for sample in samples]
        return {
            "record_bytes": self._shards.record_bytes,
            "batch_size": self._batch,
            "num_records": self.units,
            "dataset_bytes": self._shards.data_bytes,
            "batches": middle(samples, "batches"),
            "epochs": middle(samples, "epochs"),
            "first_batch_s": middle(samples, "first_batch_s"),
            "first_epoch_first_batch_s": middle(samples, "first_epoch_first_batch_s"),
            "cpu_s_per_gb_with_workers": stats.median(cpu),
        }


def middle(samples: Sequence[Sample], name: str) -> float:
    """The median of a figure."""
    return stats.median([sample.figures[name] for sample in samples])


def _at_most(count: int, limit: float) -> int:
    return max(1, min(count, int(limit)))


def _workers_cpu_seconds() -> float:
    """User and system time of all worker processes that are alive."""
    ticks = 0
    for process in multiprocessing.active_children():
        try:
            text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _wait_for_workers() -> None:
    """Until workers have done what they were told to read ahead, so that it is not done in the next loader's time."""
    deadline = time.monotonic() + _QUIET_SECONDS
    before = _workers_cpu_seconds()
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(_QUIET_STEP)
        now = _workers_cpu_seconds()
        if now == before:
            return
        before = now
