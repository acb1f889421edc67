"""Parts of files that are held in host memory: which bytes they are, how long they stay, and what is refused."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Source, evict, make_plan, random_bytes, run_python

import gdsstream
from gdsstream import _native
from gdsstream.checkpoint import FileStamp
from gdsstream.engine.lanes import MAPPED
from gdsstream.engine.native import NativeEngine, OpenFile
from gdsstream.errors import (
    ConfigError,
    EngineClosedError,
    FileChangedError,
    MemoryBudgetError,
    ReadError,
    ShortReadError,
)

PAGE = 4096
KIB, MIB = 1 << 10, 1 << 20
NBYTES = 40 * PAGE + 77


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(random_bytes(NBYTES))
    return path


def open_engine(backend: str = "staged", **knobs: Any) -> NativeEngine:
    engine = gdsstream.open_engine(backend, **{"chunk_size": 64 * KIB, "staging_bytes": MIB, "num_threads": 2, **knobs})
    assert isinstance(engine, NativeEngine)
    return engine


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    with open_engine() as engine:
        yield engine


def read(engine: NativeEngine, file: OpenFile, *extents: tuple[int, int]) -> list[bytes]:
    """The bytes of (offset, nbytes) each, read in one transfer."""
    plan = make_plan([(0, o, n, i, 0, 0) for i, (o, n) in enumerate(extents)], tuple(n for _, n in extents))
    buffers = [torch.full((n,), 0xEE, dtype=torch.uint8) for _, n in extents]
    engine.submit([file], plan, buffers).wait(timeout_s=20)
    return [buffer.numpy().tobytes() for buffer in buffers]


def mappings(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def let_go(engine: NativeEngine, path: Path, windows: int = 0, nbytes: int = 0) -> bool:
    """Whether no more than `windows` are mapped and `nbytes` held; a reader thread may have been the last to let go."""
    deadline = time.monotonic() + 10
    while (mappings(path), engine.mapped_bytes) != (windows, nbytes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# --- which bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["staged", "mapped"])
def test_what_is_read_is_what_the_file_holds(path: Path, backend: str, no_leaks: None):
    data = path.read_bytes()
    windows = [(5, 100), (3 * PAGE - 1, 2), (10 * PAGE + 1, 9 * PAGE), (NBYTES - 3, 3)]
    with open_engine(backend) as engine:
        held = engine.open_windows(Source.at(path), windows)
        assert held.lane == MAPPED
        assert not held.native.host_copy
        assert read(engine, held, *windows) == [data[o : o + n] for o, n in windows]
        assert read(engine, held, *reversed(windows)) == [data[o : o + n] for o, n in reversed(windows)]
        inside = [(10 * PAGE + 1 + i, 1 + 31 * i) for i in range(100)]
        assert read(engine, held, *inside) == [data[o : o + n] for o, n in inside]
        stats = engine.stats()
        assert stats["reads"] >= 3
        assert stats["bytes"] == sum(n for _, n in [*windows, *windows, *inside])
        assert engine.route == "registered page cache -> CPU memory"


@pytest.mark.parametrize(
    ("windows", "held_bytes", "extent"),
    [
        ([(0, PAGE), (PAGE, 10)], 2 * PAGE, (0, 2 * PAGE)),
        ([(0, PAGE + 1), (2 * PAGE + 1, 1)], 3 * PAGE, (PAGE - 5, PAGE + 10)),
        ([(7 * PAGE, 3 * PAGE), (0, 8 * PAGE), (2 * PAGE, 5)], 10 * PAGE, (1, 10 * PAGE - 2)),
        ([(0, NBYTES), (5, 5)], NBYTES, (0, NBYTES)),
        ([(40 * PAGE, 1), (39 * PAGE, 1)], PAGE + 77, (39 * PAGE, PAGE + 77)),
    ],
    ids=["neighbours", "sharing a page", "overlapping", "whole", "the end"],
)
def test_windows_that_touch_are_one(
    engine: NativeEngine, path: Path, windows: list[tuple[int, int]], held_bytes: int, extent: tuple[int, int]
):
    held = engine.open_windows(Source.at(path), windows)
    assert held.native.mapped_bytes == engine.mapped_bytes == held_bytes
    start, nbytes = extent
    assert read(engine, held, extent) == [path.read_bytes()[start : start + nbytes]]


def test_records_are_gathered_from_windows(engine: NativeEngine, path: Path):
    held = [engine.open_windows(Source.at(path), [(start, 3 * PAGE)]) for start in (0, 20 * PAGE)]
    offsets = np.array([1, 20 * PAGE, 2 * PAGE + 5, 21 * PAGE + 7], dtype=np.int64)
    out = torch.zeros((4, 999), dtype=torch.uint8)
    engine.gather(held, np.array([0, 1, 0, 1], dtype=np.int32), offsets, 999, out).wait()
    data = path.read_bytes()
    assert [row.numpy().tobytes() for row in out] == [data[o : o + 999] for o in offsets]
    with pytest.raises(ConfigError, match=rf"data\.bin: 999 bytes at offset {20 * PAGE} are in none of its windows"):
        engine.gather(held, np.zeros(4, dtype=np.int32), offsets, 999, out)


def test_only_the_windows_are_brought_in(engine: NativeEngine, tmp_path: Path):
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(32 * MIB))
    evict(path)
    engine.open_windows(Source.at(path), [(0, MIB), (16 * MIB, MIB)])
    assert _native.resident_bytes(str(path), 0, MIB) == MIB
    assert _native.resident_bytes(str(path), 16 * MIB, MIB) == MIB
    assert _native.resident_bytes(str(path), 24 * MIB, 8 * MIB) == 0


def test_a_thousand_windows_are_one_mapping(engine: NativeEngine, tmp_path: Path):
    path = tmp_path / "many.bin"
    data = random_bytes(2000 * PAGE)
    path.write_bytes(data)
    windows = [(2 * i * PAGE + i, 10) for i in range(1000)]
    held = engine.open_windows(Source.at(path), windows)
    assert mappings(path) == 1
    assert held.native.mapped_bytes == 1000 * PAGE
    assert read(engine, held, *windows) == [data[o : o + 10] for o, _ in windows]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 1), (PAGE - 1, 2), (3 * PAGE - 1, 2), (PAGE, 8 * PAGE), (3 * PAGE, PAGE), (30 * PAGE, 1), (NBYTES - 1, 1)],
    ids=["before", "into", "out of", "over the gap", "in the gap", "behind", "the last byte"],
)
def test_an_extent_outside_of_the_windows(engine: NativeEngine, path: Path, offset: int, nbytes: int):
    held = engine.open_windows(Source.at(path), [(PAGE, 2 * PAGE), (8 * PAGE, PAGE)])
    with pytest.raises(
        ConfigError, match=rf"data\.bin: {nbytes} bytes at offset {offset} are in none of its windows.*open it with a"
    ):
        read(engine, held, (PAGE, 10), (offset, nbytes))
    assert engine.stats()["tasks"] == engine.stats()["active_us"] == 0
    assert read(engine, held, (8 * PAGE, PAGE)) == [path.read_bytes()[8 * PAGE : 9 * PAGE]]


@pytest.mark.parametrize("window", [(0, NBYTES + 1), (NBYTES + 1, 0), (NBYTES, 1), (-1, 5), (5, -1), (1, 2**63 - 1)])
def test_a_window_that_the_file_does_not_have(
    engine: NativeEngine, path: Path, window: tuple[int, int], no_leaks: None
):
    with pytest.raises(ConfigError, match=rf"data\.bin: .*window.* {window[1]} bytes at offset {window[0]}"):
        engine.open_windows(Source.at(path), [(0, 10), window])
    assert engine.mapped_bytes == mappings(path) == 0
    engine.close()


@pytest.mark.parametrize("windows", [[], [(0, 0)], [(NBYTES, 0), (5, 0)]])
def test_windows_without_bytes_hold_nothing(engine: NativeEngine, path: Path, windows: Sequence[tuple[int, int]]):
    held = engine.open_windows(Source.at(path), windows)
    assert held.native.mapped
    assert held.native.mapped_bytes == mappings(path) == 0
    assert read(engine, held, (5, 0)) == [b""]
    with pytest.raises(ConfigError, match="none of its windows"):
        read(engine, held, (0, 1))


def test_an_empty_file(engine: NativeEngine, tmp_path: Path):
    (tmp_path / "empty").touch()
    held = engine.open_windows(Source.at(tmp_path / "empty"), [(0, 0)])
    assert read(engine, held, (0, 0)) == [b""]


def test_what_is_not_held_cannot_be_read_from_memory(engine: NativeEngine, path: Path):
    file = engine.open([Source.at(path)])[0]
    with pytest.raises(ConfigError, match=r"data\.bin: 7 bytes at offset 3 are not held in host memory"):
        read(engine, file._replace(lane=MAPPED), (3, 7))


def test_a_file_is_mapped_once(path: Path):
    native = _native.File(str(path), tuple(FileStamp.of(path)))
    engine = _native.Engine(
        device=-1,
        slot_bytes=64 * KIB,
        staging_bytes=64 * KIB,
        numa_node=-1,
        cpus=[],
        lanes=[_native.Lane("mapped", direct=False, threads=1, depth=1, read_bytes=64 * KIB)],
    )
    assert not native.mapped
    engine.map(native, [(PAGE, PAGE)])
    engine.map(native, [(PAGE + 5, 10), (0, 0)])
    for more in ([(0, PAGE)], [(PAGE, PAGE + 1)], None):
        with pytest.raises(ConfigError, match="none of its windows"):
            engine.map(native, more)
    assert native.mapped_bytes == engine.counters()["mapped_bytes"] == PAGE
    engine.close()


# --- room -------------------------------------------------------------------------------------------------------------


def test_more_than_the_machine_has(engine: NativeEngine, tmp_path: Path, no_leaks: None):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 42)
    wanted = (1 << 42) - 5
    with pytest.raises(MemoryBudgetError, match=rf"sparse: holding {wanted} bytes .* \d+ can be spared.*hold less"):
        engine.open_windows(Source.at(path), [(5, wanted)])
    held = engine.open_windows(Source.at(path), [(1 << 41, 10)])
    assert read(engine, held, (1 << 41, 10)) == [bytes(10)]
    assert engine.mapped_bytes == PAGE
    del held
    engine.close()


def test_windows_count_against_the_budget_of_whole_files(path: Path, make_checkpoint: Callable[..., Path]):
    second = make_checkpoint("second.safetensors")
    budget = second.stat().st_size + PAGE - 1
    with open_engine("mapped", host_cache_bytes=budget) as engine:
        held = engine.open_windows(Source.at(path), [(0, 1)])
        with pytest.raises(MemoryBudgetError, match=rf"host_cache_bytes={budget}, {PAGE} in use"):
            engine.open([Source.at(second)])
        del held
        assert engine.open([Source.at(second)])[0].lane == MAPPED


# --- files that change ------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, PAGE)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(NBYTES))
    other.replace(path)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")


CHANGES = pytest.mark.parametrize("change", [truncate, replace, rewrite])


@CHANGES
def test_changed_before_it_is_held(engine: NativeEngine, path: Path, change: Callable[[Path], None], no_leaks: None):
    source = Source.at(path)
    change(path)
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.open_windows(source, [(0, NBYTES)])
    assert engine.mapped_bytes == 0
    engine.close()


@CHANGES
def test_changed_between_opening_and_holding(path: Path, change: Callable[[Path], None], engine: NativeEngine):
    native = _native.File(str(path), tuple(FileStamp.of(path)))
    change(path)
    with pytest.raises(FileChangedError, match=r"data\.bin: it.* while it was mapped"):
        engine._native.map(native, [(20 * PAGE, 10 * PAGE)])
    assert not native.mapped
    assert engine.mapped_bytes == mappings(path) == 0


@CHANGES
def test_changed_while_it_is_held(engine: NativeEngine, path: Path, change: Callable[[Path], None], no_leaks: None):
    held = engine.open_windows(Source.at(path), [(0, PAGE), (20 * PAGE, NBYTES - 20 * PAGE)])
    assert read(engine, held, (0, 5)) == [path.read_bytes()[:5]]
    change(path)
    for extent in ((0, 5), (NBYTES - 5, 5)):
        with pytest.raises(FileChangedError, match=r"data\.bin: it"):
            read(engine, held, extent)
    now = engine.open_windows(Source.at(path), [(0, PAGE)])
    assert read(engine, now, (0, PAGE)) == [path.read_bytes()[:PAGE]]
    engine.close()


@CHANGES
def test_changed_while_it_is_read(path: Path, change: Callable[[Path], None], no_leaks: None):
    """The pages behind the cut are gone under the reads, which is an error and no signal."""
    with open_engine(faults="delay_us=200000") as engine:
        held = engine.open_windows(Source.at(path), [(0, NBYTES)])
        out = torch.zeros(NBYTES, dtype=torch.uint8)
        transfer = engine.submit([held], make_plan([(0, 0, NBYTES, 0, 0, 0)], (NBYTES,)), [out])
        time.sleep(0.02)
        assert not transfer.done(), "the change comes too late to test anything"
        change(path)
        with pytest.raises(FileChangedError, match=r"data\.bin"):
            transfer.wait(timeout_s=20)


def test_storage_that_fails_under_the_reads(path: Path, no_leaks: None):
    for fault, error in (("eio@2", ReadError), ("short@2", ShortReadError)):
        with open_engine(faults=fault) as engine:
            held = engine.open_windows(Source.at(path), [(0, NBYTES)])
            with pytest.raises(error, match=r"data\.bin: read of \d+ bytes at offset \d+"):
                read(engine, held, (0, NBYTES))
            assert read(engine, held, (0, NBYTES)) == [path.read_bytes()]


# --- how long they stay -----------------------------------------------------------------------------------------------


def test_layers_of_one_file_come_and_go(engine: NativeEngine, path: Path, no_leaks: None):
    data = path.read_bytes()
    layers = {i: engine.open_windows(Source.at(path), [(i * 10 * PAGE, 10 * PAGE)]) for i in range(4)}
    assert mappings(path) == 4
    for gone in (1, 3, 0):
        del layers[gone]
        assert let_go(engine, path, len(layers), len(layers) * 10 * PAGE)
        assert engine.stats()["mapped_bytes"] == len(layers) * 10 * PAGE
        for i in layers:
            assert read(engine, layers[i], (i * 10 * PAGE, 10 * PAGE)) == [data[i * 10 * PAGE : (i + 1) * 10 * PAGE]]
    layers[1] = engine.open_windows(layers[2], [(10 * PAGE + 5, 7)])
    assert read(engine, layers[1], (10 * PAGE + 5, 7)) == [data[10 * PAGE + 5 :][:7]]
    layers.clear()
    assert let_go(engine, path)
    engine.close()


def test_several_layers_in_one_transfer(engine: NativeEngine, path: Path):
    data = path.read_bytes()
    sources = [engine.open_windows(Source.at(path), [(i * PAGE, PAGE)]) for i in (7, 2)]
    sources += engine.open([Source.at(path)])
    extents = [(0, 7 * PAGE + 3, 100), (2, 5, 9 * PAGE), (1, 2 * PAGE, PAGE), (0, 7 * PAGE, PAGE)]
    plan = make_plan([(f, o, n, i, 0, i % 2) for i, (f, o, n) in enumerate(extents)], (100, 9 * PAGE, PAGE, PAGE), 2)
    buffers = [torch.zeros(n, dtype=torch.uint8) for _, _, n in extents]
    transfer = engine.submit(sources, plan, buffers)
    for group in (1, 0):
        transfer.wait(group, timeout_s=20)
    transfer.wait()
    assert [buffer.numpy().tobytes() for buffer in buffers] == [data[o : o + n] for _, o, n in extents]
    assert engine.route == "page cache by pread x2 -> CPU memory + registered page cache -> CPU memory"


def test_a_transfer_keeps_what_it_reads_from(path: Path, no_leaks: None):
    with open_engine(faults="delay_us=60000") as engine:
        held = engine.open_windows(Source.at(path), [(PAGE, 30 * PAGE)])
        out = torch.zeros(30 * PAGE, dtype=torch.uint8)
        transfer = engine.submit([held], make_plan([(0, PAGE, 30 * PAGE, 0, 0, 0)], (30 * PAGE,)), [out])
        del held
        assert engine.mapped_bytes == 30 * PAGE
        transfer.wait()
        assert out.numpy().tobytes() == path.read_bytes()[PAGE : 31 * PAGE]
        del transfer
        assert let_go(engine, path)


def test_they_outlive_their_engine(path: Path, no_leaks: None):
    engine = open_engine()
    held = engine.open_windows(Source.at(path), [(0, PAGE)])
    engine.close()
    engine.close()
    assert mappings(path) == 1
    with pytest.raises(EngineClosedError):
        engine.open_windows(Source.at(path), [(0, PAGE)])
    with pytest.raises(EngineClosedError):
        read(engine, held, (0, 5))
    del engine
    gc.collect()
    with open_engine() as other:
        assert read(other, held, (0, PAGE)) == [path.read_bytes()[:PAGE]]
        assert other.mapped_bytes == 0
        del held
        assert let_go(other, path)


def test_a_forked_child_is_refused(path: Path):
    code = """
