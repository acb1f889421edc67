"""Storage that fails, processes that are killed, and memory that is short: the old file stays as it was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from save_support import MIB, Save, check_file, leftovers
from support import assert_same, need_direct, reference, run_python, start_python

from gdsstream.errors import (
    WriteError,
)
from gdsstream.save import save_file

FAILING = """
import errno, sys, threading, torch
from gdsstream.errors import WriteError
from gdsstream.save import save_file, save_file_async
tensors = {"w": torch.ones(40 << 20, dtype=torch.uint8)}
for save in (save_file, lambda *a: save_file_async(*a).wait(60)):
    try:
        save(tensors, sys.argv[1])
        print("saved")
    except WriteError as error:
        print(errno.errorcode[error.errno], error)
"""


@pytest.mark.parametrize(
    ("call", "code", "passing", "advice"),
    [
        ("fallocate", errno.ENOSPC, 0, "free some space"),
        ("fallocate", errno.EDQUOT, 0, "free some of the quota"),
        ("pwritev", errno.EIO, 1, "the storage failed"),
        ("pwritev", errno.ENOSPC, 2, "free some space"),
        ("fsync", errno.EIO, 0, "the storage failed"),
        ("rename", errno.EBUSY, 0, "look at the storage"),
    ],
)
def test_storage_that_fails(
    call: str, code: int, passing: int, advice: str, old_file: tuple[Path, bytes], fail_writes: Path
) -> None:
    failure = {"LD_PRELOAD": str(fail_writes), "FAIL_WRITES": f"{call}:{code}:{passing}"}
    out, _ = run_python(FAILING, old_file[0], **failure)
    lines = out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{errno.errorcode[code]} {old_file[0]} cannot be written (41947136 bytes wanted, "), out
        assert "available)" in line
        assert advice in line


def test_a_directory_that_cannot_be_synced(tmp_path: Path, fail_writes: Path) -> None:
    path = tmp_path / "model.safetensors"
    out, _ = run_python(FAILING, path, LD_PRELOAD=str(fail_writes), FAIL_WRITES=f"fsync:{errno.EIO}:1")
    assert out.startswith(f"EIO {path} is in its place, but may be gone after a loss of power")
    assert reference(path)["w"].sum() == 40 << 20


@pytest.mark.parametrize("call", ["fallocate", "fsync"])
def test_filesystems_that_can_do_less(call: str, tmp_path: Path, fail_writes: Path) -> None:
    """No space beforehand, or no fsync of directories: saved all the same."""
    code, passing = (errno.EOPNOTSUPP, 0) if call == "fallocate" else (errno.EINVAL, 1)
    path = tmp_path / "model.safetensors"
    once = FAILING.replace("(save_file, lambda *a: save_file_async(*a).wait(60))", "(save_file,)")
    out, _ = run_python(once, path, LD_PRELOAD=str(fail_writes), FAIL_WRITES=f"{call}:{code}:{passing}")
    assert out == "saved\n"
    check_file(path, {"w": torch.ones(40 << 20, dtype=torch.uint8)})


@pytest.mark.parametrize("most", [1_000_003, 4096])
def test_short_writes_are_continued(most: int, tmp_path: Path, fail_writes: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file
generator = torch.Generator().manual_seed(5)
tensors = {f"w{i}": torch.randint(0, 255, (n,), dtype=torch.uint8, generator=generator)
           for i, n in enumerate((1, 5_000_000, 0, 4096, 77, 3_000_001))}
torch.save(tensors, sys.argv[2])
save_file(tensors, sys.argv[1])
"""
    path = tmp_path / "model.safetensors"
    run_python(code, path, tmp_path / "same.pt", LD_PRELOAD=str(fail_writes), SHORT_WRITES=str(most))
    check_file(path, torch.load(tmp_path / "same.pt"))


def test_a_disk_that_takes_nothing(old_file: tuple[Path, bytes], fail_writes: Path) -> None:
    out, _ = run_python(FAILING, old_file[0], LD_PRELOAD=str(fail_writes), SHORT_WRITES="-1")
    assert out.count(f"EIO {old_file[0]} cannot be written") == 2
    assert out.count("nothing was written at byte 0; the storage failed") == 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield folder
    unmount = subprocess.run(["umount", folder], capture_output=True, text=True)
    if unmount.returncode:
        subprocess.run(["umount", "--lazy", folder], check=True)
        pytest.fail(f"a descriptor was left open: {unmount.stderr}")


