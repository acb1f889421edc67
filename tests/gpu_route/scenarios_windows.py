"""Parts of files in host memory on the GPU route: registered pages, pinned copies in their place, and their ends."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_route.harness import KIB, MIB, SLOT, Bare, scenario, until, write_random
from gpu_route.plans import one_buffer, read_whole, small_engine
from gpu_route.scenarios_faults import Warnings
from gpu_route.scenarios_lifetime import in_child
from gpu_route.stand_in import INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, UNKNOWN, StandIn
from support import source_of

import gdsstream
from gdsstream.engine import Transfer
from gdsstream.engine.budget import free_bytes
from gdsstream.engine.native import NativeEngine, OpenFile
from gdsstream.storage import describe

PAGE = 4096
NBYTES = 64 * PAGE + 5
# Four windows with gaps between them, at odd offsets, the last one at the file's end.
WINDOWS = [(5, 100), (8 * PAGE - 1, 2), (20 * PAGE + 7, 9 * PAGE), (63 * PAGE, PAGE + 5)]
WINDOW_PAGES = [1, 2, 10, 2]


def native_engine(device: str = "cuda:0") -> NativeEngine:
    engine = small_engine(device)
    assert isinstance(engine, NativeEngine)
    return engine


def read(engine: NativeEngine, held: OpenFile, windows: list[tuple[int, int]], out: torch.Tensor) -> Transfer:
    return engine.submit([held], one_buffer([(o, n, 0) for o, n in windows]), [out])


def check(fake: StandIn, engine: NativeEngine, held: OpenFile, data: torch.Tensor) -> None:
    """The windows' bytes, as a consumer on the current stream sees them."""
    out = torch.zeros(sum(n for _, n in WINDOWS), dtype=torch.uint8)
    read(engine, held, WINDOWS, out).wait()
    fake.synchronize()
    assert torch.equal(out, torch.cat([data[o : o + n] for o, n in WINDOWS]))


