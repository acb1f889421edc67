"""Rounds of samples. What is timed is in loaders/base.py; here is the order of things and what happens on failure.

1. Every loader is prepared (timed: start-up) and loads once (timed: first), verified.
2. Each round samples the ceiling, then runs every loader once. The order rotates, so that no loader always follows
   the same one. Before each sample the page cache is made warm or empty and checked, cached device memory is given
   back, and garbage is collected; processes that measure at once begin together (gate.py). After each sample every
   byte is verified. A scenario may measure more of the same loader right before its sample (compute alone, transfer
   alone), to be compared with it within the round.

A loader that is missing or refuses is a row with its reason. One that raises or delivers wrong bytes is a failed row
and leaves the following rounds. A cold sample before which pages had stayed in memory is labelled `not_cold` and does
not count; an outlier is labelled and counts, and so does a cold read for which the block device read less than the
files hold (`fewer_device_bytes`): something between the two had it.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import cache, stats
from bench.ceilings import Ceiling
from bench.device_bytes import Counters, Moved
from bench.gate import ALONE, Gate
from bench.loaders.base import Loader, Unavailable
from bench.scenarios.base import VerificationError, Workload

_LEAST_ROUNDS = 3
#: Why a run made no more rounds: those asked for were made, its time was over, or every interval was narrow enough.
STOPPED = ("rounds", "max_seconds", "target_spread")
NOT_COLD = "not_cold"
NOT_WARM = "not_warm"
FEWER_DEVICE_BYTES = "fewer_device_bytes"

#: Called with a line of text before each step, and with None after it.
Progress = Callable[[str | None], None]
#: Called with the loader's name before anything of it runs, and with None after it.
Watch = Callable[[str | None], None]


@dataclass(slots=True)
class Sample:
    """One load: its bytes and units, seconds until every byte could be used, until the call returned, and of CPU time.

    `figures` are whatever else the scenario measured in this round, by name.
    """

    round: int
    bytes: int
    units: int
    seconds: float
    lazy_return_s: float
    cpu_s: float
    peak_gpu_bytes: int | None
    labels: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    moved: Moved | None = None

    @property
    def counts(self) -> bool:
        return NOT_COLD not in self.labels


@dataclass(slots=True)
class Outcome:
    """Everything that was measured of one loader."""

    status: str = "ok"
    reason: str | None = None
    startup_s: float | None = None
    first: Sample | None = None
    samples: list[Sample] = field(default_factory=list)
    verified: bool | None = None
    route: str | None = None
    delivers: str | None = None
    pinned_bytes: int | None = None
    #: What the loader says of its row, for the record's derived figures.
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Measurement:
    """The outcomes, the ceiling of each round in GB/s, and why there were no more rounds: one of STOPPED."""

    outcomes: dict[str, Outcome]
    ceilings: list[float]
    stopped: str = "rounds"


class Runner:
    """Measures `loaders` on one workload. `cuda_reason` says why there is no GPU although one was asked for."""

    def __init__(
        self,
        workload: Workload,
        loaders: Mapping[str, Loader],
        ceiling: Ceiling,
        *,
        cold: bool,
        fresh_memory: bool,
        progress: Progress = lambda _: None,
        watch: Watch = lambda _: None,
        counters: Counters | None = None,
        others: Gate = ALONE,
    ) -> None:
        self._workload, self._loaders, self._ceiling = workload, dict(loaders), ceiling
        self._cold, self._fresh_memory, self._progress, self._watch = cold, fresh_memory, progress, watch
        self._counters, self._others = counters, others
        self.outcomes = {name: Outcome() for name in loaders}
        self.ceilings: list[float] = []

    def run(self, rounds: int, max_seconds: float, target_spread: float | None = None) -> Measurement:
        """First loads and rounds; no round but the first three begins later than after `max_seconds`, and none once
        every row's rates have spread by `target_spread` or less (stats.spread). Loaders are closed at the end."""
        deadline = time.monotonic() + max_seconds
        stopped, frozen_before = "rounds", gc.get_freeze_count()
        try:
            _freeze()
            _touch_memory(min(self._workload.sample_bytes, self._workload.job.data_bytes))
            for name in self._loaders:
                self._start(name)
            _freeze()
            for number in range(rounds):
                if target_spread is not None and self._settled(target_spread):
                    stopped = "target_spread"
                    break
                if number >= _LEAST_ROUNDS and time.monotonic() > deadline:
                    stopped = "max_seconds"
                    break
                self._round(number)
        finally:
            if not frozen_before:
                gc.unfreeze()
            for name, loader in self._loaders.items():
                self._guard(name, loader.close)
        return Measurement(self.outcomes, self._ceiling.in_hindsight(self.ceilings), stopped)

    def _settled(self, target: float) -> bool:
        rows = [[s.bytes / s.seconds for s in self.outcomes[name].samples if s.counts] for name in self._running()]
        spreads = [stats.spread(rates) if rates else None for rates in rows]
        return bool(rows) and all(each is not None and each <= target for each in spreads)

    def _running(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome.status == "ok"]

    def _start(self, name: str) -> None:
        loader, outcome = self._loaders[name], self.outcomes[name]

        def prepare() -> None:
            if self._workload.verb not in loader.verbs:
                raise Unavailable(f"it has no verb {self._workload.verb!r}, only {', '.join(sorted(loader.verbs))}")
            if self._cold and loader.pins_page_cache:
                raise Unavailable("it keeps the files' pages in memory, so no load of it can be cold")
            loader.check(self._workload.job)
            loader.convert(self._workload.job)
            # Before it opens them: who looks at what is cached then would find what has just been written or read.
            self._settle_cache(loader)
            start = time.perf_counter()
            loader.prepare(self._workload.job)
            outcome.startup_s = time.perf_counter() - start

        self._progress(f"{name}: start-up")
        if self._guard(name, prepare):
            self._progress(f"{name}: first load")
            outcome.first = self._sample(name, -1)
        if outcome.status == "ok":
            self._guard(name, lambda: self._describe(loader, outcome))
        self._progress(None)

    def _describe(self, loader: Loader, outcome: Outcome) -> None:
        outcome.delivers, outcome.pinned_bytes, outcome.route = loader.delivers(), loader.pinned_bytes(), loader.route()
        outcome.details = {**loader.details(), **self._workload.details(loader)}

    def _round(self, number: int) -> None:
        names = self._running()
        if not names:
            return
        self._progress(f"round {number + 1}: ceiling")
        self.ceilings.append(self._ceiling.sample())
        self._progress(None)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            self._progress(f"round {number + 1}: {name}")
            sample = self._sample(name, number)
            if sample is not None:
                self.outcomes[name].samples.append(sample)
            self._progress(None)

    def _sample(self, name: str, number: int) -> Sample | None:
        loader, outcome = self._loaders[name], self.outcomes[name]
        taken: list[Sample] = []

        def one() -> None:
            try:
                figures = self._workload.before(loader, number)
                sample, delivered = self._timed(loader, number)
                sample.figures = figures | self._workload.after(loader, delivered)
                self._workload.verify(delivered)
                if loader.delivers() == "owned":
                    self._workload.spoil(delivered)
            except VerificationError:
                outcome.verified = False
                raise
            outcome.verified = loader.delivers_bytes
            taken.append(sample)

        self._guard(name, one)
        return taken[0] if taken else None

    def _timed(self, loader: Loader, number: int) -> tuple[Sample, Any]:
        try:
            loader.arm()
            labels = self._settle(loader)
            self._others.meet()
            before = self._counters.read() if self._counters else None
            cpu = _cpu_seconds()
            start = time.perf_counter()
            delivered = self._workload.run(loader)
            returned = time.perf_counter()
            self._workload.finish(delivered)
            end = time.perf_counter()
            cpu = _cpu_seconds() - cpu
            now = self._counters.read() if self._counters else None
            self._others.meet()
        finally:
            loader.disarm()
        size = self._workload.amount(delivered)
        seconds = self._workload.own_seconds(delivered) or end - start
        moved = self._counters.between(before, now, size[0]) if self._counters and before and now else None
        if self._cold and moved and moved.fewer_read_than(self._workload.least_device_bytes()):
            labels.append(FEWER_DEVICE_BYTES)
        lazy = min(returned - start, seconds)
        return Sample(number, *size, seconds, lazy, cpu, self._peak(), labels, moved=moved), delivered

    def _settle(self, loader: Loader) -> list[str]:
        gc.collect()
        if self._workload.job.cuda:
            import torch

            torch.cuda.synchronize(self._workload.job.device)
            if self._fresh_memory:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._workload.job.device)
        return self._settle_cache(loader)

    def _settle_cache(self, loader: Loader) -> list[str]:
        """Empty the page cache of the loader's files, or fill it; the label of a sample for which that failed."""
        paths = loader.paths(self._workload.job)
        if self._cold:
            return [NOT_COLD] if cache.evict(paths) else []
        return [NOT_WARM] if cache.warm(paths) else []

    def _peak(self) -> int | None:
        if not self._workload.job.cuda:
            return None
        import torch

        return int(torch.cuda.max_memory_allocated(self._workload.job.device))

    def _guard(self, name: str, step: Callable[[], None]) -> bool:
        """Run one step; an exception becomes the row's reason and ends the loader's part in this run."""
        outcome = self.outcomes[name]
        self._watch(name)
        try:
            step()
        except Unavailable as error:
            outcome.status, outcome.reason = "skipped", str(error)
        except Exception as error:  # whatever a library raises belongs into its row
            outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {error}"
        self._watch(None)
        return outcome.status == "ok"


def _freeze() -> None:
    """Spare the collections before samples what is there by now: of a process with torch they took 0.1 to 0.3 s each,
    as long as many a sample."""
    gc.collect()
    gc.freeze()


#: The most that this process has touched.
_touched_bytes = 0


def _touch_memory(nbytes: int) -> None:
    """Use as much memory as a load takes, once, and give it back. A virtual machine may get its memory from the host
    only now, at a few GB/s, which the first loader's first load would pay for all."""
    global _touched_bytes
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(nbytes, free // 2)
    if size > _touched_bytes:
        _touched_bytes = size
        memory = mmap.mmap(-1, size)
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE].fill(1)
        memory.close()


def _cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
