"""Which blocks a sample moves: files, offsets and sizes of ios, and where each has its place in memory. Pure numpy.

Every io has a place of its own in memory, aligned to 4 KiB, so that all bytes of a sample can be compared afterwards;
gdsio reuses one buffer a thread. Sequential ios follow each other through the files, and threads take the next one as
they get free. Random ones are a permutation of all blocks, drawn from the seed: none comes twice before all have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bench.config_base import BenchConfigError

#: Of memory, so that O_DIRECT can use every place.
PAGE = 4096


class Ops:
    """Ios in their order: `file` (index), `offset`, `nbytes` and `place` in memory, in bytes."""

    def __init__(
        self,
        file: npt.NDArray[np.int32],
        offset: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
        *,
        write: bool,
    ) -> None:
        self.file, self.offset, self.nbytes, self.write = file, offset, nbytes, write
        pages = -(-nbytes // PAGE) * PAGE
        self.place = np.cumsum(pages) - pages
        self.memory_bytes = int(pages.sum())

    def __len__(self) -> int:
        return len(self.file)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    @cached_property
    def uniform(self) -> int | None:
        """The size that all ios have, or None."""
        return int(self.nbytes[0]) if len(self) and bool((self.nbytes == self.nbytes[0]).all()) else None

    @cached_property
    def rows(self) -> list[tuple[int, int, int, int]]:
        """(file, offset, nbytes, place) of each, as plain numbers: what threads go through."""
        columns = (self.file, self.offset, self.nbytes, self.place)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def stretches(self) -> Iterator[tuple[int, int, int, int]]:
        """(file, offset, nbytes, place) of ios that follow each other both in a file and in memory, as one."""
        joined = (
            (self.file[1:] == self.file[:-1])
            & (self.offset[1:] == self.offset[:-1] + self.nbytes[:-1])
            & (self.place[1:] == self.place[:-1] + self.nbytes[:-1])
        )
        bounds = np.concatenate(([0], np.flatnonzero(~joined) + 1, [len(self)]))
        for begin, end in pairwise(bounds.tolist()):
            nbytes = int(self.nbytes[begin:end].sum())
            yield int(self.file[begin]), int(self.offset[begin]), nbytes, int(self.place[begin])

    def first(self, count: int) -> Ops:
        """The first `count` ios."""
        if count >= len(self):
            return self
        return Ops(self.file[:count], self.offset[:count], self.nbytes[:count], write=self.write)

    def within(self, memory_bytes: int) -> Ops:
        """The first ios that have room in so much memory, at least one. Raises BenchConfigError."""
        count = int(np.searchsorted(self.place + self.nbytes, memory_bytes, side="right"))
        if not count:
            raise BenchConfigError(
                f"an io of {self.nbytes[0]} bytes is more than the {memory_bytes} bytes that a sample moves; raise "
                "scenario.total_bytes or lower the row's io_bytes"
            )
        return self.first(count)


def make(
    op: str,
    sizes: Sequence[int],
    total_bytes: int,
    file_bytes: Sequence[int],
    *,
    offset_bytes: int = 0,
    shift_bytes: int = 0,
    seed: int = 0,
) -> Ops:
    """The ios of `total_bytes` bytes, at least one. `sizes` are used in turn; `file_bytes` is the size of each file.

    Raises BenchConfigError where no file has room for an io.
    """
    random = op.startswith("rand")
    # Sequential ios of several sizes lie end to end; random ones on a grid of the largest.
    inner = np.concatenate(([0], np.cumsum(sizes)[:-1])) if not random else np.zeros(len(sizes), dtype=np.int64)
    slot = max(sizes) if random else sum(sizes)
    each = 1 if random else len(sizes)
    slots = np.array([max(0, size - offset_bytes - shift_bytes) // slot for size in file_bytes], dtype=np.int64)
    if not slots.sum():
        raise BenchConfigError(
            f"ios of {slot} bytes from offset {offset_bytes + shift_bytes} on do not fit into files of "
            f"{max(file_bytes, default=0)} bytes; raise storage.file_bytes or lower scenario.io_bytes"
        )
    turn = np.cumsum(sizes)
    rounds, left = divmod(total_bytes, int(turn[-1]))
    count = max(1, rounds * len(sizes) + int(np.searchsorted(turn, left, side="right")))
    number = np.arange(count, dtype=np.int64)
    nbytes = np.asarray(sizes, dtype=np.int64)[number % len(sizes)]
    block = number // each
    every = int(slots.sum())
    if random:
        draw = np.random.default_rng(seed)
        orders = [draw.permutation(every) for _ in range(-(-count // every))]
        block = np.concatenate(orders)[:count]
    block = block % every
    first = np.concatenate(([0], np.cumsum(slots)))
    file = (np.searchsorted(first, block, side="right") - 1).astype(np.int32)
    offset = offset_bytes + shift_bytes + (block - first[file]) * slot + inner[number % len(sizes)]
    return Ops(file, offset.astype(np.int64), nbytes, write=op.endswith("write"))


def range_sizes(least: int, most: int, step: int) -> list[int]:
    """The sizes of `gdsio -i least:most:step`, in turn."""
    return list(range(least, most + 1, step))