def mappings(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def nothing_held(fake: StandIn, engine: NativeEngine, path: Path) -> bool:
    return fake.count("registrations") == engine.mapped_bytes == mappings(path) == 0


@scenario(delays_us=(0, 200, 2000))
def mapped_windows_come_and_go(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    with native_engine() as engine:
        first = engine.open_windows(source_of(path), WINDOWS)
        assert fake.count("registrations") == len(WINDOWS)
        assert fake.count("registered_bytes") == sum(WINDOW_PAGES) * PAGE
        check(fake, engine, first, data)
        second = engine.open_windows(source_of(path), [(0, NBYTES)])
        assert fake.count("registrations") == len(WINDOWS) + 1
        for held in (first, second, first):
            assert not held.native.host_copy
            check(fake, engine, held, data)
        assert engine.mapped_bytes == second.native.mapped_bytes + first.native.mapped_bytes
        del first, held
        gc.collect()
        until(lambda: fake.count("registrations") == mappings(path) == 1, "the first layer is let go")
        check(fake, engine, second, data)
        del second
        until(lambda: nothing_held(fake, engine, path), "the second layer is let go")
        # The ring was never needed.
        assert engine.stats()["staging_bytes"] == 0
        assert engine.route == "registered page cache -> cuda:0 (stand-in driver)"


@scenario()
def mapped_windows_and_the_ring_in_one_transfer(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    with native_engine() as engine:
        files = [engine.open_windows(source_of(path), WINDOWS), *engine.open([source_of(path)])]
        plan = one_buffer([(20 * PAGE + 7, 9 * PAGE, 0), (1, 2 * SLOT, 1), (63 * PAGE, 9, 0)], groups=2)
        plan = replace(plan, file=np.array([0, 1, 0], dtype=np.int32))
        for _ in range(20):
            out = torch.zeros(plan.buffer_bytes[0], dtype=torch.uint8)
            transfer = engine.submit(files, plan, [out])
            transfer.wait(0)
            transfer.wait()
            fake.synchronize()
            assert torch.equal(
                out, torch.cat([data[o : o + n] for o, n in zip(plan.file_offset, plan.nbytes, strict=True)])
            )
        assert "page cache by pread" in engine.route
        assert "registered page cache" in engine.route


@scenario()
def an_extent_outside_of_the_windows(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    with native_engine() as engine:
        held = engine.open_windows(source_of(path), WINDOWS)
        out = torch.zeros(2 * PAGE, dtype=torch.uint8)
        for offset, nbytes in ((PAGE, 1), (PAGE - 1, 2), (0, 2 * PAGE), (40 * PAGE, 5)):
            with pytest.raises(gdsstream.ConfigError, match=rf"data: {nbytes} bytes at offset {offset} are in none"):
                read(engine, held, [(offset, nbytes)], out[:nbytes])
        assert fake.count("copies") == engine.stats()["tasks"] == 0
        check(fake, engine, held, data)


@scenario()
def a_file_held_for_the_cpu_is_no_source_for_a_gpu(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    write_random(path, NBYTES)
    with native_engine("cpu") as cpu, native_engine() as engine:
        held = cpu.open_windows(source_of(path), WINDOWS)
        with pytest.raises(gdsstream.ConfigError, match="held in host memory by an engine on the CPU"):
            read(engine, held, [(5, 10)], torch.zeros(10, dtype=torch.uint8))
    assert fake.count("cuMemHostRegister_v2") == 0


@scenario()
def registered_page_cache_is_not_free(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    write_random(path, NBYTES)
    (folder / "meminfo").write_text("MemAvailable: 1000 kB\n")

    def pinned() -> int:
        return 900 * KIB - free_bytes(procfs=str(folder), cgroupfs=str(folder))

    with native_engine() as engine, native_engine("cpu") as cpu:
        in_memory = cpu.open_windows(source_of(path), WINDOWS)
        assert pinned() == 0
        held = [engine.open_windows(source_of(path), WINDOWS) for _ in range(2)]
        # The kernel leaves files in memory out of what it counts as available.
        assert pinned() == (0 if describe(path).is_memory else engine.mapped_bytes)
        held.clear()
        fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
        copied = engine.open_windows(source_of(path), WINDOWS)
        assert pinned() == 0
        del in_memory, copied


# --- pinned copies ----------------------------------------------------------------------------------------------------


def check_copies(fake: StandIn, path: Path, data: torch.Tensor, refuse: int, reason: str) -> None:
    """Two layers while `refuse` calls in a row to register pages are refused: both are copies, which is said once."""
    warnings = Warnings()
    with native_engine() as engine:
        layers = []
        for _ in range(2):
            if refuse:
                fake.fail("cuMemHostRegister_v2", refuse)
            layers.append(engine.open_windows(source_of(path), WINDOWS))
        assert fake.count("registrations") == 2
        assert fake.count("registered_bytes") == 2 * sum(WINDOW_PAGES) * PAGE
        assert mappings(path) == 0
        for held in layers:
            assert held.native.host_copy
            assert held.native.mapped_bytes == engine.mapped_bytes / 2 > 0
            check(fake, engine, held, data)
        assert engine.route == "pinned copy in host memory -> cuda:0 (stand-in driver)"
        del held
        layers.clear()
        until(lambda: nothing_held(fake, engine, path), "they are let go")
        held = engine.open_windows(source_of(path), WINDOWS, allow_copy=False) if refuse else None
        assert held is None or not held.native.host_copy
        del held
    assert len(warnings.texts) == 1
    assert f"pinned copies beside the page cache: {reason}" in warnings.texts[0]


@scenario(delays_us=(0, 500))
def mapped_windows_are_copied_where_pages_are_not_supported(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    check_copies(
        fake, folder / "data", data, NOT_SUPPORTED, "the driver refuses to register pages of a file: CUDA_ERROR_N"
    )


@scenario()
def mapped_windows_are_copied_where_pages_are_invalid(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    check_copies(
        fake, folder / "data", data, INVALID_VALUE, "the driver refuses to register pages of a file: CUDA_ERROR_I"
    )


@scenario()
def mapped_windows_are_copied_where_the_device_lacks_the_feature(fake: StandIn, folder: Path) -> None:
    data = write_random(folder / "data", NBYTES)
    fake.fail("cuDeviceGetAttribute", UNKNOWN, times=-1)
    check_copies(fake, folder / "data", data, 0, "this device or driver cannot register read-only memory")


@scenario()
def a_large_copy_is_filled_by_several_threads(fake: StandIn, folder: Path) -> None:
    nbytes = 70 * MIB + 5
    data = write_random(folder / "data", nbytes)
    with native_engine() as engine:
        fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
        held = engine.open_windows(source_of(folder / "data"), [(PAGE + 1, 20 * MIB), (22 * MIB, nbytes - 22 * MIB)])
        assert held.native.host_copy
        assert fake.count("registrations") == 1
        for offset, part in ((PAGE + 1, 20 * MIB), (22 * MIB, nbytes - 22 * MIB)):
            out = torch.zeros(part, dtype=torch.uint8)
            read(engine, held, [(offset, part)], out).wait()
            fake.synchronize()
            assert torch.equal(out, data[offset : offset + part])


@scenario()
def a_copy_has_to_be_allowed(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    warnings = Warnings()
    with native_engine() as engine:
        fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
        with pytest.raises(
            gdsstream.BackendUnavailableError, match=r"data: the driver refuses .*NOT_SUPPORTED.*staged"
        ):
            engine.open_windows(source_of(path), WINDOWS, allow_copy=False)
        assert nothing_held(fake, engine, path)
        # A copy stands in for what is refused, not for what has no room.
        fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
        with pytest.raises(gdsstream.MemoryBudgetError, match="registering host memory"):
            engine.open_windows(source_of(path), WINDOWS)
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    with gdsstream.open_engine("mapped", device="cuda:0", host_cache_bytes=MIB) as named:
        fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
        with pytest.raises(gdsstream.BackendUnavailableError, match="the driver refuses"):
            read_whole(named, path, out)
    assert warnings.texts == []
    with gdsstream.open_engine(device="cuda:0", host_cache_bytes=MIB) as auto:
        fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
        read_whole(auto, path, out).wait()
        fake.synchronize()
        assert torch.equal(out, data)
        assert auto.route == "pinned copy in host memory -> cuda:0 (stand-in driver)"
    assert len(warnings.texts) == 1


# --- ends -------------------------------------------------------------------------------------------------------------


@scenario()
def registering_fails_at_any_window(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    with native_engine() as engine:
        for after in range(len(WINDOWS)):
            for result, error in ((OUT_OF_MEMORY, gdsstream.MemoryBudgetError), (UNKNOWN, gdsstream.CudaError)):
                fake.fail("cuMemHostRegister_v2", result, after=after)
                with pytest.raises(error, match="registering host memory"):
                    engine.open_windows(source_of(path), WINDOWS)
                assert nothing_held(fake, engine, path)
            fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED, after=after)
            held = engine.open_windows(source_of(path), WINDOWS)
            assert held.native.host_copy
            assert fake.count("registrations") == 1
            check(fake, engine, held, data)
            del held
            until(lambda: nothing_held(fake, engine, path), "it is let go")


@scenario()
def registering_a_copy_fails(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    write_random(path, NBYTES)
    with native_engine() as engine:
        for result, error in ((OUT_OF_MEMORY, gdsstream.MemoryBudgetError), (NOT_SUPPORTED, gdsstream.CudaError)):
            fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
            fake.fail("cuMemHostRegister_v2", result)
            with pytest.raises(error, match="registering host memory"):
                engine.open_windows(source_of(path), WINDOWS)
            assert nothing_held(fake, engine, path)


@scenario()
def a_change_is_found_after_the_copies_from_either(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    for refuse in (False, True):
        data = write_random(path, NBYTES)
        with native_engine() as engine:
            if refuse:
                fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
            held = engine.open_windows(source_of(path), WINDOWS)
            assert held.native.host_copy == refuse
            out = torch.zeros(9 * PAGE, dtype=torch.uint8)
            with fake.paused():
                transfer = read(engine, held, [(20 * PAGE + 7, 9 * PAGE)], out)
                until(lambda: fake.count("in_flight_copies") > 0, "the copy is enqueued")
                with pytest.raises(TimeoutError):
                    transfer.wait(timeout_s=0.1)
                # Behind the bytes that are read: the stand-in really reads the pages, and those must not go.
                os.truncate(path, 40 * PAGE)
            for _ in range(2):
                with pytest.raises(gdsstream.FileChangedError, match="truncated from"):
                    transfer.wait()
            with pytest.raises(gdsstream.FileChangedError, match="truncated from"):
                read(engine, held, [(5, 10)], out[:10])
            fake.drain()
            assert torch.equal(out, data[20 * PAGE + 7 :][: 9 * PAGE])


@scenario()
def windows_stay_until_their_copies_are_done(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    for refuse in (False, True):
        with native_engine() as engine:
            if refuse:
                fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
            held = engine.open_windows(source_of(path), WINDOWS)
            registrations = fake.count("registrations")
            out = torch.zeros(9 * PAGE, dtype=torch.uint8)
            with fake.paused():
                transfer = read(engine, held, [(20 * PAGE + 7, 9 * PAGE)], out)
                until(lambda: fake.count("in_flight_copies") > 0, "the copy is enqueued")
                del held
                # Dropped, and so cancelled: the engine's quarantine keeps the windows.
                del transfer
                gc.collect()
                assert engine.stats()["quarantined"] == 1
                assert fake.count("registrations") == registrations > 0
                assert engine.mapped_bytes > 0
            until(lambda: engine.stats()["quarantined"] == 0, "the quarantine is over")
            until(lambda: nothing_held(fake, engine, path), "they are let go")
            assert torch.equal(out, data[20 * PAGE + 7 :][: 9 * PAGE])


@scenario()
def windows_outlive_their_engine(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    engine = native_engine()
    held = engine.open_windows(source_of(path), WINDOWS)
    engine.close()
    del engine
    gc.collect()
    assert fake.count("registrations") == len(WINDOWS)
    with native_engine() as other:
        check(fake, other, held, data)
    del held, other
    until(lambda: fake.count("registrations") == fake.count("primary_contexts") == 0, "all is let go")


@scenario()
def a_forked_child_drops_windows(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    with native_engine() as engine:
        kept = {"held": engine.open_windows(source_of(path), WINDOWS)}
        assert in_child(kept.clear) == 0
        assert fake.count("registrations") == len(WINDOWS)
        check(fake, engine, kept["held"], data)
        kept.clear()


# --- what was waited for ----------------------------------------------------------------------------------------------


@scenario()
def waiting_for_the_link_is_told_from_waiting_for_storage(fake: StandIn, folder: Path) -> None:
    nbytes = 8 * SLOT
    data = write_random(folder / "data", nbytes)
    out = torch.zeros(nbytes, dtype=torch.uint8)
    # Copies stand still for half a second: nothing but the ring holds the readers up.
    bare = Bare(folder / "data", slots=2)
    with fake.paused():
        transfer = bare.read(out)
        until(lambda: fake.count("in_flight_copies") >= 2, "the ring is full")
        time.sleep(0.5)
    assert transfer.wait(-1, 10)
    counters = bare.engine.counters()
    assert 450_000 < counters["ring_wait_us"] <= counters["active_us"]
    fake.drain()
    assert torch.equal(out, data)
    bare.close()
    assert bare.engine.counters()["ring_wait_us"] == counters["ring_wait_us"]
    # Reads of 20 ms, copies at once: nobody waits for a copy, although with one slot all but one thread wait.
    fake.set_delay_us(0)
    for slots in (1, 4):
        bare = Bare(folder / "data", slots=slots, faults="delay_us=20000")
        assert bare.read(out).wait(-1, 10)
        counters = bare.engine.counters()
        assert counters["active_us"] > 75_000
        assert counters["ring_wait_us"] < counters["active_us"] / 4
        bare.close()


@scenario()
def copies_from_windows_take_no_slots(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, NBYTES)
    with native_engine() as engine:
        held = engine.open_windows(source_of(path), WINDOWS)
        offsets = np.array([20 * PAGE + 7 + 3 * i for i in range(500)], dtype=np.int64)
        out = torch.zeros((500, 99), dtype=torch.uint8)
        engine.gather([held], np.zeros(500, dtype=np.int32), offsets, 99, out).wait()
        fake.synchronize()
        assert torch.equal(out, torch.stack([data[o : o + 99] for o in offsets]))
        assert engine.stats()["ring_wait_us"] == engine.stats()["staging_slots"] == 0
