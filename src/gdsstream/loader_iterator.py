"""One pass of a ShardLoader: the batches under way, in their order, the one that was handed out in front of them.

Between two calls of `next`, as many batches are under way as are to be read ahead. A call gives back the batch before,
begins one more, queues the transforms of what has landed, and hands out the oldest.

Nothing is lost, comes twice or comes empty where a call is cut short by what is no Exception, such as Ctrl-C: until a
batch is handed out, all that was done for it can be done again, and handing out is one assignment, `_current`. Where
the feed goes on follows from the batches under way. Behind the last step that can be interrupted stand plain
assignments only: CPython looks for signals when it calls and when it jumps back.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, NoReturn

import numpy as np

from gdsstream.accelerate_state import AccelerateState
from gdsstream.batch_reader import Flight
from gdsstream.engine.base import check_process
from gdsstream.errors import EngineClosedError, ReadError
from gdsstream.feed import Feed, Work
from gdsstream.loader_state import Progress, Standing
from gdsstream.loader_stats import LoaderStats
from gdsstream.prefetch import Prefetcher


class LoaderIterator:
    """An iterator over batches from where `standing` is, which it moves. It keeps its `owner`, the loader, alive, and
    closes itself at its end.

    After an error `next` goes on with the batch behind the one that failed; after an interrupt, with the same one.
    `begun` says whether a batch was asked for; `padded` whether records come twice at an epoch's end.
    """

    def __init__(
        self,
        owner: object,
        prefetcher: Prefetcher,
        feed: Feed,
        standing: Standing,
        depth: int,
        stats: LoaderStats,
        *,
        padded: bool,
    ) -> None:
        self._pid = os.getpid()
        self._owner = owner
        self._prefetcher = prefetcher
        self._standing = standing
        self._depth = depth
        self._stats = stats
        self._flights: deque[Flight] = deque()
        self._current: Flight | None = None  # handed out; it may be the first of the flights still
        self._closed = False
        self._released = False
        self._done = False
        self._nothing = False  # since the epoch began, no record could be read
        self._accelerate = AccelerateState(padded=padded)
        self._settled = False  # the last call came to its end, and left no flight that is not begun
        self.begun = False
        self._begin(feed)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        check_process(self._pid, "loader's iterator")
        if self._done:
            self.close()
            raise StopIteration
        self._check_open()
        self._accelerate.begin()
        started, stalled = time.perf_counter(), self._stats.stall_s
        self.begun = True
        try:
            flight = self._next()
        finally:
            spent = time.perf_counter() - started
            self._stats.host_s += spent - (self._stats.stall_s - stalled)
        self._count(flight)
        self._settled = self._flights[-1].begun
        work, batch, standing = flight.work, flight.result, self._standing
        before, over = standing.progress, standing.over
        try:
            flight.result = None  # the caller's alone
            self._current = flight
            if flight.failure is not None:
                raise flight.failure
            standing.progress, standing.over = work.after, work.last
            self._accelerate.end_of_dataloader = work.last
            return batch
        except BaseException as error:
            if error is not flight.failure:
                standing.progress, standing.over = before, over
                flight.result, self._current = batch, None
            raise

    def restart(self, feed: Feed) -> None:
        """Begin elsewhere, before anything was handed out."""
        self._drop_all()
        self._begin(feed)

    def close(self) -> None:
        """Stop the reads, and let go of the memory once nothing is written to it any more. Idempotent."""
        if self._released or self._pid != os.getpid():
            return
        self._closed = True
        self._accelerate.end()
        try:
            self._retire()
            self._drop_all()
        except Exception:
            self._released = True
            self._prefetcher.close()
            raise
        self._prefetcher.close()
        self._released = True

    def __del__(self) -> None:
        if hasattr(self, "begun"):
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(
                "this iterator was ended: its loader was closed, or iterated anew, or given a state"
            )

    def _begin(self, feed: Feed) -> None:
        self._feed = feed
        self._cursor = self._standing.progress  # where the feed goes on, unless flights say it
        self._fed = False  # whether the feed has come to its end
        self._started = time.perf_counter()
        self._handed = False  # a batch
        self._top_up(self._depth)

    def _next(self) -> Flight:
        """The next batch, ready to be handed out, or failed."""
        while True:
            self._retire()
            self._top_up(self._depth + 1)
            if not self._flights:
                self._end()
            self._prefetcher.finish_landed(self._flights)
            self._check_open()
            flight = self._flights[0]
            try:
                self._prefetcher.make_ready(flight)
            except Exception as error:
                flight.failure = error
            self._check_open()  # a transform may have ended this
            work = flight.work
            self._nothing = flight.empty and (self._nothing or not work.number)
            if self._nothing and work.last and work.after.until is None:
                self._count(flight)
                flight.failure = ReadError(
                    f"epoch {work.epoch} is over, and none of its records could be read: all of its shards are skipped "
                    '(on_error="skip"), the log says why; bring them back, or make a loader of what is there'
                )
            if flight.failure is not None or flight.num_records:
                return flight
            self._count(flight)
            self._standing.progress, self._standing.over = work.after, work.last
            self._current = flight

    def _top_up(self, wanted: int) -> None:
        if not self._settled and not self._begin_anew():
            return
        self._settled = False
        while len(self._flights) < wanted and not self._fed:
            place = self._flights[-1].work.after if self._flights else self._cursor
            try:
                work = self._feed.at(place)
            except Exception as error:  # a sampler's, which is due after the batches that it gave before
                self._flights.append(_failed(place, error))
                work = None
            if work is None:
                self._fed = True
                return
            flight = Flight(work, work.located)
            self._flights.append(flight)
            if not self._prefetcher.begin(flight, alone=len(self._flights) == 1):
                return

    def _begin_anew(self) -> bool:
        """Begin what is not begun, for want of descriptors or because of an interrupt; whether that was all."""
        for index, flight in enumerate(self._flights):
            if not flight.begun:
                self._prefetcher.drop(flight)
                again = self._flights[index] = Flight(flight.work, flight.work.located)
                if not self._prefetcher.begin(again, alone=not index):
                    return False
        return True

    def _end(self) -> NoReturn:
        """Nothing is left."""
        epoch, until = self._cursor.epoch, self._cursor.until
        self._standing.progress, self._standing.over = Progress(epoch + 1 if until is None else until), False
        self._done = self._closed = True
        self.close()
        raise StopIteration

    def _count(self, flight: Flight) -> None:
        stats = self._stats
        if flight.failure is not None:
            stats.failed_batches += 1
            return
        records, work = flight.num_records, flight.work
        nbytes = flight.layout.plan.total_bytes if flight.layout is not None else 0
        waited = 0.0 if self._handed else time.perf_counter() - self._started
        if flight.skipped:
            lost = dict(stats.skipped_by_shard)
            for path, count in flight.skipped.items():
                lost[path] = lost.get(path, 0) + count
            missing = len(work.records) - records
            stats.skipped_by_shard, stats.skipped_records = lost, stats.skipped_records + missing
        stats.epochs += work.last
        if not records:
            return
        stats.batches += 1
        stats.records += records
        stats.bytes += nbytes
        if not self._handed:
            stats.first_batch_s = waited
        self._handed = True

    def _retire(self) -> None:
        """The caller is done with the batch that was handed out."""
        flight = self._current
        if flight is None:
            return
        if flight.failure is not None or not flight.num_records:
            self._prefetcher.drop(flight)
        else:
            self._prefetcher.retire(flight)
        if self._flights and self._flights[0] is flight:
            self._cursor = flight.work.after
            self._flights.popleft()
        self._current = None

    def _drop_all(self) -> None:
        while self._flights:
            self._prefetcher.drop(self._flights[-1])
            self._flights.pop()


def _failed(place: Progress, error: Exception) -> Flight:
    """What stands for the batch at a place that the feed has failed to give."""
    work = Work(np.empty(0, dtype=np.int64), (), place.epoch, place.batches, place, False)
    return Flight(work, (), begun=True, failure=error, is_finished=True)


__all__ = ["LoaderIterator"]
