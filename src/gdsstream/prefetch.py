"""Batches under way: begun ahead of their use, transformed beside the caller's work, handed out behind their bytes.

    begun -> landed -> finished (collate_fn, transform) -> handed out -> retired

An error belongs to the batch that it happened to, and is raised when that batch is due: never earlier, and never twice.
An interrupt (KeyboardInterrupt, or whatever else is no Exception) belongs to none: what it cut short is done again.
So each step either can be repeated, or clears the batch's `begun` for as long as it lasts; and what goes back into a
pool is let go of before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gdsstream import _native
from gdsstream.batch_buffers import BufferRing, buffer_bytes
from gdsstream.batch_reader import BatchReader, Flight
from gdsstream.batches import FieldFormat
from gdsstream.devices import current_stream
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import ReadError, TransformError
from gdsstream.loader_stats import LoaderStats
from gdsstream.lost_shards import LostShards
from gdsstream.open_files import OpenFiles
from gdsstream.records import RecordTable
from gdsstream.side_streams import SideStreams

_POLL_S = 0.00005


class Prefetcher:
    """Begins, finishes and hands out batches. One for each iterator: `close` it.

    Args:
        engine, files, table: what reads, what is open, and where records lie.
        formats: the fields of a batch.
        batch_size: the most records of a batch; for the size of buffers.
        depth: how many batches are begun ahead of the one that is handed out.
        borrow: whether batches are views of depth + 1 buffers.
        skip: leave out records of shards that cannot be read, instead of failing.
        collate_fn, transform: of the caller; see ShardLoader.
        stats: counted into. said: paths of shards whose loss was logged; added to.
    """

    def __init__(
        self,
        engine: NativeEngine,
        files: OpenFiles,
        table: RecordTable,
        formats: Sequence[FieldFormat],
        *,
        batch_size: int,
        depth: int,
        borrow: bool,
        skip: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        transform: Callable[[Any], Any] | None,
        stats: LoaderStats,
        said: set[str],
    ) -> None:
        self._device = engine.device
        self._streams = SideStreams(engine.device)
        self._ring: BufferRing | None = None
        if borrow:
            _, nbytes = buffer_bytes([0 if form.field.ragged else batch_size * form.row_bytes for form in formats])
            self._ring = BufferRing(depth + 1, nbytes, self._streams)
        self._reader = BatchReader(engine, files, formats, self._streams, self._ring)
        self._lost = LostShards(table, files, self._reader, said) if skip else None
        self._depth = depth
        self._one_field = len(formats) == 1
        self._collate = collate_fn
        self._transform = transform
        self._hooked = collate_fn is not None or transform is not None
        self._stats = stats
        # Owned batches that the caller is done with, and the device perhaps not.
        self._behind: deque[_native.Fence] = deque()

    def begin(self, flight: Flight, *, alone: bool) -> bool:
        """Start to read a batch. False where its shards cannot be open beside those in use: begin it again when it is
        `alone`, and no other is in front of it. A batch that is not `begun` after an interrupt is to be dropped."""
        try:
            if self._lost is not None:
                self._lost.leave_out(flight)
            if not flight.empty:
                if not self._reader.lay_out(flight) and not alone:
                    return False
                self._reader.submit(flight)
        except Exception as error:
            flight.failure = error
        flight.begun = True
        return True

    def finish_landed(self, flights: Sequence[Flight]) -> None:
        """Queue collate_fn and transform for the first of `flights`, as many as have landed; on a GPU, where the
        caller's work goes on beside them."""
        if self._hooked and self._streams.asynchronous:
            for flight in tuple(flights):
                # A transform may have ended the iterator, and dropped them.
                if not flights or (flight.failure is None and not self._reader.landed(flight)):
                    return
                self._finish(flight)

    def make_ready(self, flight: Flight) -> None:
        """Wait until a batch's `result` can be used on the current stream, or its `failure` is known. Neither, where it
        is `empty`."""
        stream = current_stream(self._device)
        if self._hooked:
            self._finish(flight)
            self._streams.order(flight.finished)
        else:
            if flight.stream is not None and flight.stream != stream:
                # It landed, and an interrupt came; the caller is on another stream now.
                self._streams.order(self._streams.fence(flight.stream))
            flight.stream = stream
            if not flight.is_finished:
                self._land(flight)
                flight.is_finished = True
        if flight.failure is None and (self._ring is None or self._hooked):
            self._streams.used_by_current(flight.result)
        flight.stream = stream
        if self._ring is None:
            # The caller alone says how long it lives.
            flight.tensors.clear()
            flight.offsets.clear()

    def retire(self, flight: Flight) -> None:
        """The caller is done with a batch, but for what it has queued by now."""
        streams = {flight.stream, current_stream(self._device)}
        if flight.buffer is not None and self._ring is not None:
            # The stream that it was handed out on is behind its transform.
            fences = [fence for stream in streams if (fence := self._streams.fence(stream)) is not None]
            self._ring.give_back(flight.buffer, fences)
            flight.buffer = None
        else:
            self._stay_near(self._streams.fence())
        finished, flight.finished = flight.finished, None
        self._streams.give_back(finished)

    def drop(self, flight: Flight) -> None:
        """Give up a batch that was not handed out."""
        self._reader.abandon(flight)
        if flight.buffer is not None and self._ring is not None:
            if not flight.begun:
                flight.buffer.lost = True
            self._ring.give_back(flight.buffer, self._behind_hooks(flight))
            flight.buffer = None
        flight.finished = flight.result = None
        flight.tensors.clear()

    def close(self) -> None:
        """Give up buffers and streams. All batches have to be retired or dropped."""
        if self._ring is not None:
            self._ring.close()
        self._behind.clear()
        self._streams.close()

    def _stay_near(self, fence: _native.Fence | None) -> None:
        """Wait until the device has passed all but the last depth + 1 batches: memory that it still uses is not free
        for the next ones, and a host that runs ahead would need ever more of it."""
        if fence is None:
            return
        self._behind.append(fence)
        if len(self._behind) > self._depth + 1:
            oldest = self._behind.popleft()
            while not oldest.done():
                time.sleep(_POLL_S)
            self._streams.give_back(oldest)

    def _behind_hooks(self, flight: Flight) -> list[_native.Fence]:
        """What is to be passed before memory of a batch that was not handed out is written again."""
        fence = flight.finished
        if fence is None and self._hooked:
            with self._streams.transforming():
                fence = self._streams.fence()
        return [fence] if fence is not None else []

    def _finish(self, flight: Flight) -> None:
        """Queue collate_fn and transform on the loader's own stream. Waits for the bytes."""
        if flight.is_finished:
            return
        with self._streams.transforming():
            self._land(flight)
            # They may change the batch in place: they are never given one twice.
            flight.begun = False
            if flight.failure is None and not flight.empty:
                self._call(flight)
            flight.finished = self._streams.fence()
        flight.is_finished = True
        flight.begun = True

    def _call(self, flight: Flight) -> None:
        what = "collate_fn"
        try:
            if self._collate is not None:
                flight.result = self._collate(self._reader.samples(flight))
            what = "transform"
            if self._transform is not None:
                flight.result = self._transform(flight.result)
        except Exception as error:
            flight.result = None
            flight.failure = TransformError(
                f"{what} failed on batch {flight.work.number} of epoch {flight.work.epoch} "
                f"({type(error).__name__}: {error}); the loader can go on with the next batch"
            )
            flight.failure.__cause__ = error

    def _land(self, flight: Flight) -> None:
        """Wait for the bytes; the current stream is made to wait for the copies. What fails is kept in `failure`."""
        started = time.perf_counter()
        try:
            if flight.failure is None:
                self._reader.wait(flight)
        except Exception as error:
            flight.failure = error
        if self._lost is not None and isinstance(flight.failure, ReadError):
            failure = flight.failure
            flight.begun, flight.failure = False, None
            try:
                self._lost.salvage(flight, failure)
            except Exception as remains:
                flight.failure = remains
            flight.begun = True
        self._stats.stall_s += time.perf_counter() - started
        if flight.failure is None and not flight.empty:
            values = self._reader.values(flight)
            if self._hooked and self._ring is None:
                self._streams.used_by_current(values)
            flight.result = next(iter(values.values())) if self._one_field else values


__all__ = ["Prefetcher"]
