"""What the storage takes: the ceiling of scenarios that write.

O_DIRECT writes of bytes that are in memory already, then fsync of every file and of the directory, in the timed region
as in every sample. The files are new each time and removed after the clock has stopped. Where the file system has no
O_DIRECT the writes go through the page cache, still with fsync, and `kind` and `describe` say so.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import fsyncs
from bench.ceilings import Ceiling
from bench.ceilings_best import Best
from bench.config import BenchError
from bench.io_memory import used_memory

_MIB = 1 << 20
_SWEEP_BYTES = 128 << 20
_SOURCE_BYTES = 64 << 20
_ALIGNMENT = 4096
_THREADS = (1, 4, 16)
_BLOCKS = (1 * _MIB, 4 * _MIB, 16 * _MIB)


class DirectWrite(Ceiling):
    """Threads that write a file each; the best number of threads and size of a block (ceilings_best.py).

    `nbytes` are written by a sample, rounded down to whole pages, into a directory of its own inside `directory`, which
    has to have room for them. Raises BenchError where nothing can be written there.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._parent = directory
        self._nbytes = max(nbytes // _ALIGNMENT, 1) * _ALIGNMENT
        self._memory = used_memory(min(self._nbytes, _SOURCE_BYTES))
        try:
            self._no_direct = self._why_not_direct()
            self.kind = "write_fsync" if self._no_direct else "write_o_direct_fsync"
            trial = min(_SWEEP_BYTES, self._nbytes)
            choices = [
                (threads, block)
                for threads, block in itertools.product(_THREADS, _BLOCKS)
                if (threads, block) == (1, _MIB) or threads * block <= trial
            ]
            # As much as a sample writes, since what fsync costs is not in proportion to it.
            self._best = Best(self._rate, choices, self._nbytes, kept=2, sample_s=math.inf)
        except OSError as error:
            self.close()
            raise self._error(error) from error
        except BaseException:
            self.close()
            raise

    def sample(self) -> float:
        try:
            return self._best.sample()
        except OSError as error:
            raise self._error(error) from error

    def in_hindsight(self, samples: Sequence[float]) -> list[float]:
        return self._best.in_hindsight(len(samples))

    def describe(self) -> str:
        said = self._best.describe(lambda choice: f"{choice[0]} threads x {choice[1] // _MIB} MiB")
        why = f"; through the page cache: {self._no_direct}" if self._no_direct else ""
        return f"{said}; {self._nbytes / _MIB:.0f} MiB, fsync{why}"

    def close(self) -> None:
        self._memory.close()

    def _error(self, error: OSError) -> BenchError:
        return BenchError(
            f"no ceiling of writes of {self._nbytes / 1e9:.3f} GB into {self._parent}: {error.strerror or error}; "
            "choose another directory with storage.dir="
        )

    def _why_not_direct(self) -> str | None:
        """What says that O_DIRECT cannot be used here, found by one write; None where it can."""
        folder = Path(tempfile.mkdtemp(prefix="ceiling-", dir=self._parent))
        path = folder / "direct"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
                try:
                    with memoryview(self._memory)[:_ALIGNMENT] as page:
                        os.pwrite(descriptor, page, 0)
                finally:
                    os.close(descriptor)
            except OSError as error:
                path.unlink(missing_ok=True)
                os.close(os.open(path, flags, 0o644))  # raises where it is not O_DIRECT that is refused
                return f"O_DIRECT is refused here ({error.strerror})"
            return None
        finally:
            shutil.rmtree(folder)

    def _rate(self, choice: tuple[int, int], nbytes: int) -> float:
        """GB/s of `nbytes` in as many new files as there are threads."""
        threads, block = choice
        folder = Path(tempfile.mkdtemp(prefix="ceiling-", dir=self._parent))
        pages = nbytes // _ALIGNMENT
        sizes = [(pages * (i + 1) // threads - pages * i // threads) * _ALIGNMENT for i in range(threads)]
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(time.sleep, [0.001] * threads))  # start the threads
                start = time.perf_counter()
                list(pool.map(lambda i: self._write(folder / f"{i}", sizes[i], block), range(threads)))
                fsyncs.directory(folder)
                seconds = time.perf_counter() - start
        finally:
            shutil.rmtree(folder)
            fsyncs.directory(self._parent)  # what removing them costs is not the next sample's
        return sum(sizes) / seconds / 1e9

    def _write(self, path: Path, nbytes: int, block: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags | (0 if self._no_direct else os.O_DIRECT), 0o644)
        try:
            _write_blocks(descriptor, self._memory, nbytes, block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_blocks(descriptor: int, memory: mmap.mmap, nbytes: int, block: int) -> None:
    """`nbytes` from the memory, which is used again and again."""
    with memoryview(memory) as source:
        place = offset = 0
        while offset < nbytes:
            count = min(block, nbytes - offset, len(source) - place)
            with source[place : place + count] as piece:
                written = os.pwrite(descriptor, piece, offset)
            if not written:
                raise OSError(f"nothing was written at byte {offset}")
            offset += written
            place = (place + written) % len(source)
