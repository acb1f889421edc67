"""Stored proofs of GPUDirect Storage: what they hold for, and how their file survives damage."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gdsstream import notices
from gdsstream.errors import ReadError
from gdsstream.proofs import GdsProof, gds_proof, proven, store_gds_proof


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(notices, "_said", set())
    return tmp_path / "cache/gdsstream/gds-proofs.json"


@pytest.fixture
def mounts(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/mountinfo").write_text(f"30 1 9:0 / /data rw - xfs {source} rw\n")
        return str(tmp_path / "proc")

    return write


def test_a_proof_is_kept_for_its_mount_and_source(cache: Path, mounts: Callable[[str], str]):
    assert gds_proof("/data", procfs=mounts("/dev/md0")) is None
    proof = GdsProof("/data", "/dev/md0", "nvidia-fs", reads=12, nbytes=1 << 20)
    assert store_gds_proof(proof) == cache
    assert gds_proof("/data", procfs=mounts("/dev/md0")) == proof
    assert gds_proof("/data", procfs=mounts("/dev/md1")) is None, "something else is mounted there now"
    assert gds_proof("/other", procfs=mounts("/dev/md0")) is None

    newer = GdsProof("/data", "/dev/md0", "cufile", reads=13, nbytes=1 << 20)
    other = GdsProof("/scratch", "/dev/md1", "cufile", reads=1, nbytes=1)
    store_gds_proof(other)
    store_gds_proof(newer)
    assert gds_proof("/data", procfs=mounts("/dev/md0")) == newer
    assert len(json.loads(cache.read_text())["proofs"]) == 2
    assert os.listdir(cache.parent) == [cache.name], "no temporary file is left"


def test_files_are_proven_when_every_mount_is(cache: Path, tmp_path: Path):
    folders = [tmp_path / name for name in ("first", "second")]
    lines = []
    for index, folder in enumerate(folders):
        folder.mkdir()
        (folder / "a").touch()
        (folder / "b").touch()
        device = os.stat(folder).st_dev
        lines.append(f"3{index} 1 {os.major(device)}:{os.minor(device)} / {folder} rw - xfs /dev/md{index} rw")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    procfs = str(tmp_path / "proc")
    first = [folders[0] / "a", str(folders[0] / "b")]
    link = tmp_path / "link"
    link.symlink_to(folders[1] / "a")

    assert proven(first, procfs=procfs) is None
    proof = GdsProof(str(folders[0]), "/dev/md0", "nvidia-fs", reads=12, nbytes=1)
    store_gds_proof(proof)
    assert proven(first, procfs=procfs) == proof
    assert proven(iter(first), procfs=procfs) == proof
    assert proven([], procfs=procfs) is None
    assert proven([*first, folders[0] / "missing"], procfs=procfs) is None
    for unproven in (folders[1] / "b", link):
        assert proven([*first, unproven], procfs=procfs) is None
        assert proven([unproven, *first], procfs=procfs) is None

    store_gds_proof(GdsProof(str(folders[1]), "/dev/md7", "nvidia-fs", reads=12, nbytes=1))
    assert proven([*first, link], procfs=procfs) is None, "something else is mounted there now"
    store_gds_proof(GdsProof(str(folders[1]), "/dev/md1", "nvidia-fs", reads=12, nbytes=1))
    assert proven([*first, link], procfs=procfs) == proof
    assert proven(first, procfs="/nonexistent") is None


def test_without_a_proof_no_file_is_looked_at(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os.path, "realpath", lambda path: pytest.fail("a file was looked at"))
    assert proven(["/data/a"]) is None


def test_a_proof_of_another_machine_does_not_count(cache: Path, mounts: Callable[[str], str]):
    store_gds_proof(GdsProof("/data", "/dev/md0", "nvidia-fs", reads=12, nbytes=1, host="another"))
    assert gds_proof("/data", procfs=mounts("/dev/md0")) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"proofs": 3}',
        '{"proofs": [{"mount_point": "/data"}]}',
        '{"proofs": [[]]}',
        '{"proofs": [{"mount_point": "/data", "source": "s", "evidence": "e", "reads": "9", "nbytes": 1}]}',
        '{"proofs": [{"mount_point": "/data", "source": "s", "evidence": "e", "reads": 0, "nbytes": 1}]}',
        b"\xff\xfe",
    ],
)
def test_a_malformed_file_is_ignored_with_one_warning(
    cache: Path, mounts: Callable[[str], str], text: str | bytes, caplog: pytest.LogCaptureFixture
):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(text.encode() if isinstance(text, str) else text)
    with caplog.at_level(logging.WARNING):
        assert gds_proof("/data", procfs=mounts("s")) is None
        assert gds_proof("/data", procfs=mounts("s")) is None
    assert len(caplog.records) == 1
    assert str(cache) in caplog.text
    store_gds_proof(GdsProof("/data", "s", "nvidia-fs", reads=1, nbytes=1))
    assert gds_proof("/data", procfs=mounts("s")) is not None


def test_a_failed_store_keeps_the_old_file(cache: Path, mounts: Callable[[str], str], monkeypatch: pytest.MonkeyPatch):
    store_gds_proof(GdsProof("/data", "s", "nvidia-fs", reads=1, nbytes=1))
    before = cache.read_bytes()

    def refuse(source: str, target: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ReadError, match="XDG_CACHE_HOME") as caught:
        store_gds_proof(GdsProof("/data", "s", "nvidia-fs", reads=2, nbytes=1))
    assert caught.value.errno == errno.EROFS
    assert cache.read_bytes() == before
    assert os.listdir(cache.parent) == [cache.name]
