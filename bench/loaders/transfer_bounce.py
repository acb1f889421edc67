"""storage -> CPU -> GPU and back, through buffers of an io's size in host memory: gdsio's transfer types 2, 3 and 4.

One at a time in each native thread, or, with `overlap`, `depth` (at least two) buffers each: while one is being copied
on the thread's own stream the next one is read. A write is the other way round, and one at a time always: the copy has
to have arrived before it can be written.

The time of an io ends when its copy has; with `overlap` that is seen when its buffer is needed again, so that it is an
upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.loaders.base import Job
from bench.loaders.timed_ios import TimedIos
from bench.loaders.transfer_route import Route, need_gpu
from bench.transfer_memory import host_memory
from bench.transfer_ops import PAGE

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class Bounce(Route):
    """`direct` False goes through the page cache; `overlap` reads ahead while copies are under way."""

    direct: bool = True
    overlap: bool = False

    _ios: TimedIos | None = field(default=None, init=False, repr=False)
    _memory: Any = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        super().check(job)
        need_gpu(job, "this route")

    def start(self) -> None:
        self.open_files(direct=self.direct)
        largest = -(-int(self.ops().nbytes.max()) // PAGE) * PAGE
        shape = (self._num_lanes, self._buffers, largest)
        self._memory = host_memory(int(np.prod(shape, dtype=np.int64)), pinned=self.pinned).view(shape)
        self._ios = TimedIos(self._num_lanes, buffers=self._memory, device=self.job.device)
        self.memory()

    @property
    def _num_lanes(self) -> int:
        """One io in flight a thread without overlap: more are more threads."""
        return self.num_threads if self.overlap else self.num_threads * self.in_flight

    @property
    def _buffers(self) -> int:
        return max(2, self.in_flight) if self.overlap else 1

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._ios is not None
        assert self._way is not None
        return self._ios.move(self._way.descriptors, ops, self.memory())

    def close(self) -> None:
        if self._ios is not None:
            self._ios.close()
        self._ios = self._memory = None
        super().close()

    def route(self) -> str:
        kind = "pinned" if self.pinned else "pageable"
        how = f", {self._buffers} of them in turn" if self.overlap and not self.request.write else ""
        return self.said(f"{self._num_lanes} native threads, {kind} buffers{how}, copies on a stream each")

    def pinned_bytes(self) -> int:
        return self._memory.numel() if self.pinned and self._memory is not None else 0
