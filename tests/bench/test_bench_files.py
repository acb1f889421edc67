from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from bench import cache, environment, files
from bench.config import BenchError, StorageConfig

MIB = 1 << 20


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A directory whose files can leave the page cache."""
    found = environment.filesystem(tmp_path)
    if found is None or found["type"] in ("tmpfs", "ramfs", "overlay"):
        pytest.skip(f"the temporary directory is on {found}, whose pages cannot be dropped")
    return tmp_path


def test_the_files_are_valid_and_hold_what_is_expected(tmp_path: Path) -> None:
    plan = files.Plan(tmp_path, 2, 2 * MIB, "")
    with files.written(plan) as written:
        names = []
        for index, path in enumerate(written.paths):
            assert 0.8 * 2 * MIB < os.path.getsize(path) <= 2 * MIB
            with safe_open(path, framework="np") as handle:
                names += handle.keys()
            raw = np.fromfile(path, dtype=np.uint8)
            for info in written.tensors.values():
                if info.file != index:
                    continue
                content = raw[info.offset : info.offset + info.nbytes]
                wanted = [written.pool[place : place + count] for _, place, count in written.expected(info)]
                assert np.array_equal(content, np.concatenate(wanted)), info.name
        assert sorted(names) == sorted(written.tensors)
    assert list(tmp_path.iterdir()) == []


def test_all_tensors_differ(tmp_path: Path) -> None:
    with files.written(files.Plan(tmp_path, 2, 2 * MIB, "")) as written:
        starts = [info.pool_offset for info in written.tensors.values()]
    assert len(set(starts)) == len(starts)


def test_a_tensor_larger_than_the_pool_wraps_around() -> None:
    info = files.TensorInfo("x", "BF16", (1,), 0, 0, 40_000_000, 16_000_000)
    pieces = list(files.BenchFiles(Path(), (), {}, np.empty(0, np.uint8)).expected(info))
    assert sum(count for _, _, count in pieces) == info.nbytes
    assert pieces[0][:2] == (0, 16_000_000)
    assert all(place == 0 for _, place, _ in pieces[1:])


@pytest.mark.parametrize("target", [MIB, 16_000_000, 134_000_000, files.LAYER_BYTES])
def test_a_layer_comes_close_to_its_size(target: int) -> None:
    total = sum(int(np.prod(s)) * (4 if d == "F32" else 2) for _, d, s in files.layer_shapes(0, target))
    assert 0.8 * target < total <= target
    if target == files.LAYER_BYTES:
        assert total > 0.99 * target


def test_a_failure_inside_the_block_removes_the_files(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), files.written(files.Plan(tmp_path, 1, MIB, "")):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_removes_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(BenchError, match="No space left on device; choose another"),
        files.written(files.Plan(tmp_path, 2, MIB, "")),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_kept_files_stay(tmp_path: Path) -> None:
    with files.written(files.Plan(tmp_path, 1, MIB, ""), keep=True) as written:
        pass
    assert all(Path(path).exists() for path in written.paths)
    assert written.directory.parent == tmp_path


def test_too_little_room_is_said_with_sizes(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(BenchError, match=r"need .* GB, but .* has room for"):
        files.choose(StorageConfig(str(tmp_path), 2, free), cuda=False, cold=False)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="is not a directory"):
        files.choose(StorageConfig(str(tmp_path / "no")), cuda=False, cold=False)


def test_cold_files_do_not_go_to_memory() -> None:
    plan = files.choose(StorageConfig(files=1, file_bytes=MIB), cuda=False, cold=True)
    assert not str(plan.directory).startswith("/dev/shm")


def test_a_file_just_written_is_resident_and_an_evicted_one_is_not(on_disk: Path) -> None:
    path = on_disk / "data"
    path.write_bytes(os.urandom(3 * MIB + 17))
    assert cache.resident_bytes(str(path)) >= 3 * MIB
    assert cache.evict([str(path)]) == 0
    assert cache.resident_bytes(str(path)) == 0
    assert cache.warm([str(path)]) == 0
    assert cache.resident_bytes(str(path)) >= 3 * MIB


def test_mapped_pages_stay_and_are_reported(on_disk: Path) -> None:
    path = on_disk / "data"
    path.write_bytes(os.urandom(2 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert sum(mapping[::4096]) > 0  # touches every page
        assert cache.evict([str(path)], attempts=1) >= MIB


def test_an_empty_file_is_not_resident(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cache.resident_bytes(str(tmp_path / "empty")) == 0


def test_what_a_killed_run_left_is_found(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for name in (f"gdsstream-bench-{process.pid}-dead", f"gdsstream-bench-{os.getpid()}-alive", "other-1-x"):
        (tmp_path / name).mkdir()
    assert files.left_over(tmp_path) == [str(tmp_path / f"gdsstream-bench-{process.pid}-dead")]


def test_the_filesystem_of_a_directory_is_found() -> None:
    found = environment.filesystem(Path("/proc"))
    assert found is not None
    assert found["type"] == "proc"
