"""Verb `transfer`: ios of one size from or to raw files, by a named route.

The files hold a pattern that is known byte for byte (transfer_memory.py); reads have theirs, writes files of the same
size beside them, which are written once before, so that no sample measures how a file grows. A run's first part writes
them, and later parts use them again.

In a warm run the pages of the files that are written are in memory, too, which O_DIRECT has to drop first.

Memory is cleared before each read and filled anew before each write, and after it every byte is compared: in memory,
or in the file once its pages have been given back to the disk. All of that is outside of the timed region; fsync is,
too, unless the scenario says otherwise, and the rows say which.

With `sample_seconds` a row's first load is a trial of a few ios and then of more, until it takes a tenth of that and
50 ms; it says how many ios the samples have.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from functools import cache as memoise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench import cache, stats, transfer_ops
from bench.config_base import BenchConfigError, BenchError
from bench.config_transfer import TransferConfig
from bench.files import BenchFiles, Plan, room
from bench.loaders.base import GatherRequest, Job, Loader, TransferRequest
from bench.loaders.transfer_route import Route
from bench.scenarios.base import Workload
from bench.transfer_memory import Memory, Pattern
from bench.transfer_ops import Ops

if TYPE_CHECKING:
    import torch

    from bench.measure import Sample

_PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
#: Single ios are the disk's limit below, whole blocks of many threads above.
_LARGE_IO = 1 << 20
_TRIAL_TURNS, _TRIAL_GROWTH = 4, 4
# Of a sample's seconds, and seconds: shorter trials say little about it.
_TRIAL_SHARE, _TRIAL_S = 0.1, 0.05
_CEILING_IOS = 65536
_MOST_IOS = 1 << 18
_BLOCK = 1 << 20
_SALT_STEP = 40_009


def plan(scenario: TransferConfig, chosen: Plan) -> Plan:
    """As chosen, and as much again where something is written. Raises BenchError where there is no room for that."""
    if chosen.tensors is not None:
        raise BenchConfigError("'storage.tensors' has to be null: a transfer's files hold no tensors")
    needed = chosen.total_bytes * (2 if scenario.writes else 1) + (64 << 20)
    free = room(chosen.directory)
    if needed > free:
        raise BenchError(
            f"files to read and files to write of {chosen.total_bytes / 1e9:.2f} GB each need {needed / 1e9:.2f} GB, "
            f"and {chosen.directory} has room for {free / 1e9:.2f} GB; lower storage.files or storage.file_bytes, or "
            "choose another storage.dir"
        )
    return dataclasses.replace(chosen, by_part=True)


class Moved(NamedTuple):
    """What one sample moved: its ios, the salt of what was written, and the seconds of each that was timed."""

    loader: Route
    ops: Ops
    salt: int
    latencies_s: npt.NDArray[np.float64] | None
    #: Of the call.
    seconds: float
    #: What a trial has moved before and with this call; 0 where it was none.
    tried_bytes: int = 0


def _moved(loader: Route, ops: Ops, salt: int) -> Moved:
    assert ops.rows  # made now, and not where it is timed
    began = time.perf_counter()
    latencies_s = loader.transfer(ops)
    return Moved(loader, ops, salt, latencies_s, loader.own_seconds or time.perf_counter() - began)


class Transfer(Workload):
    """One part: one operation, one size of an io."""

    verb = "transfer"
    unit = "ios"

    def __init__(self, files: BenchFiles, device: str, scenario: TransferConfig) -> None:
        assert files.plan is not None
        self._scenario = scenario
        (self._op,), (total,), (shift,) = scenario.ops, scenario.total_bytes, scenario.shift_bytes
        self._write = self._op.endswith("write")
        self._pattern = Pattern(files.pool)
        sizes = [files.plan.file_bytes] * files.plan.files
        self._file_bytes = files.plan.total_bytes
        scenario_sizes = transfer_ops.range_sizes(*scenario.io_range) if scenario.io_range else scenario.io_bytes
        # A row that may move less for its time need not go through millions of ios first.
        most = _MOST_IOS if scenario.sample_seconds is not None else total
        total = min(total, most * min(scenario_sizes))
        capacity = 0

        @memoise
        def ops(io_bytes: int | None) -> Ops:
            chosen = [io_bytes] if io_bytes is not None else scenario_sizes
            offsets: dict[str, Any] = {"offset_bytes": scenario.offset_bytes, "seed": scenario.seed}
            found = transfer_ops.make(self._op, chosen, total, sizes, shift_bytes=shift, **offsets)
            return found.within(capacity) if capacity else found

        own = ops(None)
        ops.cache_clear()
        # Rows with ios of another size use the same memory.
        capacity = max(own.memory_bytes, -(-total // transfer_ops.PAGE) * transfer_ops.PAGE)
        self._memory = Memory(device, capacity)
        paths = _write_files(files.directory, self._pattern, sizes, "written" if self._write else "read")
        self.units, self._bytes = len(own), own.total_bytes
        self.job = Job(
            paths,
            files.plan.total_bytes,
            device,
            request=self._records(own, sizes) if self._op.startswith("rand") else None,
            transfer=TransferRequest(
                self._op,
                max(scenario_sizes),
                scenario.threads[0],
                scenario.depth[0],
                scenario.registered[0],
                ops,
                self._memory,
            ),
        )
        self._samples = 0
        self._counts: dict[int, int] = {}  # by the loader's id
        self._due: dict[int, tuple[Ops, int]] = {}
        self._verified: set[int] = set()

    def _records(self, own: Ops, sizes: Sequence[int]) -> GatherRequest | None:
        """The same ios, aligned, for a ceiling of single ones; None where blocks are the better one."""
        size = own.uniform
        if size is None or size >= _LARGE_IO or size % 512:
            return None
        ops = transfer_ops.make(self._op, [size], own.total_bytes, sizes, seed=self._scenario.seed).first(_CEILING_IOS)
        return GatherRequest(ops.file, ops.offset, size)

    @property
    def sample_bytes(self) -> int:
        return self._bytes

    def close(self) -> None:
        self._memory.close()

    # ---- a sample

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        assert isinstance(loader, Route)
        ops = loader.ops().first(self._counts.get(id(loader), len(loader.ops())))
        assert ops.rows  # made now, and not in the timed region
        self._samples += 1
        salt = self._samples * _SALT_STEP if self._write else 0
        if self._write:
            self._pattern.fill(loader.memory(), ops, salt)
        elif loader.delivers_bytes:
            self._pattern.scrub(loader.memory(), ops)
        self._due[id(loader)] = (ops, salt)
        return {}

    def run(self, loader: Loader) -> Moved:
        assert isinstance(loader, Route)
        ops, salt = self._due[id(loader)]
        if id(loader) not in self._counts and self._scenario.sample_seconds is not None:
            return self._trial(loader, ops, salt, self._scenario.sample_seconds)
        return _moved(loader, ops, salt)

    def _trial(self, loader: Route, every: Ops, salt: int, sample_seconds: float) -> Moved:
        """More and more of the ios, until that takes long enough to tell how many a sample has."""
        count = _TRIAL_TURNS * loader.num_threads * loader.in_flight
        found = _moved(loader, every.first(count), salt)
        tried = found.ops.total_bytes
        while found.seconds < max(_TRIAL_SHARE * sample_seconds, min(_TRIAL_S, sample_seconds)) and len(
            found.ops
        ) < len(every):
            count *= _TRIAL_GROWTH
            found = _moved(loader, every.first(count), salt)
            tried += found.ops.total_bytes
        return found._replace(tried_bytes=tried)

    def finish(self, delivered: Moved) -> None:
        if self.job.cuda:
            super().finish(delivered)
        if self._write and self._scenario.fsync:
            for path in self.job.paths:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)

    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        del delivered
        return []

    def amount(self, delivered: Moved) -> tuple[int, int]:
        return delivered.tried_bytes or delivered.ops.total_bytes, len(delivered.ops)

    def after(self, loader: Loader, delivered: Moved) -> dict[str, float]:
        self._counts.setdefault(id(loader), self._lasting(delivered))
        found = delivered.latencies_s
        if found is None or not len(found):
            return {}
        values = np.percentile(found, list(_PERCENTILES.values()))
        figures = {f"latency_{name}_us": 1e6 * float(value) for name, value in zip(_PERCENTILES, values, strict=True)}
        return {**figures, "latency_mean_us": 1e6 * float(found.mean())}

    def _lasting(self, first: Moved) -> int:
        """How many ios the loader's samples have, by its first load."""
        every, wanted = len(first.loader.ops()), self._scenario.sample_seconds
        if wanted is None:
            return every
        return max(1, min(every, int(len(first.ops) / first.seconds * wanted)))

    def own_seconds(self, delivered: Moved) -> float | None:
        return delivered.loader.own_seconds

    def verify(self, delivered: Moved) -> None:
        if not delivered.loader.delivers_bytes:
            return
        first = id(delivered.loader) not in self._verified
        if not (first or self._scenario.verify):
            return
        if not self._write:
            self._pattern.check(delivered.loader.memory(), delivered.ops)
        else:
            cache.evict(self.job.paths)  # so that what is compared is what the disk has
            for index, path in enumerate(self.job.paths):
                self._pattern.check_file(path, index, delivered.ops, delivered.salt)
            cache.evict(self.job.paths)  # the comparison has brought them in, and the next row shall not meet them
        self._verified.add(id(delivered.loader))

    # ---- after all

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        scenario = self._scenario
        found: dict[str, Any] = {
            "op": self._op,
            "total_bytes": scenario.total_bytes[0],
            "shift_bytes": scenario.shift_bytes[0],
            "dataset_bytes": self._file_bytes,
            "fsync": scenario.fsync if self._write else None,
            "samples_verified": "all" if scenario.verify else "the first load",
            "ios": samples[0].units,
        }
        for name in samples[0].figures:
            middle = max if name == "latency_max_us" else stats.median
            found[name] = middle([sample.figures[name] for sample in samples])
        return found


def _write_files(directory: Path, pattern: Pattern, sizes: Sequence[int], name: str) -> tuple[str, ...]:
    """Files of these sizes that hold the pattern, unless an earlier part has made them."""
    paths = []
    for index, size in enumerate(sizes):
        path = directory / f"{name}-{index + 1:05d}-of-{len(sizes):05d}.bin"
        paths.append(str(path))
        if path.exists():
            continue
        with path.open("xb", buffering=0) as file:
            for offset in range(0, size, _BLOCK):
                file.write(pattern.bytes_of(index, offset, min(_BLOCK, size - offset)).data)
    return tuple(paths)
