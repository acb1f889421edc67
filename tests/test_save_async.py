"""Saving in a thread: what it saves, waiting, cancelling, errors that nobody waits for, and the end of the program."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from pathlib import Path

import pytest
import torch
from save_support import MIB, check_file, leftovers, save_and_wait, wait_until
from support import need_direct, reference, run_python

from gdsstream.errors import (
    ForkedProcessError,
    WriteError,
)
from gdsstream.save import save_file, save_file_async


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    w, turned = torch.ones(30 * MIB, dtype=torch.uint8), torch.ones(1000, 3000)
    tensors = {"w": w, "turned": turned.t()}
    for value in range(2, 6):
        pending = save_file_async(tensors, path)
        w.fill_(value)
        turned.fill_(value)
        tensors["late"] = torch.ones(1)
        pending.wait(60)
        assert pending.done()
        loaded = reference(path)
        assert set(loaded) == {"w", "turned"}
        assert loaded["w"].unique().tolist() == [value - 1]
        assert loaded["turned"].unique().tolist() == [value - 1]
        del tensors["late"]


def test_waiting_ends_and_can_go_on(tmp_path: Path, fail_writes: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file_async
pending = save_file_async({"w": torch.ones(40 << 20, dtype=torch.uint8)}, sys.argv[1])
assert not pending.done()
try:
    pending.wait(0.05)
except TimeoutError as error:
    print(error)
pending.wait()
assert pending.done()
pending.wait(0)
pending.cancel()
pending.wait(0)
"""
    path = tmp_path / "model.safetensors"
    out, _ = run_python(code, path, LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="200000")
    assert out == f"{path} is not written after 0.05 s; wait again, or cancel the save\n"
    check_file(path, {"w": torch.ones(40 << 20, dtype=torch.uint8)})


def test_a_cancelled_save_leaves_the_old_file(old_file: tuple[Path, bytes], fail_writes: Path) -> None:
    code = """
import sys, time, torch
from gdsstream.errors import TransferCancelledError
from gdsstream.save import save_file_async
pending = save_file_async({"w": torch.ones(200 << 20, dtype=torch.uint8)}, sys.argv[1])
time.sleep(0.3)
start = time.monotonic()
pending.cancel()
assert time.monotonic() - start < 0.1
try:
    pending.wait()
except TransferCancelledError as error:
    print(error)
assert time.monotonic() - start < 1
save_file_async({"w": torch.ones(200 << 20, dtype=torch.uint8)}, sys.argv[1]).cancel()  # and nobody minds
"""
    out, err = run_python(code, old_file[0], LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="100000")
    assert out == f"saving {old_file[0]} was cancelled; what was there before is unchanged\n"
    assert err == ""


def test_the_error_is_raised_by_every_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pending = save_file_async({"a": torch.ones(1)}, tmp_path / "missing" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(WriteError, match="make the directory first"):
            pending.wait(60)
    assert pending.done()
    dropped = weakref.ref(pending)
    del pending
    gc.collect()
    assert dropped() is None
    assert caplog.records == []


@pytest.mark.parametrize("dropped", ["before", "after"])
def test_an_error_that_nobody_waits_for_is_logged_once(
    dropped: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "missing" / "model.safetensors"
    pending = save_file_async({"a": torch.ones(8 * MIB)}, path)
    if dropped == "after":
        wait_until(pending.done)
    del pending
    wait_until(lambda: bool(caplog.records))
    gc.collect()
    assert [(r.name, r.levelno) for r in caplog.records] == [("gdsstream.save", logging.ERROR)]
    assert "was not saved, and nobody waited for it" in caplog.text
    assert "make the directory first" in caplog.text


def test_an_error_is_logged_when_the_program_ends(tmp_path: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file_async
kept = save_file_async({"a": torch.ones(1 << 20)}, sys.argv[1])
"""
    path = tmp_path / "missing" / "model.safetensors"
    _, err = run_python(code, path)
    assert err.count(f"{path} was not saved, and nobody waited for it: {path} cannot be written") == 1


def test_a_program_that_ends_finishes_its_saves(tmp_path: Path, fail_writes: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file_async
save_file_async({"w": torch.ones(40 << 20, dtype=torch.uint8)}, sys.argv[1])
kept = save_file_async({"w": torch.ones(40 << 20, dtype=torch.uint8)}, sys.argv[2])
"""
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    _, err = run_python(code, *paths, LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="100000")
    assert err == ""
    for path in paths:
        check_file(path, {"w": torch.ones(40 << 20, dtype=torch.uint8)})


def test_a_failed_save_keeps_no_tensors(tmp_path: Path) -> None:
    count = 3_000_017

    def alive() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor and o.numel() in (count, 4 * count) for o in gc.get_objects())

    tensor = torch.ones(count)
    pending = save_file_async({"w": tensor}, tmp_path / "missing" / "model.safetensors")
    wait_until(pending.done)
    wait_until(lambda: alive() == 1)
    with pytest.raises(WriteError):
        pending.wait()


def test_a_child_process_cannot_wait_for_its_parents_save(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    pending = save_file_async({"w": torch.ones(8 * MIB)}, path)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: pending.wait(5), pending.done, pending.cancel):
            try:
                call()
            except ForkedProcessError as error:
                refused += f"saved by process {os.getppid()}" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    pending.wait(60)
    check_file(path, {"w": torch.ones(8 * MIB)})


def test_saves_of_one_path_at_a_time_leave_one_of_them(tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "model.safetensors"
    for _ in range(5):
        pending = [save_file_async({"w": torch.full((5 * MIB,), float(i))}, path) for i in range(4)]
        for save in pending:
            save.wait(60)
        values = reference(path)["w"].unique().tolist()
        assert len(values) == 1
        assert values[0] in range(4)
    assert not leftovers(tmp_path)


def test_nothing_is_left_behind(tmp_path: Path, no_leaks: None) -> None:
    need_direct(tmp_path)
    for direct_io in (False, True):
        for _ in range(20):
            save_file({"w": torch.ones(MIB)}, tmp_path / "model.safetensors", direct_io=direct_io)
            save_and_wait({"w": torch.ones(MIB)}, tmp_path / "model.safetensors", direct_io=direct_io)
            with pytest.raises(WriteError):
                save_file({"w": torch.ones(MIB)}, tmp_path / "missing" / "file", direct_io=direct_io)
            with pytest.raises(WriteError):
                save_and_wait({"w": torch.ones(MIB)}, tmp_path, direct_io=direct_io)