import os, sys
from pathlib import Path
import gdsstream
from support import Source
engine = gdsstream.open_engine("staged")
held = [engine.open_windows(Source.at(Path(sys.argv[1])), [(0, 4096)])]
pid = os.fork()
if pid == 0:
    status = 1
    try:
        engine.open_windows(Source.at(Path(sys.argv[1])), [(0, 4096)])
    except gdsstream.ForkedProcessError:
        held.clear()
        status = 0
    os._exit(status)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_python(code, path)[0].strip() == "0"


# --- what was waited for ----------------------------------------------------------------------------------------------


def test_active_time_is_counted_once_and_only_while_bytes_are_read(path: Path):
    with open_engine(faults="delay_us=30000", num_threads=1, direct_io=False) as engine:
        assert engine.stats()["active_us"] == 0
        began = time.perf_counter()
        sources = engine.open([Source.at(path)])
        plan = make_plan([(0, 0, NBYTES, 0, 0, 0)], (NBYTES,))
        transfers = []
        for _ in range(2):
            transfers.append(engine.submit(sources, plan, [torch.zeros(NBYTES, dtype=torch.uint8)]))
            time.sleep(0.05)
        assert 0 < engine.stats()["active_us"] <= (time.perf_counter() - began) * 1e6
        for transfer in transfers:
            transfer.wait(timeout_s=20)
        # Two transfers of three reads each, of 30 ms and more.
        active_us = engine.stats()["active_us"]
        assert 160_000 < active_us <= (time.perf_counter() - began) * 1e6
        time.sleep(0.05)
        assert engine.stats()["active_us"] == active_us
        transfers[0].cancel()
        engine.submit(sources, plan, [torch.zeros(NBYTES, dtype=torch.uint8)]).cancel()
        engine.close()
        stopped_us = engine.stats()["active_us"]
        assert stopped_us >= active_us
        time.sleep(0.02)
        assert engine.stats()["active_us"] == stopped_us
        assert engine.stats()["ring_wait_us"] == 0
