"""Reader threads that are refused memory at each of their allocations in turn: what a read makes of that.

For processes that were started with the library of native/refuse_memory.cpp before all others (LD_PRELOAD). Counting
decides which allocation fails, so that every one is met: those under which a slot is held, those of lists that grow,
those of the text of an error.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpu_route.harness import Bare, check_nothing_left, reader_threads, until
from gpu_route.stand_in import UNKNOWN, StandIn
from support import make_plan, random_bytes, source_of

import gdsstream
from gdsstream.engine import Engine
from gdsstream.errors import CudaError, GdsStreamError, MemoryBudgetError, ReadError

CHUNK = 64 * 1024
# Four tasks for two slots: the last of them wait for a slot that others had.
NBYTES = 3 * CHUNK + 5
WHOLE = make_plan([(0, 0, NBYTES, 0, 0, 0)], (NBYTES,))
SLOTS = 2
NO_MEMORY = "no memory left for the engine's own lists; free some, or submit less at once"


def write_data(folder: Path) -> Path:
    path = folder / "data.bin"
    path.write_bytes(random_bytes(NBYTES))
    return path


def open_small(**knobs: Any) -> Engine:
    """Small chunks, and one thread, so that the N-th read and the N-th allocation are known."""
    return gdsstream.open_engine(**{"chunk_size": CHUNK, "staging_bytes": SLOTS * CHUNK, "num_threads": 1, **knobs})


def read_all(engine: Engine, path: Path) -> bytes:
    """All of the file; nothing is under way any more, however it ends."""
    buffer = torch.full((NBYTES,), 0xEE, dtype=torch.uint8)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    try:
        transfer.wait(timeout_s=20)
    finally:
        until(transfer._native.drained, "drained")  # type: ignore[attr-defined]
    if engine.device.type == "cuda":
        StandIn().synchronize()
    return buffer.numpy().tobytes()


def check_whole(engine: Engine, path: Path) -> None:
    """That the engine holds no slot, has its thread, and reads right bytes."""

    def nothing_held() -> bool:
        stats = engine.stats()
        return stats["staging_slots_held"] == stats["quarantined"] == 0

    until(nothing_held, "no slot held, no transfer under way")
    # One that was joined before may still be on its way out of the kernel.
    until(lambda: engine.stats()["threads"] == reader_threads() == 1, "one reader thread")
    assert read_all(engine, path) == path.read_bytes()
    assert nothing_held()


def sweep(
    path: Path,
    knobs: Mapping[str, Any],
    *,
    warm: int = 0,
    for_good: bool = False,
    also: tuple[type[GdsStreamError], ...] = (),
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Refuse a read of `path` its first allocation, another one its second, until one of them asks for no more.

    Each has an engine of its own, which has read the file `warm` times before, and is right, or fails for want of
    memory or with one of `also`. `for_good` refuses all later allocations as well. `before` and `after` enclose each
    read. Returns how many reads failed for want of memory.
    """
    control = ctypes.CDLL(os.environ["LD_PRELOAD"])
    failures = 0
    for number in itertools.count():
        with open_small(**knobs) as engine:
            for _ in range(warm):
                read_all(engine, path)
            before()
            control.refuse_memory_after(number, for_good)
            failure: GdsStreamError | None = None
            try:
                assert read_all(engine, path) == path.read_bytes(), f"wrong bytes, allocation {number} refused"
            except (MemoryBudgetError, *also) as error:
                failure = error
            finally:
                refused = control.grant_memory()
            if isinstance(failure, MemoryBudgetError):
                assert str(failure) == NO_MEMORY, f"allocation {number} refused"
                failures += 1
            after()
            with suppress(*also):  # where the read gave up before it came to the other fault
                read_all(engine, path)
            check_whole(engine, path)
        if refused == 0:
            return failures


def sweep_dropped(path: Path) -> None:
    """The same for transfers that nobody waits for: the reader thread destroys them."""
    control = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for number in itertools.count():
        bare = Bare(path, slots=SLOTS, threads=1)
        out = torch.empty(NBYTES, dtype=torch.uint8)
        control.refuse_memory_after(number, False)
        bare.read(out)
        # Where the task fails that is refused memory, the others are skipped: they do not count.
        deadline = time.monotonic() + 0.05
        while bare.engine.counters()["tasks"] < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        bare.close()
        if control.grant_memory() == 0:
            return


def sweep_reader(path: str, knobs: str) -> None:
    """One kind of reader, on the CPU."""
    data, reader = Path(path), json.loads(knobs)
    assert sweep(data, reader) >= 10
    assert sweep(data, reader, for_good=True) >= 10
    assert sweep(data, reader, warm=1) >= 10
    # Now the text that says what failed has no memory either.
    assert sweep(data, {**reader, "faults": "eio@3"}, also=(ReadError,)) >= 10


def sweep_gpu(path: str) -> None:
    """Copies, events and the ring of pinned slots, on the stand-in driver."""
    data, fake = Path(path), StandIn()
    gpu = {"backend": "staged", "device": "cuda:0", "numa": False, "direct_io": False, "reader": "pread"}

    def failing(symbol: str, calls: int, warm: int = 1) -> int:
        def fail() -> None:
            fake.fail(symbol, UNKNOWN, after=calls)

        return sweep(data, gpu, warm=warm, also=(CudaError,), before=fail, after=fake.clear_faults)

    assert sweep(data, gpu) >= 20
    assert sweep(data, gpu, for_good=True) >= 20
    # The list of slots whose copies are pending grows by 64: here, in the middle of the read.
    assert sweep(data, gpu, warm=15) >= 20
    # Events are recorded at submit, behind each of four slots, behind the group and behind the transfer.
    for calls in range(1, 7):
        assert failing("cuEventRecord", calls) >= 10
    assert failing("cuEventSynchronize", 0) >= 10
    assert failing("cuMemcpyHtoDAsync_v2", 2) >= 10
    assert failing("cuCtxSetCurrent", 0, warm=0) >= 1
    assert failing("cuMemHostRegister_v2", 0, warm=0) >= 1
    sweep_dropped(data)
    check_nothing_left(fake, frozenset())
