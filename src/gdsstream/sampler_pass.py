"""One pass over a sampler of the caller's, from which nothing gets lost when it is interrupted.

What the sampler gave stays here until somebody asks for what is behind it. An interrupt inside a sampler that is a
generator finishes that generator: it is asked anew then, and what it gave before is skipped, once it is seen to be the
same. So is what it gave before a state was taken, from which a pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from gdsstream.errors import ConfigError, LoaderStateError

# Items that are skipped together.
_TOGETHER = 8192


class SamplerPass:
    """What `sampler` gives in `epoch`, from item `first` on: record numbers, or lists of them.

    `checksum` is that of what it has to give before, None where nobody knows. `tell` is called with the epoch before
    the sampler is iterated. `error` is what the sampler failed with, behind what it gave.
    """

    def __init__(
        self,
        epoch: int,
        sampler: Iterable[Any],
        first: int,
        checksum: int | None,
        tell: Callable[[int], None] | None,
    ) -> None:
        self.epoch = epoch
        self.error: Exception | None = None
        self._sampler = sampler
        self._tell = tell
        self._iterator: Iterator[Any] | None = None
        self._asking = False
        # Replaced in one piece: the first item that is held, what is held, and a checksum of what came before.
        self._held: tuple[int, list[Any], int | None] = (first, [], checksum)

    def items(self, begin: int, count: int, beyond: int, checksum: int | None) -> Sequence[Any]:
        """Items from `begin` on, `count` and as many `beyond`; fewer at the end. What is in front of `begin`, with this
        `checksum`, is forgotten. Raises what the sampler raised where it gave some, but fewer than `count`, or none."""
        first, items, before = self._held
        if begin > first:
            self._held = first, items, before = begin, items[begin - first :], checksum
        if len(items) < count + beyond and self.error is None:
            if self._iterator is None or (self._asking and getattr(self._iterator, "gi_frame", self) is None):
                known = _checksum(items, before)
                iterator, seen = self._begin(first + len(items), known)
                if known is None:
                    self._held = first, items, seen
                self._iterator = iterator
            self._asking = True
            try:
                items.extend(islice(self._iterator, count + beyond - len(items)))
            except Exception as error:
                self.error = error
            self._asking = False
        if self.error is not None and len(items) < count:
            raise self.error
        return items[: count + beyond]

    def checksum(self, count: int) -> int | None:
        """Of all that the sampler gave up to `count` items behind the place that was asked for last."""
        _, items, before = self._held
        return _checksum(items[:count], before)

    def _begin(self, place: int, known: int | None) -> tuple[Iterator[Any], int]:
        """The sampler at item `place`, and the checksum of what it gave up to there, which has to be `known`."""
        if self._tell is not None:
            self._tell(self.epoch)
        iterator = iter(self._sampler)
        seen, left = 0, place
        while left and (part := list(islice(iterator, min(left, _TOGETHER)))):
            seen, left = _checksum(part, seen) or 0, left - len(part)
        if known is None or seen == known:
            return iterator, seen
        if self._iterator is None:
            raise LoaderStateError(
                f"in epoch {self.epoch} the sampler does not begin with the {place} item(s) that it gave before the "
                "state was taken; give it the same data, seed and epoch as then (and each rank the state of its own, "
                "where its rank is not known), or begin the epoch anew without the state"
            )
        raise ConfigError(
            f"the sampler was interrupted, and gives other records for epoch {self.epoch} when it is asked again; "
            "iterate the loader anew, or give the sampler a seed of its own for each epoch"
        )


def _checksum(items: Sequence[Any], before: int | None) -> int | None:
    """Of record numbers, or of lists of them, end to end; None where what was before is not known."""
    if items and before is not None:
        for numbers in items if np.ndim(items[0]) else (items,):
            before = crc32(np.array(numbers, dtype=np.int64).data, before)
    return before


__all__ = ["SamplerPass"]
