"""The limits of verb `transfer`, measured as those of ceilings.py:

| run                         | ceiling                                                                         |
|-----------------------------|---------------------------------------------------------------------------------|
| warm reads to a GPU         | one large copy from pinned memory                                               |
| warm reads on the CPU       | bare threads, preadv; of random ios index_select out of a mapping of the files  |
| cold reads                  | the best O_DIRECT rate: a sweep of threads, or blocks by kernel AIO; of random  |
|                             | ios below 64 KiB kernel AIO, one io each                                        |
| writes                      | the same of writes; of random ios below 1 MiB kernel AIO or threads, one io     |
|                             | each, whichever is faster                                                       |

No consumer's pass here, as in the rows. Where O_DIRECT is not to be had, writes through the page cache are the limit
of writes, and `kind` says so. Ios that are not aligned are held against aligned ones. A route that ends in host memory
has the ceiling of its run too, so that in a warm run it can pass 100 % of the link.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench import cache, table, transfer_ops
from bench.aio import Aio
from bench.ceilings import Ceiling, DirectRecords, MappedGather, ParallelRead, PinnedCopy
from bench.config_base import BenchError
from bench.loaders.base import GatherRequest
from bench.scenarios.base import Workload

_MIB = 1 << 20
_THREADS = (1, 4, 8, 16)
_BLOCKS = (1 * _MIB, 4 * _MIB, 16 * _MIB)
_TRIAL_BYTES = 64 * _MIB
_SAMPLE_BYTES = 1 << 30
_AIO_BLOCK, _AIO_DEPTHS = 512 << 10, (8, 32, 64)
#: From here on one thread that submits single ios may be slower than threads with whole blocks.
_MIDDLE = 64 << 10


class ParallelWrite(Ceiling):
    """Threads that write whole blocks from page-aligned memory, over what the files hold."""

    def __init__(self, paths: Sequence[str], nbytes: int, sizes: Sequence[int] = _BLOCKS) -> None:
        self._paths = list(paths)
        self._nbytes = min(nbytes, sum(map(os.path.getsize, paths)))
        self._direct = cache.refuses_direct(self._paths[0]) is None
        self.kind = "disk_o_direct_writes" if self._direct else "page_cache_writes"
        blocks = [block for block in sizes if block <= min(map(os.path.getsize, paths))] or [mmap.PAGESIZE]
        self._memory = mmap.mmap(-1, max(blocks))
        np.frombuffer(self._memory, dtype=np.uint8).fill(1)
        trial = min(_TRIAL_BYTES, self._nbytes)
        rates = {choice: self._rate(*choice, trial) for choice in itertools.product(_THREADS, blocks)}
        self._choice = max(rates, key=lambda choice: rates[choice])

    def sample(self) -> float:
        return self._rate(*self._choice, self._nbytes)

    def describe(self) -> str:
        threads, block = self._choice
        return f"{threads} threads x {table.block(block)}, {self._nbytes / _MIB:.0f} MiB, fsync not inside"

    def close(self) -> None:
        self._memory.close()

    def _rate(self, threads: int, block: int, nbytes: int) -> float:
        cache.evict(self._paths)
        flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        descriptors = [os.open(path, flags) for path in self._paths]
        try:
            places = [
                (descriptor, offset)
                for descriptor, path in zip(descriptors, self._paths, strict=True)
                for offset in range(0, os.path.getsize(path) - block + 1, block)
            ][: max(1, nbytes // block)]
            with memoryview(self._memory) as memory, memory[:block] as view, ThreadPoolExecutor(threads) as pool:
                list(pool.map(time.sleep, [0.001] * threads))  # start the threads
                start = time.perf_counter()
                done = sum(pool.map(lambda place: os.pwritev(place[0], [view], place[1]), places))
                return done / (time.perf_counter() - start) / 1e9
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class DirectBlocks(Ceiling):
    """Blocks in the files' order with O_DIRECT through kernel AIO, read or, from memory of zeros, written."""

    def __init__(self, paths: Sequence[str], nbytes: int, *, write: bool = False) -> None:
        self.kind = "disk_o_direct_writes" if write else "disk_o_direct"
        self._paths = list(paths)
        ops = transfer_ops.make("read", [_AIO_BLOCK], nbytes, [os.path.getsize(path) for path in paths])
        self._count = len(ops)
        self._aio = Aio(paths, GatherRequest(ops.file, ops.offset, _AIO_BLOCK), write=write)
        trial = min(self._count, _TRIAL_BYTES // _AIO_BLOCK)
        self._depth = max(_AIO_DEPTHS, key=lambda depth: self._rate(depth, trial))

    def sample(self) -> float:
        return self._rate(self._depth, self._count)

    def describe(self) -> str:
        return f"kernel AIO, depth {self._depth} x {table.block(_AIO_BLOCK)}"

    def _rate(self, depth: int, count: int) -> float:
        cache.evict(self._paths)
        return self._aio.rate(depth, count)


def choose(workload: Workload, *, cold: bool) -> Ceiling:
    """The ceiling that the table above names for this part."""
    job = workload.job
    assert job.transfer is not None
    nbytes = min(workload.sample_bytes, _SAMPLE_BYTES)
    if job.transfer.write:
        return _writes(job.paths, nbytes, job.request)
    if cold:
        return _cold_reads(job.paths, nbytes, job.request)
    if job.cuda:
        return PinnedCopy(job.device, nbytes)
    if job.request is not None:
        return MappedGather(job.paths, job.request, consumer=False)
    return ParallelRead(job.paths, direct=False, consumer=False, nbytes=nbytes)


def _writes(paths: Sequence[str], nbytes: int, small: GatherRequest | None) -> Ceiling:
    threads = ParallelWrite(paths, nbytes, [small.length] if small is not None else _BLOCKS)
    if cache.refuses_direct(paths[0]) is not None:
        return threads
    if small is not None:
        return _faster(threads, *_with_aio(lambda: DirectRecords(paths, small, write=True)))
    return _faster(threads, *_with_aio(lambda: DirectBlocks(paths, nbytes, write=True)))


def _cold_reads(paths: Sequence[str], nbytes: int, small: GatherRequest | None) -> Ceiling:
    records = _with_aio(lambda: DirectRecords(paths, small)) if small is not None else []
    if small is not None and small.length < _MIDDLE and records:
        return records[0]
    threads = ParallelRead(paths, direct=True, consumer=False, nbytes=nbytes)
    return _faster(*records, threads, *_with_aio(lambda: DirectBlocks(paths, nbytes)))


def _with_aio(make: Callable[[], Ceiling]) -> list[Ceiling]:
    """Nothing where the system has no kernel AIO, or the files are smaller than a block: the ceiling's kind tells."""
    try:
        return [make()]
    except BenchError:
        return []


def _faster(*candidates: Ceiling) -> Ceiling:
    """The one whose first sample is. In memory threads are faster than kernel AIO, which is synchronous there."""
    rates = [candidate.sample() for candidate in candidates]
    chosen = candidates[rates.index(max(rates))]
    for other in candidates:
        if other is not chosen:
            other.close()
    return chosen
