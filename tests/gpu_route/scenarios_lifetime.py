"""Closing, forking and sharing engines while work is under way."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_route.harness import SLOT, Bare, reader_threads, scenario, until, write_random
from gpu_route.plans import one_buffer, read_whole, small_engine
from gpu_route.stand_in import StandIn
from support import source_of

import gdsstream

NBYTES = 16 * SLOT


@scenario()
def closed_with_a_transfer_under_way(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", NBYTES)
    engine = small_engine()
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    raised: list[BaseException] = []
    with fake.paused():
        transfer = read_whole(engine, folder / "data", out)
        until(lambda: fake.count("in_flight_copies") == 4, "the ring is full")

        def wait() -> None:
            try:
                transfer.wait()
            except BaseException as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        closing = threading.Thread(target=engine.close)
        closing.start()
        waiting.join(10)
        assert isinstance(raised[0], gdsstream.EngineClosedError)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    assert fake.count("in_flight_copies") == 0
    engine.close()
    with pytest.raises(gdsstream.EngineClosedError):
        read_whole(engine, folder / "data", out)
    with pytest.raises(gdsstream.EngineClosedError):
        transfer.wait()


@scenario()
def closed_with_complete_and_given_up_transfers(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    engine = small_engine(slots=160)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    with fake.paused():
        complete = read_whole(engine, folder / "data", out)
        until(complete.done, "it has landed")
        read_whole(engine, folder / "data", torch.zeros(NBYTES, dtype=torch.uint8)).cancel()
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(0.1)
    closing.join(10)
    assert not closing.is_alive()
    complete.wait()
    assert torch.equal(out, data)


@scenario(delays_us=(2000,))
def closed_at_any_moment(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    for pause_ms in (0, 0, 1, 2, 4, 8, 16, 32):
        engine = small_engine(slots=2)
        outs = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(3)]
        transfers = [read_whole(engine, folder / "data", out) for out in outs]
        time.sleep(pause_ms / 1000)
        engine.close()
        assert fake.count("registrations") == 0
        for transfer, out in zip(transfers, outs, strict=True):
            try:
                transfer.wait()
            except gdsstream.EngineClosedError:
                continue
            assert torch.equal(out, data)
        assert reader_threads() == 0


@scenario(limit_s=60)
def closed_while_others_submit_and_ask(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    failures: list[str] = []

    def against(bare: Bare, act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while True:
                    act()
            except gdsstream.EngineClosedError:
                pass
            except BaseException:
                failures.append(traceback.format_exc())

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    for _ in range(20):
        bare = Bare(folder / "data")

        def read(bare: Bare = bare) -> None:
            out = torch.zeros(2 * SLOT, dtype=torch.uint8)
            transfer = bare.read(out)
            try:
                assert transfer.wait(-1, 10), "neither landed nor failed"
            finally:
                until(transfer.drained, "it drains")
            assert torch.equal(out, data[: 2 * SLOT])

        closed = threading.Event()

        def ask(bare: Bare = bare, closed: threading.Event = closed) -> None:
            bare.engine.counters()
            assert bare.engine.take_notes() == []
            if closed.is_set():
                raise gdsstream.EngineClosedError

        threads = [against(bare, read), against(bare, read), against(bare, ask)]
        time.sleep(0.01)
        bare.close()
        closed.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert failures == []


@scenario()
def an_engine_that_nobody_closes(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    engine = small_engine()
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    transfer = read_whole(engine, folder / "data", out)
    transfer.wait()
    fake.synchronize()
    assert torch.equal(out, data)
    del transfer, engine
    until(lambda: reader_threads() == 0, "dropping it closes it")


def in_child(act: Callable[[], None]) -> int:
    """Exit status of a forked child that runs `act`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@scenario()
def a_forked_child_is_refused(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    engine = small_engine()
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    shared = gdsstream.read_many(folder / "data", [0], [5], 100, device="cuda:0")

    def child() -> None:
        with pytest.raises(gdsstream.ForkedProcessError):
            transfer.wait()
        with pytest.raises(gdsstream.ForkedProcessError):
            read_whole(engine, folder / "data", out)
        # A driver that was initialised cannot be used in a child: an error, and no hang.
        with pytest.raises(gdsstream.EngineError):
            gdsstream.read_many(folder / "data", [0], [5], 100, device="cuda:0")
        assert torch.equal(gdsstream.read_many(folder / "data", [0], [5], 100)[0], data[5:105])
        transfer.cancel()
        engine.close()
        gdsstream.release_engines()

    with fake.paused():
        transfer = read_whole(engine, folder / "data", out)
        until(lambda: fake.count("in_flight_copies") >= 4, "the ring is full")
        assert in_child(child) == 0
    transfer.wait()
    fake.synchronize()
    assert torch.equal(out, data)
    assert torch.equal(shared[0], data[5:105])
    engine.close()


@scenario()
def a_forked_child_drops_what_it_inherited(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    kept = {"engine": small_engine()}
    plan = one_buffer([(0, NBYTES, 0)])
    with fake.paused():
        kept["transfer"] = kept["engine"].submit([source_of(folder / "data")], plan, [out])
        until(lambda: fake.count("in_flight_copies") == 4, "the ring is full")
        assert in_child(kept.clear) == 0
    kept["transfer"].wait()
    fake.synchronize()
    assert torch.equal(out, data)
    kept["engine"].close()
