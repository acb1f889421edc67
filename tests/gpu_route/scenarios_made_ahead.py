"""A task whose lists are made while it waits for its slot: given up, cancelled, or of a file that changed since.

The ring has one slot, and the streams stand still with a copy out of it. The next task is then off the queue and not
open: its lists are made, and a worker waits for the slot on its behalf.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gpu_route.harness import KIB, scenario, until, write_random
from gpu_route.plans import read_whole, small_engine
from gpu_route.stand_in import StandIn

import gdsstream
from gdsstream.engine import Engine, Transfer

NBYTES = 4 * KIB  # one task, also where a lane that was idle begins with small ones


class Queue(NamedTuple):
    """One task each: of `first` the copy is under way, of `ahead` the lists are made, `last` is queued."""

    first: Transfer
    ahead: Transfer
    last: Transfer
    out: torch.Tensor  # where `ahead` reads to
    last_out: torch.Tensor


@contextmanager
def made_ahead(fake: StandIn, folder: Path, engine: Engine) -> Iterator[Queue]:
    """Within, the streams stand still; `first` and `last` read the file "data", `ahead` reads "ahead"."""
    outs = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(3)]
    with fake.paused():
        first = read_whole(engine, folder / "data", outs[0])
        until(first.done, "the first task has landed")
        ahead = read_whole(engine, folder / "ahead", outs[1])
        until(lambda: engine.stats()["staging_slots_held"] == 1, "the slot is waited for")
        last = read_whole(engine, folder / "data", outs[2])
        yield Queue(first, ahead, last, outs[1], outs[2])


def write_files(folder: Path) -> torch.Tensor:
    write_random(folder / "ahead", NBYTES, seed=2)
    return write_random(folder / "data", NBYTES)


@scenario()
def closed_with_a_task_made_ahead(fake: StandIn, folder: Path) -> None:
    write_files(folder)
    engine = small_engine(slots=1)
    with made_ahead(fake, folder, engine) as queue:
        closing = threading.Thread(target=engine.close)
        closing.start()
        # Both are given up in one step, before anything is joined.
        until(queue.last.done, "what is queued was given up")
        assert queue.ahead.done(), "neither begun nor given up"
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    queue.first.wait()
    for transfer in (queue.ahead, queue.last):
        with pytest.raises(gdsstream.EngineClosedError, match="under way"):
            transfer.wait()
    assert not queue.out.any(), "read although the engine was closed before its turn"


@scenario()
def cancelled_with_its_task_made_ahead(fake: StandIn, folder: Path) -> None:
    data = write_files(folder)
    with small_engine(slots=1) as engine:
        with made_ahead(fake, folder, engine) as queue:
            queue.ahead.cancel()
            assert queue.ahead.done()
            assert not queue.last.done()
        with pytest.raises(gdsstream.TransferCancelledError):
            queue.ahead.wait()
        queue.last.wait(timeout_s=10)
        fake.synchronize()
        assert torch.equal(queue.last_out, data)
        assert not queue.out.any(), "read although it was cancelled before its turn"
        assert engine.stats()["staging_slots_held"] == 0


def check_changed(fake: StandIn, folder: Path, change: Callable[[Path], None]) -> None:
    data = write_files(folder)
    with small_engine(slots=1) as engine:
        with made_ahead(fake, folder, engine) as queue:
            change(folder / "ahead")
        with pytest.raises(gdsstream.FileChangedError, match="ahead: "):
            queue.ahead.wait(timeout_s=10)
        queue.last.wait(timeout_s=10)
        fake.synchronize()
        assert torch.equal(queue.last_out, data)
        assert engine.stats()["staging_slots_held"] == 0


@scenario()
def a_file_shrinks_behind_the_lists_of_its_task(fake: StandIn, folder: Path) -> None:
    check_changed(fake, folder, lambda path: os.truncate(path, NBYTES // 2))


@scenario()
def a_file_is_removed_behind_the_lists_of_its_task(fake: StandIn, folder: Path) -> None:
    check_changed(fake, folder, Path.unlink)
