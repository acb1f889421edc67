"""storage -> CPU -> GPU and back, through buffers of an io's size in host memory: gdsio's transfer types 2, 3 and 4.

One at a time in each thread, or, with `overlap`, `depth` (at least two) buffers each: while one is being copied on the
thread's own stream the next one is read. A write is the other way round, and one at a time always: the copy has to have
arrived before it can be written.

The time of an io ends when its copy has; with `overlap` that is seen when its buffer is needed again, so that it is an
upper bound.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.full_io import move_full
from bench.loaders.base import Job
from bench.loaders.transfer_route import Route, Threads, need_gpu
from bench.transfer_memory import host_memory

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class Bounce(Route):
    """`direct` False goes through the page cache; `overlap` reads ahead while copies are under way."""

    direct: bool = True
    overlap: bool = False

    _threads: Threads | None = field(default=None, init=False, repr=False)
    #: Of each thread: its buffers, with their memory, and its stream.
    _lanes: list[tuple[list[tuple[Any, Any]], Any]] = field(default_factory=list, init=False, repr=False)

    def check(self, job: Job) -> None:
        super().check(job)
        need_gpu(job, "this route")

    def start(self) -> None:
        self.open_files(direct=self.direct)
        largest = int(self.ops().nbytes.max())
        for _ in range(self._num_lanes):
            buffers = [host_memory(largest, pinned=self.pinned) for _ in range(self._buffers)]
            self._lanes.append(([(each, each.numpy().data) for each in buffers], self.new_stream()))
        self._threads = Threads(self._num_lanes, self.job.device)
        self.memory()

    @property
    def _num_lanes(self) -> int:
        """One io in flight a thread without overlap: more are more threads."""
        return self.num_threads if self.overlap else self.num_threads * self.in_flight

    @property
    def _buffers(self) -> int:
        return max(2, self.in_flight) if self.overlap else 1

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._threads is not None
        taken = np.zeros(len(ops))
        rows = ops.rows

        def work(thread: int, numbers: Iterator[int]) -> None:
            with on_stream(self._lanes[thread][1]):
                (self._write if ops.write else self._read)(thread, numbers, rows, taken)

        self._threads.each(work, ops)
        return taken

    def _read(self, thread: int, numbers: Iterator[int], rows: Any, taken: npt.NDArray[np.float64]) -> None:
        assert self._way is not None
        buffers, stream = self._lanes[thread]
        target = self.memory()
        flying: deque[tuple[int, float, Any]] = deque()

        def land() -> None:
            number, began, copied = flying.popleft()
            copied.synchronize()
            taken[number] = time.perf_counter() - began

        for turn, number in enumerate(numbers):
            if len(flying) == len(buffers):
                land()
            file, offset, nbytes, place = rows[number]
            buffer, memory = buffers[turn % len(buffers)]
            began = time.perf_counter()
            move_full(self._way.descriptors[file], memory[:nbytes], offset, write=False)
            target[place : place + nbytes].copy_(buffer[:nbytes], non_blocking=True)
            copied = new_event()
            copied.record(stream)
            flying.append((number, began, copied))
            if not self.overlap:
                land()
        while flying:
            land()

    def _write(self, thread: int, numbers: Iterator[int], rows: Any, taken: npt.NDArray[np.float64]) -> None:
        assert self._way is not None
        buffers, stream = self._lanes[thread]
        buffer, memory = buffers[0]
        source = self.memory()
        for number in numbers:
            file, offset, nbytes, place = rows[number]
            began = time.perf_counter()
            buffer[:nbytes].copy_(source[place : place + nbytes], non_blocking=True)
            stream.synchronize()
            move_full(self._way.descriptors[file], memory[:nbytes], offset, write=True)
            taken[number] = time.perf_counter() - began

    def close(self) -> None:
        super().close()
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        self._lanes = []

    def route(self) -> str:
        kind = "pinned" if self.pinned else "pageable"
        how = f", {self._buffers} of them in turn" if self.overlap and not self.request.write else ""
        return self.said(f"{self._num_lanes} threads, {kind} buffers{how}, copies on a stream each")

    def pinned_bytes(self) -> int:
        held = sum(buffer.numel() for buffers, _ in self._lanes for buffer, _ in buffers)
        return held if self.pinned else 0


def on_stream(stream: Any) -> Any:
    """Within, `stream` is the current one."""
    import torch

    return torch.cuda.stream(stream)


def new_event() -> Any:
    """An event whose waiters sleep."""
    import torch

    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
