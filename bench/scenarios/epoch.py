"""Verb `epoch`: a dataset's records, shuffled, in batches on the device.

A sample is whole epochs one after the other, as many as take about `sample_seconds`, or a part of one epoch where that
takes longer; the first load, a whole epoch where it may, says how many. Each batch is copied, by the current stream,
into memory that is verified after the clock has stopped: every byte of it, and that an epoch has each record once and
in another order than stored. So batches are given back while the epoch goes on, as in training, and those that are only
valid until the next one is asked for can be measured too.

With `compute_ms` each batch is also followed by matrix products of about that time. The host stays at most one step
ahead of the device, as a training loop that looks at its loss a step later. The same steps on a resident batch, right
before, are compute alone. The stall of a step is the time from one step's end to the next one's beginning on the
device; the overhead is what the loop took beyond compute alone, but for its first batch, which has its own figure.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench import record_shards, slope, stats
from bench.clock import Clock
from bench.config import BenchConfigError, EpochConfig
from bench.files import BenchFiles, Plan
from bench.loaders.base import EpochRequest, GatherRequest, Job, Loader
from bench.record_shards import RecordShards
from bench.scenarios.base import Alone, VerificationError, Workload

if TYPE_CHECKING:
    import torch

    from bench.measure import Sample

_GIB = 1 << 30
_LEAST_RECORDS = 4
# A first load delivers a whole epoch where that takes no longer than so many samples.
_FIRST_SAMPLES = 5
# Single records are the disk's limit below, whole blocks of many threads above.
_LARGE_RECORD = 1 << 20
_CEILING_BYTES = 256 << 20
# An order of fewer may be that of the files by chance.
_SHUFFLED_RECORDS = 32
# The share of records behind which their successor in the files comes.
_MOST_IN_ORDER = 0.9
_QUIET_SECONDS, _QUIET_STEP = 5.0, 0.05
_ALONE_STEPS = 100
_WARM_UP = 3
_CALIBRATION = 50


def plan(scenario: EpochConfig, chosen: Plan) -> Plan:
    """As much for each size of a record as was chosen. Raises BenchConfigError where that is too little."""
    if chosen.tensors is not None:
        raise BenchConfigError("'storage.tensors' has to be null: a shard is one tensor of records")
    for size in scenario.sizes:
        if chosen.total_bytes // size < _LEAST_RECORDS:
            raise BenchConfigError(
                f"'storage.files' times 'storage.file_bytes' is {chosen.total_bytes} bytes, which is less than "
                f"{_LEAST_RECORDS} records of {size} bytes; raise storage.file_bytes or lower scenario.sizes"
            )
    return dataclasses.replace(chosen, by_part=True)


class Length(NamedTuple):
    """Of a sample: whole epochs, or batches of the first one."""

    epochs: int
    batches: int | None


@dataclasses.dataclass(slots=True)
class Pass:
    """What one run delivered into the sink, and the iterator that it came from."""

    stream: Iterator[torch.Tensor]
    records: int = 0
    batches: int = 0
    #: Seconds until the first batch was there, and until the last one had been asked for.
    first_s: float = 0.0
    seconds: float = 0.0
    #: Whether the loader said that its epochs are over.
    ended: bool = False
    #: Marks at the beginning and the end of each step with compute.
    steps: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


class Epoch(Workload):
    """One size of records."""

    verb = "epoch"
    unit = "records"

    def __init__(self, files: BenchFiles, device: str, scenario: EpochConfig) -> None:
        import torch

        assert files.plan is not None
        (size,) = scenario.sizes
        self._scenario = scenario
        self._directory = files.directory / f"records-{size}"
        self._directory.mkdir()
        count = files.plan.total_bytes // size
        self._shards = record_shards.write(
            self._directory / "shards", files.pool, count, size, min(files.plan.files, count)
        )
        self._batch = max(1, min(scenario.batch_bytes // size, count // 2))
        self.units = count
        self._clock = Clock(device)
        self.job = Job(
            self._shards.paths,
            self._shards.data_bytes,
            device,
            request=_request(self._shards, scenario.seed) if size < _LARGE_RECORD and size % 512 == 0 else None,
            epoch=EpochRequest(self._shards, self._directory, self._batch, scenario.seed),
        )
        sample = scenario.sample_bytes or self._default_sample()
        rows = max(sample // size, self._batch)
        # Zeros, so that on the CPU no page has to be made while a sample is timed.
        self._sink = torch.zeros((rows // count * count or rows, size), dtype=torch.uint8, device=device)
        self._contents = record_shards.RecordContents(files.pool, size, device)
        self._lengths: dict[int, Length] = {}  # by the loader's id
        self._first_s: dict[int, float] = {}
        self._length = Length(1, None)
        self._workers_cpu = 0.0
        self.computes = scenario.compute_ms > 0
        self._compute: Compute | None = None
        if self.computes:
            with self._clock.side():
                self._compute = Compute(device, self._clock, scenario.compute_ms / 1e3)
        self._clock.synchronize()

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
        import torch

        self._sink = torch.empty(0)
        shutil.rmtree(self._directory)

    # ---- a sample

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        first = Length(1, None if self._epochs_that_fit else len(self._sink) // self._batch)
        self._length = self._lengths.get(id(loader), first)
        figures = {}
        if self.computes and number >= 0:
            figures["compute_s"] = self._step_alone()
        self._workers_cpu = _workers_cpu_seconds()
        return figures

    def run(self, loader: Loader) -> Pass:
        first = id(loader) not in self._lengths
        most = _FIRST_SAMPLES * self._scenario.sample_seconds if first else float("inf")
        began = time.perf_counter()
        found = Pass(loader.epochs(self._length.epochs))
        with self._current():
            for batch in found.stream:
                if not found.batches:
                    self._wait()
                    found.first_s = time.perf_counter() - began
                self._take(batch, found)
                if found.batches == self._length.batches or time.perf_counter() - began > most:
                    break
            else:
                found.ended = True
        found.seconds = time.perf_counter() - began
        return found

    def finish(self, delivered: Pass) -> None:
        with self._current():
            self._wait()

    def _take(self, batch: torch.Tensor, found: Pass) -> None:
        """A step: the copy of the batch, and the compute. Raises VerificationError."""
        end = found.records + len(batch)
        room = self._sink[found.records : end]
        if batch.shape != room.shape or batch.dtype != room.dtype or batch.device != room.device:
            raise VerificationError(
                f"batch {found.batches} is {batch.dtype} {tuple(batch.shape)} on {batch.device}, expected "
                f"{room.dtype} {tuple(room.shape)} on {room.device}"
            )
        if self._compute is None:
            room.copy_(batch, non_blocking=True)
        else:
            found.steps.append(self._step(batch, room, found.steps))
        found.records = end
        found.batches += 1

    def _step(self, batch: torch.Tensor, room: torch.Tensor, before: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        assert self._compute is not None
        begin = self._clock.mark()
        room.copy_(batch, non_blocking=True)
        self._compute.run()
        end = self._clock.mark()
        if before and self._clock.cuda:
            before[-1][1].synchronize()
        return begin, end

    def _step_alone(self) -> float:
        """Seconds of a step on a batch that is on the device already."""
        count = self._length.batches or self._length.epochs * self.units // self._batch
        steps: list[tuple[Any, Any]] = []
        with self._current():
            batch, room = self._sink[: self._batch], self._sink[-self._batch :]
            for _ in range(_WARM_UP):
                self._step(batch, room, [])
            self._wait()
            began = time.perf_counter()
            for _ in range(min(count, _ALONE_STEPS)):
                steps.append(self._step(batch, room, steps))
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

    @property
    def _epochs_that_fit(self) -> int:
        return len(self._sink) // self.units

    def _lasting(self, first: Pass) -> Length:
        """How long the samples of a loader are, by its first load."""
        beyond = first.seconds - first.first_s
        rate = (first.records - self._batch) / beyond if first.batches > 1 else first.records / first.seconds
        wanted = rate * self._scenario.sample_seconds
        if self._epochs_that_fit and wanted >= self.units:
            return Length(min(int(wanted // self.units), self._epochs_that_fit), None)
        batches = min(int(wanted), len(self._sink), self.units) // self._batch
        return Length(1, max(batches, min(2, len(self._sink) // self._batch)))

    # ---- after it

    def tensors(self, delivered: Pass) -> list[torch.Tensor]:
        return [self._sink[: delivered.records]]

    def amount(self, delivered: Pass) -> tuple[int, int]:
        return delivered.records * self._shards.record_bytes, delivered.records

    def after(self, loader: Loader, delivered: Pass) -> dict[str, float]:
        workers_cpu = _workers_cpu_seconds() - self._workers_cpu
        if not delivered.ended:
            getattr(delivered.stream, "close", lambda: None)()
            _wait_for_workers()
        if id(loader) not in self._lengths:
            self._lengths[id(loader)] = self._lasting(delivered)
            self._first_s[id(loader)] = delivered.first_s
        figures = {
            "batches": delivered.batches,
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
        records = self._sink[: delivered.records]
        numbers = record_shards.numbers_of(records).cpu().numpy()
        wrong = self._contents.first_difference(records)
        if wrong is not None:
            row, byte = wrong
            raise VerificationError(
                f"row {row} of the sample, by its number record {numbers[row]}, differs at byte {byte}"
            )
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

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        def middle(name: str) -> float:
            return stats.median([sample.figures[name] for sample in samples])

        cpu = [(sample.cpu_s + sample.figures["workers_cpu_s"]) / (sample.bytes / 1e9) for sample in samples]
        found = {
            "record_bytes": self._shards.record_bytes,
            "batch_size": self._batch,
            "num_records": self.units,
            "dataset_bytes": self._shards.data_bytes,
            "batches": middle("batches"),
            "epochs": middle("epochs"),
            "first_batch_s": middle("first_batch_s"),
            "first_epoch_first_batch_s": middle("first_epoch_first_batch_s"),
            "cpu_s_per_gb_with_workers": stats.median(cpu),
        }
        if not self.computes:
            return found
        loops = [(s.seconds - s.figures["first_batch_s"]) / s.figures["batches"] for s in samples]
        beyond = slope.difference(loops, [sample.figures["compute_s"] for sample in samples])
        return {
            **found,
            "compute_s": beyond["predicted_s"],
            "step_s": beyond["measured_s"],
            "overhead": beyond["difference"],
            "overhead_ci95": beyond["difference_ci95"],
            "stall_s": middle("stall_s"),
        }


class Compute:
    """Matrix products of about `seconds` on the current stream, in memory of their own."""

    def __init__(self, device: str, clock: Clock, seconds: float) -> None:
        import torch

        width, dtype = (4096, torch.bfloat16) if clock.cuda else (256, torch.float32)
        self._left, self._right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        self._out = torch.empty_like(self._left)
        self._count = _CALIBRATION
        for _ in range(2):  # the first time warms up
            clock.synchronize()
            began = time.perf_counter()
            self.run()
            clock.synchronize()
            each = (time.perf_counter() - began) / _CALIBRATION
        self._count = max(1, round(seconds / each))

    def run(self) -> None:
        import torch

        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._out)


def _request(shards: RecordShards, seed: int) -> GatherRequest:
    """Records of the dataset, for a ceiling of single records."""
    random = np.random.default_rng(seed)
    count = max(1, min(shards.num_records, _CEILING_BYTES // shards.record_bytes))
    chosen = random.permutation(shards.num_records)[:count]
    starts = np.concatenate(([0], np.cumsum(shards.rows)))
    file = np.searchsorted(starts, chosen, side="right") - 1
    offsets = record_shards.DATA_OFFSET + (chosen - starts[file]) * shards.record_bytes
    return GatherRequest(file.astype(np.int32), offsets.astype(np.int64), shards.record_bytes)


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
