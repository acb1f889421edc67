"""What stations between a path and a device do when nothing else is asked of them, measured with bare means.

None of the library's routes is used, so that their figures can be compared with these. Every figure is the best of a
few settings, in bytes a second: what was found here, not a law of nature. Reads are bounded in bytes and in time.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import torch

from gdsstream.errors import GdsStreamError, ReadError
from gdsstream.sample_files import Piece, SampleFiles, drop_cached
from gdsstream.topology import node_cpus

MIB = 2**20
THREADS = (1, 4, 8, 16, 32)
BLOCKS = (MIB, 4 * MIB)
CACHED_BLOCKS = (2 * MIB, 8 * MIB)
SWEEP_BYTES = 128 * MIB
_BEST_BYTES = 512 * MIB
_SAMPLES = 3
_CACHED_BYTES = 1024 * MIB
_COPY_BYTES = 512 * MIB
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured: bytes a second, the median of `samples`, and how."""

    rate: float
    how: str
    samples: tuple[float, ...] = ()


def storage_bytes(sample: SampleFiles) -> int:
    """How many bytes `storage` and `cached` read at most."""
    sweep, best = min(SWEEP_BYTES, sample.nbytes), min(_BEST_BYTES, sample.nbytes)
    return len(THREADS) * len(BLOCKS) * sweep + _SAMPLES * best + min(_CACHED_BYTES, sample.nbytes)


def storage(sample: SampleFiles, *, direct: bool, seconds: float) -> Measured:
    """The best of threads x block size, reading what is not in the page cache: with O_DIRECT, else through the cache.

    Then three longer reads with the best, of which the median counts. Stops early when `seconds` are over. Raises
    ReadError where the storage fails.
    """
    end = time.monotonic() + seconds
    with _Memory(min(_BEST_BYTES, sample.nbytes)) as memory:

        def rate(threads: int, block: int, nbytes: int) -> float:
            pieces = sample.window(nbytes)
            drop_cached(pieces)
            return _read(pieces, memory, threads, block, direct=direct)

        tried: dict[tuple[int, int], float] = {}
        sweep = min(SWEEP_BYTES, sample.nbytes)
        for threads in THREADS:
            for block in BLOCKS:
                # With less than a block for each thread, more threads are no more.
                if not tried or (threads * block <= sweep and time.monotonic() < end):
                    tried[threads, block] = rate(threads, block, sweep)
        threads, block = max(tried, key=lambda choice: tried[choice])
        samples: list[float] = []
        while len(samples) < _SAMPLES and time.monotonic() < end:
            samples.append(rate(threads, block, memory.nbytes))
        samples = samples or [tried[threads, block]]
    way = "O_DIRECT" if direct else "the page cache, emptied before"
    how = f"reads by {way}, {_threads(threads)} x {block // MIB} MiB, best of {len(tried)} settings; drives included"
    return Measured(median(samples), how, tuple(samples))


