"""Storage that fails, and files that change while they are read: errors, never garbage."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_support import CHUNK, MIB, NBYTES, READERS, WHOLE, buffers_for, drained, plan_of, read_all, write_data
from support import need_reader, random_bytes, source_of, write_checkpoint

import gdsstream
from gdsstream.checkpoint import Checkpoint
from gdsstream.engine import Engine
from gdsstream.errors import (
    ConfigError,
    FileChangedError,
    GdsStreamError,
    ReadError,
    ShortReadError,
)
from gdsstream.plan import plan_separate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def check_place(message: str, path: Path) -> int:
    """That a message names the file and a read in the middle of it; how many bytes that wanted."""
    found = re.match(rf"{re.escape(str(path))}: read of (\d+) bytes at offset (\d+) ", message)
    assert found, message
    wanted, offset = int(found[1]), int(found[2])
    assert 0 < wanted <= CHUNK
    assert 0 < offset <= NBYTES - wanted
    return wanted


def rings() -> set[int]:
    """Descriptors of this process's io_urings."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is gone
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[io_uring]":
                found.add(int(name))
    return found


# --- reads that fail --------------------------------------------------------------------------------------------------


def test_a_failed_read_names_file_offset_and_reason(
    path: Path, reader: dict[str, Any], opened: Callable[..., Engine], no_leaks: None
):
    engine = opened(**reader, faults="eio@5")
    transfer = engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE))
    with pytest.raises(ReadError, match=r"failed: .*check") as caught:
        transfer.wait()
    check_place(str(caught.value), path)
    assert caught.value.errno == errno.EIO
    assert type(caught.value) is ReadError
    assert transfer.done()
    with pytest.raises(ReadError, match="failed"):
        transfer.wait()  # and again
    del transfer
    assert read_all(engine, path) == path.read_bytes()
    stats = drained(engine)
    assert stats["quarantined"] == stats["staging_slots_held"] == 0
    assert stats["failed_tasks"] >= 1
    engine.close()


def test_a_short_read_names_what_arrived(
    path: Path, reader: dict[str, Any], opened: Callable[..., Engine], no_leaks: None
):
    engine = opened(**reader, faults="short@3,short@17")
    transfer = engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE))
    with pytest.raises(ShortReadError, match=rf"although the file has {NBYTES} bytes") as caught:
        transfer.wait(timeout_s=20)
    wanted = check_place(str(caught.value), path)
    assert f"ended after {wanted // 2} " in str(caught.value)
    del caught
    transfer = None  # type: ignore[assignment]
    for _ in range(3):  # the reads that were under way count too: the second fault comes somewhere in here
        try:
            assert read_all(engine, path) == path.read_bytes()
        except ShortReadError:
            continue
    assert read_all(engine, path) == path.read_bytes()
    engine.close()


def test_the_last_odd_bytes_are_wanted_exactly(path: Path, reader: dict[str, Any], opened: Callable[..., Engine]):
    engine = opened(**reader)
    plan = plan_of((NBYTES - 3, 3), (NBYTES - 4096, 4096), (1, 4097))
    buffers = buffers_for(plan)
    engine.submit([source_of(path)], plan, buffers).wait()
    data = path.read_bytes()
    assert [buffer.numpy().tobytes() for buffer in buffers] == [data[-3:], data[-4096:], data[1:4098]]


def test_an_io_uring_that_breaks_down_fails_what_it_has_and_what_comes(path: Path, opened: Callable[..., Engine]):
    need_reader(READERS["io_uring"], path.parent)
    before = rings()
    engine = opened(**READERS["io_uring"])
    assert read_all(engine, path) == path.read_bytes()
    (ring,) = rings() - before
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), ring)
    with pytest.raises(ReadError, match=re.escape(os.strerror(errno.EOPNOTSUPP))):
        read_all(engine, path)
    with pytest.raises(GdsStreamError, match="io_uring broke down earlier"):
        read_all(engine, path)
    assert drained(engine)["quarantined"] == 0


@pytest.mark.parametrize("extent", [(NBYTES - 4, 5), (NBYTES + 1, 1), (0, NBYTES + 1), (2**62, 8)])
def test_a_plan_beyond_the_end_is_refused(
    path: Path, reader: dict[str, Any], opened: Callable[..., Engine], extent: tuple[int, int]
):
    engine = opened(**reader)
    plan = plan_of((0, min(extent[1], 8)))
    plan.file_offset[:], plan.nbytes[:] = extent
    whole = torch.empty(2 * MIB, dtype=torch.uint8)
    with pytest.raises((ConfigError, ShortReadError), match=r"data\.bin|outside its buffer"):
        engine.submit([source_of(path)], plan, [whole]).wait()
    assert read_all(engine, path) == path.read_bytes()


def test_a_file_that_is_gone(path: Path, reader: dict[str, Any], opened: Callable[..., Engine], no_leaks: None):
    engine = opened(**reader)
    source = source_of(path)
    path.unlink()
    with pytest.raises(ReadError, match=r"data\.bin") as caught:
        engine.submit([source], WHOLE, buffers_for(WHOLE)).wait()
    assert caught.value.errno == errno.ENOENT
    os.mkfifo(path)  # whoever opens it for reading would wait for a writer
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.submit([source], WHOLE, buffers_for(WHOLE)).wait()
    engine.close()


