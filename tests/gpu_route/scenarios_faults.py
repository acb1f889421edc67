"""The driver refuses, once or for ever, at any call: an error of ours, nothing lost, and the engine goes on."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gpu_route.harness import MIB, SLOT, Bare, scenario, until, write_random
from gpu_route.plans import read_whole, small_engine
from gpu_route.scenarios_load import ONE_SLOT, check_loads, model
from gpu_route.stand_in import ILLEGAL_ADDRESS, OUT_OF_MEMORY, UNKNOWN, StandIn
from support import as_bytes, need_uring, reference

import gdsstream
from gdsstream.config import StreamConfig


class Warnings(logging.Handler):
    """What gdsstream logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("gdsstream").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@scenario()
def no_memory_for_the_first_segment(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY, times=-1)
    with pytest.raises(gdsstream.MemoryBudgetError, match="registering host memory"):
        gdsstream.load_file(path, device="cuda:0", config=ONE_SLOT)
    fake.clear_faults()
    check_loads(fake, path, ONE_SLOT, "page cache")


@scenario()
def no_memory_for_a_later_segment(fake: StandIn, folder: Path) -> None:
    # The first segment has 32 MiB at most, which streams that stand still fill.
    nbytes = 40 * MIB
    data = write_random(folder / "data", nbytes)
    warnings = Warnings()
    with small_engine(chunk_size=4 * MIB, staging_bytes=64 * MIB) as engine:
        fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY, after=1, times=-1)
        for _ in range(3):
            out = torch.zeros(nbytes, dtype=torch.uint8)
            with fake.paused():
                transfer = read_whole(engine, folder / "data", out)
                until(lambda: fake.count("cuMemHostRegister_v2") >= 2, "a second segment was asked for")
            transfer.wait()
            fake.synchronize()
            assert torch.equal(out, data)
        assert 0 < engine.stats()["staging_bytes"] <= 32 * MIB
        assert fake.count("registrations") == 1
        assert fake.count("cuMemHostRegister_v2") == 2
    assert len(warnings.texts) == 1
    assert "staging ring stays smaller" in warnings.texts[0]


