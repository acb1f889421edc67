"""What the hardware gives without any loader, measured in the same process and in every round.

| run                     | ceiling                                                                             |
|-------------------------|-------------------------------------------------------------------------------------|
| warm, to a GPU          | one large copy from pinned memory, wall clock around a synchronised copy            |
| warm, on the CPU        | bare threads, preadv into memory that already exists, and the consumer's pass       |
| cold, read              | the best O_DIRECT rate of threads and of kernel AIO (ceilings_disk.py)               |
| warm, gather on the CPU | torch's index_select out of a mapping of the files, and the consumer's pass         |
| cold, gather            | the same of reads of one record each; from 64 KiB on of blocks if those are faster   |
| pipeline, train         | the same as for read, or the compute alone, whichever is slower                      |
| write                   | O_DIRECT writes with fsync, the best of a sweep (ceilings_write.py)                  |
| transfer                | see ceilings_transfer.py                                                            |
| epoch, mlperf           | as for gather below 1 MiB a record, cold without blocks; for read above; and as      |
|                         | pipeline with compute                                                               |

The CPU ceilings end with the consumer's pass since every sample does (loaders/base.py). They need no allocation and
fault no pages in, which a loader that returns new memory has to: what is missing to 100 % is mostly that. A loader
that maps the page cache instead of copying it can pass 100 %. A cold ceiling is what was found on this disk, with the
best of a few arrangements by all rounds (ceilings_best.py), not what its data sheet says; where the file system refuses
O_DIRECT it goes through the emptied page cache, and its detail says so.
"""

from __future__ import annotations

import itertools
import mmap
import operator
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import stats
from bench.ceilings_best import Best
from bench.loaders.base import GatherRequest, Job
from bench.scenarios.base import Workload, consume

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
_SAMPLE_BYTES = 1 << 30
_COPIES = 3
_GATHER_S = 0.05


class Ceiling(ABC):
    """A physical limit, sampled once in every round."""

    kind: str

    @abstractmethod
    def sample(self) -> float:
        """One measurement in GB/s."""

    def in_hindsight(self, samples: Sequence[float]) -> list[float]:
        """What the rounds' limits were, now that there are no more: `samples`, unless it had to be found out which of
        several ways is the limit."""
        return list(samples)

    @abstractmethod
    def describe(self) -> str:
        """The settings that were used, for the record."""

    def close(self) -> None:
        """Give the memory back."""
        return None


class PinnedCopy(Ceiling):
    """Pinned memory to the GPU in one large copy; a sample is the median of three."""

    kind = "h2d_pinned"

    def __init__(self, device: str, nbytes: int) -> None:
        import torch

        # Page-locked memory comes in powers of two from torch's allocator.
        size = 1 << min(nbytes, _SAMPLE_BYTES).bit_length() - 1
        self._device, self._size = device, size
        self._source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self._target = torch.empty(size, dtype=torch.uint8, device=device)
        self._copy()  # the first copy pays for more than the link

    def sample(self) -> float:
        return stats.median([self._copy() for _ in range(_COPIES)])

    def describe(self) -> str:
        return f"{self._size / _MIB:.0f} MiB, median of {_COPIES} copies"

    def close(self) -> None:
        import torch

        self._source = self._target = torch.empty(0)
        torch.cuda.empty_cache()

    def _copy(self) -> float:
        import torch

        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        torch.cuda.synchronize(self._device)
        return self._size / (time.perf_counter() - start) / 1e9


class ParallelRead(Ceiling):
    """Threads that preadv whole blocks of the page cache into existing memory; the best number of threads and size of
    blocks (ceilings_best.py)."""

    kind = "preadv_warm"

    def __init__(self, paths: Sequence[str], *, consumer: bool, nbytes: int = _SAMPLE_BYTES) -> None:
        self._paths, self._consumer = list(paths), consumer
        self._nbytes = min(nbytes, sum(os.path.getsize(path) for path in paths))
        self._memory = mmap.mmap(-1, -(-self._nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        np.frombuffer(self._memory, dtype=np.uint8).fill(0)
        cores = len(os.sched_getaffinity(0))
        choices = list(itertools.product(sorted({1, 2, cores, 2 * cores}), (1 * _MIB, 8 * _MIB)))
        self._best = Best(self._rate, choices, self._nbytes)

    def sample(self) -> float:
        return self._best.sample()

    def in_hindsight(self, samples: Sequence[float]) -> list[float]:
        return self._best.in_hindsight(len(samples))

    def describe(self) -> str:
        said = self._best.describe(lambda choice: f"{choice[0]} threads x {choice[1] // _MIB} MiB")
        return f"{said}; {self._nbytes / _MIB:.0f} MiB{', consumed' if self._consumer else ''}"

    def close(self) -> None:
        self._memory.close()

    def _rate(self, choice: tuple[int, int], nbytes: int) -> float:
        threads, block = choice
        descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._paths]
        sizes = [os.path.getsize(path) for path in self._paths]
        memory = memoryview(self._memory)
        try:
            tasks, used = [], 0
            for descriptor, size in zip(descriptors, sizes, strict=True):
                for offset in range(0, size, block):
                    count = min(block, size - offset, nbytes - used)
                    if not count:
                        break
                    tasks.append((descriptor, memory[used : used + count], offset))
                    used += count
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(time.sleep, [0.001] * threads))  # start the threads
                start = time.perf_counter()
                done = sum(pool.map(lambda task: os.preadv(task[0], [task[1]], task[2]), tasks))
                if self._consumer:
                    self._consume(done)
                seconds = time.perf_counter() - start
        finally:
            tasks.clear()
            memory.release()
            for descriptor in descriptors:
                os.close(descriptor)
        return done / seconds / 1e9

    def _consume(self, nbytes: int) -> None:
        import torch

        consume([torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes)])