def test_groups_that_had_landed_stay(path: Path, opened: Callable[..., Engine], reader: dict[str, Any]):
    engine = opened(**reader, faults="delay_us=20000,eio@9")
    plan = plan_of((0, 1000), (CHUNK, NBYTES - CHUNK), groups=(0, 1))
    buffers = buffers_for(plan)
    transfer = engine.submit([source_of(path)], plan, buffers)
    transfer.wait(0)
    assert not transfer.done(1)
    first = buffers[0].numpy().tobytes()
    assert first == path.read_bytes()[:1000]
    with pytest.raises(ReadError, match="failed"):
        transfer.wait(1)
    with pytest.raises(ReadError, match="failed"):
        transfer.wait()
    assert buffers[0].numpy().tobytes() == first
    for group in (2, -1):
        with pytest.raises(ConfigError, match=f"no group {group}"):
            transfer.wait(group)


@pytest.mark.parametrize("faults", ["eio", "eio@x", "eio@", "delay_us", "explode@3", "eio@1;short@2"])
def test_faults_that_are_not_understood(path: Path, opened: Callable[..., Engine], faults: str):
    with pytest.raises(ConfigError, match="fault"):
        read_all(opened(backend="staged", faults=faults), path)


# --- files that change ------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(CHUNK // 2)


def rewrite(path: Path) -> None:
    time.sleep(0.02)  # beyond the resolution of the file's times
    with path.open("r+b") as file:
        file.write(bytes(NBYTES))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(NBYTES))
    other.rename(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = pytest.mark.parametrize("change", [truncate, rewrite, replace, grow])


@CHANGES
def test_changed_between_stamp_and_submit(
    path: Path,
    reader: dict[str, Any],
    opened: Callable[..., Engine],
    change: Callable[[Path], None],
    no_leaks: None,
):
    engine = opened(**reader)
    stale = source_of(path)
    change(path)
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.submit([stale], WHOLE, buffers_for(WHOLE)).wait()
    if change is not truncate:
        assert read_all(engine, path) == path.read_bytes()[:NBYTES]
    engine.close()


@CHANGES
def test_changed_while_it_is_open(
    path: Path,
    reader: dict[str, Any],
    opened: Callable[..., Engine],
    change: Callable[[Path], None],
    no_leaks: None,
):
    engine = opened(**reader)
    kept = engine.open([source_of(path)])  # type: ignore[attr-defined]
    buffers = buffers_for(WHOLE)
    engine.submit(kept, WHOLE, buffers).wait()
    assert buffers[0].numpy().tobytes() == path.read_bytes()
    change(path)
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.submit(kept, WHOLE, buffers_for(WHOLE)).wait()
    engine.close()


@CHANGES
def test_changed_while_it_is_read(
    path: Path,
    reader: dict[str, Any],
    opened: Callable[..., Engine],
    change: Callable[[Path], None],
    no_leaks: None,
):
    engine = opened(**reader, faults="delay_us=15000")
    source = source_of(path)
    transfer = engine.submit([source], WHOLE, buffers_for(WHOLE))
    time.sleep(0.05)
    assert not transfer.done(), "the change comes too late to test anything"
    change(path)
    with pytest.raises((FileChangedError, ShortReadError), match=r"data\.bin") as caught:
        transfer.wait(timeout_s=20)
    assert isinstance(caught.value, FileChangedError)
    if change is not truncate:
        assert read_all(engine, path) == path.read_bytes()[:NBYTES]
    engine.close()


def test_a_mapping_that_lost_its_pages_is_never_touched(path: Path, opened: Callable[..., Engine], no_leaks: None):
    """Truncated and grown again, its pages are back in place, empty: only the stamp tells."""
    engine = opened(**READERS["mapped"])
    kept = engine.open([source_of(path)])  # type: ignore[attr-defined]
    os.truncate(path, 0)
    with pytest.raises(FileChangedError):
        engine.submit(kept, WHOLE, buffers_for(WHOLE)).wait()
    os.truncate(path, NBYTES)
    with pytest.raises(FileChangedError):
        engine.submit(kept, WHOLE, buffers_for(WHOLE)).wait()
    kept.clear()
    assert read_all(engine, path) == bytes(NBYTES)
    engine.close()


@pytest.mark.parametrize("knobs", [{"backend": "staged", "direct_io": False}, {"backend": "traditional"}])
def test_load_file_of_a_file_cut_off_after_its_header_was_read(tmp_path: Path, knobs: dict[str, Any]):
    data = random_bytes(NBYTES)
    path = write_checkpoint(tmp_path / "m.safetensors", {"a": ("U8", (NBYTES,), data)})
    checkpoint = Checkpoint.open(path)
    os.truncate(path, path.stat().st_size - 100)
    with gdsstream.open_engine(**knobs) as engine:
        plan = plan_separate(checkpoint.select())
        with pytest.raises(FileChangedError):
            engine.submit(checkpoint.files, plan, buffers_for(plan)).wait()


# --- arguments that do not fit ----------------------------------------------------------------------------------------


def test_every_error_is_ours(path: Path, opened: Callable[..., Engine]):
    engine = opened(backend="staged")
    for plan, buffers in (
        (WHOLE, []),
        (WHOLE, [torch.empty(NBYTES - 1, dtype=torch.uint8)]),
        (WHOLE, [torch.empty(NBYTES, dtype=torch.int8)]),
        (WHOLE, [torch.empty(2 * NBYTES, dtype=torch.uint8)[::2]]),
    ):
        with pytest.raises(GdsStreamError):
            engine.submit([source_of(path)], plan, buffers)
    with pytest.raises(ConfigError, match="not among the 0"):
        engine.submit([], WHOLE, buffers_for(WHOLE))