@scenario()
def no_memory_to_register_a_mapped_file(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    with pytest.raises(gdsstream.MemoryBudgetError, match="registering host memory"):
        gdsstream.safe_open(path, device="cuda:0", host_cache_bytes=64 * MIB)
    with gdsstream.safe_open(path, device="cuda:0", host_cache_bytes=64 * MIB) as handle:
        tensor = handle.get_tensor("t5")
        fake.synchronize()
        assert torch.equal(tensor, reference(path)["t5"])


@scenario()
def a_copy_fails_in_the_middle(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    for config in (ONE_SLOT, None):
        check_loads(fake, path, config or ONE_SLOT, "page cache", times=1)
        fake.fail("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS, after=20)
        with pytest.raises(gdsstream.CudaError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
            gdsstream.load_file(path, device="cuda:0", config=ONE_SLOT)
        fake.clear_faults()
        check_loads(fake, path, ONE_SLOT, "page cache")


@scenario(delays_us=(5000,))
def a_later_portion_fails_under_the_copies_of_an_earlier_one(fake: StandIn, folder: Path) -> None:
    # The tensors of the first portion have been waited for and are dropped: only their stream keeps the memory.
    path = model(folder, mib=5)
    config = StreamConfig(chunk_size=MIB, staging_bytes=32 * MIB, num_threads=1, direct_io=False)
    fake.fail("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS, after=180)
    with pytest.raises(gdsstream.CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gdsstream.load_file(path, device="cuda:0", config=config)
    assert fake.count("in_flight_copies") >= 100
    gc.collect()
    check_loads(fake, path, config, "page cache", times=1)


@scenario()
def no_copy_stream(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    fake.fail("cuStreamCreate", UNKNOWN)
    with pytest.raises(gdsstream.CudaError, match="CUDA_ERROR_UNKNOWN"):
        gdsstream.open_engine("staged", device="cuda:0", numa=False)
    assert fake.count("primary_contexts") == 0
    check_loads(fake, path, ONE_SLOT, "page cache")


@scenario()
def no_context(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    fake.fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY)
    with pytest.raises(gdsstream.MemoryBudgetError, match="retaining the primary context"):
        gdsstream.open_engine("staged", device="cuda:0", numa=False)
    fake.fail("cuDevicePrimaryCtxRetain", UNKNOWN)
    with pytest.raises(gdsstream.CudaError, match="retaining the primary context"):
        gdsstream.open_engine("staged", device="cuda:0", numa=False)
    check_loads(fake, path, ONE_SLOT, "page cache")


def sweep(fake: StandIn, folder: Path, symbols: Sequence[str], after: Sequence[int]) -> None:
    """Fail each function once at each of some calls: the load is right or raises an error of ours, the next is right,
    and what was loaded before stays right."""
    path = model(folder, mib=4)
    expected = {name: as_bytes(tensor) for name, tensor in reference(path).items()}
    failed = 0
    for symbol in symbols:
        for calls in after:
            if calls % 3 == 2:
                gdsstream.release_engines()
            earlier = gdsstream.load_file(path, device="cuda:0", config=ONE_SLOT)
            fake.fail(symbol, UNKNOWN, after=calls)
            try:
                loaded = gdsstream.load_file(path, device="cuda:0", config=ONE_SLOT)
                if calls % 2:
                    gdsstream.release_engines()
            except gdsstream.CudaError:
                loaded = {}
                failed += 1
            fake.clear_faults()
            gc.collect()
            again = gdsstream.load_file(path, device="cuda:0", config=ONE_SLOT)
            fake.drain()
            for what, tensors in {"earlier": earlier, "loaded": loaded, "again": again}.items():
                for name, tensor in tensors.items():
                    assert as_bytes(tensor) == expected[name], f"{symbol} after {calls}: {name} of {what}"
            assert fake.count("unregister_in_use") == 0, f"{symbol} after {calls}"
    assert failed >= len(symbols)


@scenario(delays_us=(300,), limit_s=60)
def an_event_fails_at_any_call(fake: StandIn, folder: Path) -> None:
    sweep(fake, folder, ["cuEventRecord", "cuEventQuery", "cuEventSynchronize"], [0, 1, 2, 3, 5, 8, 13, 30, 60, 100])


@scenario(delays_us=(300,), limit_s=60)
def a_wait_or_copy_fails_at_any_call(fake: StandIn, folder: Path) -> None:
    sweep(fake, folder, ["cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2", "cuStreamQuery"], [0, 1, 2, 3, 5, 8, 13, 30])


# A context that cannot be made current leaves an event behind, as there is no other way to destroy it.
@scenario(delays_us=(300,), limit_s=60, leaves=["events"])
def a_context_fails_at_any_call(fake: StandIn, folder: Path) -> None:
    sweep(fake, folder, ["cuCtxPushCurrent_v2"], [0, 1, 2, 3, 5, 8])


@scenario()
def a_reader_thread_has_no_context(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    fake.fail("cuCtxSetCurrent", UNKNOWN, times=-1)
    with pytest.raises(gdsstream.CudaError):
        gdsstream.load_file(path, device="cuda:0", config=ONE_SLOT)
    gdsstream.release_engines()
    fake.clear_faults()
    check_loads(fake, path, ONE_SLOT, "page cache")


@scenario()
def a_read_finds_no_memory(fake: StandIn, folder: Path) -> None:
    nbytes = 16 * SLOT
    data = write_random(folder / "data", nbytes)
    # The fifth is the first that may find every slot in use.
    with small_engine(num_threads=1, faults="nomem@1,nomem@5") as engine:
        for _ in range(2):
            with pytest.raises(gdsstream.MemoryBudgetError, match="no memory left for the engine's own lists"):
                read_whole(engine, folder / "data", torch.zeros(nbytes, dtype=torch.uint8)).wait()
        out = torch.zeros(nbytes, dtype=torch.uint8)
        read_whole(engine, folder / "data", out).wait()
        fake.synchronize()
        assert torch.equal(out, data)
        assert engine.stats()["staging_slots_held"] == engine.stats()["quarantined"] == 0
        assert engine.stats()["threads"] == 1


@scenario()
def waiting_for_a_slot_fails_under_its_copies(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", 3 * SLOT)
    bare = Bare(folder / "data", slots=1, threads=1)
    # Smaller than a slot, whatever a slot keeps for itself.
    outs = torch.zeros((3, SLOT // 2), dtype=torch.uint8)
    with fake.paused():
        first = bare.read(outs[0])
        assert first.wait(-1, 10)
        fake.fail("cuEventSynchronize", UNKNOWN)
        with pytest.raises(gdsstream.CudaError, match="waiting for copies"):
            bare.read(outs[1], SLOT).wait(-1, 10)
        third = bare.read(outs[2], 2 * SLOT)
        assert not third.wait(-1, 0.2), "the slot was filled again while its copy was pending"
    assert third.wait(-1, 10)
    fake.drain()
    assert torch.equal(outs[0], data[: SLOT // 2])
    assert torch.equal(outs[2], data[2 * SLOT : 2 * SLOT + SLOT // 2])
    bare.close()


@scenario()
def the_next_reads_begin_before_what_arrived_is_copied(fake: StandIn, folder: Path) -> None:
    need_uring()
    data = write_random(folder / "data", 4 * SLOT)
    # The third read is the next one when one of the first two has arrived, and what it fails with skips their copies.
    bare = Bare(folder / "data", reader="io_uring", slots=4, threads=1, depth=2, faults="nomem@3")
    out = torch.zeros(4 * SLOT, dtype=torch.uint8)
    before = fake.count("copies")
    with pytest.raises(gdsstream.GdsStreamError, match="memory"):
        bare.read(out).wait(-1, 10)
    fake.drain()
    assert fake.count("copies") == before
    assert bare.read(out).wait(-1, 10)
    fake.drain()
    assert torch.equal(out, data)
    bare.close()


@scenario()
def who_reads_one_by_one_copies_before_the_next(fake: StandIn, folder: Path) -> None:
    write_random(folder / "data", 4 * SLOT)
    bare = Bare(folder / "data", slots=4, threads=1, faults="nomem@2")
    out = torch.zeros(4 * SLOT, dtype=torch.uint8)
    before = fake.count("copies")
    with pytest.raises(gdsstream.GdsStreamError, match="memory"):
        bare.read(out).wait(-1, 10)
    fake.drain()
    assert fake.count("copies") == before + 1
    bare.close()


@scenario()
def a_slot_that_cannot_be_asked_for_hides_no_free_one(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", 2 * SLOT)
    bare = Bare(folder / "data", slots=2, threads=1)
    outs = torch.zeros((2, SLOT // 2), dtype=torch.uint8)
    with fake.paused():
        assert bare.read(outs[0]).wait(-1, 10)
        asked = fake.count("cuEventQuery")
        fake.fail("cuEventQuery", UNKNOWN)
        assert bare.read(outs[1], SLOT).wait(-1, 10)
        assert fake.count("cuEventQuery") > asked
    fake.drain()
    assert torch.equal(outs[0], data[: SLOT // 2])
    assert torch.equal(outs[1], data[SLOT : SLOT + SLOT // 2])
    bare.close()


@scenario(delays_us=(2000,))
def the_last_event_fails_under_copies(fake: StandIn, folder: Path) -> None:
    nbytes = 4 * SLOT
    write_random(folder / "data", nbytes)
    with small_engine(slots=160, num_threads=1) as engine:
        first = torch.zeros(nbytes, dtype=torch.uint8)
        read_whole(engine, folder / "data", first).wait()
        fake.drain()
        for records in range(8):
            out: torch.Tensor | None = torch.zeros(nbytes, dtype=torch.uint8)
            transfer = None
            buffer = weakref.ref(out)
            with fake.paused():
                fake.fail("cuEventRecord", UNKNOWN, after=records, times=-1)
                with contextlib.suppress(gdsstream.CudaError):
                    transfer = read_whole(engine, folder / "data", out)
                    until(transfer.done, "it has landed or failed")
                pending = fake.count("in_flight_copies")
                out = transfer = None
                assert buffer() is not None or not pending, f"let go under {pending} copies, after {records} records"
                fake.clear_faults()
            until(lambda: engine.stats()["quarantined"] == 0, "the quarantine is over")
            assert buffer() is None


@scenario(delays_us=(2000,))
def closing_fails_to_record_under_copies(fake: StandIn, folder: Path) -> None:
    nbytes = 4 * SLOT
    data = write_random(folder / "data", nbytes)
    engine = small_engine(slots=4)
    out = torch.zeros(nbytes, dtype=torch.uint8)
    read_whole(engine, folder / "data", out).wait()
    fake.fail("cuEventRecord", UNKNOWN)
    engine.close()
    assert fake.count("unregister_in_use") == 0
    assert torch.equal(out, data)
