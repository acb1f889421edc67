"""The cufile engine: its refusals, its bookkeeping over a stand-in for kvikio, and, with a GPU, kvikio itself."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_kvikio import FakeCounters, FakeKvikio
from support import InterruptAt, Source, make_plan

from gdsstream.engine import cufile, cufile_transfer
from gdsstream.engine.cufile import CuFileEngine
from gdsstream.engine.kvikio_process import CuFileSettings
from gdsstream.engine.traditional import TraditionalEngine
from gdsstream.errors import (
    BackendUnavailableError,
    ConfigError,
    CudaError,
    EngineClosedError,
    FileChangedError,
    ForkedProcessError,
    ReadError,
    ShortReadError,
    TransferCancelledError,
)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "a.bin"
    path.write_bytes(np.random.default_rng(3).bytes(300_007))
    return Source.at(path)


def content(source: Source) -> bytes:
    return Path(source.path).read_bytes()


# --- settings and refusals ------------------------------------------------------------------------------------------


def test_a_cpu_is_refused_with_the_reason():
    with pytest.raises(BackendUnavailableError, match="reads to CUDA devices only, not to cpu"):
        CuFileEngine("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_cuda_is_refused_before_kvikio_is_touched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cufile, "load_kvikio", lambda: pytest.fail("kvikio was loaded"))
    for compat_mode in ("auto", "off"):
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            CuFileEngine("cuda:0", CuFileSettings(compat_mode=compat_mode))
    monkeypatch.setenv("GDSSTREAM_LIBCUDA", "/a/stand-in.so")
    with pytest.raises(BackendUnavailableError, match="kvikio uses the real one"):
        CuFileEngine("cuda:0", CuFileSettings(compat_mode="off"))


# --- over the stand-in ----------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvikio]:
    fake = FakeKvikio()
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake.defaults)
    monkeypatch.setattr(CuFileEngine, "_require_cuda", lambda self: None)
    monkeypatch.setattr(CuFileEngine, "_drain_stream", lambda self: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield fake
    fake.gate.set()
    deadline = time.monotonic() + 10
    while cufile_transfer.PARKED and time.monotonic() < deadline:
        cufile_transfer.sweep()
        time.sleep(0.001)
    assert not cufile_transfer.PARKED


def fill(plan: Any) -> list[torch.Tensor]:
    return [torch.full((size,), 0xEE, dtype=torch.uint8) for size in plan.buffer_bytes]


@pytest.fixture
def two_groups() -> Any:
    return make_plan([(0, 7, 1000, 0, 0, 0), (0, 5000, 2000, 1, 50, 1), (0, 9, 0, 1, 0, 1)], (1000, 3000), 2)


@pytest.mark.parametrize("deferred", [False, True])
def test_bytes_land_where_the_traditional_engine_puts_them(
    fake: FakeKvikio, source: Source, two_groups: Any, deferred: bool
):
    fake.deferred = deferred
    got, wanted = fill(two_groups), fill(two_groups)
    TraditionalEngine().submit([source], two_groups, wanted).wait()
    with CuFileEngine("cpu") as engine:
        transfer = engine.submit([source], two_groups, got)
        transfer.wait(1)
        transfer.wait()
        transfer.wait(0)
        assert transfer.done()
        stats = engine.stats()
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert (stats["reads"], stats["bytes"], stats["in_flight"], stats["open_files"]) == (2, 3000, 0, 1)


def test_waiting_has_a_limit_and_can_be_repeated(fake: FakeKvikio, source: Source, two_groups: Any):
    fake.gate.clear()
    engine = CuFileEngine("cpu")
    buffers = fill(two_groups)
    transfer = engine.submit([source], two_groups, buffers)
    assert not transfer.done()
    with pytest.raises(TimeoutError, match=r"the transfer is not complete after 0\.01 s"):
        transfer.wait(timeout_s=0.01)
    with pytest.raises(TimeoutError, match="group 1"):
        transfer.wait(1, timeout_s=0.0)
    fake.gate.set()
    transfer.wait(timeout_s=10)
    assert buffers[0].numpy().tobytes() == content(source)[7:1007]
    with pytest.raises(ConfigError, match="no group 2"):
        transfer.wait(2)
    engine.close()


def test_files_stay_open_until_they_change(fake: FakeKvikio, source: Source, two_groups: Any):
    with CuFileEngine("cpu") as engine:
        for _ in range(3):
            engine.submit([source], two_groups, fill(two_groups)).wait()
        assert len(fake.opened) == 1
        Path(source.path).write_bytes(b"y" * 300_007)
        with pytest.raises(FileChangedError, match="changed since it was opened"):
            engine.submit([source], two_groups, fill(two_groups)).wait()
        buffers = fill(two_groups)
        engine.submit([Source.at(Path(source.path))], two_groups, buffers).wait()
        assert buffers[0].numpy().tobytes() == b"y" * 1000
        assert len(fake.opened) == 2


def test_the_number_of_open_files_is_bounded(fake: FakeKvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cufile, "_MAX_OPEN_FILES", 2)
    sources = []
    for index in range(5):
        (tmp_path / str(index)).write_bytes(bytes([index]) * 10)
        sources.append(Source.at(tmp_path / str(index)))
    plan = make_plan([(index, 0, 10, 0, 10 * index, 0) for index in range(5)], (50,))
    buffers = fill(plan)
    with CuFileEngine("cpu") as engine:
        engine.submit(sources, plan, buffers).wait()
        assert engine.stats()["open_files"] == 2
    assert buffers[0].numpy().tobytes() == b"".join(bytes([index]) * 10 for index in range(5))


def test_a_change_during_the_read_is_noticed(fake: FakeKvikio, source: Source, two_groups: Any):
    fake.gate.clear()
    with CuFileEngine("cpu") as engine:
        transfer = engine.submit([source], two_groups, fill(two_groups))
        os.utime(source.path, ns=(1, 1))
        fake.gate.set()
        for group in (None, 0, 1):
            with pytest.raises(FileChangedError, match="mtime_ns"):
                transfer.wait(group)


def test_failures_name_file_and_offset(fake: FakeKvikio, source: Source):
    plan = make_plan([(0, 7, 1000, 0, 0, 0)], (1000,))
    with CuFileEngine("cpu") as engine:
        fake.short_by = 10
        with pytest.raises(ShortReadError, match="1000 bytes wanted at offset 7, got 990") as caught:
            engine.submit([source], plan, fill(plan)).wait()
        assert source.path in str(caught.value)
        fake.failure = RuntimeError("POSIX error on pread: EOF")
        with pytest.raises(ShortReadError, match="got fewer"):
            engine.submit([source], plan, fill(plan)).wait()
        fake.failure = RuntimeError("POSIX error on pread: Input/output error")
        transfer = engine.submit([source], plan, fill(plan))
        with pytest.raises(ReadError, match=r"1000 bytes at offset 7 of .*Input/output error") as caught:
            transfer.wait()
        assert not isinstance(caught.value, ShortReadError)
        os.unlink(source.path)
        engine._handles.clear()
        with pytest.raises(ReadError, match="cannot be opened") as caught:
            engine.submit([source], plan, fill(plan)).wait()
        assert caught.value.errno == 2


def test_a_cancelled_transfer_keeps_its_memory_until_the_last_read(fake: FakeKvikio, source: Source, two_groups: Any):
    fake.gate.clear()
    engine = CuFileEngine("cpu", CuFileSettings(register_buffers=True))
    buffers = fill(two_groups)
    transfer = engine.submit([source], two_groups, buffers)
    transfer.cancel()
    transfer.cancel()
    assert transfer.done()
    with pytest.raises(TransferCancelledError):
        transfer.wait(0)
    assert engine.stats()["in_flight"] == 1
    assert cufile_transfer.PARKED[0].buffers[0] is buffers[0]
    assert len(fake.registered) == 2
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "close waits for what can still be written to"
    fake.gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not cufile_transfer.PARKED
    assert fake.registered == []


def test_a_dropped_transfer_and_engine_stay_until_the_last_read(fake: FakeKvikio, source: Source, two_groups: Any):
    fake.gate.clear()
    CuFileEngine("cpu").submit([source], two_groups, fill(two_groups))
    gc.collect()
    assert len(cufile_transfer.PARKED) == 1
    fake.gate.set()
    deadline = time.monotonic() + 10
    while cufile_transfer.PARKED and time.monotonic() < deadline:
        cufile_transfer.sweep()
    assert not cufile_transfer.PARKED


def test_an_interrupted_submit_parks_every_read_that_began(
    fake: FakeKvikio, source: Source, two_groups: Any, monkeypatch: pytest.MonkeyPatch
):
    # Raised by the tracer in front of a lock's release, where no signal is handled, an interrupt leaves it locked.
    lock = threading.RLock()
    monkeypatch.setattr(cufile, "LOCK", lock)
    monkeypatch.setattr(cufile_transfer, "LOCK", lock)
    began_to_read = n = 0
    with CuFileEngine("cpu") as engine:
        while True:
            n += 1
            fake.gate.clear()
            before = fake.begun
            buffers = fill(two_groups)
            ended = not InterruptAt(n, cufile).run(lambda: engine.submit([source], two_groups, buffers))  # noqa: B023
            began = fake.begun - before
            kept = {id(one) for entry in cufile_transfer.PARKED for one in entry.arriving}
            kept |= {id(read.future) for entry in cufile_transfer.PARKED for read in entry.reads}
            assert len(kept) == began, f"at event {n}"
            if began:
                assert any(entry.buffers[0] is buffers[0] for entry in cufile_transfer.PARKED)
            began_to_read += began
            fake.gate.set()
            deadline = time.monotonic() + 10
            while engine.stats()["in_flight"] and time.monotonic() < deadline:
                time.sleep(0.001)
            assert not engine.stats()["in_flight"], f"never let go of, at event {n}"
            if ended:
                break
    assert began_to_read > 10, f"{n} events, hardly any while reads were under way"


def test_no_other_thread_waits_for_a_list_of_reads(
    fake: FakeKvikio, source: Source, two_groups: Any, monkeypatch: pytest.MonkeyPatch
):
    def lock_is_free() -> bool:
        got = cufile_transfer.LOCK.acquire(blocking=False)
        if got:
            cufile_transfer.LOCK.release()
        return got

    with CuFileEngine("cpu") as engine, ThreadPoolExecutor(1) as other:
        free: list[bool] = []

        def listed(*fields: Any) -> cufile_transfer.Read:
            free.append(other.submit(lock_is_free).result())
            return cufile_transfer.Read(*fields)

        monkeypatch.setattr(cufile, "Read", listed)
        engine.submit([source], two_groups, fill(two_groups)).wait()
    assert free == [True, True]


def test_cancelling_what_is_complete_changes_nothing(fake: FakeKvikio, source: Source, two_groups: Any):
    with CuFileEngine("cpu") as engine:
        transfer = engine.submit([source], two_groups, fill(two_groups))
        transfer.wait()
        transfer.cancel()
        transfer.wait()


def test_a_deferred_read_that_is_cancelled_never_runs(fake: FakeKvikio, source: Source, two_groups: Any):
    fake.deferred = True
    buffers = fill(two_groups)
    with CuFileEngine("cpu") as engine:
        engine.submit([source], two_groups, buffers).cancel()
    assert all(bool((buffer == 0xEE).all()) for buffer in buffers)


def test_a_buffer_is_registered_once_while_it_is_used(fake: FakeKvikio, source: Source):
    plan = make_plan([(0, 0, 100, 0, 0, 0), (0, 100, 100, 1, 0, 0)], (100, 100))
    shared = torch.zeros(100, dtype=torch.uint8)
    fake.gate.clear()
    with CuFileEngine("cpu", CuFileSettings(register_buffers=True)) as engine:
        first = engine.submit([source], plan, [shared, shared])
        second = engine.submit([source], plan, [shared, torch.zeros(100, dtype=torch.uint8)])
        assert fake.registered.count(shared.data_ptr()) == 1
        assert len(fake.registered) == 2
        fake.gate.set()
        first.wait()
        second.wait()
        assert fake.registered == []
        fake.failure = RuntimeError("cuFile: out of BAR1 space")
        with pytest.raises(CudaError, match=r"cannot register buffer 0 .*BAR1"):
            engine.submit([source], plan, [shared, shared])


def test_settings_hold_while_an_engine_is_open(fake: FakeKvikio):
    settings = CuFileSettings(num_threads=3, task_size_bytes=1 << 20, direct_io=True, compat_mode="on")
    first = CuFileEngine("cpu", settings)
    assert fake.values["num_threads"] == 3
    assert fake.values["task_size"] == 1 << 20
    assert fake.values["auto_direct_io_read"] is True
    assert fake.values["compat_mode"] == "ON"
    second = CuFileEngine("cpu", settings)
    with pytest.raises(ConfigError, match="other settings"):
        CuFileEngine("cpu", CuFileSettings(num_threads=4))
    first.close()
    first.close()
    assert fake.values["num_threads"] == 3
    second.close()
    assert fake.values == fake.before


def test_auto_leaves_what_the_environment_told_kvikio(fake: FakeKvikio):
    fake.values["compat_mode"] = "ON"
    with CuFileEngine("cpu"):
        assert fake.values["compat_mode"] == "ON"


def test_an_engine_that_was_never_closed_gives_its_settings_up(fake: FakeKvikio):
    CuFileEngine("cpu", CuFileSettings(num_threads=3))
    gc.collect()
    CuFileEngine("cpu", CuFileSettings(num_threads=5)).close()
    assert fake.values == fake.before


def test_an_old_kvikio_without_direct_io(fake: FakeKvikio):
    del fake.values["auto_direct_io_read"]
    CuFileEngine("cpu").close()
    with pytest.raises(BackendUnavailableError, match="no direct_io"):
        CuFileEngine("cpu", CuFileSettings(direct_io=True))


def test_a_closed_engine_and_a_child_process_are_refused(fake: FakeKvikio, source: Source, two_groups: Any):
    engine = CuFileEngine("cpu")
    transfer = engine.submit([source], two_groups, fill(two_groups))
    transfer.wait()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            for use in (transfer.wait, transfer.done, engine.check_usable):
                with pytest.raises(ForkedProcessError, match="open a new engine in the child"):
                    use()
            engine.close()
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit([source], two_groups, fill(two_groups))


# --- the route ------------------------------------------------------------------------------------------------------


def test_the_posix_path_is_called_so(fake: FakeKvikio):
    with CuFileEngine("cpu") as engine:
        assert engine.route == "kvikio POSIX path: pread (page cache) -> pinned bounce buffer -> GPU"
    with CuFileEngine("cpu", CuFileSettings(direct_io=True)) as engine:
        assert "O_DIRECT" in engine.route


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> FakeCounters:
    counters = FakeCounters()
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", counters)  # type: ignore[arg-type]
    return counters


def test_gds_is_claimed_only_with_cufiles_own_counters(
    fake: FakeKvikio, counters: FakeCounters, source: Source, two_groups: Any
):
    fake.compat = False
    with CuFileEngine("cpu") as engine:
        assert "unproven: nothing was read yet" in engine.route
        engine.submit([source], two_groups, fill(two_groups)).wait()
        assert engine.route == (
            "kvikio -> cuFile -> GPU for 3000 bytes (unproven: cuFile counted no direct read (0 nvfs, 0 p2p, 0 posix))"
        )
        counters.counts["posix"] += 3
        assert "unproven" in engine.route
        counters.counts["p2p"] += 4
        assert "(proven by cuFile's counters of reads: 0 nvfs, 4 p2p, 3 posix)" in engine.route
        fake.backends["POSIX"] = 17
        assert "; 17 bytes took the kvikio POSIX path" in engine.route
        fake.backends["GDS"] = 0
        assert engine.route.startswith("kvikio POSIX path")


def test_without_counters_gds_is_unproven(
    fake: FakeKvikio, source: Source, two_groups: Any, monkeypatch: pytest.MonkeyPatch
):
    fake.compat = False
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", None)  # type: ignore[arg-type]
    with CuFileEngine("cpu") as engine:
        engine.submit([source], two_groups, fill(two_groups)).wait()
        assert "(unproven: neither" in engine.route
        assert "proven by" not in engine.route.replace("unproven", "")


# --- kvikio itself --------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture
def gpu() -> Iterator[Callable[..., CuFileEngine]]:
    engines: list[CuFileEngine] = []
    pytest.importorskip("kvikio", reason="kvikio is not installed")

    def open_one(**knobs: Any) -> CuFileEngine:
        engines.append(CuFileEngine("cuda", CuFileSettings(**knobs)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture
def shards(tmp_path: Path) -> list[Source]:
    sources = []
    for index in range(3):
        path = tmp_path / f"{index}.bin"
        path.write_bytes(np.random.default_rng(index).bytes(24_000_000 + index))
        sources.append(Source.at(path))
    return sources


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"compat_mode": "on", "task_size_bytes": 1 << 20},
        {"direct_io": True},
        {"register_buffers": True},
        {"num_threads": 1, "bounce_buffer_bytes": 4096, "task_size_bytes": 1 << 20},
    ],
    ids=str,
)
def test_gpu_bytes_equal_the_traditional_engines(
    gpu: Callable[..., CuFileEngine], shards: list[Source], knobs: dict[str, Any]
):
    generator = np.random.default_rng(11)
    extents, cursor = [], [0, 0]
    for index in range(60):
        nbytes = int(generator.integers(1, 10_000)) if index % 3 else int(generator.integers(1, 6_000_000))
        offset = int(generator.integers(0, 24_000_000 - nbytes))
        buffer = index % 2
        extents.append((index % 3, offset, nbytes, buffer, cursor[buffer], index % 4))
        cursor[buffer] += nbytes + index
    plan = make_plan(extents, (cursor[0], cursor[1]), num_groups=4)
    wanted = [torch.full((size,), 0xEE, dtype=torch.uint8, device="cuda") for size in plan.buffer_bytes]
    got = [buffer.clone() for buffer in wanted]
    TraditionalEngine("cuda").submit(shards, plan, wanted).wait()
    engine = gpu(**knobs)
    transfer = engine.submit(shards, plan, got)
    for group in (2, 0, 1, 3):
        transfer.wait(group, timeout_s=60)
    transfer.wait()
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert engine.stats()["bytes"] == int(plan.nbytes.sum())
    assert engine.route.startswith("kvikio")
    if knobs.get("compat_mode") == "on":
        assert engine.route.startswith("kvikio POSIX path")


@pytest.mark.gpu
@needs_gpu
def test_gpu_reads_wait_for_the_buffers_last_work(gpu: Callable[..., CuFileEngine], shards: list[Source]):
    engine = gpu()
    plan = make_plan([(0, 0, 8 << 20, 0, 0, 0)], (8 << 20,))
    buffer = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    engine.submit(shards, plan, [buffer]).wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        buffer.fill_(0xEE)
        transfer = engine.submit(shards, plan, [buffer])
        transfer.wait()
        assert buffer.cpu().numpy().tobytes() == content(shards[0])[: 8 << 20]


@pytest.mark.gpu
@needs_gpu
def test_gpu_truncated_and_cancelled_reads(gpu: Callable[..., CuFileEngine], shards: list[Source]):
    engine = gpu()
    plan = make_plan([(0, 23_000_000, 2_000_000, 0, 0, 0)], (2_000_000,))
    with pytest.raises(ShortReadError, match="2000000 bytes wanted at offset 23000000"):
        engine.submit(shards, plan, [torch.empty(2_000_000, dtype=torch.uint8, device="cuda")]).wait()
    whole = make_plan([(index, 0, 24_000_000, index, 0, 0) for index in range(3)], (24_000_000,) * 3)
    for _ in range(20):
        transfer = engine.submit(
            shards, whole, [torch.empty(24_000_000, dtype=torch.uint8, device="cuda") for _ in range(3)]
        )
        transfer.cancel()
        with pytest.raises(TransferCancelledError):
            transfer.wait()
    buffers = [torch.empty(24_000_000, dtype=torch.uint8, device="cuda") for _ in range(3)]
    engine.submit(shards, whole, buffers).wait()
    for buffer, shard in zip(buffers, shards, strict=True):
        assert buffer.cpu().numpy().tobytes() == content(shard)[:24_000_000]
    os.truncate(shards[0].path, 1000)
    with pytest.raises(FileChangedError):
        engine.submit(shards, whole, buffers).wait()


@pytest.mark.gpu
@needs_gpu
def test_gpu_is_left_with_kvikios_own_settings(gpu: Callable[..., CuFileEngine]):
    engine = gpu(num_threads=7, compat_mode="on")
    defaults = importlib.import_module("kvikio.defaults")
    assert defaults.get("num_threads") == 7
    engine.close()
    assert defaults.get("num_threads") != 7
    with pytest.raises(ConfigError, match="cuda:99 does not exist"):
        CuFileEngine("cuda:99")
