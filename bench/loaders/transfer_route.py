"""What the routes of verb `transfer` have in common: options that a row sets for itself, files opened by the best way
that the file system allows, and threads that take ios as they get free.

O_DIRECT is found by trying: one io is read where the first of the row lies. Where the system refuses it (an offset
that is not aligned, a file system without it) the page cache is used, and the row's route says so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Barrier
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from bench.config_transfer import MOST_DEPTH
from bench.loaders.base import Job, Loader, TransferRequest, Unavailable

if TYPE_CHECKING:
    import torch

    from bench.transfer_ops import Ops


class Way(NamedTuple):
    """How files were opened: descriptors in the order of the job's files, and what to call it."""

    descriptors: list[int]
    direct: bool
    said: str


@dataclass
class Route(Loader):
    """Options at None are the scenario's; the order of the ios, their shift and what is moved always are. `xfer_type`
    is gdsio's number of the route, `gpu_dev_id` the GPU that a job of gdsio names: the run's own has to be it."""

    io_bytes: int | None = None
    threads: int | None = None
    depth: int | None = None
    registered: bool | None = None
    xfer_type: int | None = None
    gpu_dev_id: int | None = None

    verbs: ClassVar[frozenset[str]] = frozenset({"transfer"})
    #: Whether the bytes end, or begin, in host memory although the run has a GPU.
    on_host: ClassVar[bool] = False

    _job: Job | None = field(default=None, init=False, repr=False)
    _way: Way | None = field(default=None, init=False, repr=False)

    # ---- what a row does

    def check(self, job: Job) -> None:
        for name in ("io_bytes", "threads", "depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Unavailable(f"{name} is {value}; it has to be at least 1")
        if self.depth is not None and self.depth > MOST_DEPTH:
            raise Unavailable(f"depth is {self.depth}; it has to be at most {MOST_DEPTH}")
        if not self.on_host and self.gpu_dev_id not in (None, _first_gpu()):
            raise Unavailable(
                f"gpu_dev_id={self.gpu_dev_id}, and this run uses GPU {_first_gpu()}: run it with "
                f"CUDA_VISIBLE_DEVICES={self.gpu_dev_id}"
            )

    def prepare(self, job: Job) -> None:
        self._job = job
        self.start()

    def start(self) -> None:
        """Open and register what the ios need."""
        raise NotImplementedError

    def close(self) -> None:
        if self._way is not None:
            for descriptor in self._way.descriptors:
                os.close(descriptor)
            self._way = None

    @property
    def own_seconds(self) -> float | None:
        """What the last `transfer` took by the route's own clock, where that is another program's."""
        return None

    def paths(self, job: Job) -> tuple[str, ...]:
        return job.paths

    def delivers(self) -> str:
        return "host memory" if self.on_host and self.job.cuda else "owned"

    def details(self) -> dict[str, Any]:
        return {
            "io_bytes": self.io_bytes or self.request.io_bytes,
            "threads": self.num_threads,
            "depth": self.in_flight,
            "registered": self.pinned,
            # None where others open the files; the route's text says what they do.
            "direct": self._way.direct if self._way is not None else None,
            "latency_of": self.latency_of,
            "xfer_type": self.xfer_type,
        }

    @property
    def latency_of(self) -> str:
        """What one figure of `transfer` is the time of."""
        return "io"

    # ---- what it works with

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    @property
    def request(self) -> TransferRequest:
        assert self.job.transfer is not None
        return self.job.transfer

    @property
    def num_threads(self) -> int:
        return self.threads or self.request.threads

    @property
    def in_flight(self) -> int:
        """Ios in flight in each thread."""
        return self.depth or self.request.depth

    @property
    def pinned(self) -> bool:
        """Whether buffers are page-locked or registered; never without a GPU."""
        wanted = self.request.registered if self.registered is None else self.registered
        return wanted and self.job.cuda

    def ops(self) -> Ops:
        """All ios of the row. Raises Unavailable where its size of an io does not go with the files."""
        from bench.config_base import BenchConfigError

        try:
            return self.request.ops(self.io_bytes)
        except BenchConfigError as error:
            raise Unavailable(str(error)) from error

    def new_stream(self) -> Any:
        """A stream of the run's GPU."""
        import torch

        cuda: Any = torch.cuda  # parts of it are untyped
        return cuda.Stream(self.job.device)

    def memory(self) -> torch.Tensor:
        """Where the ios have their places."""
        return self.request.memory.tensor(host=self.on_host, registered=self.pinned)

    def open_files(self, *, direct: bool) -> Way:
        """Open the job's files, with O_DIRECT if that is asked for and can be had."""
        self.close()
        said = "page cache"
        if direct:
            refused = self._refuses_direct()
            direct, said = refused is None, f"page cache, since O_DIRECT {refused}" if refused else "O_DIRECT"
        self._way = Way(_open(self.job.paths, write=self.request.write, direct=direct), direct, said)
        return self._way

    def said(self, text: str) -> str:
        """The row's route: the way of the files, and whether writes are durable at the end."""
        assert self._way is not None
        return f"{self._way.said}, {text}"

    def _refuses_direct(self) -> str | None:
        import mmap

        file, offset, nbytes, _ = self.ops().first(1).rows[0]
        try:
            descriptor = os.open(self.job.paths[file], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return f"cannot be opened here ({error.strerror})"
        try:
            with mmap.mmap(-1, nbytes) as scratch, memoryview(scratch) as view:
                os.preadv(descriptor, [view], offset)
        except OSError as error:
            return f"refuses {nbytes} bytes at offset {offset} ({error.strerror})"
        finally:
            os.close(descriptor)
        return None


def need_gpu(job: Job, what: str) -> None:
    """Raise Unavailable, with the reason that the driver gives, unless the run has a GPU."""
    if job.cuda:
        return
    import torch

    try:
        torch.zeros(1, device="cuda")
    except Exception as error:  # torch raises AssertionError, RuntimeError or its own
        raise Unavailable(f"{what} ends on a GPU, and there is none: {str(error).partition(chr(10))[0]}") from error
    raise Unavailable(f"{what} ends on a GPU, and this run is on the CPU (device=cpu)")


class Threads:
    """A pool whose threads exist before the first sample, each with the GPU's context as its current one."""

    def __init__(self, count: int, device: str) -> None:
        def begin() -> None:
            if device.startswith("cuda"):
                import torch

                # cuFile asks the driver for the current context, which only a call of the runtime's makes current.
                torch.zeros(1, device=device)

        self.count = count
        self._pool = ThreadPoolExecutor(count, initializer=begin)
        # Threads start on demand; a task each that waits for the others makes all of them start now.
        barrier = Barrier(count)
        list(self._pool.map(lambda _: barrier.wait(), range(count)))

    def each(self, work: Callable[[int, Iterator[int]], None], ops: Ops) -> None:
        """`work(thread, numbers)` in every thread; `numbers` gives the next io that no thread has taken. All of them
        have ended when this returns. Raises the first error; the other threads then stop at their next io."""
        numbers = itertools.count()
        stop: list[bool] = []

        def next_one() -> Iterator[int]:
            while not stop and (number := next(numbers)) < len(ops):
                yield number

        def guarded(thread: int) -> None:
            try:
                work(thread, next_one())
            except BaseException:
                stop.append(True)
                raise

        futures = [self._pool.submit(guarded, thread) for thread in range(self.count)]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()


def _open(paths: tuple[str, ...], *, write: bool, direct: bool) -> list[int]:
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    found: list[int] = []
    try:
        for path in paths:
            found.append(os.open(path, flags))
    except OSError:
        for descriptor in found:
            os.close(descriptor)
        raise
    return found


def _first_gpu() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return int(visible) if visible.isdigit() else 0
