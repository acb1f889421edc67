"""The shards that are open: as many as descriptors allow, those used last.

A dataset may have more shards than a process may open. Below the limit every shard stays open once it was used, which
costs a dictionary look-up; above it the one whose last use is longest ago goes, unless a batch under way reads from it.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence

from gdsstream.engine.base import SourceFile
from gdsstream.engine.native import NativeEngine, OpenFile

_MOST = 4096
# Of a process's descriptors: half are for everybody else, and a reader thread may hold the files of a batch that has
# just landed for a moment longer.
_SHARE = 4


def descriptor_limit() -> int:
    """How many shards may be open at once in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // _SHARE))


class OpenFiles:
    """Open shards by their numbers, at most `limit` of them.

    `sources` makes what the engine opens, from numbers. Raises what NativeEngine.open raises.
    """

    def __init__(
        self,
        engine: NativeEngine,
        sources: Callable[[Iterable[int]], Sequence[SourceFile]],
        num_files: int,
        limit: int | None = None,
    ) -> None:
        self.limit = descriptor_limit() if limit is None else limit
        self._engine = engine
        self._sources = sources
        self._crowded = num_files > self.limit
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._in_use: dict[Hashable, Sequence[int]] = {}  # by their user

    def __len__(self) -> int:
        return len(self._open)

    def room_for(self, numbers: Sequence[int]) -> bool:
        """Whether these can be open at once, beside those that batches under way read from."""
        return not self._crowded or len(self._used().union(numbers)) <= self.limit

    def take(self, numbers: Sequence[int], user: Hashable) -> list[OpenFile]:
        """The files, opened where they are not; they stay until `user` gives them back, or takes others."""
        missing = [number for number in numbers if number not in self._open]
        if not missing and not self._crowded:
            return [self._open[number] for number in numbers]
        if self._crowded:
            self._in_use[user] = numbers
            for number in numbers:
                if number in self._open:
                    self._open.move_to_end(number)
        self._make_room(len(missing))
        for number, source in zip(missing, self._sources(missing), strict=True):
            self._open[number] = self._engine.open([source])[0]
        return [self._open[number] for number in numbers]

    def give_back(self, user: Hashable) -> None:
        """`user` reads from none of them any more, also where `take` failed. Idempotent."""
        self._in_use.pop(user, None)

    def forget(self, numbers: Iterable[int]) -> None:
        """Close files that are no good any more; what still reads from them keeps them until it ends."""
        for number in numbers:
            self._open.pop(number, None)

    def clear(self) -> None:
        self._open.clear()
        self._in_use.clear()

    def _make_room(self, wanted: int) -> None:
        over = len(self._open) + wanted - self.limit
        if over > 0:
            used = self._used()
            for number in [number for number in self._open if number not in used][:over]:
                del self._open[number]

    def _used(self) -> set[int]:
        return set().union(*self._in_use.values())


__all__ = ["OpenFiles", "descriptor_limit"]
