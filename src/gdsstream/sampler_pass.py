"""One pass over a sampler of the caller's, from which nothing gets lost when it is interrupted.

What the sampler gave stays here until somebody asks for what is behind it. An interrupt inside a sampler that is a
generator finishes that generator: it is asked anew then, and what it gave before is skipped, once it is seen to be the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from gdsstream.errors import ConfigError

# Items that are skipped together.
_TOGETHER = 8192


class SamplerPass:
    """What `sampler` gives in `epoch`, from item `first` on: record numbers, or lists of them.

    `set_epoch` is called before the sampler is iterated. `error` is what the sampler failed with, behind what it gave.
    """

    def __init__(self, epoch: int, sampler: Iterable[Any], first: int, set_epoch: Callable[[int], None]) -> None:
        self.epoch = epoch
        self.error: Exception | None = None
        self._sampler = sampler
        self._set_epoch = set_epoch
        self._origin = first
        self._iterator: Iterator[Any] | None = None
        self._asking = False
        # Replaced in one piece: the first item that is held, what is held, and a checksum of what came before.
        self._held: tuple[int, list[Any], int] = (first, [], 0)

    def items(self, begin: int, count: int, beyond: int) -> Sequence[Any]:
        """Items from `begin` on, `count` and as many `beyond`; fewer at the end. What is in front of `begin` is
        forgotten. Raises what the sampler raised where it gave some, but fewer than `count`, or none."""
        first, items, before = self._held
        if begin > first:
            taken = begin - first
            if hasattr(self._iterator, "gi_frame"):
                before = _checksum(items[:taken], before)
            self._held = first, items, before = begin, items[taken:], before
        if len(items) < count + beyond and self.error is None:
            if self._iterator is None or (self._asking and getattr(self._iterator, "gi_frame", self) is None):
                self._iterator = self._begin(first + len(items), _checksum(items, before))
            self._asking = True
            try:
                items.extend(islice(self._iterator, count + beyond - len(items)))
            except Exception as error:
                self.error = error
            self._asking = False
        if self.error is not None and len(items) < count:
            raise self.error
        return items[: count + beyond]

    def _begin(self, place: int, known: int) -> Iterator[Any]:
        """The sampler at item `place`; from the origin up to there it has to give what has the checksum `known`."""
        self._set_epoch(self.epoch)
        iterator = iter(self._sampler)
        for _ in islice(iterator, self._origin):
            pass
        seen, left = 0, place - self._origin
        while left and (part := list(islice(iterator, min(left, _TOGETHER)))):
            seen, left = _checksum(part, seen), left - len(part)
        if left or seen != known:
            raise ConfigError(
                f"the sampler was interrupted, and gives other records for epoch {self.epoch} when it is asked again; "
                "iterate the loader anew, or give the sampler a seed of its own for each epoch"
            )
        return iterator


def _checksum(items: Sequence[Any], before: int) -> int:
    """Of record numbers, or of lists of them, end to end."""
    if items:
        for numbers in items if np.ndim(items[0]) else (items,):
            before = crc32(np.array(numbers, dtype=np.int64).data, before)
    return before


__all__ = ["SamplerPass"]
