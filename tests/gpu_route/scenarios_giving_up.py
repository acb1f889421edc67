"""Cancelled and dropped transfers: at once for the caller, and nothing writes to memory that somebody else has."""

from __future__ import annotations

import random
import time
import weakref
from pathlib import Path

import pytest
import torch
from gpu_route.harness import SLOT, scenario, until, write_random
from gpu_route.plans import one_buffer, read_whole, small_engine
from gpu_route.stand_in import StandIn
from support import source_of

import gdsstream
from gdsstream.engine import Engine, Transfer

NBYTES = 16 * SLOT
AT_ONCE_S = 0.05


def give_up_and_watch(
    fake: StandIn, engine: Engine, out: torch.Tensor, transfer: Transfer
) -> weakref.ref[torch.Tensor]:
    """Cancel, and check what a caller sees. Both arguments should be the last references afterwards."""
    started = time.monotonic()
    transfer.cancel()
    assert time.monotonic() - started < AT_ONCE_S
    with pytest.raises(gdsstream.TransferCancelledError):
        transfer.wait()
    assert transfer.done()
    return weakref.ref(out)


def check_let_go(engine: Engine, buffer: weakref.ref[torch.Tensor]) -> None:
    until(lambda: engine.stats()["quarantined"] == 0, "the quarantine is over")
    assert buffer() is None
    assert engine.stats()["staging_slots_held"] == 0


@scenario()
def cancelled_with_copies_in_flight(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", NBYTES)
    with small_engine() as engine:
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        with fake.paused():
            transfer = read_whole(engine, folder / "data", out)
            until(lambda: fake.count("in_flight_copies") == 4, "the ring is full")
            buffer = give_up_and_watch(fake, engine, out, transfer)
            del out, transfer
            assert engine.stats()["quarantined"] == 1
            assert buffer() is not None, "freed under copies that write to it"
            time.sleep(0.05)
            assert engine.stats()["quarantined"] == 1
        check_let_go(engine, buffer)


@scenario()
def cancelled_with_reads_under_way(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", NBYTES)
    with small_engine(faults="delay_us=100000") as engine:
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        transfer = read_whole(engine, folder / "data", out)
        until(lambda: engine.stats()["staging_slots_held"] > 0, "a read is under way")
        buffer = give_up_and_watch(fake, engine, out, transfer)
        del out, transfer
        assert engine.stats()["quarantined"] == 1
        assert buffer() is not None
        check_let_go(engine, buffer)


@scenario()
def dropped_with_copies_in_flight(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", NBYTES)
    with small_engine(slots=160) as engine:
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        buffer = weakref.ref(out)
        with fake.paused():
            transfer = read_whole(engine, folder / "data", out)
            until(transfer.done, "it has landed")
            del out, transfer
            assert engine.stats()["quarantined"] == 1
            assert buffer() is not None, "freed under copies that write to it"
        check_let_go(engine, buffer)


@scenario()
def failed_with_copies_in_flight(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", NBYTES)
    with small_engine(slots=160, faults="eio@5", num_threads=1) as engine:
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        buffer = weakref.ref(out)
        with fake.paused():
            transfer = read_whole(engine, folder / "data", out)
            with pytest.raises(gdsstream.ReadError, match=r"offset .* failed"):
                transfer.wait()
            assert fake.count("in_flight_copies") > 0
            del out, transfer
            assert buffer() is not None, "freed under copies that write to it"
        check_let_go(engine, buffer)


@scenario()
def a_group_that_was_waited_for_survives_a_cancel(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    with small_engine(faults="delay_us=10000", num_threads=1) as engine:
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        half = NBYTES // 2
        plan = one_buffer([(0, half, 0), (half, half, 1)], groups=2)
        transfer = engine.submit([source_of(folder / "data")], plan, [out])
        transfer.wait(0)
        transfer.cancel()
        transfer.wait(0)
        with pytest.raises(gdsstream.TransferCancelledError):
            transfer.wait(1)
        fake.synchronize()
        assert torch.equal(out[:half], data[:half])


@scenario()
def a_wait_runs_out_and_is_taken_up_again(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    with small_engine() as engine:
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        with fake.paused():
            transfer = read_whole(engine, folder / "data", out)
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                transfer.wait(timeout_s=0.1)
            assert 0.1 <= time.monotonic() - started < 1
        transfer.wait(timeout_s=10)
        fake.synchronize()
        assert torch.equal(out, data)


def random_cycles(fake: StandIn, folder: Path, count: int, **knobs: object) -> None:
    """Submit, wait, cancel and drop as chance has it; whatever was waited for has to be right in the end."""
    chance = random.Random(11)
    file_bytes = 2 * 1024 * 1024
    data = write_random(folder / "data", file_bytes)
    source = [source_of(folder / "data")]
    under_way: list[tuple[Transfer, torch.Tensor, torch.Tensor]] = []
    completed = 0
    with small_engine(**knobs) as engine:
        opened = engine.open(source) if hasattr(engine, "open") else source
        for _ in range(count):
            extents = []
            for _ in range(chance.randint(1, 6)):
                nbytes = chance.choice([0, 1, 4096, 30_000, SLOT, 150_000])
                extents.append((chance.randint(0, file_bytes - nbytes), nbytes, 0))
            plan = one_buffer(extents)
            expected = torch.cat([data[offset : offset + nbytes] for offset, nbytes, _ in extents])
            out = torch.zeros(plan.buffer_bytes[0], dtype=torch.uint8)
            under_way.append((engine.submit(opened, plan, [out]), out, expected))
            del out
            if chance.random() < 0.05:
                fake.set_delay_us(chance.choice([0, 10, 300]))
            while len(under_way) > chance.randint(0, 6):
                transfer, out, expected = under_way.pop(chance.randrange(len(under_way)))
                act = chance.random()
                if act < 0.6:
                    transfer.wait()
                    fake.synchronize()
                    assert torch.equal(out, expected)
                    completed += 1
                elif act < 0.8:
                    transfer.cancel()
                del transfer, out
        for transfer, out, expected in under_way:
            transfer.wait()
            fake.synchronize()
            assert torch.equal(out, expected)
        under_way.clear()
        until(lambda: engine.stats()["quarantined"] == 0, "the quarantine is over")
        stats = engine.stats()
        assert stats["staging_slots_held"] == 0
        assert stats["failed_tasks"] >= 0
    assert completed > count // 3


@scenario(limit_s=60)
def a_thousand_random_cycles(fake: StandIn, folder: Path) -> None:
    random_cycles(fake, folder, 1000)


@scenario(limit_s=60)
def random_cycles_through_one_slot_with_slow_reads(fake: StandIn, folder: Path) -> None:
    random_cycles(fake, folder, 300, slots=1, faults="delay_us=100", num_threads=3)
