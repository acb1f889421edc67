"""Who counts in this process: a book for each engine with statistics on, and the snapshot of them all.

A book owns the ledgers that the engine's threads write to, so that what was counted outlives the engine. Books of
engines that are gone are added up, device by device, and closed. The registry belongs to one process: a forked child
begins with an empty one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gdsstream import _native
from gdsstream.config import StreamConfig
from gdsstream.stats import Direction, EngineStats, Operations, ProcessStats, RouteStats

if TYPE_CHECKING:
    from gdsstream.engine.base import Engine

HISTOGRAMS, BY_ROUTE = 2, 3


class Book:
    """What one engine counts: a ledger for each route, and the time in which it had something to do."""

    def __init__(
        self,
        level: int,
        engine: str,
        device: str,
        routes: Sequence[str],
        process: _native.Activity,
        direction: Direction = "read",
    ) -> None:
        self.level = level
        self.engine, self.device, self.direction = engine, device, direction
        self.ledgers = {route: _native.Ledger(level >= HISTOGRAMS) for route in routes}
        self.activity = _native.Activity(process)
        self.owner: weakref.ref[Engine] | None = None
        self.seen_gone = False

    def totals(self) -> EngineStats:
        """Everything so far, and the engine's memory now."""
        routes = tuple(
            RouteStats(route, self.direction, _operations(ledger.total())) for route, ledger in self.ledgers.items()
        )
        owner = self.owner() if self.owner is not None else None
        now = owner.stats() if owner is not None else {}
        on_gpu = self.device != "cpu"
        return EngineStats(
            self.engine,
            self.device,
            open=int(owner is not None and not owner.closed),
            active_s=self.activity.microseconds() / 1e6,
            pinned_bytes=int(now.get("staging_bytes", 0)) if on_gpu else 0,
            slots=int(now.get("staging_slots", 0)),
            slots_held=int(now.get("staging_slots_held", 0)),
            registered_bytes=int(now.get("mapped_bytes", 0)) + int(now.get("registered_bytes", 0)),
            ring_wait_s=now.get("ring_wait_us", 0) / 1e6,
            routes=routes,
        )

    def gone(self) -> bool:
        """Whether nobody writes to it any more."""
        return self.owner is not None and self.owner() is None


class Registry:
    """The books of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.started_at = time.time()
        self._lock = threading.Lock()
        self._books: list[Book] = []
        self._past: dict[tuple[str, str, int], EngineStats] = {}
        self._writers: dict[int, Book] = {}
        self._activity: dict[Direction, _native.Activity] = {
            "read": _native.Activity(),
            "write": _native.Activity(),
        }
        self.level = 0

    def open(self, level: int, engine: str, device: str, routes: Sequence[str], direction: Direction = "read") -> Book:
        """A book for an engine that is about to be opened; `keep` it when it is."""
        return Book(level, engine, device, routes, self._activity[direction], direction)

    def keep(self, book: Book, owner: Engine | None = None) -> None:
        """Add a book to the snapshots, as long as its owner lives, and what it counted for ever."""
        if owner is not None:
            book.owner = weakref.ref(owner)
        with self._lock:
            self._books.append(book)
            self.level = max(self.level, book.level)

    def writer(self, level: int) -> Book:
        """The book of what is saved."""
        with self._lock:
            book = self._writers.get(level)
        if book is None:
            book = self.open(level, "writer", "", ("save",), "write")
            with self._lock:
                book = self._writers.setdefault(level, book)
                if book not in self._books:
                    self._books.append(book)
                self.level = max(self.level, level)
        return book

    def snapshot(self) -> ProcessStats:
        with self._lock:
            self._close_books()
            parts = [(book.level, book.totals()) for book in self._books]
            parts += [(key[2], totals) for key, totals in self._past.items()]
            level = self.level
        io: dict[Direction, Operations] = {"read": Operations(), "write": Operations()}
        for _, part in parts:
            for route in part.routes:
                io[route.direction] += route.io
        return ProcessStats(
            pid=self.pid,
            command_line=_command_line(),
            host=socket.gethostname(),
            level=level,
            started_at=self.started_at,
            taken_at=time.time(),
            reads=io["read"],
            writes=io["write"],
            read_active_s=self._activity["read"].microseconds() / 1e6,
            write_active_s=self._activity["write"].microseconds() / 1e6,
            pinned_bytes=sum(part.pinned_bytes for _, part in parts),
            registered_bytes=sum(part.registered_bytes for _, part in parts),
            engines=_by_device([part for part_level, part in parts if part_level >= BY_ROUTE]),
        )

    def _close_books(self) -> None:
        """Add up the books of engines that are gone, one snapshot after they were first missed: an object can be dead
        to its references a moment before its threads have ended."""
        for book in [book for book in self._books if book.gone()]:
            if not book.seen_gone:
                book.seen_gone = True
                continue
            self._books.remove(book)
            key = (book.engine, book.device, book.level)
            self._past[key] = _sum(self._past[key], book.totals()) if key in self._past else book.totals()


def _by_device(parts: Sequence[EngineStats]) -> tuple[EngineStats, ...]:
    sums: dict[tuple[str, str], EngineStats] = {}
    for part in parts:
        key = (part.device, part.engine)
        sums[key] = _sum(sums[key], part) if key in sums else part
    return tuple(sums[key] for key in sorted(sums))


def _sum(one: EngineStats, other: EngineStats) -> EngineStats:
    return replace(
        one,
        open=one.open + other.open,
        active_s=one.active_s + other.active_s,
        pinned_bytes=one.pinned_bytes + other.pinned_bytes,
        slots=one.slots + other.slots,
        slots_held=one.slots_held + other.slots_held,
        registered_bytes=one.registered_bytes + other.registered_bytes,
        ring_wait_s=one.ring_wait_s + other.ring_wait_s,
        routes=tuple(replace(a, io=a.io + b.io) for a, b in zip(one.routes, other.routes, strict=True)),
    )


def _operations(counts: _native.Counts) -> Operations:
    return Operations(
        counts.operations,
        counts.bytes,
        counts.errors,
        counts.retries,
        counts.timed,
        counts.latency_ns,
        counts.longest_ns,
        tuple(counts.sizes),
        tuple(counts.latencies),
    )


def _command_line() -> str:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read(4096).split(b"\0")
    except OSError:
        return ""
    return " ".join(b" ".join(words).decode(errors="replace").split())[:200]


_registry = Registry()


def open_book(level: int, engine: str, device: str, routes: Sequence[str]) -> Book | None:
    """A book for an engine that is about to be opened; None at level 0."""
    return _registry.open(level, engine, device, routes) if level else None


def keep_book(book: Book | None, owner: Engine) -> None:
    """The engine is open: its book counts, and other processes can see it. Does nothing without a book."""
    if book is not None:
        _registry.keep(book, owner)
        _publish()


def writer_book() -> Book | None:
    """The book for what is saved; None unless GDSSTREAM_STATS asks for it. Raises ConfigError."""
    if not os.environ.get("GDSSTREAM_STATS"):
        return None
    level = StreamConfig.resolve({}, {"GDSSTREAM_STATS": os.environ["GDSSTREAM_STATS"]}).stats
    if not level:
        return None
    book = _registry.writer(level)
    _publish()
    return book


def snapshot() -> ProcessStats:
    """The process's counters now."""
    return _registry.snapshot()


def _publish() -> None:
    from gdsstream.stats_publisher import publish

    publish(snapshot)


def _after_fork_in_child() -> None:
    global _registry
    _registry = Registry()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["Book", "Registry", "keep_book", "open_book", "snapshot", "writer_book"]
