"""The traditional engine against plain file reads, and the checks that every engine shares."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Source, make_plan

from gdsstream.engine.base import Engine, check_buffers, check_plan
from gdsstream.engine.traditional import TraditionalEngine
from gdsstream.errors import (
    ConfigError,
    EngineClosedError,
    FileChangedError,
    ForkedProcessError,
    ReadError,
    ShortReadError,
)


def buffers_for(plan: Any, fill: int = 0xEE) -> list[torch.Tensor]:
    return [torch.full((size,), fill, dtype=torch.uint8) for size in plan.buffer_bytes]


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(7).bytes(100_003)


@pytest.fixture
def source(tmp_path: Path, content: bytes) -> Source:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    return Source.at(path)


@pytest.mark.parametrize("piece_bytes", [1, 4096, 10_000, 1 << 20])
def test_every_extent_lands_where_the_plan_says(source: Source, content: bytes, tmp_path: Path, piece_bytes: int):
    other = tmp_path / "b.bin"
    other.write_bytes(content[::-1])
    plan = make_plan(
        [(0, 17, 5000, 1, 100, 0), (1, 0, 3000, 0, 0, 1), (0, 99_003, 1000, 0, 3000, 0), (1, 50, 0, 0, 0, 1)],
        (4000, 6000),
        num_groups=2,
    )
    buffers = buffers_for(plan)
    with TraditionalEngine("cpu", piece_bytes=piece_bytes) as engine:
        transfer = engine.submit([source, Source.at(other)], plan, buffers)
        assert transfer.done()
        transfer.wait()
        transfer.wait(0)
        transfer.wait(1, timeout_s=0.0)
        stats = engine.stats()
    assert buffers[0].numpy().tobytes() == content[::-1][:3000] + content[99_003:]
    assert buffers[1].numpy().tobytes() == b"\xee" * 100 + content[17:5017] + b"\xee" * 900
    assert stats["bytes"] == 9000
    assert stats["transfers"] == 1
    assert stats["reads"] == sum(-(-size // piece_bytes) for size in (5000, 3000, 1000))


def test_longer_buffers_and_empty_plans_are_fine(source: Source, content: bytes):
    engine = TraditionalEngine()
    engine.submit([source], make_plan([], (), num_groups=0), []).wait()
    long = torch.zeros(64, dtype=torch.uint8)
    engine.submit([source], make_plan([(0, 5, 10, 0, 0, 0)], (10,)), [long]).wait()
    assert long.numpy().tobytes() == content[5:15] + bytes(54)


def test_a_view_is_written_in_place(source: Source, content: bytes):
    whole = torch.zeros(300, dtype=torch.uint8)
    TraditionalEngine().submit([source], make_plan([(0, 0, 100, 0, 0, 0)], (100,)), [whole[100:200]]).wait()
    assert whole.numpy().tobytes() == bytes(100) + content[:100] + bytes(100)


def test_reading_past_the_end_is_a_short_read(source: Source, content: bytes):
    plan = make_plan([(0, len(content) - 100, 300, 0, 0, 0)], (300,))
    transfer = TraditionalEngine().submit([source], plan, buffers_for(plan))
    with pytest.raises(ShortReadError, match=rf"300 bytes wanted at offset {len(content) - 100}, got 100") as caught:
        transfer.wait()
    assert source.path in str(caught.value)
    assert transfer.done()
    with pytest.raises(ShortReadError):
        transfer.wait(0)


@pytest.mark.parametrize("change", ["truncate", "grow", "rewrite", "replace"])
def test_a_changed_file_is_refused(source: Source, content: bytes, change: str):
    if change == "truncate":
        os.truncate(source.path, 50)
    elif change == "grow":
        os.truncate(source.path, len(content) + 1)
    elif change == "rewrite":
        Path(source.path).write_bytes(bytes(len(content)))
    else:
        other = Path(source.path + ".new")
        other.write_bytes(content)
        other.rename(source.path)
    plan = make_plan([(0, 0, 40, 0, 0, 0)], (40,))
    with pytest.raises(FileChangedError, match="changed since it was opened") as caught:
        TraditionalEngine().submit([source], plan, buffers_for(plan)).wait()
    assert source.path in str(caught.value)


@pytest.mark.parametrize("left", [0, 5000], ids=["all of it", "a part"])
def test_a_truncation_between_two_reads_is_noticed(source: Source, monkeypatch: pytest.MonkeyPatch, left: int):
    real, calls = os.preadv, []

    def truncating(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            os.truncate(source.path, left)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncating)
    plan = make_plan([(0, 0, 20_000, 0, 0, 0)], (20_000,))
    transfer = TraditionalEngine(piece_bytes=4096).submit([source], plan, buffers_for(plan))
    with pytest.raises(FileChangedError, match=f"size 100003 -> {left}"):
        transfer.wait()


def test_a_change_after_the_last_read_is_noticed(source: Source, monkeypatch: pytest.MonkeyPatch):
    real = os.preadv

    def touching(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        os.utime(source.path, ns=(1, 1))
        return got

    monkeypatch.setattr(os, "preadv", touching)
    plan = make_plan([(0, 0, 100, 0, 0, 0)], (100,))
    with pytest.raises(FileChangedError, match="mtime_ns"):
        TraditionalEngine().submit([source], plan, buffers_for(plan)).wait()


def test_partial_reads_are_continued(source: Source, content: bytes, monkeypatch: pytest.MonkeyPatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    plan = make_plan([(0, 3, 100, 0, 0, 0)], (100,))
    buffers = buffers_for(plan)
    TraditionalEngine().submit([source], plan, buffers).wait()
    assert buffers[0].numpy().tobytes() == content[3:103]


def test_failures_keep_the_systems_reason(source: Source, monkeypatch: pytest.MonkeyPatch):
    plan = make_plan([(0, 8, 100, 0, 0, 0)], (100,))
    engine = TraditionalEngine()

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        transfer = engine.submit([source], plan, buffers_for(plan))
    with pytest.raises(ReadError, match="100 bytes at offset 8 of") as caught:
        transfer.wait()
    assert caught.value.errno == errno.EIO

    os.unlink(source.path)
    with pytest.raises(ReadError, match="cannot be opened") as caught:
        engine.submit([source], plan, buffers_for(plan)).wait()
    assert caught.value.errno == errno.ENOENT


def test_no_descriptor_is_left_open(source: Source):
    engine = TraditionalEngine()
    before = len(os.listdir("/proc/self/fd"))
    for nbytes in (10, 10**6):
        plan = make_plan([(0, 0, nbytes, 0, 0, 0)], (nbytes,))
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        engine.submit([source], plan, [buffer])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_group_that_is_not_there_is_refused(source: Source):
    plan = make_plan([(0, 0, 10, 0, 0, 0)], (10,))
    transfer = TraditionalEngine().submit([source], plan, buffers_for(plan))
    for group in (1, -1):
        with pytest.raises(ConfigError, match=rf"no group {group}"):
            transfer.wait(group)
        with pytest.raises(ConfigError, match=rf"no group {group}"):
            transfer.done(group)


def test_cancelling_a_complete_transfer_changes_nothing(source: Source, content: bytes):
    plan = make_plan([(0, 0, 10, 0, 0, 0)], (10,))
    buffers = buffers_for(plan)
    transfer = TraditionalEngine().submit([source], plan, buffers)
    transfer.cancel()
    transfer.wait()
    assert buffers[0].numpy().tobytes() == content[:10]


def test_a_closed_engine_says_so(source: Source):
    with TraditionalEngine() as engine:
        pass
    engine.close()
    with pytest.raises(EngineClosedError, match="open a new one"):
        engine.submit([source], make_plan([], (), 0), [])
    with pytest.raises(EngineClosedError), engine:
        pass


def test_a_child_process_is_told_to_open_its_own(source: Source):
    plan = make_plan([(0, 0, 10, 0, 0, 0)], (10,))
    engine = TraditionalEngine()
    transfer = engine.submit([source], plan, buffers_for(plan))
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (lambda: engine.submit([source], plan, buffers_for(plan)), transfer.wait):
            try:
                use()
            except ForkedProcessError as error:
                said.append(str(error))
        engine.close()
        os.write(writable, "\n".join(said).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        said = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 2
    for line in said:
        assert f"belongs to process {os.getpid()}" in line
        assert "open a new engine in the child" in line
    transfer.wait()


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([], r"fills 2 buffer\(s\), 0 given"),
        ([torch.zeros(8, dtype=torch.uint8), torch.zeros(8)], "buffer 1 is torch.float32"),
        ([torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)], r"buffer 0 has shape \(2, 4\)"),
        ([torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)[::2]], r"strides \(2,\)"),
        ([torch.zeros(8, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)], "the plan needs 8: 3 bytes short"),
        ([torch.zeros(8, dtype=torch.uint8, device="meta"), torch.zeros(8, dtype=torch.uint8)], "buffer 0 is on meta"),
    ],
)
def test_buffers_that_do_not_fit_are_named(buffers: list[torch.Tensor], message: str):
    with pytest.raises(ConfigError, match=message):
        check_buffers(buffers, (8, 8), torch.device("cpu"))


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        ((2, 0, 1, 0, 0, 0), "extent 1 of the plan names a file"),
        ((-1, 0, 1, 0, 0, 0), "names a file"),
        ((0, -5, 1, 0, 0, 0), r"negative offset or length \(value -5\)"),
        ((0, 0, -1, 0, 0, 0), "negative offset or length"),
        ((0, 0, 1, 2, 0, 0), "names a buffer"),
        ((0, 0, 1, 0, -1, 0), "ends outside its buffer"),
        ((0, 0, 5, 0, 4, 0), "ends outside its buffer"),
        ((0, 0, 1, 0, 2**63 - 1, 0), "ends outside its buffer"),
        ((0, 0, 2**63 - 1, 0, 2**63 - 1, 0), "ends outside its buffer"),
        ((0, 0, 1, 0, 0, 1), "is in none of 1 groups"),
    ],
)
def test_extents_outside_the_plan_are_named(extent: tuple[int, int, int, int, int, int], message: str):
    plan = make_plan([(0, 0, 8, 0, 0, 0), extent], (8, 4))
    with pytest.raises(ConfigError, match=message):
        check_plan(plan, num_files=2)


def test_submit_checks_before_it_reads(source: Source):
    engine: Engine = TraditionalEngine()
    plan = make_plan([(0, 0, 10, 0, 0, 0)], (10,))
    with pytest.raises(ConfigError, match="names a file"):
        engine.submit([], plan, buffers_for(plan))
    with pytest.raises(ConfigError, match="bytes short"):
        engine.submit([source], plan, [torch.zeros(9, dtype=torch.uint8)])
    assert engine.stats()["transfers"] == 0


def test_devices_and_route(monkeypatch: pytest.MonkeyPatch):
    assert TraditionalEngine("cpu:0").device == torch.device("cpu")
    assert TraditionalEngine("cpu").route == "preadv (page cache) -> pageable memory -> CPU"
    monkeypatch.setenv("GDSSTREAM_LIBCUDA", "/a/stand-in.so")
    assert TraditionalEngine("cuda").device == torch.device("cuda:0")
    assert TraditionalEngine("cuda").route.endswith("-> GPU")
    with pytest.raises(ConfigError, match="piece_bytes"):
        TraditionalEngine(piece_bytes=0)
