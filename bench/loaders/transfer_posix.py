"""storage -> CPU: threads that pread or pwrite whole ios, gdsio's transfer type 1.

A call waits for its io, so that `depth` ios in flight in each of `threads` threads are as many threads. Each io passes
through Python, which bounds all of them together at some 100,000 a second; transfer_aio and transfer_engine do not
depend on threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from bench.full_io import move_full
from bench.loaders.transfer_route import Route, Threads

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class Posix(Route):
    """`direct` False goes through the page cache."""

    direct: bool = True

    on_host: ClassVar[bool] = True

    _threads: Threads | None = field(default=None, init=False, repr=False)

    def start(self) -> None:
        self.open_files(direct=self.direct)
        self._threads = Threads(self.num_threads * self.in_flight, self.job.device)
        self.memory()

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._threads is not None
        assert self._way is not None
        taken = np.zeros(len(ops))
        descriptors, rows, write = self._way.descriptors, ops.rows, ops.write
        memory = self.memory().numpy().data

        def work(_: int, numbers: Iterator[int]) -> None:
            for number in numbers:
                file, offset, nbytes, place = rows[number]
                began = time.perf_counter()
                move_full(descriptors[file], memory[place : place + nbytes], offset, write=write)
                taken[number] = time.perf_counter() - began

        self._threads.each(work, ops)
        return taken

    def close(self) -> None:
        super().close()
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def route(self) -> str:
        call = "pwrite" if self.request.write else "pread"
        kind = "page-locked memory" if self.pinned else "ordinary memory"
        return self.said(f"{call} x{self.num_threads * self.in_flight} threads, {kind}")

    def pinned_bytes(self) -> int:
        return self.request.memory.nbytes if self.pinned else 0
