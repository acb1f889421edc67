"""The native engine: readers, staging ring, copies and fences. Internal: use the modules above it.

Sizes and offsets are bytes; addresses and CUDA stream handles are plain integers. Errors are those of
gdsstream.errors.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Span = tuple[int, int, int, int, int]

def cuda_reason() -> str:
    """Why the CUDA driver cannot be used, or an empty string."""

def io_uring_reason() -> str:
    """Why io_uring cannot be used, or an empty string."""

def file_alignment(path: str) -> tuple[int, int]:
    """(memory, offset) alignment that O_DIRECT needs, by statx; (0, 0) where untold."""

def direct_io_works(path: str) -> bool:
    """Whether one O_DIRECT read succeeds. ReadError for a file that cannot be opened."""

def resident_bytes(path: str, offset: int, nbytes: int) -> int:
    """How many of the bytes are in the page cache, by mincore. ReadError."""

def unevictable_bytes() -> int:
    """Page cache that this process has registered, which the kernel counts as available and cannot evict."""

def pci_bus_id(ordinal: int) -> str:
    """A CUDA device's PCI address, such as "0000:3b:00.0". BackendUnavailableError without a driver."""

def size_bucket(nbytes: int) -> int:
    """Which of `Counts.sizes` an operation is counted in."""

def latency_bucket(ns: int) -> int:
    """Which of `Counts.latencies` an operation is counted in."""

def cut_for_tests(
    file: NDArray[np.int32],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    target: NDArray[np.uint64],
    group: NDArray[np.int32],
    task_bytes: int,
    alignment: int,
    read_bytes: int,
    ramp_tasks: int,
) -> list[tuple[int, list[_Span], list[_Span]]]:
    """How extents are cut: (group, reads, copies) of each task. A read is (file, offset, nbytes, wanted, place in the
    slot), a copy (place in the slot, target, nbytes, file, 0)."""

class File:
    """An open file with the stamp that it has to keep: (device, inode, size, mtime_ns, ctime_ns)."""

    def __init__(self, path: str, stamp: tuple[int, int, int, int, int], interrupt_cpu: int = -1) -> None:
        """Opens it. ReadError, or FileChangedError where the stamp differs. `interrupt_cpu` takes the interrupts of its
        disk; -1: unknown."""

    def resident_fraction(self) -> float:
        """The share of the file in the page cache, from windows spread over it; 1 for an empty file."""

    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mapped(self) -> bool: ...
    @property
    def mapped_bytes(self) -> int:
        """How much of it is held in host memory."""

    @property
    def host_copy(self) -> bool:
        """Whether that is a pinned copy instead of the file's own pages."""

class FenceStream:
    """A stream of our own on a CUDA device, on which nothing is computed; it collects fences."""

    def __init__(self, ordinal: int) -> None:
        """BackendUnavailableError without a driver, ConfigError for an ordinal that does not exist."""

    @property
    def handle(self) -> int: ...

class Fence:
    """A point in a CUDA stream, for other streams to wait for."""

    def __init__(self, stream: FenceStream, timing: bool = False) -> None: ...
    def record(self, stream: int) -> None:
        """Moves the fence to what `stream` has queued by now."""

    def order(self, stream: int) -> None:
        """`stream` goes no further until the recorded point is reached."""

    def done(self) -> bool: ...
    def elapsed_ms(self, earlier: Fence) -> float:
        """Milliseconds since `earlier`, both with timing and done; NaN where the driver does not say."""

