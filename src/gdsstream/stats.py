"""What a process read and wrote: a snapshot of its counters, and the same as a report in a file.

Off by default. `GDSSTREAM_STATS=1|2|3`, or `stats=` of StreamConfig, turns it on for the engines opened from then on:

    1   operations, bytes, bandwidth, average and longest latency, errors, retries; pinned and registered bytes
    2   also histograms of sizes and latencies, and with them percentiles
    3   also each device and route for itself

as gds_stats has its levels. An operation is one read or write as the system is asked for it: what a reader thread has
under way, not a tensor. Its latency is the time until the thread took its result, so that it includes waiting in the
queue of an io_uring. Copies out of registered page cache (route "mapped" to a GPU) are counted by size, but have no
latency, because nobody learns when each of them has ended. Of reads below 64 KiB that a thread makes one by one only
every sixteenth is timed: a look at the clock would cost too much. With kvikio (route "cufile") an operation is a
tensor's extent, and its latency lasts until somebody waited for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from gdsstream.errors import ConfigError, ReadError, WriteError
from gdsstream.histograms import LATENCY_BUCKETS, SIZE_BUCKETS, latency_from_ns, percentile_ns, size_from

Direction = Literal["read", "write"]
REPORT_VERSION = 1
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Operations:
    """Sums over operations. One that failed is an error and nothing else.

    Attributes:
        operations, bytes: that came to their end, and what they brought.
        errors: operations that failed; retries: calls beyond an operation's first (interrupted, or come back short).
        timed: operations whose latency is known; latency_ns is theirs together, longest_ns the longest one's.
        sizes: operations by size, in the buckets of `histograms`; all 0 at level 1.
        latencies: timed operations by latency, likewise.
    """

    operations: int = 0
    bytes: int = 0
    errors: int = 0
    retries: int = 0
    timed: int = 0
    latency_ns: int = 0
    longest_ns: int = 0
    sizes: tuple[int, ...] = (0,) * SIZE_BUCKETS
    latencies: tuple[int, ...] = (0,) * LATENCY_BUCKETS

    @property
    def average_s(self) -> float | None:
        """Average latency in seconds; None where none is known."""
        return self.latency_ns / self.timed / 1e9 if self.timed else None

    def percentile_s(self, percent: float) -> float | None:
        """The latency in seconds that `percent` of the operations do not exceed, to 6 %; None below level 2."""
        found = percentile_ns(self.latencies, percent, self.longest_ns)
        return None if found is None else found / 1e9

    def __add__(self, other: Operations) -> Operations:
        return Operations(
            self.operations + other.operations,
            self.bytes + other.bytes,
            self.errors + other.errors,
            self.retries + other.retries,
            self.timed + other.timed,
            self.latency_ns + other.latency_ns,
            max(self.longest_ns, other.longest_ns),
            tuple(a + b for a, b in zip(self.sizes, other.sizes, strict=True)),
            tuple(a + b for a, b in zip(self.latencies, other.latencies, strict=True)),
        )

    def __sub__(self, other: Operations) -> Operations:
        """What came since `other`, or beside it; the longest one stays."""
        return Operations(
            self.operations - other.operations,
            self.bytes - other.bytes,
            self.errors - other.errors,
            self.retries - other.retries,
            self.timed - other.timed,
            self.latency_ns - other.latency_ns,
            self.longest_ns,
            tuple(a - b for a, b in zip(self.sizes, other.sizes, strict=True)),
            tuple(a - b for a, b in zip(self.latencies, other.latencies, strict=True)),
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON values: the sums, what follows from them, and the buckets that are not empty."""
        sums = {name: getattr(self, name) for name in _SUMS}
        percentiles = {f"p{percent:g}_us": _us(self.percentile_s(percent)) for percent in PERCENTILES}
        return {
            **sums,
            "average_us": _us(self.average_s),
            **percentiles,
            "sizes": [{"from_bytes": size_from(i), "count": count} for i, count in enumerate(self.sizes)],
            "latencies": [{"from_ns": latency_from_ns(i), "count": n} for i, n in enumerate(self.latencies) if n],
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """From what `as_dict` made. Raises KeyError, TypeError and ValueError for anything else."""
        sizes, latencies = [0] * SIZE_BUCKETS, [0] * LATENCY_BUCKETS
        for entry in data["sizes"]:
            sizes[_SIZES.index(entry["from_bytes"])] = _count(entry["count"])
        for entry in data["latencies"]:
            latencies[_LATENCIES.index(entry["from_ns"])] = _count(entry["count"])
        sums = {name: _count(data[name]) for name in _SUMS}
        return cls(sizes=tuple(sizes), latencies=tuple(latencies), **sums)


_SUMS = ("operations", "bytes", "errors", "retries", "timed", "latency_ns", "longest_ns")
_SIZES = [size_from(bucket) for bucket in range(SIZE_BUCKETS)]
_LATENCIES = [latency_from_ns(bucket) for bucket in range(LATENCY_BUCKETS)]


@dataclass(frozen=True, slots=True)
class RouteStats:
    """What went one way: "page cache", "direct" (O_DIRECT), "mapped" (host memory), "cufile", "traditional", "save"."""

    route: str
    direction: Direction
    io: Operations


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engines of one kind on one device, those that are closed included.

    Attributes:
        engine, device: "staged" and "cuda:0", say; files that are saved have the engine "writer" and no device.
        open: how many of them are open.
        active_s: wall time in which each had something to do, together.
        pinned_bytes: staging memory, which is pinned for GPUs; `slots` of it, of which `slots_held` are in use.
        registered_bytes: of files held in host memory, or of buffers registered with cuFile.
        ring_wait_s: how long lanes waited for a staging slot.
        routes: what was moved, by route.
    """

    engine: str
    device: str
    open: int
    active_s: float
    pinned_bytes: int
    slots: int
    slots_held: int
    registered_bytes: int
    ring_wait_s: float
    routes: tuple[RouteStats, ...]


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """A process's counters at one moment.

    Attributes:
        pid, command_line, host: the process.
        level: 1 to 3, the highest of its engines'; 0 where nothing is counted.
        started_at, taken_at: seconds since the epoch: when it began to count, and when this snapshot was taken.
        reads, writes: over all engines.
        read_active_s, write_active_s: wall time in which anything was being read, or written; overlaps count once.
        pinned_bytes, registered_bytes: now; see EngineStats.
        engines: those of level 3.
    """

    pid: int
    command_line: str
    host: str
    level: int
    started_at: float
    taken_at: float
    reads: Operations = field(default_factory=Operations)
    writes: Operations = field(default_factory=Operations)
    read_active_s: float = 0.0
    write_active_s: float = 0.0
    pinned_bytes: int = 0
    registered_bytes: int = 0
    engines: tuple[EngineStats, ...] = ()

    def bandwidth(self, direction: Direction) -> float | None:
        """Bytes moved in a second in which there was something to move; None where there was none."""
        io, active_s = (self.reads, self.read_active_s) if direction == "read" else (self.writes, self.write_active_s)
        return io.bytes / active_s if active_s else None

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        plain = {name: getattr(self, name) for name in _PROCESS}
        engines = []
        for engine in self.engines:
            routes = [{"route": one.route, "direction": one.direction, "io": one.io.as_dict()} for one in engine.routes]
            engines.append({**{name: getattr(engine, name) for name in _ENGINE}, "routes": routes})
        return {
            "report_version": REPORT_VERSION,
            **plain,
            "read_bytes_per_s": self.bandwidth("read"),
            "write_bytes_per_s": self.bandwidth("write"),
            "reads": self.reads.as_dict(),
            "writes": self.writes.as_dict(),
            "engines": engines,
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """From what `as_dict` made. Raises KeyError, TypeError and ValueError for anything else."""
        if data["report_version"] != REPORT_VERSION:
            raise ValueError(f"report_version is {data['report_version']!r}, not {REPORT_VERSION}")
        engines = []
        for entry in data["engines"]:
            routes = tuple(
                RouteStats(str(one["route"]), _direction(one["direction"]), Operations.of(one["io"]))
                for one in entry["routes"]
            )
            engines.append(EngineStats(**{name: kind(entry[name]) for name, kind in _ENGINE.items()}, routes=routes))
        return cls(
            **{name: kind(data[name]) for name, kind in _PROCESS.items()},
            reads=Operations.of(data["reads"]),
            writes=Operations.of(data["writes"]),
            engines=tuple(engines),
        )

    def at_level(self, level: int) -> ProcessStats:
        """The same with no more than a level has: below 3 no engines, below 2 no histograms."""
        if level >= self.level:
            return self
        reads, writes = self.reads, self.writes
        if level < 2:
            empty = Operations()
            reads = replace(reads, sizes=empty.sizes, latencies=empty.latencies)
            writes = replace(writes, sizes=empty.sizes, latencies=empty.latencies)
        return replace(self, level=level, reads=reads, writes=writes, engines=())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, for `load_report` and `gdsstream stats`. Raises WriteError."""
        try:
            Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or str(error)
            raise WriteError(f"{os.fspath(path)} cannot be written: {reason}; save elsewhere", error.errno) from error


_PROCESS: dict[str, type] = {
    "pid": int,
    "command_line": str,
    "host": str,
    "level": int,
    "started_at": float,
    "taken_at": float,
    "read_active_s": float,
    "write_active_s": float,
    "pinned_bytes": int,
    "registered_bytes": int,
}
_ENGINE: dict[str, type] = {
    "engine": str,
    "device": str,
    "open": int,
    "active_s": float,
    "pinned_bytes": int,
    "slots": int,
    "slots_held": int,
    "registered_bytes": int,
    "ring_wait_s": float,
}


def load_report(path: str | os.PathLike[str]) -> ProcessStats:
    """A report that `ProcessStats.save` or `gdsstream stats --json` wrote.

    Raises ReadError for a file that cannot be read, ConfigError for one that is no report.
    """
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(f"{name} cannot be read: {error.strerror}; check the path", error.errno) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no report of statistics: {error}; save one with `gdsstream stats`") from error
    return parse_report(text, name)


def parse_report(text: str, name: str) -> ProcessStats:
    """The report in `text`. Raises ConfigError, in which it is called `name`."""
    try:
        return ProcessStats.of(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{name} is no report of statistics: {what}; save one with `gdsstream stats`") from error


def process_stats() -> ProcessStats:
    """This process's counters now; level 0 and zeros where none are on. Takes a fraction of a millisecond."""
    from gdsstream.stats_registry import snapshot

    return snapshot()


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _direction(value: object) -> Direction:
    if value == "read":
        return "read"
    if value == "write":
        return "write"
    raise ValueError(f"{value!r} is no direction")


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)


__all__ = [
    "EngineStats",
    "Operations",
    "ProcessStats",
    "RouteStats",
    "load_report",
    "parse_report",
    "process_stats",
]
