"""Statistics: what is counted, what it says, and that nothing is counted unless somebody asked."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_kvikio import FakeKvikio
from stats_support import engine_stats, io_of, write_data
from support import Source, build_library, make_plan, need_direct, need_uring, random_raw, run_python, write_checkpoint

import gdsstream
from gdsstream import _native, stats_publisher
from gdsstream.engine import cufile_transfer, open_engine
from gdsstream.engine.cufile import CuFileEngine
from gdsstream.errors import ConfigError, ReadError, ShortReadError, WriteError
from gdsstream.stats import Operations, ProcessStats, process_stats

MIB = 1 << 20
NATIVE = Path(__file__).resolve().parent / "native"


def plan_of(*extents: tuple[int, int]) -> Any:
    """(offset, nbytes) each, end to end in one buffer."""
    rows, end = [], 0
    for offset, nbytes in extents:
        rows.append((0, offset, nbytes, 0, end, 0))
        end += nbytes
    return make_plan(rows, (end,))


def read(engine: Any, path: Path, *extents: tuple[int, int]) -> torch.Tensor:
    plan = plan_of(*extents or [(0, path.stat().st_size)])
    out = torch.empty(plan.buffer_bytes[0], dtype=torch.uint8)
    engine.submit([Source.at(path)], plan, [out]).wait()
    return out


# --- what is counted --------------------------------------------------------------------------------------------------


def test_nothing_is_counted_unless_asked_for(counting: Path, checkpoint: Path):
    before = threading.active_count()
    gdsstream.load_file(checkpoint)
    gdsstream.save_file({"a": torch.zeros(9)}, checkpoint.with_name("b.safetensors"))
    found = process_stats()
    assert (found.level, found.reads, found.writes, found.engines) == (0, Operations(), Operations(), ())
    assert threading.active_count() == before
    assert list(counting.iterdir()) == []


@pytest.mark.parametrize("level", [1, 2, 3])
def test_reads_through_the_page_cache(counting: Path, tmp_path: Path, level: int):
    path = write_data(tmp_path, 9 * MIB + 5)
    with open_engine("staged", num_threads=3, direct_io=False, stats=level) as engine:
        read(engine, path)
        read(engine, path, (1, 100), (5000, 5))
        found, known = process_stats(), engine.stats()
    assert found.level == level
    assert found.reads.operations == known["reads"] > 0
    assert found.reads.bytes == known["read_bytes"] == 9 * MIB + 110
    assert (found.reads.errors, found.writes) == (0, Operations())
    assert 0 < found.reads.timed <= found.reads.operations
    assert 0 < found.reads.longest_ns <= found.reads.latency_ns
    assert 0 < found.read_active_s < 10
    assert found.bandwidth("read") == found.reads.bytes / found.read_active_s
    assert found.bandwidth("write") is None
    assert sum(found.reads.sizes) == (found.reads.operations if level > 1 else 0)
    assert sum(found.reads.latencies) == (found.reads.timed if level > 1 else 0)
    assert (found.reads.percentile_s(50) is not None) == (level > 1)
    assert bool(found.engines) == (level > 2)
    if level == 3:
        assert io_of("page cache") == found.reads
        assert io_of("direct") == io_of("mapped") == Operations()


def test_large_reads_are_all_timed_and_small_ones_sometimes(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, 4 * MIB)
    with open_engine("staged", num_threads=1, direct_io=False, chunk_size=MIB, stats=2) as engine:
        read(engine, path)
        large = process_stats().reads
        read(engine, path, *((offset, 4096) for offset in range(0, 4 * MIB, 8192)))
        small = process_stats().reads - large
    assert large.timed == large.operations
    assert small.sizes[1] == small.operations == 512
    assert small.timed == 512 / 16


def test_latency_is_how_long_a_read_takes(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, MIB)
    with open_engine("staged", num_threads=1, direct_io=False, chunk_size=MIB, faults="delay_us=30000", stats=2) as one:
        read(one, path)
    io = process_stats().reads
    assert io.average_s is not None
    assert 0.03 <= io.average_s < 1
    middle = io.percentile_s(50)
    assert middle is not None
    assert 0.028 <= middle <= io.longest_ns / 1e9


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
def test_reads_past_the_page_cache_have_a_route_of_their_own(counting: Path, tmp_path: Path, reader: str):
    need_direct(tmp_path)
    if reader == "io_uring":
        need_uring()
    path = write_data(tmp_path, 3 * MIB + 7)
    with open_engine("staged", reader=reader, direct_io=True, num_threads=2, stats=3) as engine:
        read(engine, path)
        io = io_of("direct")
        assert io.operations == engine.stats()["reads"] > 0
        assert io.bytes >= 3 * MIB + 7
        assert io.timed == io.operations
        assert engine_stats().slots > 0
        assert (engine_stats().pinned_bytes, engine_stats().slots_held) == (0, 0)
    assert io_of("page cache") == Operations()


def test_mapped_files_are_counted_and_so_is_what_they_hold(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, MIB)
    with open_engine("mapped", host_cache_bytes=8 * MIB, stats=3) as engine:
        opened = engine.open([Source.at(path)])  # type: ignore[attr-defined]
        engine.submit(opened, plan_of((0, MIB)), [torch.empty(MIB, dtype=torch.uint8)]).wait()
        assert io_of("mapped", "mapped").bytes == MIB
        assert process_stats().registered_bytes == engine_stats("mapped").registered_bytes == MIB
        del opened
    gc.collect()
    assert process_stats().registered_bytes == 0


@pytest.mark.parametrize(("faults", "kind"), [("eio@1", ReadError), ("short@1", ShortReadError)])
def test_a_read_that_fails_is_an_error_and_no_operation(
    counting: Path, tmp_path: Path, faults: str, kind: type[Exception]
):
    path = write_data(tmp_path, MIB)
    with open_engine("staged", num_threads=1, direct_io=False, chunk_size=MIB, faults=faults, stats=2) as engine:
        with pytest.raises(kind):
            read(engine, path)
        assert (process_stats().reads.errors, process_stats().reads.operations) == (1, 0)
        read(engine, path)
    io = process_stats().reads
    assert (io.errors, io.bytes) == (1, MIB)
    assert io.operations == sum(io.sizes) > 0


def test_a_read_that_cannot_be_started_is_an_error(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, MIB)
    engine = open_engine("staged", num_threads=1, direct_io=False, faults="nomem@1", stats=1)
    with engine, pytest.raises(gdsstream.MemoryBudgetError):
        read(engine, path)
    assert process_stats().reads.errors == 1


@pytest.mark.parametrize("mode", ["eintr", "half"])
def test_calls_that_have_to_be_made_again_are_retries(tmp_path: Path, mode: str):
    library = build_library(tmp_path / "libinterrupt.so", [NATIVE / "interrupt_reads.cpp"])
    path = write_data(tmp_path, MIB)
    code = """