class MappedGather(Ceiling):
    """torch's own gather out of the mapped page cache into existing memory, then the consumer's pass; a sample is the
    best pass of some time with all of torch's threads and with one, since where others use the cores, threads can take
    longer to wake up and to wait for each other than a few records take to be copied."""

    kind = "index_select_mapped"

    def __init__(self, paths: Sequence[str], request: GatherRequest, *, consumer: bool = True) -> None:
        import torch

        self._request, self._consumer = request, consumer
        self._tables: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        for index, path in enumerate(paths):
            data = np.memmap(path, dtype=np.uint8, mode="c")
            table = data[: len(data) // request.length * request.length].reshape(-1, request.length)
            rows = torch.from_numpy(request.offsets[request.file_index == index] // request.length)
            self._tables.append(torch.from_numpy(table))
            self._rows.append(rows)
            self._targets.append(torch.zeros((len(rows), request.length), dtype=torch.uint8))

    def sample(self) -> float:
        import torch

        every, best = torch.get_num_threads(), 0.0
        try:
            for threads in {every, 1}:
                torch.set_num_threads(threads)
                self._pass()  # wakes them
                until = time.perf_counter() + _GATHER_S
                while time.perf_counter() < until:
                    best = max(best, self._pass())
        finally:
            torch.set_num_threads(every)
        return best

    def _pass(self) -> float:
        import torch

        start = time.perf_counter()
        for table, rows, target in zip(self._tables, self._rows, self._targets, strict=True):
            torch.index_select(table, 0, rows, out=target)
        if self._consumer:
            consume(self._targets)
        return self._request.total_bytes / (time.perf_counter() - start) / 1e9

    def describe(self) -> str:
        return (
            f"{len(self._request.offsets)} records of {self._request.length} B"
            f"{', consumed' if self._consumer else ''}, best pass in {2 * _GATHER_S:g} s"
        )

    def close(self) -> None:
        self._tables, self._rows, self._targets = [], [], []


class Overlap(Ceiling):
    """Compute that hides what arrives meanwhile, or is hidden by it: the slower of the two, each alone."""

    def __init__(self, link: Ceiling, workload: Workload) -> None:
        self.kind = f"max(compute, {link.kind})"
        self._link, self._workload = link, workload
        self._links: list[float] = []
        self._computes: list[float] = []

    def sample(self) -> float:
        self._links.append(self._link.sample())
        alone = self._workload.alone()
        self._computes.append(alone.nbytes / alone.seconds / 1e9)
        return min(self._links[-1], self._computes[-1])

    def in_hindsight(self, samples: Sequence[float]) -> list[float]:
        assert len(samples) == len(self._links), "every sample is one of a round"
        return list(map(min, self._link.in_hindsight(self._links), self._computes))

    def describe(self) -> str:
        slower = sum(map(operator.lt, self._computes, self._link.in_hindsight(self._links)))
        return f"{self._link.describe()}; compute was the slower one in {slower} rounds"

    def close(self) -> None:
        self._link.close()


def choose(workload: Workload, *, cold: bool) -> Ceiling:
    """The ceiling that the table above names for this run."""
    link = _choose(workload, cold=cold)
    return Overlap(link, workload) if workload.computes else link


def _choose(workload: Workload, *, cold: bool) -> Ceiling:
    job: Job = workload.job
    request: Any = job.request
    if job.saves_to is not None:
        from bench.ceilings_write import DirectWrite

        return DirectWrite(job.saves_to, workload.sample_bytes)
    if job.transfer is not None:
        from bench import ceilings_transfer

        return ceilings_transfer.choose(workload, cold=cold)
    if cold:
        from bench.ceilings_disk import Disk

        nbytes = request.total_bytes if request else _SAMPLE_BYTES
        return Disk(job.paths, nbytes, request=request, shuffled=job.epoch is not None)
    if job.cuda:
        return PinnedCopy(job.device, workload.sample_bytes)
    return MappedGather(job.paths, request) if request else ParallelRead(job.paths, consumer=True)
