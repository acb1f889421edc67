"""Timed ios through buffers to and from a device: what a buffer holds stays until it is copied, whatever fails.

The stand-in copies late and reads its sources late, so that a buffer that is read into too early shows in the bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_route.harness import KIB, scenario, until, write_random
from gpu_route.stand_in import ILLEGAL_ADDRESS, StandIn

import gdsstream
from gdsstream import _native

IO, COUNT, THREADS = 4 * KIB, 96, 3


@contextmanager
def timed_ios(fake: StandIn, buffers: int, threads: int = THREADS) -> Iterator[_native.TimedIos]:
    """Threads with so many buffers each, in memory that the driver knows: copies out of it are made later."""
    memory = torch.zeros(threads * buffers * IO, dtype=torch.uint8)
    with fake.registered(memory):
        ios = _native.TimedIos(threads, memory=memory.data_ptr(), buffers=buffers, buffer_bytes=IO, device=0)
        try:
            yield ios
        finally:
            ios.close()


def begin(ios: _native.TimedIos, path: Path, memory: torch.Tensor, *, write: bool = False) -> None:
    """Every IO bytes of the file, to and from the places of `memory` in another order."""
    # Open as long as the process: the threads may still read.
    descriptor = os.open(path, os.O_RDWR)
    order = np.random.default_rng(3).permutation(COUNT)
    ios.begin(
        np.full(COUNT, descriptor, dtype=np.int32),
        order.astype(np.int64) * IO,
        np.full(COUNT, IO, dtype=np.int64),
        (memory.data_ptr() + np.arange(COUNT) * IO).astype(np.uint64),
        write=write,
    )


def finish(ios: _native.TimedIos) -> None:
    until(lambda: ios.wait(0.05), "the ios have ended")


def in_order(data: torch.Tensor) -> torch.Tensor:
    return data.view(COUNT, IO)[torch.from_numpy(np.random.default_rng(3).permutation(COUNT))].reshape(-1)


@scenario(delays_us=(0, 300))
def timed_reads_through_buffers(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", COUNT * IO)
    for count in (1, 3):
        target = torch.zeros(COUNT * IO, dtype=torch.uint8)
        with timed_ios(fake, count) as ios:
            for _ in range(2):
                target.zero_()
                begin(ios, folder / "data", target)
                finish(ios)
                assert fake.count("in_flight_copies") == 0
                assert torch.equal(target, in_order(data))
                taken = np.zeros(COUNT)
                ios.seconds(taken)
                assert (taken > 0).all()


@scenario(delays_us=(0, 300))
def timed_writes_through_buffers(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", COUNT * IO)
    (folder / "out").write_bytes(b"\0" * (COUNT * IO))
    source = in_order(data)
    with timed_ios(fake, 2) as ios:
        begin(ios, folder / "out", source, write=True)
        finish(ios)
    assert (folder / "out").read_bytes() == data.numpy().tobytes()


@scenario(delays_us=(300,))
def timed_reads_of_which_one_fails(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", COUNT * IO)
    target = torch.zeros(COUNT * IO, dtype=torch.uint8)
    with timed_ios(fake, 3) as ios:
        fake.fail("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS, after=20)
        begin(ios, folder / "data", target)
        with pytest.raises(gdsstream.CudaError, match="while copying an io"):
            finish(ios)
        assert fake.count("in_flight_copies") == 0, "copied from buffers whose owner has been told"
        os.truncate(folder / "data", (COUNT - 1) * IO + 10)
        begin(ios, folder / "data", target)
        with pytest.raises(gdsstream.ShortReadError, match=r"4096 bytes at byte \d+ of .*data: the file ends 4086"):
            finish(ios)
        assert fake.count("in_flight_copies") == 0
        (folder / "data").write_bytes(data.numpy().tobytes())
        begin(ios, folder / "data", target)
        finish(ios)
        assert torch.equal(target, in_order(data))


@scenario()
def timed_reads_of_which_a_copy_cannot_be_followed(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", COUNT * IO)
    target = torch.zeros(COUNT * IO, dtype=torch.uint8)
    with timed_ios(fake, 2, threads=1) as ios:
        fake.fail("cuEventRecord", ILLEGAL_ADDRESS)
        with fake.paused():
            begin(ios, folder / "data", target)
            assert not ios.wait(0.2), "the copy that was begun is still to be made"
            assert fake.count("in_flight_copies") == 1
        with pytest.raises(gdsstream.CudaError, match="while recording an event"):
            finish(ios)
        assert fake.count("in_flight_copies") == 0


@scenario()
def timed_reads_closed_in_the_middle(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", COUNT * IO)
    target = torch.zeros(COUNT * IO, dtype=torch.uint8)
    with timed_ios(fake, 2) as ios:
        with fake.paused():
            begin(ios, folder / "data", target)
            until(lambda: fake.count("in_flight_copies") == 2 * THREADS, "every buffer is under way")
            assert not ios.wait(0.01)
            with pytest.raises(gdsstream.ConfigError, match="under way already"):
                begin(ios, folder / "data", target)
            closing = threading.Thread(target=ios.close)
            closing.start()
            closing.join(0.05)
            assert closing.is_alive(), "it waits for the copies"
        closing.join(10)
        assert not closing.is_alive()
        assert fake.count("in_flight_copies") == 0
        with pytest.raises(gdsstream.EngineClosedError, match="before all ios were made"):
            ios.wait(1)
        with pytest.raises(gdsstream.EngineClosedError, match="have ended"):
            begin(ios, folder / "data", target)
    delivered = (target.view(COUNT, IO) == in_order(data).view(COUNT, IO)).all(dim=1)
    assert 2 * THREADS <= int(delivered.sum()) < COUNT