import sys, torch, gdsstream
from support import Source, make_plan
from gdsstream.stats import process_stats
with gdsstream.open_engine("staged", num_threads=1, direct_io=False, chunk_size=1 << 18, stats=1) as engine:
    out = torch.empty(1 << 20, dtype=torch.uint8)
    plan = make_plan([(0, 0, 1 << 20, 0, 0, 0)], (1 << 20,))
    from pathlib import Path
    engine.submit([Source.at(Path(sys.argv[1]))], plan, [out]).wait()
assert out.numpy().tobytes() == open(sys.argv[1], "rb").read()
io = process_stats().reads
print(io.operations, io.errors, io.retries)
"""
    out, _ = run_python(code, path, LD_PRELOAD=str(library), INTERRUPT_READS=mode, XDG_RUNTIME_DIR=str(tmp_path))
    count, errors, retries = map(int, out.split())
    assert (errors, retries) == (0, count)
    assert count >= 4


def test_the_traditional_engine_counts_too(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, 3 * MIB)
    with open_engine("traditional", stats=3) as engine:
        read(engine, path, (0, MIB), (MIB, 17))
        assert io_of("traditional", "traditional").bytes == MIB + 17
        path.write_bytes(b"x")
        source = Source.at(path)._replace(stamp=Source.at(path).stamp)
        transfer = engine.submit([source], plan_of((0, 100)), [torch.empty(100, dtype=torch.uint8)])
        with pytest.raises(ShortReadError):
            transfer.wait()
    io = process_stats().reads
    assert (io.operations, io.timed, io.errors) == (2, 2, 1)
    assert process_stats().read_active_s >= io.latency_ns / 1e9


def test_kvikio_is_counted_by_extent(counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeKvikio()
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake.defaults)
    monkeypatch.setattr(CuFileEngine, "_require_cuda", lambda self: None)
    monkeypatch.setattr(CuFileEngine, "_drain_stream", lambda self: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cufile_transfer.REGISTRATIONS, "_users", {})
    path = write_data(tmp_path, MIB)
    with CuFileEngine("cpu", stats=3) as engine:
        read(engine, path, (0, 1000), (5000, 2000))
        assert (io_of("cufile", "cufile").operations, io_of("cufile", "cufile").bytes) == (2, 3000)
        busy = process_stats().read_active_s
        time.sleep(0.02)
        assert process_stats().read_active_s == busy > 0, "nothing is under way any more"
        fake.failure = OSError(5, "Input/output error")
        with pytest.raises(ReadError):
            read(engine, path)
        assert io_of("cufile", "cufile").errors == 1
        cufile_transfer.REGISTRATIONS.add(FakeKvikio(), torch.empty(4096, dtype=torch.uint8))
        assert process_stats().registered_bytes == 4096


def test_what_is_saved_is_counted_as_written(counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDSSTREAM_STATS", "3")
    path = tmp_path / "saved.safetensors"
    gdsstream.save_file({"a": torch.zeros(20 * MIB, dtype=torch.uint8)}, path)
    found = process_stats()
    assert (found.writes.bytes, found.reads) == (path.stat().st_size, Operations())
    assert found.writes.operations == 2
    assert found.writes.timed == sum(found.writes.sizes) == 2
    assert found.write_active_s >= found.writes.latency_ns / 1e9
    assert [(one.engine, one.routes[0].route, one.routes[0].direction) for one in found.engines] == [
        ("writer", "save", "write")
    ]
    monkeypatch.setenv("GDSSTREAM_STATS", "9")
    with pytest.raises(ConfigError, match="stats is 9"):
        gdsstream.save_file({"a": torch.zeros(2)}, path)
    assert path.stat().st_size > 20 * MIB
    assert os.listdir(path.parent).count(path.name) == 1


def test_a_failed_write_is_an_error(counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDSSTREAM_STATS", "1")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(WriteError):
        gdsstream.save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert (process_stats().writes.errors, process_stats().writes.operations) == (1, 0)


def test_the_environment_turns_it_on_and_an_argument_off(
    counting: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GDSSTREAM_STATS", "2")
    gdsstream.load_file(checkpoint, stats=0)
    assert process_stats().level == 0
    gdsstream.load_file(checkpoint)
    assert process_stats().level == 2
    assert process_stats().reads.bytes > 2 * 10**6


# --- sums over engines ------------------------------------------------------------------------------------------------


def test_engines_of_one_kind_are_added_up_and_remembered(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, MIB)
    for _ in range(3):
        with open_engine("staged", direct_io=False, num_threads=1, stats=3) as engine:
            read(engine, path)
    kept = open_engine("staged", direct_io=False, num_threads=1, stats=3)
    read(kept, path)
    dropped = open_engine("staged", direct_io=False, num_threads=1, stats=3)
    read(dropped, path)
    assert engine_stats().open == 2
    del engine, dropped
    gc.collect()
    for _ in range(3):  # at the second look the books of what is gone are closed
        assert io_of("page cache").bytes == 5 * MIB
        assert engine_stats().open == 1
    active = engine_stats().active_s
    kept.close()
    assert engine_stats().open == 0
    assert engine_stats().active_s == active


def test_levels_of_engines_may_differ(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, MIB)
    for level in (0, 1, 3):
        with open_engine("staged", direct_io=False, num_threads=1, stats=level) as engine:
            read(engine, path)
    found = process_stats()
    assert (found.level, found.reads.bytes, io_of("page cache").bytes) == (3, 2 * MIB, MIB)
    assert sum(found.reads.sizes) == io_of("page cache").operations


def test_no_count_is_lost_between_threads(counting: Path, tmp_path: Path):
    path = write_data(tmp_path, MIB)
    with open_engine("staged", direct_io=False, num_threads=4, stats=3) as engine:
        threads = [
            threading.Thread(target=lambda: [read(engine, path, *((i * 512, 512) for i in range(2048)))])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            process_stats()
        for thread in threads:
            thread.join()
        io = process_stats().reads
        assert io.operations == engine.stats()["reads"]
    assert io.bytes == 4 * MIB
    assert sum(io.sizes) == io.operations


def test_time_under_way_counts_once_however_much_overlaps():
    process = _native.Activity()
    one, other = _native.Activity(process), _native.Activity(process)
    one.begin(2)
    other.begin()
    time.sleep(0.05)
    one.end()
    other.end()
    busy = process.microseconds()
    assert busy >= 50_000
    assert other.microseconds() >= 50_000
    one.end()
    end = process.microseconds()
    time.sleep(0.02)
    assert process.microseconds() == end >= busy
    assert end <= one.microseconds() + 1000


# --- NVTX -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has NVTX of its own")
def test_transfers_are_ranges_of_nvtx_if_asked_for(tmp_path: Path, checkpoint: Path):
    build_library(tmp_path / "libnvToolsExt.so.1", [NATIVE / "fake_nvtx.cpp"])
    code = "import sys, gdsstream; gdsstream.load_file(sys.argv[1])"
    said = tmp_path / "ranges.txt"
    run_python(code, checkpoint, LD_LIBRARY_PATH=str(tmp_path), FAKE_NVTX=str(said))
    assert not said.exists()
    run_python(code, checkpoint, LD_LIBRARY_PATH=str(tmp_path), FAKE_NVTX=str(said), GDSSTREAM_NVTX="1")
    lines = [line.split(maxsplit=2) for line in said.read_text().splitlines()]
    begun = {line[1]: line[2] for line in lines if line[0] == "begin"}
    assert begun
    assert {line[1] for line in lines if line[0] == "end"} == begun.keys()
    assert all(re.fullmatch(r"gdsstream staged \d+ bytes", text) for text in begun.values())
    _, warning = run_python(code, checkpoint, GDSSTREAM_NVTX="1")
    assert "GDSSTREAM_NVTX=1 has no effect: torch was built without NVTX" in warning


def test_statistics_stop_with_the_publisher_and_start_again(counting: Path, checkpoint: Path):
    for _ in range(2):
        with open_engine("staged", stats=1):
            assert [thread.name for thread in threading.enumerate()].count("gdsstream-stats") == 1
        stats_publisher.stop_publishing()
        assert "gdsstream-stats" not in [thread.name for thread in threading.enumerate()]
        assert list((counting / "gdsstream").iterdir()) == []


def test_a_checkpoint_read_and_saved_adds_up(counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDSSTREAM_STATS", "3")
    path = write_checkpoint(tmp_path / "c.safetensors", {f"t{i}": random_raw("U8", (70_001,), i) for i in range(40)})
    tensors = gdsstream.load_file(path)
    gdsstream.save_file(tensors, tmp_path / "d.safetensors")
    found: ProcessStats = process_stats()
    assert found.reads.bytes == 40 * 70_001
    assert found.writes.bytes == (tmp_path / "d.safetensors").stat().st_size
    assert ProcessStats.of(found.as_dict()) == found
