"""Blocking ios by native threads without buffers: every byte, a time for each, and errors that say where."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import gdsstream
from gdsstream import _native

IO, COUNT = 4096, 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(np.random.default_rng(0).bytes(IO * COUNT))
    return tmp_path / "data"


def begin(ios: _native.TimedIos, descriptor: int, memory: torch.Tensor, write: bool = False, nbytes: int = IO) -> None:
    numbers = np.arange(COUNT)
    ios.begin(
        np.full(COUNT, descriptor, dtype=np.int32),
        numbers * IO,
        np.full(COUNT, nbytes),
        (memory.data_ptr() + numbers * IO).astype(np.uint64),
        write=write,
    )


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("through", [0, 1, 3])
def test_every_byte_is_read_and_written(path: Path, through: int) -> None:
    memory, other = torch.zeros(2, IO * COUNT, dtype=torch.uint8)
    buffers = torch.zeros(4, through, IO, dtype=torch.uint8)
    given = {"memory": buffers.data_ptr(), "buffers": through, "buffer_bytes": IO} if through else {}
    ios = _native.TimedIos(4, **given)
    with open(path, "r+b", buffering=0) as file:
        begin(ios, file.fileno(), memory)
        assert ios.wait(10)
        assert memory.numpy().tobytes() == path.read_bytes()
        taken = np.zeros(COUNT)
        ios.seconds(taken)
        assert (taken > 0).all()
        other += 7
        begin(ios, file.fileno(), other, write=True)
        assert ios.wait(10)
        assert path.read_bytes() == b"\7" * (IO * COUNT)
    ios.close()
    with pytest.raises(gdsstream.EngineClosedError):
        begin(ios, 0, memory)


@pytest.mark.usefixtures("no_leaks")
def test_the_first_failure_says_where(path: Path) -> None:
    memory = torch.zeros(IO * COUNT, dtype=torch.uint8)
    ios = _native.TimedIos(3)
    os.truncate(path, IO * 10 + 1)
    with open(path, "rb") as file:
        begin(ios, file.fileno(), memory)
        with pytest.raises(gdsstream.ShortReadError, match=r"reading 4096 bytes at byte \d+ of .*/data: the file ends"):
            ios.wait(10)
        begin(ios, file.fileno(), memory, write=True)
        with pytest.raises(gdsstream.ReadError, match=r"writing 4096 bytes at byte \d+ of .*/data failed: Bad file"):
            ios.wait(10)
    begin(ios, 1_000_000, memory)
    with pytest.raises(gdsstream.ReadError, match="of descriptor 1000000 failed: Bad file descriptor"):
        ios.wait(10)
    del ios


def test_what_cannot_be_is_refused(path: Path) -> None:
    memory = torch.zeros(IO * COUNT, dtype=torch.uint8)
    with pytest.raises(gdsstream.ConfigError, match="threads is 0"):
        _native.TimedIos(0)
    with pytest.raises(gdsstream.ConfigError, match="need buffers in host memory"):
        _native.TimedIos(1, device=0)
    ios = _native.TimedIos(1, memory=memory.data_ptr(), buffers=1, buffer_bytes=512)
    with pytest.raises(gdsstream.ConfigError, match="an io of 4096 bytes is more than a buffer of 512"):
        begin(ios, 0, memory)
    with pytest.raises(gdsstream.ConfigError, match="differ in length"):
        ios.begin(
            np.zeros(2, np.int32), np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(2, np.uint64), write=False
        )


def test_a_close_right_behind_the_beginning_leaves_nobody_waiting(path: Path) -> None:
    memory = torch.zeros(IO * COUNT, dtype=torch.uint8)
    with open(path, "rb") as file:
        for _ in range(50):
            ios = _native.TimedIos(4)
            begin(ios, file.fileno(), memory)
            ios.close()
            with suppress(gdsstream.EngineClosedError):
                assert ios.wait(5)
