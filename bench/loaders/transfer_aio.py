"""storage -> CPU with a deep queue and few threads: kernel AIO, `depth` ios in flight in each thread.

Only O_DIRECT is asynchronous there. The time of an io is from before it was submitted, with others, until the thread
found it complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from bench.aio import Queue
from bench.config_base import BenchError
from bench.loaders.base import Unavailable
from bench.loaders.transfer_route import Route, Threads

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class KernelAio(Route):
    """`threads` queues of `depth` ios."""

    on_host: ClassVar[bool] = True

    _threads: Threads | None = field(default=None, init=False, repr=False)
    _queues: list[Queue] = field(default_factory=list, init=False, repr=False)

    def start(self) -> None:
        way = self.open_files(direct=True)
        if not way.direct:
            raise Unavailable(f"kernel AIO is asynchronous with O_DIRECT only, and the files go by {way.said}")
        try:
            self._queues = [Queue(self.in_flight) for _ in range(self.num_threads)]
        except BenchError as error:
            raise Unavailable(str(error)) from error
        self._threads = Threads(self.num_threads, self.job.device)
        self.memory()

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._threads is not None
        assert self._way is not None
        taken = np.zeros(len(ops))
        descriptors, rows = self._way.descriptors, ops.rows
        base = self.memory().data_ptr()

        def io(number: int, _: int) -> tuple[int, int, int, int]:
            file, offset, nbytes, place = rows[number]
            return descriptors[file], offset, nbytes, base + place

        def work(thread: int, numbers: Iterator[int]) -> None:
            self._queues[thread].move(numbers, io, taken.__setitem__, write=ops.write)

        self._threads.each(work, ops)
        return taken

    def close(self) -> None:
        for queue in self._queues:
            queue.close()
        self._queues = []
        super().close()
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def route(self) -> str:
        return self.said(f"kernel AIO x{self.num_threads} queues of depth {self.in_flight}")

    def pinned_bytes(self) -> int:
        return self.request.memory.nbytes if self.pinned else 0
