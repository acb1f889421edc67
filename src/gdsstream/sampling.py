"""Which record comes when, and which rank sees it: closed forms, whatever the number of records. Pure numpy.

An epoch has one *order*, a permutation of all records that every rank agrees on without talking; a *position* counts
along it. Ranks take positions in turn: from position p, with W of them, rank r's samples are p + r, p + r + W, p + r +
2W and so on, which is DistributedSampler's order. So all ranks together have seen exactly the range [0, p + k * B * W)
after k batches of B, and its end is all there is to save: any other number of ranks, with any other batch size, goes on
from there.

Three orders. *Full* is one keyed permutation of all records. *Block* permutes blocks of consecutive records, takes as a
window so many of them in their new order, and permutes the records of each window by a permutation of its own: a reader
needs the blocks of a window, which are large, and no others. Only the stored order's last block may be short; wherever
it is moved to, it counts last inside its window, so that a record's block is one division away. *None* is the stored
order, in windows of consecutive blocks.

Orders are part of what a saved position means: see `permutation` about what must never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdsstream.errors import ConfigError
from gdsstream.permutation import MAX_SIZE, Permutation, checked_integer, checked_positions, mix_key

Shuffle: TypeAlias = Literal["full", "block", "none"]
Partition: TypeAlias = Literal["pad", "drop", "uneven"]

BLOCK_RECORDS = 1024
WINDOW_BLOCKS = 64

# So many blocks are looked up in a table that outlives the call, which saves most batches a permutation.
_KNOWN_BLOCKS = 4096

# What a key is for, so that equal seeds and epochs give unrelated permutations. Part of the order: never renumber.
_FULL, _BLOCKS, _WITHIN = range(3)


class EpochOrder:
    """The order of one epoch, the same for all ranks: a bijection of positions and records, both [0, num_records).

    Args:
        num_records: how many records the dataset has, 0 to 2**62.
        shuffle: "full" (or True), "block", "none" (or False).
        seed: -2**63 to 2**64 - 1, as torch takes them: a negative one counts as itself plus 2**64.
        epoch: 0 or more. Each seed and epoch has an order of its own.
        block_records, window_blocks: records in a block, and blocks in a window; "block" shuffles inside
            window_blocks * block_records records. "full" ignores them.

    The arguments are kept as attributes, `shuffle` as a name. Raises ConfigError. An object holds a few kilobytes
    and the block numbers of the windows that it was asked for last; any number of threads may use it.
    """

    def __init__(
        self,
        num_records: int,
        *,
        shuffle: bool | Shuffle,
        seed: int,
        epoch: int,
        block_records: int = BLOCK_RECORDS,
        window_blocks: int = WINDOW_BLOCKS,
    ) -> None:
        self.num_records = checked_integer("num_records", num_records, 0, MAX_SIZE)
        self.shuffle = checked_shuffle(shuffle)
        self.seed = checked_integer("seed", seed, -(2**63), 2**64 - 1)
        self.epoch = checked_integer("epoch", epoch, 0, 2**63 - 1)
        self.block_records = checked_integer("block_records", block_records, 1, MAX_SIZE)
        self.window_blocks = checked_integer("window_blocks", window_blocks, 1, MAX_SIZE)
        if self.shuffle == "full":
            self._order = Permutation(self.num_records, mix_key(self.seed, self.epoch, _FULL))
            return
        # Larger than the dataset is as good as its size, and products of them stay below 2**63.
        self._block = min(self.block_records, max(self.num_records, 1))
        self._num_blocks = -(-self.num_records // self._block)
        self._per_window = min(self.window_blocks, max(self._num_blocks, 1))
        self._window = self._per_window * self._block
        self._order = Permutation(self._num_blocks, mix_key(self.seed, self.epoch, _BLOCKS))
        self._within_key = mix_key(self.seed, self.epoch, _WITHIN)
        self._within: dict[int, Permutation] = {}  # by a window's size, of which there are three at most
        # The slot, in the order of blocks, of the stored order's last block, and how many records that is short of.
        self._missing = self._num_blocks * self._block - self.num_records
        self._short = self._num_blocks - 1
        if self.shuffle == "block" and self._num_blocks:
            self._short = int(self._order.inverse(self._short))
        self._short_window = self._short // self._per_window
        self._known: tuple[int, int, NDArray[np.int64]] | None = None

    def records(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The records at positions of the order.

        Args:
            positions: integers in [0, num_records), of any shape.

        Returns an int64 array of the same shape, a new one. Raises IndexError for positions outside, ConfigError for
        what are no integers.
        """
        if self.shuffle == "full":
            return self._order(positions)
        given = checked_positions(positions, self.num_records)
        if self.shuffle == "none" or not given.size:
            return given.copy()
        first, last = self.window_of(int(given.min())), self.window_of(int(given.max()))
        cells: NDArray[np.int64]
        blocks: NDArray[np.int64]
        if first == last:  # most batches
            windows: int | NDArray[np.int64] = first
            cells = self._within_window(self._size_of(first))(given - self._start_of(first), first)
        else:
            full = given + np.where(given >= self._start_of(self._short_window + 1), self._missing, 0)  # see window_of
            windows = full // self._window
            cells = self._cells(full - windows * self._window, windows, first, last)
        slots, within = np.divmod(cells, self._block)
        slots += windows * self._per_window
        if (last - first + 1) * self._per_window <= max(given.size, _KNOWN_BLOCKS):
            blocks = self._blocks_at(first, last)[slots - first * self._per_window]
        else:
            blocks = self._blocks_of(slots)
        return blocks * self._block + within

    @property
    def num_windows(self) -> int:
        """How many windows the order has. Raises ConfigError for "full", which has none."""
        self._require_windows()
        return -(-self._num_blocks // self._per_window)

    def window_of(self, position: int) -> int:
        """The window that a position lies in. Raises IndexError, and ConfigError for "full"."""
        self._require_windows()
        if not 0 <= position < self.num_records:
            raise IndexError(f"position {position} is outside [0, {self.num_records})")
        # Every window is as long as the others once what the short block lacks is added to what comes after its window.
        after = position >= self._start_of(self._short_window + 1)
        return (position + (self._missing if after else 0)) // self._window

    def window_range(self, window: int) -> tuple[int, int]:
        """The positions of a window: the first, and the one after the last. Raises IndexError, ConfigError as above."""
        if not 0 <= window < self.num_windows:
            raise IndexError(f"window {window} is outside [0, {self.num_windows})")
        return self._start_of(window), self._start_of(window + 1)

    def blocks_of_window(self, window: int) -> list[tuple[int, int]]:
        """The blocks of a window, by ascending record: (first record, how many records) of each. Errors as above."""
        self.window_range(window)
        first = np.sort(self._blocks_at(window, window)) * self._block
        count = np.minimum(self._block, self.num_records - first)
        return list(zip(first.tolist(), count.tolist(), strict=True))

    def _require_windows(self) -> None:
        if self.shuffle == "full":
            raise ConfigError('shuffle="full" has no windows; "block" and "none" have')

    def _start_of(self, window: int) -> int:
        start = window * self._window - (self._missing if window > self._short_window else 0)
        return min(start, self.num_records)

    def _size_of(self, window: int) -> int:
        return self._start_of(window + 1) - self._start_of(window)

    def _within_window(self, size: int) -> Permutation:
        if size not in self._within:
            self._within[size] = Permutation(size, self._within_key)
        return self._within[size]

    def _cells(
        self, offsets: NDArray[np.int64], windows: NDArray[np.int64], first: int, last: int
    ) -> NDArray[np.int64]:
        """Where the permutations of their windows lead offsets; the windows are all from `first` to `last`."""
        unlike = {
            window: self._size_of(window)
            for window in (self._short_window, self.num_windows - 1)
            if first <= window <= last and self._size_of(window) != self._window
        }
        if not unlike:
            return self._within_window(self._window)(offsets, windows)
        cells = np.empty_like(offsets)
        rest = np.ones(offsets.shape, dtype=bool)
        for window, size in unlike.items():
            here = windows == window
            cells[here] = self._within_window(size)(offsets[here], window)
            rest &= ~here
        cells[rest] = self._within_window(self._window)(offsets[rest], windows[rest])
        return cells

    def _blocks_at(self, first: int, last: int) -> NDArray[np.int64]:
        """The blocks in all slots of windows `first` to `last`; the latest answer is kept."""
        known = self._known
        if known is None or known[:2] != (first, last):
            end = min((last + 1) * self._per_window, self._num_blocks)
            known = self._known = (first, last, self._blocks_of(np.arange(first * self._per_window, end)))
        return known[2]

    def _blocks_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks in slots of the order of blocks, after the short one has changed places with its window's last."""
        if self.shuffle == "none":
            return slots
        end = min((self._short_window + 1) * self._per_window, self._num_blocks) - 1
        return self._order(np.where(slots == self._short, end, np.where(slots == end, self._short, slots)))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one rank reads of an epoch, from position `start` on.

    Args:
        num_records: the dataset's, 0 to 2**62.
        start: the position that the epoch goes on from, 0 to num_records; 0 at its beginning.
        batch_size: samples in a batch of one rank.
        rank, world_size: whose samples, of how many ranks; rank is below world_size.
        drop_last: leave a rank's last batch out where it is not full.
        partition: what becomes of the last num_records - start modulo world_size positions, of which there are not
            enough for all ranks. "pad" repeats the epoch's first positions until there are, and "drop" leaves them
            out: as DistributedSampler does with drop_last=False and True. "uneven" does neither: each position comes
            exactly once, and the last ranks get one sample fewer.

    Raises ConfigError. Constant size; every answer is computed.
    """

    num_records: int
    start: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    partition: Partition = "pad"

    def __post_init__(self) -> None:
        num_records = checked_integer("num_records", self.num_records, 0, MAX_SIZE)
        checked = {
            "num_records": num_records,
            "start": checked_integer("start", self.start, 0, num_records),
            "batch_size": checked_integer("batch_size", self.batch_size, 1, MAX_SIZE),
            "world_size": checked_integer("world_size", self.world_size, 1, 2**31),
        }
        checked["rank"] = checked_integer("rank", self.rank, 0, checked["world_size"] - 1)
        if self.partition not in get_args(Partition):
            raise ConfigError(f"partition is {self.partition!r}; it has to be one of {', '.join(get_args(Partition))}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def num_samples(self) -> int:
        """How many samples this rank has, padding included, whole batches or not."""
        return self._samples_of(self.rank)

    @property
    def num_batches(self) -> int:
        """How many batches this rank has."""
        return self._batches_of(self.rank)

    @property
    def num_steps(self) -> int:
        """The most batches that any rank has: `num_batches`, but for "uneven" ranks."""
        return self._batches_of(0)

    def batch(self, index: int) -> NDArray[np.int64]:
        """The positions of this rank's batch, int64, in their order; fewer than `batch_size` in the last one only.

        Positions that repeat (see "pad") are the epoch's first ones, 0, 1, 2 and so on. Raises IndexError outside
        [0, num_batches).
        """
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} is outside [0, {self.num_batches}) of rank {self.rank}")
        begin = index * self.batch_size
        end = min(begin + self.batch_size, self.num_samples)
        first = self.start + begin * self.world_size + self.rank
        positions = first + np.arange(end - begin, dtype=np.int64) * self.world_size
        if self.partition == "pad":
            positions %= self.num_records
        return positions

    def position_after(self, batches: int) -> int:
        """Where the epoch goes on after so many batches of all ranks: the next plan's `start`. The same on every rank.

        After `num_steps` batches that is `num_records`: the epoch is over, whatever was dropped. Raises IndexError
        outside [0, num_steps].
        """
        if not 0 <= batches <= self.num_steps:
            raise IndexError(f"{batches} batches are outside [0, {self.num_steps}]")
        if batches == self.num_steps:
            return self.num_records
        return self.start + batches * self.batch_size * self.world_size

    def _samples_of(self, rank: int) -> int:
        left = self.num_records - self.start
        if self.partition == "drop":
            return left // self.world_size
        return -(-(left if self.partition == "pad" else left - rank) // self.world_size)

    def _batches_of(self, rank: int) -> int:
        samples = self._samples_of(rank)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


def checked_shuffle(shuffle: bool | Shuffle) -> Shuffle:
    """The name of a shuffle: True is "full", False "none". Raises ConfigError for what is no shuffle."""
    named: Shuffle = ("full" if shuffle else "none") if isinstance(shuffle, bool) else shuffle
    if named not in get_args(Shuffle):
        raise ConfigError(f"shuffle is {shuffle!r}; it has to be True, False or one of {', '.join(get_args(Shuffle))}")
    return named


__all__ = [
    "BLOCK_RECORDS",
    "WINDOW_BLOCKS",
    "BatchPlan",
    "EpochOrder",
    "Partition",
    "Shuffle",
    "checked_shuffle",
]