def test_a_full_disk(save: Save, tiny_disk: Path) -> None:
    path = tiny_disk / "model.safetensors"
    save_file({"old": torch.ones(MIB)}, path)
    content = path.read_bytes()
    with pytest.raises(WriteError, match=r"\(8392704 bytes wanted, 4190208 available\): No space left") as caught:
        save({"new": torch.ones(2 * MIB)}, path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == content
    assert os.listdir(tiny_disk) == ["model.safetensors"]
    save({"new": torch.ones(MIB // 2)}, path)
    check_file(path, {"new": torch.ones(MIB // 2)})


def test_a_limit_on_file_sizes(old_file: tuple[Path, bytes]) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))\n"
    lines = run_python(limit + FAILING, old_file[0])[0].splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"EFBIG {old_file[0]} cannot be written") and "ulimit -f" in line for line in lines)


SLOW = """
import sys, torch
from gdsstream.save import save_file, save_file_async
tensors = {"w": torch.ones(200 << 20, dtype=torch.uint8)}
print("ready", flush=True)
try:
    save_file(tensors, sys.argv[1]) if sys.argv[2] == "sync" else save_file_async(tensors, sys.argv[1]).wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_slow_save(path: Path, kind: str, fail_writes: Path, pause_us: int = 100_000) -> subprocess.Popen[str]:
    """A process that is in the middle of its save."""
    process = start_python(SLOW, path, kind, LD_PRELOAD=str(fail_writes), SLOW_WRITES_US=str(pause_us))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 30
    while not leftovers(path.parent):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    assert process.poll() is None
    return process


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_process_leaves_the_old_file(kind: str, tmp_path: Path, fail_writes: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"old": torch.arange(1000)}, path)
    content = path.read_bytes()
    process = start_slow_save(path, kind, fail_writes)
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert path.read_bytes() == content
    assert len(leftovers(tmp_path)) == 1  # the only way to leave it
    save_file({"new": torch.ones(3)}, path)  # which is in nobody's way
    assert_same(reference(path), {"new": torch.ones(3)})


def test_an_interrupted_save_leaves_no_trace(old_file: tuple[Path, bytes], fail_writes: Path) -> None:
    process = start_slow_save(old_file[0], "sync", fail_writes)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert out == "interrupted\n", err


def test_an_interrupted_wait_lets_the_save_go_on(tmp_path: Path, fail_writes: Path) -> None:
    path = tmp_path / "model.safetensors"
    process = start_slow_save(path, "async", fail_writes)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n", err
    assert process.returncode == 0
    check_file(path, {"w": torch.ones(200 << 20, dtype=torch.uint8)})


def test_no_room_for_copies(tmp_path: Path) -> None:
    code = """
import resource, sys, torch
from gdsstream.errors import MemoryBudgetError
from gdsstream.save import save_file, save_file_async
tensors = {"w": torch.zeros(200 << 20, dtype=torch.uint8)}
in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + (100 << 20), -1))
try:
    save_file_async(tensors, sys.argv[1])
except MemoryBudgetError as error:
    print(error)
save_file(tensors, sys.argv[1], fsync=False)
"""
    path = tmp_path / "model.safetensors"
    out, _ = run_python(code, path)
    assert out.startswith(f"{path}: no room on cpu to copy tensor 'w' (209715200 bytes)")
    assert "use save_file" in out
    assert path.stat().st_size == (200 << 20) + 4096


def test_no_room_for_buffers(old_file: tuple[Path, bytes]) -> None:
    need_direct(old_file[0].parent)
    code = """
import resource, sys, torch
from gdsstream.errors import MemoryBudgetError
from gdsstream.save import save_file
tensors = {"w": torch.ones(1 << 20)}
save_file(tensors, sys.argv[1] + ".warm")
in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + (8 << 20), -1))
try:
    save_file(tensors, sys.argv[1], direct_io=True)
except MemoryBudgetError as error:
    print(error)
"""
    out, _ = run_python(code, old_file[0])
    assert out.startswith("no room for a buffer of 16777216 bytes to save through")
