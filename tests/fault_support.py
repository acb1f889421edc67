"""What tests of failing reads share: one file, every reader with one thread and small chunks, and plans by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support import need_reader, random_bytes, source_of

import gdsstream
from gdsstream.checkpoint import TensorSpec
from gdsstream.engine import Engine
from gdsstream.plan import ReadPlan, plan_separate

KIB, MIB = 1024, 1 << 20
CHUNK = 64 * KIB

# One thread, so that the N-th read is known.
READERS: dict[str, dict[str, Any]] = {
    "pread": {"backend": "staged", "reader": "pread", "direct_io": False},
    "io_uring": {"backend": "staged", "reader": "io_uring", "direct_io": False, "io_depth": 4},
    "pread O_DIRECT": {"backend": "staged", "reader": "pread", "direct_io": True},
    "io_uring O_DIRECT": {"backend": "staged", "reader": "io_uring", "direct_io": True, "io_depth": 4},
    "mapped": {"backend": "mapped", "host_cache_bytes": 64 * MIB},
}
NBYTES = 16 * CHUNK + 5


def write_data(folder: Path) -> Path:
    path = folder / "data.bin"
    path.write_bytes(random_bytes(NBYTES))
    return path


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    knobs = READERS[request.param]
    need_reader(knobs, tmp_path)
    return knobs


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    """opened(**knobs) -> an engine of small chunks, closed after the test."""
    with ExitStack() as stack:

        def make(**knobs: Any) -> Engine:
            small = {"chunk_size": CHUNK, "staging_bytes": MIB, "num_threads": 1}
            return stack.enter_context(gdsstream.open_engine(**{**small, **knobs}))

        yield make


def plan_of(*parts: tuple[int, int], groups: tuple[int, ...] = ()) -> ReadPlan:
    """(offset, nbytes) of file 0, a buffer each; and their groups."""
    specs = [TensorSpec(str(i), "U8", (n,), 0, offset, n) for i, (offset, n) in enumerate(parts)]
    return plan_separate(specs, (lambda name: groups[int(name)]) if groups else None)


WHOLE = plan_of((0, NBYTES))


def buffers_for(plan: ReadPlan) -> list[torch.Tensor]:
    return [torch.full((size,), 0xEE, dtype=torch.uint8) for size in plan.buffer_bytes]


def read_all(engine: Engine, path: Path) -> bytes:
    (buffer,) = buffers_for(WHOLE)
    engine.submit([source_of(path)], WHOLE, [buffer]).wait()
    return buffer.numpy().tobytes()


def drained(engine: Engine, seconds: float = 10) -> dict[str, int | float]:
    """Stats once nothing is held any more, or at the end of the time."""
    until = time.monotonic() + seconds
    while True:
        stats = engine.stats()
        if (stats["quarantined"] == stats["staging_slots_held"] == 0) or time.monotonic() > until:
            return stats
        time.sleep(0.01)
