"""storage -> GPU by cuFile through kvikio: gdsio's transfer type 0.

Without nvidia-fs kvikio reads by POSIX through pinned bounce buffers; the row's route says which it was, and such a
row is no measurement of GPUDirect Storage.

`submit` whole: one request for each stretch of ios that follow each other in a file, which kvikio cuts into tasks of an
io's size for its own `threads` threads; what is timed is then a stretch. `submit` each: threads of Python submit an io
at a time and wait for it, `depth` of them in each of `threads`, and each io is timed; all of them together are bound by
the interpreter at some 50,000 ios a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.config_base import BenchConfigError
from bench.loaders.base import Job, need
from bench.loaders.transfer_route import Route, Threads, need_gpu

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class KvikioFiles(Route):
    """What kvikio's rows share: the files open in it, the destination registered, and which path it takes."""

    _library: Any = field(default=None, init=False, repr=False)
    _defaults: Any = field(default=None, init=False, repr=False)
    _files: list[Any] = field(default_factory=list, init=False, repr=False)
    _registered: bool = field(default=False, init=False, repr=False)

    def check(self, job: Job) -> None:
        super().check(job)
        need_gpu(job, "this route")

    def start(self) -> None:
        self._library = need("kvikio", "kvikio-cu13")
        self._defaults = need("kvikio.defaults", "kvikio-cu13")
        mode = "r+" if self.request.write else "r"
        self._files = [self._library.CuFile(path, mode) for path in self.job.paths]
        if self.pinned:
            memory = self.memory()
            self.request.memory.register(memory, lambda: self._library.memory_register(memory))
            self._registered = True

    def close(self) -> None:
        if self._registered:
            memory = self.memory()
            self.request.memory.deregister(memory, lambda: self._library.memory_deregister(memory))
            self._registered = False
        for file in self._files:
            file.close()
        self._files = []
        super().close()

    def path_taken(self) -> str:
        """cuFile or POSIX, as far as kvikio tells."""
        properties = need("kvikio.cufile_driver", "kvikio-cu13")
        try:
            available = bool(properties.get("is_gds_available"))
        except Exception:  # kvikio raises what the driver says where there is none
            available = False
        if self._defaults.is_compat_mode_preferred() or not available:
            return "kvikio's POSIX path, pinned bounce buffers: not GDS"
        return "cuFile; whether it is GDS only its own counters prove"


@dataclass
class KvikioIos(KvikioFiles):
    """`submit` is `each` or `whole`."""

    submit: str = "each"

    _threads: Threads | None = field(default=None, init=False, repr=False)
    _found: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.submit not in ("each", "whole"):
            raise BenchConfigError(f"'submit' is {self.submit!r}; it has to be 'each' or 'whole'")

    def start(self) -> None:
        super().start()
        if self.submit == "each":
            self._threads = Threads(self.num_threads * self.in_flight, self.job.device)

    def arm(self) -> None:
        # The pool is the process's: rows with different settings would otherwise share the last one's.
        workers = self.num_threads * (self.in_flight if self.submit == "each" else 1)
        wanted = {"num_threads": workers, "task_size": int(self.ops().nbytes.max())}
        self._found = {key: self._defaults.get(key) for key in wanted}
        if self._found == wanted:
            return
        self._defaults.set(wanted)
        # New threads make their streams and buffers in their first io, which is not to be the measured one.
        import torch

        count = min(workers * wanted["task_size"], os.path.getsize(self.job.paths[0]))
        scratch = torch.empty(count, dtype=torch.uint8, device=self.job.device)
        self._files[0].pread(scratch, count, 0, wanted["task_size"]).get()

    def disarm(self) -> None:
        if self._found:
            self._defaults.set(self._found)
            self._found = {}

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        return self._whole(ops) if self.submit == "whole" else self._each(ops)

    @property
    def latency_of(self) -> str:
        return "io" if self.submit == "each" else "stretch of ios"

    def _each(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._threads is not None
        taken = np.zeros(len(ops))
        rows, memory = ops.rows, self.memory()

        def work(_: int, numbers: Iterator[int]) -> None:
            for number in numbers:
                file, offset, nbytes, place = rows[number]
                opened = self._files[file]
                began = time.perf_counter()
                start = opened.pwrite if ops.write else opened.pread
                count = start(memory[place : place + nbytes], nbytes, offset, nbytes).get()
                taken[number] = time.perf_counter() - began
                all_moved(count, nbytes, offset)

        self._threads.each(work, ops)
        return taken

    def _whole(self, ops: Ops) -> npt.NDArray[np.float64]:
        memory, pending = self.memory(), []
        task = int(ops.nbytes.max())
        began = time.perf_counter()
        for file, offset, nbytes, place in ops.stretches():
            opened = self._files[file]
            start = opened.pwrite if ops.write else opened.pread
            pending.append((start(memory[place : place + nbytes], nbytes, offset, task), nbytes, offset))
        taken = []
        for future, nbytes, offset in pending:
            all_moved(future.get(), nbytes, offset)
            taken.append(time.perf_counter() - began)
        return np.array(taken)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        super().close()

    def route(self) -> str:
        kind = "registered" if self.pinned else "unregistered"
        how = "whole stretches, cut by kvikio" if self.submit == "whole" else "an io at a time from threads of Python"
        threads = self.num_threads * (self.in_flight if self.submit == "each" else 1)
        return f"{self.path_taken()}; {threads} threads, {how}, {kind} GPU memory"


def all_moved(count: int, nbytes: int, offset: int) -> None:
    """Raise OSError where kvikio moved fewer bytes."""
    if count != nbytes:
        raise OSError(f"kvikio moved {count} of {nbytes} bytes at offset {offset}")
