"""The memory that ceilings read into: of huge pages, and told where it is not."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from bench import io_memory
from bench.ceilings_disk import Disk

MIB = 1 << 20
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


@pytest.fixture
def huge_pages() -> None:
    if not HUGE.exists() or "[never]" in HUGE.read_text():
        pytest.skip("this kernel makes no huge pages where it is asked to")


@pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 33 * MIB + 5])
def test_it_holds_at_least_what_was_asked_for_and_no_zeros(nbytes: int) -> None:
    memory = io_memory.used_memory(nbytes)
    assert nbytes <= len(memory) < nbytes + 2 * MIB
    held = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
    assert held.any()
    again = held[16 * MIB :]
    assert np.array_equal(again, held[: len(again)])  # the same bytes after 16 MiB


def test_memory_is_of_huge_pages_and_small_ones_are_counted(huge_pages: None) -> None:
    memory = io_memory.used_memory(64 * MIB)
    assert io_memory.small_pages(address(memory), len(memory)) <= 2 * MIB
    small = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    small.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(small, dtype=np.uint8)[:] = 1
    assert io_memory.small_pages(address(small), len(small)) >= 60 * MIB
    assert io_memory.small_pages(address(small), MIB) == 0


def test_a_child_that_is_forked_does_not_take_its_huge_pages_apart(huge_pages: None) -> None:
    memory = io_memory.used_memory(64 * MIB)
    before = io_memory.small_pages(address(memory), len(memory))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        np.frombuffer(memory, dtype=np.uint8)[::4096] = 2
        assert io_memory.small_pages(address(memory), len(memory)) == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_ceiling_says_that_its_memory_is_of_small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (MIB // 64))

    def small(nbytes: int) -> mmap.mmap:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        np.frombuffer(memory, dtype=np.uint8)[:] = 1
        return memory

    monkeypatch.setattr("bench.ceilings_disk.used_memory", small)
    disk = Disk([str(path)], 4 * MIB)
    try:
        assert disk.sample() > 0
    finally:
        disk.close()
    assert "MiB of its memory are small pages" in disk.describe()  # which is asked for when all is over
