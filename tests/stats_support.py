"""What tests of statistics share: a registry of their own, files to read, and processes that count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import random_bytes

import gdsstream
from gdsstream import stats_publisher, stats_registry
from gdsstream.stats import EngineStats, Operations, ProcessStats, RouteStats, process_stats

# Counts until a line comes in, or for a minute: python -c COUNTING file
COUNTING = """
import select, sys, gdsstream
from gdsstream.stats import process_stats
path = sys.argv[1]
engine = gdsstream.open_engine("staged", device="cpu", num_threads=2)
gdsstream.load_file(path)
print("reading", flush=True)
select.select([sys.stdin], [], [], 60)
"""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A registry without a past, and a runtime directory without other processes; that directory."""
    gdsstream.release_engines()
    stats_publisher.stop_publishing()
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(stats_registry, "_registry", stats_registry.Registry())
    yield runtime
    gdsstream.release_engines()
    stats_publisher.stop_publishing()


def until(true: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(0.01)


def write_data(folder: Path, nbytes: int, name: str = "data.bin") -> Path:
    path = folder / name
    path.write_bytes(random_bytes(nbytes))
    return path


def engine_stats(name: str = "staged", device: str = "cpu") -> EngineStats:
    return next(one for one in process_stats().engines if (one.engine, one.device) == (name, device))


def io_of(route: str, name: str = "staged", device: str = "cpu") -> Operations:
    return next(one.io for one in engine_stats(name, device).routes if one.route == route)


def operations(count: int, nbytes: int, *, seed: int = 1, errors: int = 0, retries: int = 0) -> Operations:
    """`count` operations of `nbytes` bytes, the i-th taking (i + 1) * 100 * seed microseconds."""
    from gdsstream import _native

    ledger = _native.Ledger(True)
    for number in range(count):
        ledger.record(nbytes, (number + 1) * 100_000 * seed, retries if number == 0 else 0)
    for _ in range(errors):
        ledger.fail()
    total = ledger.total()
    return Operations(
        total.operations,
        total.bytes,
        total.errors,
        total.retries,
        total.timed,
        total.latency_ns,
        total.longest_ns,
        tuple(total.sizes),
        tuple(total.latencies),
    )


def example(pid: int = 4242) -> ProcessStats:
    """A level 3 process with a GPU, the same numbers each time."""
    reads = operations(100, 2 << 20)
    direct = operations(7, 512 << 10, seed=3, errors=2, retries=5)
    mapped = Operations(3, 3 << 30, sizes=(0,) * 15 + (3,))
    saved = operations(2, 16 << 20, seed=50)
    nothing = Operations()
    staged = (
        RouteStats("page cache", "read", reads),
        RouteStats("direct", "read", direct),
        RouteStats("mapped", "read", nothing),
    )
    held = (
        RouteStats("page cache", "read", nothing),
        RouteStats("direct", "read", nothing),
        RouteStats("mapped", "read", mapped),
    )
    return ProcessStats(
        pid=pid,
        command_line="python train.py --model /data/model",
        host="node7",
        level=3,
        started_at=1_750_000_000.0,
        taken_at=1_750_000_083.5,
        reads=reads + direct + mapped,
        writes=saved,
        read_active_s=0.5,
        write_active_s=0.25,
        pinned_bytes=96 << 20,
        registered_bytes=3 << 30,
        engines=(
            EngineStats("writer", "", 0, 0.25, 0, 0, 0, 0, 0.0, (RouteStats("save", "write", saved),)),
            EngineStats("mapped", "cuda:0", 1, 0.1, 0, 0, 0, 3 << 30, 0.0, held),
            EngineStats("staged", "cuda:0", 2, 0.45, 96 << 20, 6, 2, 0, 0.0123, staged),
        ),
    )
