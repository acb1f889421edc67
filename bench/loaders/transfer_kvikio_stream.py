"""storage -> GPU in the order of CUDA streams: cuFile's stream API through kvikio, gdsio's transfer type 5.

`threads` streams, each with up to `depth` ios queued; then the stream is waited for, so that what is timed is a batch
of `depth`. kvikio's POSIX path has no streams: it waits for the stream and moves the io at once, in the caller's
thread, which the row's route says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.loaders.transfer_kvikio import KvikioFiles, all_moved
from bench.loaders.transfer_route import Threads

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class KvikioStreams(KvikioFiles):
    """A stream and a thread of Python for each of `threads`."""

    _threads: Threads | None = field(default=None, init=False, repr=False)
    _streams: list[Any] = field(default_factory=list, init=False, repr=False)

    def start(self) -> None:
        super().start()
        self._streams = [self.new_stream() for _ in range(self.num_threads)]
        self._threads = Threads(self.num_threads, self.job.device)

    @property
    def latency_of(self) -> str:
        return "io" if self.in_flight == 1 else f"batch of {self.in_flight} ios"

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._threads is not None
        rows, memory = ops.rows, self.memory()
        taken: list[float] = []

        def work(thread: int, numbers: Iterator[int]) -> None:
            stream = self._streams[thread].cuda_stream
            while batch := [rows[number] for _, number in zip(range(self.in_flight), numbers, strict=False)]:
                began = time.perf_counter()
                futures = []
                for file, offset, nbytes, place in batch:
                    opened = self._files[file]
                    start = opened.raw_write_async if ops.write else opened.raw_read_async
                    futures.append(start(memory, stream, nbytes, offset, place))
                counts = [future.check_bytes_done() for future in futures]
                taken.append(time.perf_counter() - began)
                for count, (_, offset, nbytes, _) in zip(counts, batch, strict=True):
                    all_moved(count, nbytes, offset)

        self._threads.each(work, ops)
        return np.array(taken)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        self._streams = []
        super().close()

    def route(self) -> str:
        kind = "registered" if self.pinned else "unregistered"
        return f"{self.path_taken()}; {self.num_threads} streams of {self.in_flight} ios, {kind} GPU memory"
