"""Transfers that are waited for, cancelled, dropped or closed: at once for the caller, and nothing is lost."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_support import CHUNK, NBYTES, READERS, WHOLE, buffers_for, drained, plan_of, read_all, write_data
from support import need_direct, need_reader, run_python, source_of

import gdsstream
from gdsstream.engine import Engine, Transfer
from gdsstream.errors import (
    EngineClosedError,
    TransferCancelledError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def test_waiting_has_a_limit_and_goes_on(path: Path, opened: Callable[..., Engine], reader: dict[str, Any]):
    engine = opened(**reader, faults="delay_us=20000")
    (buffer,) = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    begin = time.monotonic()
    for limit in (0, 0.001, 0.03):
        with pytest.raises(TimeoutError, match=f"not complete after {limit} s"):
            transfer.wait(timeout_s=limit)
    with pytest.raises(TimeoutError, match="group 0"):
        transfer.wait(0, timeout_s=0.001)
    assert time.monotonic() - begin < 0.25
    assert not transfer.done()
    assert not transfer.done(0)
    transfer.wait(timeout_s=20)
    assert transfer.done()
    transfer.wait(0, timeout_s=0)
    assert buffer.numpy().tobytes() == path.read_bytes()


def test_cancel_returns_at_once(path: Path, opened: Callable[..., Engine], reader: dict[str, Any], no_leaks: None):
    engine = opened(**reader, faults="delay_us=200000")
    transfer = engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE))
    time.sleep(0.05)
    begin = time.monotonic()
    transfer.cancel()
    with pytest.raises(TransferCancelledError, match=f"{NBYTES} bytes was cancelled"):
        transfer.wait()
    assert transfer.done()
    transfer.cancel()
    del transfer
    assert time.monotonic() - begin < 0.1  # less than the read takes that is under way
    assert drained(engine)["quarantined"] == 0
    assert time.monotonic() - begin < 1.5  # and not the 3.4 s that were planned
    small = plan_of((7, 100))
    buffers = buffers_for(small)
    engine.submit([source_of(path)], small, buffers).wait()
    assert buffers[0].numpy().tobytes() == path.read_bytes()[7:107]
    engine.close()


def test_cancelling_what_is_complete_changes_nothing(path: Path, opened: Callable[..., Engine]):
    engine = opened(backend="staged")
    (buffer,) = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    transfer.wait()
    transfer.cancel()
    transfer.wait()
    assert buffer.numpy().tobytes() == path.read_bytes()


def test_transfers_behind_a_cancelled_one_are_not_held_up(
    path: Path, opened: Callable[..., Engine], reader: dict[str, Any]
):
    engine = opened(**reader, faults="delay_us=20000")
    waiting = [engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE)) for _ in range(20)]
    small = plan_of((7, 100))
    buffers = buffers_for(small)
    last = engine.submit([source_of(path)], small, buffers)
    begin = time.monotonic()
    for transfer in waiting:
        transfer.cancel()
    last.wait()
    assert time.monotonic() - begin < 1  # the twenty would take 6.8 s
    assert buffers[0].numpy().tobytes() == path.read_bytes()[7:107]


CYCLES = 300  # for each of four: more than a thousand


@pytest.mark.parametrize("name", ["pread", "pread O_DIRECT", "io_uring O_DIRECT", "mapped"])
def test_a_thousand_random_cycles_leave_nothing(
    path: Path, name: str, opened: Callable[..., Engine], tmp_path: Path, no_leaks: None
):
    knobs = READERS[name]
    need_reader(knobs, tmp_path)
    dice = random.Random(name)
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    engine = opened(**{**knobs, "num_threads": 3, "faults": "delay_us=100"})
    source = source_of(path)
    kept: list[Transfer] = []
    canaries: list[torch.Tensor] = []
    finished = 0
    for _ in range(CYCLES):
        spans = [(dice.randrange(NBYTES), dice.randrange(200_000)) for _ in range(dice.randrange(1, 4))]
        spans = [(offset, min(nbytes, NBYTES - offset)) for offset, nbytes in spans]
        plan = plan_of(*spans)
        buffers = buffers_for(plan)
        transfer = engine.submit([source], plan, buffers)
        what = dice.randrange(8)
        if what == 0:
            transfer.wait(timeout_s=20)
            for (offset, nbytes), buffer in zip(spans, buffers, strict=True):
                assert np.array_equal(buffer.numpy(), data[offset : offset + nbytes])
            finished += 1
        if what in (1, 2):
            transfer.cancel()
        if what == 2 and transfer.done():
            with suppress(TransferCancelledError):
                transfer.wait()
        if what == 3:
            with suppress(TimeoutError):
                transfer.wait(timeout_s=dice.random() * 1e-3)
        if what == 4:
            kept.append(transfer)
        if what == 5 and kept:
            kept.pop(dice.randrange(len(kept))).cancel()
        if what == 6:
            kept.clear()
        sizes = [buffer.numel() for buffer in buffers]
        del transfer, buffers  # memory that may still be written to must not be given out again
        canaries = canaries[-50:] + [torch.full((size,), 0x5A, dtype=torch.uint8) for size in sizes]
    assert finished > CYCLES // 20
    kept.clear()
    gc.collect()
    stats = drained(engine)
    assert stats["quarantined"] == stats["staging_slots_held"] == 0
    assert stats["transfers"] == CYCLES
    assert stats["threads"] <= 3
    assert all(bool((canary == 0x5A).all()) for canary in canaries)
    assert read_all(engine, path) == data.tobytes()
    engine.close()


def test_closing_ends_what_is_under_way(path: Path, opened: Callable[..., Engine], reader: dict[str, Any]):
    engine = opened(**reader, faults="delay_us=20000")
    waiting = [engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE)) for _ in range(5)]
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            waiting[4].wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    begin = time.monotonic()
    engine.close()
    # What was begun may come to its end; the rest, 1.3 s of it, is given up.
    assert time.monotonic() - begin < 0.8
    thread.join(5)
    assert [type(error) for error in errors] == [EngineClosedError]
    for transfer in waiting:
        assert transfer.done()
        transfer.cancel()
    with pytest.raises(EngineClosedError, match="under way"):
        waiting[3].wait()
    for use in (
        lambda: engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE)),
        lambda: engine.open([source_of(path)]),  # type: ignore[attr-defined]
        engine.__enter__,
    ):
        with pytest.raises(EngineClosedError):
            use()
    assert engine.stats()["staging_bytes"] == 0
    engine.close()


def test_a_transfer_outlives_its_engine(path: Path):
    engine = gdsstream.open_engine("staged")
    (buffer,) = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    transfer.wait()
    engine.close()
    del engine
    gc.collect()
    transfer.wait()
    assert transfer.done()
    assert buffer.numpy().tobytes() == path.read_bytes()


def test_an_engine_that_is_dropped_while_it_reads(path: Path, no_leaks: None):
    engine = gdsstream.open_engine("staged", chunk_size=CHUNK, num_threads=2, faults="delay_us=5000")
    buffers = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, buffers)
    del engine, buffers
    gc.collect()
    transfer.wait(timeout_s=20)  # it holds what it needs
    del transfer
    gc.collect()


RACE = """
import random, sys, threading
import torch
import gdsstream
from gdsstream.errors import EngineClosedError
from gdsstream.plan import plan_separate
from gdsstream.checkpoint import TensorSpec
from support import source_of
from pathlib import Path

path = Path(sys.argv[1])
source = source_of(path)
nbytes = path.stat().st_size
plan = plan_separate([TensorSpec("a", "U8", (nbytes,), 0, 0, nbytes)])
unexpected = []
for turn in range(150):
    engine = gdsstream.open_engine("staged", chunk_size=65536, staging_bytes=1 << 20, num_threads=2,
                                   direct_io=turn % 2 == 0, reader="pread")
    start = threading.Barrier(4)

    def work():
        start.wait()
        try:
            while True:
                engine.submit([source], plan, [torch.empty(nbytes, dtype=torch.uint8)]).wait(timeout_s=20)
                engine.stats()
        except EngineClosedError:
            pass
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    if turn % 3:
        threading.Event().wait(random.random() * 0.004)
    engine.close()
    for thread in threads:
        thread.join()
assert not unexpected, unexpected
"""


def test_closing_while_other_threads_submit(path: Path):
    need_direct(path)
    run_python(RACE, path)
