"""storage -> GPU by cuFile's batch API: gdsio's transfer type 6.

Each of `threads` threads submits `depth` ios in one call and waits until all are complete; what is timed is a batch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.cufile_files import CuFileSession, description
from bench.loaders.base import Job, Unavailable
from bench.loaders.transfer_route import Route, Threads, need_gpu

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class CuFileRoute(Route):
    """What the routes over cuFile's own API share."""

    _session: CuFileSession | None = field(default=None, init=False, repr=False)
    _threads: Threads | None = field(default=None, init=False, repr=False)
    _registered: bool = field(default=False, init=False, repr=False)

    def check(self, job: Job) -> None:
        super().check(job)
        need_gpu(job, "this route")

    def start(self) -> None:
        self._session = CuFileSession(self.job.paths, write=self.request.write)
        if self.pinned:
            memory, session = self.memory(), self._session
            self.request.memory.register(memory, lambda: session.register(memory.data_ptr(), memory.numel()))
            self._registered = True
        self._threads = Threads(self.num_threads, self.job.device)

    @property
    def session(self) -> CuFileSession:
        assert self._session is not None
        return self._session

    @property
    def latency_of(self) -> str:
        return "io" if self.in_flight == 1 else f"batch of {self.in_flight} ios"

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._threads is not None
        taken: list[float] = []

        def work(thread: int, numbers: Iterator[int]) -> None:
            while batch := [number for _, number in zip(range(self.in_flight), numbers, strict=False)]:
                began = time.perf_counter()
                self.move(thread, ops, batch)
                taken.append(time.perf_counter() - began)

        self._threads.each(work, ops)
        return np.array(taken)

    def move(self, thread: int, ops: Ops, batch: Sequence[int]) -> None:
        """Move these ios of `ops`, and return when they are complete."""
        raise NotImplementedError

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        if self._session is not None:
            memory, session = self.memory(), self._session
            if self._registered:
                self.request.memory.deregister(memory, lambda: session.deregister(memory.data_ptr()))
                self._registered = False
            session.close()
            self._session = None
        super().close()

    def route(self) -> str:
        kind = "registered" if self.pinned else "unregistered"
        return f"{description()}; {self.num_threads} threads, batches of {self.in_flight}, {kind} GPU memory"


@dataclass
class CuFileBatch(CuFileRoute):
    """One batch context a thread."""

    _contexts: list[Any] = field(default_factory=list, init=False, repr=False)

    def start(self) -> None:
        super().start()
        api = self.session.api
        try:
            for _ in range(self.num_threads):
                self._contexts.append((api.batch_io_set_up(self.in_flight), _ios(api, self.in_flight)))
            # What cuFile refuses it refuses here, and not in the first load.
            if not self.request.write:
                self.move(0, self.ops(), [0])
        except Exception as error:
            raise Unavailable(f"cuFile refuses a batch: {type(error).__name__}: {error}") from error

    def move(self, thread: int, ops: Ops, batch: Sequence[int]) -> None:
        api, (context, (ios, events)) = self.session.api, self._contexts[thread]
        # All ios of a batch at once: a few calls of numpy, however many they are.
        chosen, mine = np.array(batch), ios[: len(batch)]
        mine["mode"] = int(api.BatchMode.BATCH)
        mine["opcode"] = int(api.Opcode.WRITE if ops.write else api.Opcode.READ)
        mine["fh"] = np.array(self.session.handles)[ops.file[chosen]]
        mine["cookie"] = chosen
        inner = mine["u"]["batch"]
        inner["dev_ptr_base"], inner["dev_ptr_offset"] = self.memory().data_ptr(), ops.place[chosen]
        inner["file_offset"], inner["size_"] = ops.offset[chosen], ops.nbytes[chosen]
        api.batch_io_submit(context, len(batch), ios.ctypes.data, 0)
        left = len(batch)
        while left:
            found = ctypes.c_uint(left)
            api.batch_io_get_status(context, left, ctypes.addressof(found), events.ctypes.data, 0)
            done = events[: found.value]
            wrong = (done["status"] != int(api.Status.COMPLETE)) | (done["ret"] != ops.nbytes[done["cookie"]])
            if wrong.any():
                first = done[wrong][0]
                raise OSError(
                    f"cuFile's batch ended io {first['cookie']} of {ops.nbytes[first['cookie']]} bytes with status "
                    f"{first['status']}, {first['ret']} bytes"
                )
            left -= found.value

    def close(self) -> None:
        for context, _ in self._contexts:
            self.session.api.batch_io_destroy(context)
        self._contexts = []
        super().close()


def _ios(api: Any, count: int) -> tuple[Any, Any]:
    return np.zeros(count, dtype=np.dtype(api.io_params_dtype)), np.zeros(count, dtype=np.dtype(api.io_events_dtype))
