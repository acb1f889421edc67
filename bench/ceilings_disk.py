"""What a disk gives and takes: the ceilings of cold reads, of single records, and of writes into files that exist.

Ios with O_DIRECT between the files and memory that all arrangements share, in use before, so that no page is faulted in
where it is timed, and of huge pages where the system has them: a virtual disk that takes so many segments in a request
was three times as fast into them as into small ones. Threads that wait for their ios, or kernel AIO, which keeps many
in flight from one thread; blocks in the files' order, or single records where a request names them. Which arrangement
is the ceiling, ceilings_best.py says. Where the file system refuses O_DIRECT they go through the page cache, emptied
before, and the kind and detail say so; without kernel AIO there are threads only.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench import aio, cache, table
from bench.ceilings import Ceiling
from bench.ceilings_best import Best
from bench.config import BenchError
from bench.io_memory import small_pages, used_memory
from bench.loaders.base import GatherRequest

_KIB, _MIB = 1 << 10, 1 << 20
_THREADS = (1, 4, 8, 32)
_BLOCKS = (1 * _MIB, 4 * _MIB, 16 * _MIB)
#: In flight, and in how many queues.
_AIO_BLOCKS, _AIO_DEPTHS = (512 * _KIB, 1 * _MIB, 4 * _MIB), ((8, 1), (32, 1), (128, 1), (32, 4), (128, 4))
#: Of single records.
_RECORD_THREADS = (4, 8, 16, 64)
_RECORD_DEPTHS = ((8, 1), (32, 1), (128, 1), (512, 1), (128, 4), (512, 4), (1024, 8))
#: In flight at once; more is no other arrangement to a disk.
_MOST_BYTES, _MOST_THREADS, _MOST_DEPTH = 256 * _MIB, 64, 1024
#: From here on single records may be slower than whole blocks.
_MIDDLE = 64 * _KIB
_PAGE = mmap.PAGESIZE
#: The best that a search of this process found, by device, direction, whether there are O_DIRECT and kernel AIO, the
#: length of records (None: none) and whether there are blocks: a search takes seconds, and later parts of a run ask
#: these and their own only.
_FOUND: dict[tuple[object, ...], list[Arrangement]] = {}


#: Of ios: int64 [ios, 2], file or descriptor, and offset.
Places = npt.NDArray[np.int64]


class Arrangement(NamedTuple):
    """So many ios of `length` bytes in flight, by threads or by kernel AIO; of `records`, or of blocks in order."""

    length: int
    in_flight: int
    aio: bool
    records: bool
    #: Of kernel AIO, each with its share of what is in flight and a thread: a disk may have one for each core.
    queues: int = 1

    @property
    def in_flight_bytes(self) -> int:
        return -(-self.length // _PAGE) * _PAGE * self.in_flight

    def __str__(self) -> str:
        queues = f", {self.queues} queues" if self.queues > 1 else ""
        what = f"kernel AIO, depth {self.in_flight}{queues}" if self.aio else f"{self.in_flight} threads"
        return f"{what} x {table.block(self.length)}"


class Disk(Ceiling):
    """Reads of the files, or writes over what they hold: of `request`'s records or, without one, of blocks. Reads of
    records of 64 KiB and more may be blocks, too, if that is faster: loaders that ask for all of them at once may
    join them. `shuffled`: never joined, and in another order each time, as epochs are; what is read in one order
    again and again finds nothing in a cache of the host that has no room for all of it. `own` is the size of a row's
    io and how many it has in flight, one more arrangement. A measurement moves `nbytes` at most. Raises BenchError
    where kernel AIO refuses an io, OSError where the system does.
    """

    def __init__(
        self,
        paths: Sequence[str],
        nbytes: int,
        *,
        request: GatherRequest | None = None,
        shuffled: bool = False,
        own: tuple[int, int] | None = None,
        write: bool = False,
    ) -> None:
        self._paths, self._request, self._write = list(paths), request, write
        self._sizes = [os.path.getsize(path) for path in paths]
        self._why = cache.refuses_direct(self._paths[0])
        self._no_aio = self._why or _without_aio()
        self._places: dict[int, Places] = {}
        self._order = np.random.default_rng(0) if shuffled else None
        device = os.stat(self._paths[0]).st_dev, write, self._why is None, self._no_aio is None
        blocks = request is None or (not shuffled and request.length >= _MIDDLE and not write)
        key = *device, request.length if request is not None else None, blocks
        known = self._known(key)
        choices = self._records(request, own, known) if request is not None else []
        if blocks:
            known = known or self._known((*device, None, True))
            choices += [each for each in self._blocks(own, known) if each not in choices]
        self._memory = used_memory(max(each.in_flight_bytes for each in choices))
        self._address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._small = 0
        try:
            most = min(nbytes, sum(self._sizes))
            self._best = Best(self.rate, choices, most, lambda each: 4 * each.in_flight * each.length)
            _FOUND.setdefault(key, list(self._best.rates))
        except BaseException:
            self.close()
            raise

    @property
    def kind(self) -> str:  # type: ignore[override]
        records = self._best.winner.records
        if self._why is not None:
            return "page_cache_writes" if self._write else "pread_cold_records" if records else "preadv_cold"
        if self._write:
            return "disk_o_direct_record_writes" if records else "disk_o_direct_writes"
        return "disk_o_direct_records" if records else "disk_o_direct"

    def sample(self) -> float:
        return self._best.sample()

    def in_hindsight(self, samples: Sequence[float]) -> list[float]:
        return self._best.in_hindsight(len(samples))

    def describe(self) -> str:
        fsync = "; fsync not inside" if self._write else ""
        why = f"; through the page cache: {self._why}" if self._why else f"; {self._no_aio}" if self._no_aio else ""
        pages = f"; {table.block(self._small)} of its memory are small pages" if self._small else ""
        return f"{self._best.describe(str)}{fsync}{why}{pages}"

    def close(self) -> None:
        if not self._memory.closed:
            self._small = small_pages(self._address, len(self._memory))
        self._memory.close()

    def rate(self, choice: Arrangement, nbytes: int) -> float:
        """GB/s of one arrangement over about `nbytes`, at least one io."""
        cache.evict(self._paths)  # O_DIRECT reads of cached pages may be served from memory
        ios = self._ios(choice)
        count = min(len(ios), max(1, nbytes // choice.length))
        ios = ios[self._order.permutation(len(ios))[:count]] if self._order is not None else ios[:count]
        flags = (os.O_RDWR if self._write else os.O_RDONLY) | os.O_CLOEXEC | (0 if self._why else os.O_DIRECT)
        descriptors: list[int] = []
        try:
            for path in self._paths:
                descriptors.append(os.open(path, flags))
                if choice.records and self._why:
                    # Or much more than a record would be read.
                    os.posix_fadvise(descriptors[-1], 0, 0, os.POSIX_FADV_RANDOM)
            moving = self._by_aio if choice.aio else self._by_threads
            places = np.stack((np.array(descriptors)[ios[:, 0]], ios[:, 1]), axis=1)
            return count * choice.length / moving(choice, places) / 1e9
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _by_threads(self, choice: Arrangement, ios: Places) -> float:
        """Seconds. The threads take the next io as they get free."""
        slot = choice.in_flight_bytes // choice.in_flight
        turn: Iterator[list[int]] = iter(ios.tolist())
        move = os.pwritev if self._write else os.preadv

        def work(number: int) -> None:
            with memoryview(self._memory) as memory, memory[number * slot : number * slot + choice.length] as view:
                for descriptor, offset in turn:
                    done = move(descriptor, [view], offset)
                    if done != choice.length:
                        raise BenchError(f"an io of {choice.length} bytes at byte {offset} moved {done} of them")

        with ThreadPoolExecutor(choice.in_flight) as pool:
            list(pool.map(time.sleep, [0.001] * choice.in_flight))  # start the threads
            start = time.perf_counter()
            list(pool.map(work, range(choice.in_flight)))
            return time.perf_counter() - start

    def _by_aio(self, choice: Arrangement, ios: Places) -> float:
        """Seconds. Each queue has every so manieth io."""
        slot, depth = choice.in_flight_bytes // choice.in_flight, choice.in_flight // choice.queues
        queues: list[aio.Queue] = []
        try:
            each = []
            for number in range(choice.queues):
                queues.append(aio.Queue(depth))
                mine, address = ios[number :: choice.queues], self._address + number * depth * slot
                each.append(aio.Prepared(mine, choice.length, address, depth, slot, write=self._write))
            with ThreadPoolExecutor(choice.queues) as pool:
                list(pool.map(time.sleep, [0.001] * choice.queues))  # start the threads
                start = time.perf_counter()
                list(pool.map(aio.Queue.stream, queues, each))
                return time.perf_counter() - start
        finally:
            for queue in queues:
                queue.close()

    def _ios(self, choice: Arrangement) -> Places:
        """File and offset of each, in their order."""
        key = 0 if choice.records else choice.length
        if key not in self._places:
            if choice.records:
                assert self._request is not None
                found = np.stack((self._request.file_index.astype(np.int64), self._request.offsets), axis=1)
            else:
                blocks = (
                    (number, offset)
                    for number, size in enumerate(self._sizes)
                    for offset in range(0, size - choice.length + 1, choice.length)
                )
                found = np.array(list(blocks), dtype=np.int64).reshape(-1, 2)
            self._places[key] = found
        return self._places[key]

    def _known(self, key: tuple[object, ...]) -> list[Arrangement]:
        return [each for each in _FOUND.get(key, []) if each.length <= max(self._sizes)]

    def _records(
        self, request: GatherRequest, own: tuple[int, int] | None, known: list[Arrangement]
    ) -> list[Arrangement]:
        """As _blocks, one io for each record."""
        depths = [] if known else [*_RECORD_DEPTHS]
        if own is not None and own[0] == request.length:
            depths.append((own[1], 1))
        found = [
            Arrangement(request.length, depth, True, True, queues) for depth, queues in depths if self._no_aio is None
        ]
        threads = [] if known else [*_RECORD_THREADS]
        found += [Arrangement(request.length, count, False, True) for count in threads]
        return _within([*found, *(each for each in known if each.records)])

    def _blocks(self, own: tuple[int, int] | None, known: list[Arrangement]) -> list[Arrangement]:
        """`own`, and which of what is `known` to be best are blocks or, where nothing is, what may be."""
        largest = max(self._sizes)
        deep = [] if known else [(block, *each) for block, each in itertools.product(_AIO_BLOCKS, _AIO_DEPTHS)]
        threads = [] if known else [*itertools.product(_BLOCKS, _THREADS)]
        if own is not None and own[0] % 512 == 0:
            deep, threads = [(*own, 1), *deep], [own, *threads]
        found = [
            Arrangement(length, depth, True, False, queues) for length, depth, queues in deep if self._no_aio is None
        ]
        found += [Arrangement(*pair, False, False) for pair in threads]
        found += [each for each in known if not each.records]
        found = _within([each for each in found if each.length <= largest])
        return found or ([] if known else [Arrangement(_PAGE, count, False, False) for count in _THREADS])


def _within(found: Sequence[Arrangement]) -> list[Arrangement]:
    """Once each, with no more in flight than what one measures with."""
    most = [each._replace(in_flight=min(each.in_flight, _MOST_DEPTH if each.aio else _MOST_THREADS)) for each in found]
    return list(dict.fromkeys(each for each in most if each.in_flight_bytes <= _MOST_BYTES))


def _without_aio() -> str | None:
    """Why there is no kernel AIO here; None where there is."""
    try:
        aio.Queue(1).close()
    except BenchError as error:
        return f"threads only: {error}"
    return None
