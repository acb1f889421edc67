"""The ceiling of writes, and the watch over fsync."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from bench import fsyncs
from bench.ceilings_write import DirectWrite
from bench.config import BenchError


def test_fsync_is_watched_and_put_back(tmp_path: Path) -> None:
    original, watch = os.fsync, fsyncs.Watch()
    (tmp_path / "x").write_bytes(b"x")
    watch.start()
    fsyncs.file(tmp_path / "x")
    fsyncs.directory(tmp_path)
    watch.stop()
    watch.stop()
    assert os.fsync is original
    assert watch.count == 2
    assert watch.seconds > 0
    fsyncs.file(tmp_path / "x")
    assert watch.count == 2


@pytest.mark.parametrize(("number", "raises"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced_is_no_failure_and_one_that_fails_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if raises:
        with pytest.raises(OSError, match="Input/output error"):
            fsyncs.directory(tmp_path)
    else:
        fsyncs.directory(tmp_path)


def test_fsyncs_at_the_same_time_count_once() -> None:
    watch = fsyncs.Watch()
    watch._spans = [(1.0, 3.0), (2.0, 2.5), (2.5, 4.0), (10.0, 11.0)]
    assert watch.seconds == pytest.approx(4.0)


def test_the_ceiling_writes_and_leaves_nothing(tmp_path: Path) -> None:
    ceiling = DirectWrite(tmp_path, 3_000_000)
    assert ceiling.kind in ("write_o_direct_fsync", "write_fsync")
    assert 0 < ceiling.sample() < 1000
    assert "fsync" in ceiling.describe()
    ceiling.close()
    assert list(tmp_path.iterdir()) == []


def test_the_ceiling_writes_every_byte_and_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = DirectWrite(tmp_path, 5_000_000)
    seen: list[int] = []
    remove = shutil.rmtree

    def look(folder: Path) -> None:
        seen.append(sum(path.stat().st_size for path in folder.iterdir()))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", look)
    watch = fsyncs.Watch()
    watch.start()
    ceiling.sample()
    watch.stop()
    ceiling.close()
    assert set(seen) == {5_000_000 // 4096 * 4096}
    assert watch.count >= 2


def test_without_o_direct_the_ceiling_says_so(tmp_path: Path, no_direct: None) -> None:
    ceiling = DirectWrite(tmp_path, 3_000_000)
    assert ceiling.kind == "write_fsync"
    assert "O_DIRECT is refused here (Invalid argument)" in ceiling.describe()
    assert ceiling.sample() > 0
    ceiling.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_ceiling_that_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(BenchError, match="No space left on device"):
        DirectWrite(tmp_path, 3_000_000)
    assert list(tmp_path.iterdir()) == []
