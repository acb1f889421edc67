"""One pass of a ShardLoader: the batches under way, in their order, and the one that was handed out.

Between two calls of `next`, as many batches are under way as are to be read ahead. A call gives back the batch before,
begins one more, queues the transforms of what has landed, and hands out the oldest.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, Protocol

from gdsstream.batch_reader import Flight
from gdsstream.engine.base import check_process
from gdsstream.errors import EngineClosedError
from gdsstream.feed import Feed
from gdsstream.loader_state import Progress
from gdsstream.loader_stats import LoaderStats
from gdsstream.prefetch import Prefetcher


class Owner(Protocol):
    """The loader, as its iterator knows it."""

    def handed_out(self, progress: Progress, *, last: bool) -> None: ...
    def exhausted(self) -> None: ...


class LoaderIterator:
    """An iterator over batches from `start` on. It keeps its loader alive, and closes itself at its end.

    After an error `next` goes on with the batch behind the one that failed. `begun` says whether a batch was asked for.
    """

    def __init__(
        self, owner: Owner, prefetcher: Prefetcher, feed: Feed, start: Progress, depth: int, stats: LoaderStats
    ) -> None:
        self._pid = os.getpid()
        self._owner = owner
        self._prefetcher = prefetcher
        self._depth = depth
        self._stats = stats
        self._flights: deque[Flight] = deque()
        self._current: Flight | None = None
        self._closed = False
        self._done = False
        self.begun = False
        self._begin(feed, start)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        check_process(self._pid, "loader's iterator")
        if self._done:
            raise StopIteration
        if self._closed:
            raise EngineClosedError(
                "this iterator was ended: its loader was closed, or iterated anew, or given a state"
            )
        started, stalled = time.perf_counter(), self._stats.stall_s
        self.begun = True
        try:
            return self._next()
        finally:
            spent = time.perf_counter() - started
            self._stats.host_s += spent - (self._stats.stall_s - stalled)

    def restart(self, feed: Feed, start: Progress) -> None:
        """Begin elsewhere, before anything was handed out."""
        self._drop_all()
        self._begin(feed, start)

    def close(self) -> None:
        """Stop the reads, and let go of the memory once nothing is written to it any more. Idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        try:
            self._drop_all()
            self._retire()
        finally:
            self._prefetcher.close()

    def __del__(self) -> None:
        if hasattr(self, "_done"):
            self.close()

    def _begin(self, feed: Feed, start: Progress) -> None:
        self._work = feed.work(start)
        self._next_flight: Flight | None = None  # not begun for want of descriptors
        self._feed_error: Exception | None = None
        self._fed = False  # whether the feed has come to its end
        self._started = time.perf_counter()
        self._handed = 0
        self._top_up(self._depth)

    def _next(self) -> Any:
        self._retire()
        while True:
            self._top_up(self._depth + 1)
            if not self._flights:
                self._end()
            self._prefetcher.finish_landed(self._flights)
            flight = self._flights[0]
            try:
                batch = self._prefetcher.hand_out(flight)
            except Exception:
                self._flights.popleft()
                self._stats.failed_batches += 1
                self._prefetcher.drop(flight)
                raise
            self._flights.popleft()
            if flight.empty:
                self._prefetcher.drop(flight)
                self._owner.handed_out(flight.work.after, last=flight.work.last)
                continue
            self._current = flight
            self._count(flight)
            self._owner.handed_out(flight.work.after, last=flight.work.last)
            return batch

    def _top_up(self, wanted: int) -> None:
        while len(self._flights) < wanted:
            if self._next_flight is None:
                self._next_flight = self._take()
            if self._next_flight is None or not self._prefetcher.begin(self._next_flight, alone=not self._flights):
                return
            self._flights.append(self._next_flight)
            self._next_flight = None

    def _take(self) -> Flight | None:
        """The feed's next batch; None at its end."""
        if self._fed:
            return None
        try:
            work = next(self._work, None)
        except Exception as error:  # a sampler's, which is due after the batches that it gave before
            self._feed_error, work = error, None
        self._fed = work is None
        return None if work is None else Flight(work, work.located)

    def _end(self) -> None:
        """Nothing is left: StopIteration, or what the feed failed with."""
        error, self._feed_error = self._feed_error, None
        if error is not None:
            raise error
        self._done = True
        self._owner.exhausted()
        self.close()
        raise StopIteration

    def _count(self, flight: Flight) -> None:
        stats = self._stats
        stats.batches += 1
        stats.records += flight.num_records
        if flight.layout is not None:
            stats.bytes += flight.layout.plan.total_bytes
        if not self._handed:
            stats.first_batch_s = time.perf_counter() - self._started
        self._handed += 1

    def _retire(self) -> None:
        if self._current is not None:
            self._prefetcher.retire(self._current)
            self._current = None

    def _drop_all(self) -> None:
        while self._flights:
            self._prefetcher.drop(self._flights.pop())


__all__ = ["LoaderIterator", "Owner"]
