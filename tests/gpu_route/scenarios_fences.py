"""Each fence on its own, with streams held still, so that a missing one fails every time and not now and then."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from gpu_route.harness import MIB, SLOT, Bare, Extent, scenario, until, write_random
from gpu_route.plans import read_whole, small_engine
from gpu_route.stand_in import StandIn

import gdsstream

NBYTES = 8 * SLOT
# Operations that a stream does before the one that matters: its delays add up.
MANY = 30


@scenario()
def a_slot_waits_for_its_copies(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    bare = Bare(folder / "data", slots=3)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    with fake.paused():
        transfer = bare.read(out)
        until(lambda: fake.count("in_flight_copies") >= 3, "the ring is full")
        assert not transfer.wait(-1, 0.3), "a slot was filled again while its copy was pending"
        assert fake.count("in_flight_copies") == 3
        assert not out.any()
    assert transfer.wait(-1, 10)
    fake.drain()
    assert torch.equal(out, data)
    bare.close()


@scenario(delays_us=(500,))
def a_consumer_waits_for_the_copies(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    bare = Bare(folder / "data", slots=16)
    with fake.stream() as consumer:
        out, seen = torch.zeros((2, NBYTES), dtype=torch.uint8)
        with fake.paused():
            transfer = bare.read(out)
            assert transfer.wait(-1, 10), "a wait is for reads and enqueued copies, not for the GPU"
            assert not out.any()
            transfer.order_before(-1, consumer)
            fake.copy(seen, out, consumer)
        fake.synchronize(consumer)
        assert torch.equal(seen, data)
    bare.close()


@scenario(delays_us=(500,))
def a_consumer_waits_for_its_group_only(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", 2 * NBYTES)
    bare = Bare(folder / "data", slots=16, threads=1, faults="delay_us=10000")
    with fake.stream() as consumer:
        out = torch.zeros(2 * NBYTES, dtype=torch.uint8)
        seen = torch.zeros(NBYTES, dtype=torch.uint8)
        halves = [Extent(half * NBYTES, NBYTES, out.data_ptr() + half * NBYTES, half) for half in range(2)]
        transfer = bare.submit(halves)
        assert transfer.wait(0, 10)
        assert not transfer.wait(1, 0.0)
        transfer.order_before(0, consumer)
        fake.copy(seen, out[:NBYTES], consumer)
        fake.synchronize(consumer)
        assert torch.equal(seen, data[:NBYTES])
        assert not transfer.wait(1, 0.0), "the consumer of group 0 waited for group 1"
        assert transfer.wait(-1, 10)
        fake.drain()
        assert torch.equal(out, data)
    bare.close()


@scenario(delays_us=(500,))
def a_consumer_of_everything_waits_for_every_group(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    bare = Bare(folder / "data", slots=16, threads=1)
    with fake.stream() as consumer:
        out, seen = torch.zeros((2, NBYTES), dtype=torch.uint8)
        eighth = NBYTES // 8
        with fake.paused():
            transfer = bare.submit([Extent(i * eighth, eighth, out.data_ptr() + i * eighth, i) for i in range(8)])
            assert transfer.wait(-1, 10)
            transfer.order_before(-1, consumer)
            fake.copy(seen, out, consumer)
        fake.synchronize(consumer)
        assert torch.equal(seen, data)
    bare.close()


@scenario(delays_us=(500,))
def the_public_wait_orders_the_current_stream(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    out, seen = torch.zeros((2, NBYTES), dtype=torch.uint8)
    with small_engine(slots=160) as engine:
        with fake.paused():
            read_whole(engine, folder / "data", out).wait()
            assert not out.any()
            with fake.device():
                fake.copy(seen, out, stream=0)
        fake.synchronize()
        assert torch.equal(seen, data)


@scenario(delays_us=(500,))
def copies_wait_for_the_last_use_of_the_destination(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", SLOT)
    junk = torch.full((SLOT,), 7, dtype=torch.uint8)
    bare = Bare(folder / "data")
    with fake.stream() as allocator:
        out = torch.zeros(SLOT, dtype=torch.uint8)
        for _ in range(MANY):
            fake.copy(out, junk, allocator)
        transfer = bare.read(out, stream=allocator)
        assert transfer.wait(-1, 10)
        fake.drain()
        assert torch.equal(out, data), "what was queued before the submit wrote over the bytes"
    bare.close()


@scenario(delays_us=(500,))
def the_public_submit_follows_the_current_stream(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", SLOT)
    junk = torch.full((SLOT,), 7, dtype=torch.uint8)
    with small_engine() as engine:
        out = torch.zeros(SLOT, dtype=torch.uint8)
        with fake.device():
            for _ in range(MANY):
                fake.copy(out, junk, stream=0)
            transfer = read_whole(engine, folder / "data", out)
        transfer.wait()
        fake.drain()
        assert torch.equal(out, data)


@scenario()
def a_mapped_file_is_checked_after_its_last_copy(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, 2 * NBYTES)
    bare = Bare(path, reader="mapped", threads=1)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    with fake.paused():
        transfer = bare.read(out)
        until(lambda: fake.count("in_flight_copies") > 0, "the copy is enqueued")
        assert not transfer.wait(-1, 0.2), "landed although the file could not have been checked"
        # Behind the bytes that are read: the stand-in really reads the pages, and those must not go.
        os.truncate(path, 2 * NBYTES - 4096)
    with pytest.raises(gdsstream.FileChangedError, match="truncated from"):
        transfer.wait(-1, 10)
    with pytest.raises(gdsstream.FileChangedError, match="truncated from"):
        bare.read(out)
    fake.drain()
    assert torch.equal(out, data[:NBYTES])
    del bare.file, transfer
    bare.close()


@scenario()
def a_staged_file_is_checked_after_its_last_read(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    write_random(path, NBYTES)
    bare = Bare(path, threads=1, faults="delay_us=20000")
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    transfer = bare.read(out)
    with path.open("r+b") as file:
        file.seek(NBYTES - 1)
        file.write(b"?")
    with pytest.raises(gdsstream.FileChangedError):
        transfer.wait(-1, 10)
    bare.close()


@scenario()
def the_ring_is_kept_until_its_copies_are_done(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    bare = Bare(folder / "data", slots=16)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    closing = threading.Thread(target=bare.close)
    with fake.paused():
        assert bare.read(out).wait(-1, 10)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive(), "closed under copies that were pending"
        assert fake.count("registrations") == 1
    closing.join(10)
    assert not closing.is_alive()
    assert fake.count("unregister_in_use") == 0
    assert fake.count("registrations") == 0
    assert torch.equal(out, data)


@scenario()
def a_mapped_file_is_kept_until_its_copies_are_done(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    bare = Bare(folder / "data", reader="mapped", threads=1)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    with fake.paused():
        transfer = bare.read(out)
        del bare.file
        until(lambda: fake.count("in_flight_copies") > 0, "the copy is enqueued")
        assert fake.count("registrations") == 1, "the transfer let go of its file"
    assert transfer.wait(-1, 10)
    assert torch.equal(out, data)
    del transfer
    until(lambda: fake.count("registrations") == 0, "the file went with the last transfer that reads it")
    bare.close()


@scenario()
def a_public_handle_closes_under_copies_from_its_mapping(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, MIB)
    engine = gdsstream.open_engine("mapped", device="cuda:0", host_cache_bytes=16 * MIB)
    out = torch.zeros(MIB, dtype=torch.uint8)
    closing = threading.Thread(target=engine.close)
    with fake.paused():
        transfer = read_whole(engine, path, out)
        until(lambda: fake.count("in_flight_copies") > 0, "the copy is enqueued")
        del transfer
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        assert fake.count("registrations") == 1
    closing.join(10)
    assert not closing.is_alive()
    assert torch.equal(out, data)