def cached(sample: SampleFiles) -> Measured:
    """Copies out of the page cache, the best of threads x block size. Raises ReadError.

    Each thread reads into one block of its own, again and again, as staging does: what is written stays in the CPU's
    cache, where memory as large as the data would have to be written out as well.
    """
    cores = len(os.sched_getaffinity(0))
    pieces = sample.window(min(_CACHED_BYTES, sample.nbytes))
    total = sum(piece.nbytes for piece in pieces)
    found: dict[tuple[int, int], list[float]] = {}
    choices = [
        (threads, block)
        for threads in sorted({1, max(1, cores * 3 // 4), cores, 2 * cores})
        for block in CACHED_BLOCKS
        if threads == 1 or threads * block <= total
    ]
    with _Memory(max(threads * block for threads, block in [*choices, (cores, MIB)])) as memory:
        _read(pieces, memory, cores, MIB, direct=False, reuse=True)  # brings them into the cache
        for threads, block in choices:
            found[threads, block] = [
                _read(pieces, memory, threads, block, direct=False, reuse=True) for _ in range(_SAMPLES)
            ]
    threads, block = max(found, key=lambda choice: median(found[choice]))
    how = f"reads of cached pages, {_threads(threads)} x {block // MIB} MiB, best of {len(found)} settings"
    return Measured(median(found[threads, block]), how, tuple(found[threads, block]))


def pinned_copy(device: torch.device, *, cpus: Sequence[int] = ()) -> Measured:
    """One large copy from pinned memory to a GPU, the median of three; `cpus`: allocated by a thread that runs there,
    and so on their NUMA node."""
    source = _on(cpus, lambda: torch.zeros(_COPY_BYTES, dtype=torch.uint8).pin_memory())
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    samples = [_timed(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(_SAMPLES + 1)][1:]
    return Measured(median(samples), f"copies of {_COPY_BYTES // MIB} MiB from pinned memory", tuple(samples))


def device_copy(device: torch.device) -> Measured:
    """Copies within a GPU's memory; each byte counts twice, since it is read and written."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = [2 * _timed(device, lambda: target.copy_(source)) for _ in range(_SAMPLES + 1)][1:]
    return Measured(median(samples), "copies within its memory, reads and writes counted", tuple(samples))


def node_copy(source: int, target: int) -> Measured | None:
    """Copies by threads on one NUMA node out of memory of another; None where one of them has no core for us."""
    far, near = node_cpus(source), node_cpus(target)
    if not far or not near:
        return None
    nbytes = _COPY_BYTES
    # A page lies where the thread runs that touches it first.
    data = _on(far, lambda: torch.ones(nbytes, dtype=torch.uint8))
    into = _on(near, lambda: torch.ones(nbytes, dtype=torch.uint8))
    parts = list(zip(into.chunk(len(near)), data.chunk(len(near)), strict=True))

    def copy(number: int) -> None:
        os.sched_setaffinity(0, near)
        parts[number][0].copy_(parts[number][1])

    samples = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(_SAMPLES + 1):
            began = time.perf_counter()
            list(pool.map(copy, range(len(parts))))
            samples.append(nbytes / (time.perf_counter() - began))
    how = f"copies by {len(parts)} threads on node {target} from memory of node {source}"
    return Measured(median(samples[1:]), how, tuple(samples[1:]))


class _Memory:
    """Memory to read into: page-aligned, which O_DIRECT needs, and touched before anything is timed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, max(nbytes, _PAGE))
        self.view = memoryview(self._map)
        for page in range(0, nbytes, _PAGE):
            self.view[page] = 1

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.view.release()
        self._map.close()


def _read(
    pieces: Sequence[Piece], memory: _Memory, threads: int, block: int, *, direct: bool, reuse: bool = False
) -> float:
    """Bytes a second of reading pieces into the memory from its beginning; with `reuse` into one block a thread."""
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    tasks: list[tuple[Piece, int, int, int, int]] = []
    used = 0
    with ExitStack() as stack:
        for piece in pieces:
            try:
                fd = os.open(piece.path, flags)
            except OSError as error:
                raise _failed(piece, 0, error) from error
            stack.callback(os.close, fd)
            for start in range(0, piece.nbytes, block):
                count = min(block, piece.nbytes - start)
                tasks.append((piece, fd, piece.offset + start, used, count))
                used += count
        # Each thread takes the next block when it is done with one; the interpreter's lock makes this a single step.
        waiting = iter(tasks)
        ready = threading.Barrier(threads + 1)

        def read(number: int) -> None:
            ready.wait()
            for piece, fd, offset, place, count in waiting:
                start = number * block if reuse else place
                with memory.view[start : start + count] as target:
                    try:
                        got = os.preadv(fd, [target], offset)
                    except OSError as error:
                        raise _failed(piece, offset, error) from error
                if got != count:
                    raise ReadError(f"{piece.path}: {got} of {count} bytes at offset {offset}; it changed meanwhile")

        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(read, number) for number in range(threads)]
            ready.wait()  # every thread runs before the clock does
            began = time.perf_counter()
            for future in futures:
                future.result()
            return used / (time.perf_counter() - began)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _failed(piece: Piece, offset: int, error: OSError) -> GdsStreamError:
    text = f"reading {piece.path} at offset {offset} failed: {error.strerror}; check the storage"
    return ReadError(text, error.errno)


def _timed(device: torch.device, copy: Callable[[], object]) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    copy()
    torch.cuda.synchronize(device)
    return _COPY_BYTES / (time.perf_counter() - began)


def _on(cpus: Sequence[int], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` returns, called on those cores (anywhere, if there are none) by a thread that ends with it."""

    def work() -> torch.Tensor:
        if cpus:
            os.sched_setaffinity(0, cpus)
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


__all__ = ["Measured", "cached", "device_copy", "node_copy", "pinned_copy", "storage", "storage_bytes"]