class Counts:
    """Sums over operations; see gdsstream.stats.Operations."""

    @property
    def operations(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def timed(self) -> int: ...
    @property
    def latency_ns(self) -> int: ...
    @property
    def longest_ns(self) -> int: ...
    @property
    def sizes(self) -> list[int]: ...
    @property
    def latencies(self) -> list[int]: ...

class Ledger:
    """Where operations are counted: by the threads of lanes, each on a page of its own, and by `record`."""

    def __init__(self, histograms: bool) -> None: ...
    def record(self, nbytes: int, ns: int, retries: int = 0) -> None: ...
    def fail(self) -> None: ...
    def total(self) -> Counts: ...

class Activity:
    """The wall time in which something was under way; what overlaps counts once. A parent is busy while this is."""

    def __init__(self, parent: Activity | None = None) -> None: ...
    def begin(self, things: int = 1) -> None: ...
    def end(self) -> None: ...
    def microseconds(self) -> int: ...

class Lane:
    """Threads with one kind of reader: "pread", "io_uring" or "mapped". `depth` reads under way in each thread at most;
    with `paced_bytes` of all threads as many as keep the disk busy, and no fewer bytes than that. Tasks whose reads
    have `near_interrupts_bytes` on average, or more, are read by one thread, on the CPU that takes the interrupts of
    the disk. With `slot_bytes` its tasks have that, and slots of a ring of its own, of `staging_bytes` at most."""

    def __init__(
        self,
        reader: str,
        *,
        direct: bool,
        threads: int,
        depth: int,
        read_bytes: int,
        fixed_buffers: bool = False,
        paced_bytes: int = 0,
        near_interrupts_bytes: int = 0,
        slot_bytes: int = 0,
        staging_bytes: int = 0,
        faults: str = "",
        ledger: Ledger | None = None,
    ) -> None: ...

class Pace:
    """How many bytes one of `threads` threads has under way at a disk: what the disk brings in a millisecond. Each
    thread of a lane has one; here for tests."""

    def __init__(self, threads: int, least_bytes: int) -> None: ...
    @property
    def limit_bytes(self) -> int: ...
    def begin(self, now_ns: int) -> None:
        """The thread has reads under way from now on, and had none before."""

    def arrived(self, reads: int, nbytes: int, quickest_ns: int, now_ns: int) -> None:
        """As many came back by now, the quickest of them after so long."""

class Transfer:
    """Bytes under way. A group of -1 stands for all groups.

    Dropped before `complete` was called, it is cancelled, and what `submit` was given to keep stays alive until nothing
    can be written to it any more. Given None, it goes on, and the caller keeps the destination alive.
    """

    def wait(self, group: int, seconds: float) -> bool:
        """Whether the group has landed, waiting for at most `seconds`; raises the transfer's failure."""

    def order_before(self, group: int, stream: int) -> None:
        """Make a stream wait for the copies of a group that has landed."""

    def cancel(self) -> None: ...
    def drained(self) -> bool:
        """Whether nothing can write to the destination any more."""

    def complete(self) -> None:
        """All of it has landed, and the current stream waits for its copies: let go of what was kept."""

    @property
    def nbytes(self) -> int: ...

class TimedIos:
    """Blocking ios by threads of their own, each timed; the bench's. Through `buffers` for each thread, which are
    `buffer_bytes` large and lie end to end from `memory` on, or straight to their addresses. One caller at a time."""

    def __init__(
        self, threads: int, *, memory: int = 0, buffer_bytes: int = 0, buffers: int = 0, device: int = -1
    ) -> None: ...
    def begin(
        self,
        descriptor: NDArray[np.int32],
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        address: NDArray[np.uint64],
        *,
        write: bool,
    ) -> None: ...
    def wait(self, seconds: float) -> bool:
        """Whether all have ended; raises the first failure once no thread does anything more."""

    def seconds(self, out: NDArray[np.float64]) -> None:
        """The seconds of each, into `out`; behind `wait`."""

    def close(self) -> None: ...

class Request:
    """What one transfer reads; can be submitted again and again."""

    def __init__(
        self,
        files: Sequence[File],
        file_lane: Sequence[int],
        file: NDArray[np.int32],
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        target: NDArray[np.uint64],
        group: NDArray[np.int32],
        groups: int,
    ) -> None: ...

class Engine:
    """Lanes, a staging ring and a sink. `device` is a CUDA ordinal, or negative for CPU memory."""

    def __init__(
        self,
        *,
        device: int,
        slot_bytes: int,
        staging_bytes: int,
        numa_node: int,
        cpus: Sequence[int],
        lanes: Sequence[Lane],
        process: Activity | None = None,
    ) -> None: ...
    def submit(self, request: Request, stream: int, keep: object | None) -> Transfer: ...
    def gather(
        self,
        files: Sequence[File],
        file_lane: Sequence[int],
        file: NDArray[np.int32],
        offset: NDArray[np.int64],
        record_bytes: int,
        target: int,
        stream: int,
        keep: object | None,
    ) -> Transfer: ...
    def prepare(self, lane: int) -> None:
        """Start a lane's threads and pin the whole staging ring, before the first transfer does."""

    def map(self, file: File, windows: Sequence[tuple[int, int]] | None = None, *, allow_copy: bool = False) -> None:
        """Hold (offset, nbytes) windows of a file in host memory, registered for a GPU; None: all of it.

        `allow_copy` takes a pinned copy where the file's own pages cannot be registered, which is
        BackendUnavailableError otherwise. Once for each File: later calls may ask for no more.
        """

    def close(self) -> None: ...
    def quarantined(self) -> int:
        """How many transfers were given up whose memory may still be written to."""

    def idle(self) -> bool:
        """Whether nothing that was submitted can still write anywhere."""

    def counters(self) -> dict[str, int]: ...
    def ring_wait_us(self) -> int: ...
    def take_notes(self) -> list[str]: ...
    @property
    def device(self) -> int: ...
    @property
    def forked(self) -> bool: ...
