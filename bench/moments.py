"""The moments of single layers: when each began and ended to arrive, and to be computed with.

They are of a pass of their own, which is not timed: its marks are events on a GPU and looks at the clock on the CPU,
and a thread of its own waits for every transfer. A transfer begins when it has been asked for and its slot is free; it
may still have to wait for the transfer before it. It ends when its last byte is in the slot, or at the latest where the
layer's look-up came back.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.clock import Clock
from bench.config import BenchError

#: Seconds from the pass's begin: [begin, end] of each layer in the order of use.
Moments = dict[str, list[list[float]]]


_SWITCH_S = 1e-4


class Watch:
    """Collects the marks of one pass; transfers are told in the order in which the layers are used."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._origin = clock.mark()
        self._compute: list[tuple[Any, Any]] = []
        self._transfers: list[tuple[Any, Any]] = []

    def computed(self, begin: Any, end: Any) -> None:
        """A layer was computed with between these marks."""
        self._compute.append((begin, end))

    def moved(self, begin: Any, end: Any) -> None:
        """A layer arrived between these marks."""
        self._transfers.append((begin, end))

    def moments(self) -> Moments:
        """Once everything has been reached. Raises BenchError where not every layer was told of."""
        if len(self._transfers) != len(self._compute):
            raise BenchError(f"{len(self._transfers)} of {len(self._compute)} layers were seen to arrive")
        compute, transfer = self._seconds(self._compute), self._seconds(self._transfers)
        # Both marks are behind the last byte, and a busy thread may have made its own late.
        ended = [min(moved[1], used[0]) for moved, used in zip(transfer, compute, strict=True)]
        return {
            "transfer": [[min(moved[0], end), end] for moved, end in zip(transfer, ended, strict=True)],
            "compute": compute,
        }

    def _seconds(self, marks: Sequence[tuple[Any, Any]]) -> list[list[float]]:
        # An event's time is as fine as half a microsecond, and so may lie before what came before it.
        return [[max(self.clock.seconds(self._origin, mark), 0.0) for mark in pair] for pair in marks]


@contextmanager
def waiting(watch: Watch) -> Iterator[Callable[[Any, Callable[[], None]], None]]:
    """Within, `tell(begin, wait)` has a thread call `wait`, which returns when its current stream waits for a transfer,
    and mark the transfer's end. Raises what a wait raised, at the end."""
    told: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with watch.clock.other():
                while (found := told.get()) is not None:
                    found[1]()
                    watch.moved(found[0], watch.clock.mark())
        except BaseException as error:  # of a read; belongs to the thread that asked for the pass
            failed.append(error)

    thread = threading.Thread(target=work, name="bench-moments")
    patience_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)  # or a mark would be late by as much
    thread.start()
    try:
        yield lambda begin, wait: told.put((begin, wait))
    finally:
        told.put(None)
        thread.join()
        sys.setswitchinterval(patience_s)
    if failed:
        raise failed[0]
