"""Read-ahead for block shuffling: the next window's blocks are brought into the page cache while this one is used.

A block is a long run of bytes in one shard, read best in one piece; the records inside a window are then gathered from
the page cache, in random order, at no cost to the disk. The kernel is asked (posix_fadvise), and reads by itself:
nothing here waits for bytes or holds any. Blocks are asked for bit by bit, as the loader moves through the window
before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from gdsstream.engine.budget import free_bytes
from gdsstream.records import Located, RecordTable
from gdsstream.sampling import EpochOrder

log = logging.getLogger(__name__)

# The kernel cuts every request to what its own read-ahead takes at once, 128 KiB by default.
_STEP_BYTES = 128 << 10
# Of the memory that is free: pages that were asked for too early go before they are used.
_SHARE = 4

Locate = Callable[[np.ndarray[tuple[int], np.dtype[np.int64]]], tuple[Located, ...]]


@dataclass(slots=True)
class _Window:
    """A window that is being asked for."""

    blocks: list[tuple[int, int]]  # (first record, how many)
    asked: int = 0  # of the blocks
    nbytes: int = 0


class ReadAhead:
    """Asks for the blocks of windows ahead of their use. `budget_bytes` bounds what one window may ask for."""

    def __init__(self, table: RecordTable, locate: Locate, budget_bytes: int | None = None) -> None:
        self._table = table
        self._locate = locate
        self._budget = free_bytes() // _SHARE if budget_bytes is None else budget_bytes
        self._windows: dict[tuple[int, int], _Window] = {}  # by epoch and window
        self._warned = False
        self.asked_bytes = 0

    def reach(self, order: EpochOrder, following: EpochOrder | None, position: int) -> None:
        """The loader is at `position` of `order`; `following` is the next epoch's order, where there is one."""
        window = order.window_of(position)
        here = (order.epoch, window)
        self._ask(order, window, 1.0)
        for key in [key for key in self._windows if key < here]:
            del self._windows[key]
        begin, end = order.window_range(window)
        done = (position - begin + 1) / (end - begin)
        if window + 1 < order.num_windows:
            self._ask(order, window + 1, done)
        elif following is not None:
            self._ask(following, 0, done)

    def _ask(self, order: EpochOrder, window: int, share: float) -> None:
        """Ask for the blocks of a window up to a share of them."""
        key = (order.epoch, window)
        state = self._windows.get(key)
        if state is None:
            state = self._windows[key] = _Window(order.blocks_of_window(window))
        while state.asked < min(ceil(share * len(state.blocks)), len(state.blocks)):
            first, count = state.blocks[state.asked]
            state.asked += 1
            if state.nbytes < self._budget:
                state.nbytes += self._ask_block(first, count)
            elif not self._warned:
                self._warned = True
                log.warning(
                    "block shuffling reads ahead %d MB of a window at most, a quarter of the free memory, and a window "
                    "is more; make window_blocks or block_records smaller",
                    self._budget // 10**6,
                )

    def _ask_block(self, first: int, count: int) -> int:
        """Ask for the bytes of consecutive records, and say how many that is."""
        # The ends are enough where a block lies in one shard; its parts are looked at shard by shard.
        starts = self._table.starts
        cuts = starts[(starts > first) & (starts < first + count)]
        begins = np.concatenate(([first], cuts))
        ends = np.concatenate((cuts, [first + count])) - 1
        total = 0
        for head, tail in zip(self._locate(begins), self._locate(ends), strict=True):
            for file, offset, stop in zip(head.file, head.offset, tail.offset + tail.nbytes, strict=True):
                if stop > offset:
                    self._advise(self._table.paths[file], int(offset), int(stop))
                    total += int(stop - offset)
        self.asked_bytes += total
        return total

    def _advise(self, path: str, begin: int, end: int) -> None:
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            # The read itself will say what is wrong, if the file is still needed by then.
            log.debug("no read-ahead for %s: %s", path, error)
            return
        with file:
            for at in range(begin, end, _STEP_BYTES):
                os.posix_fadvise(file.fileno(), at, min(_STEP_BYTES, end - at), os.POSIX_FADV_WILLNEED)


__all__ = ["ReadAhead"]
