"""Where a save goes: modes, links, relative paths, and places that cannot be written to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from save_support import MIB, Save, check_file, leftovers
from support import run_python

from gdsstream.errors import (
    WriteError,
)
from gdsstream.save import save_file, save_file_async


def test_the_mode_is_kept_or_follows_the_umask(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(0o027)
    try:
        save({"a": torch.ones(1)}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        save({"a": torch.zeros(1)}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)
    check_file(path, {"a": torch.zeros(1)})


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(exists: bool, save: Save, tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / "0123", tmp_path / "snapshots" / "model.safetensors"
    blob.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to("../blobs/0123")
    if exists:
        save_file({"a": torch.ones(1)}, blob)
    save({"a": torch.zeros(2)}, link)
    assert link.is_symlink()
    assert not blob.is_symlink()
    check_file(blob, {"a": torch.zeros(2)})
    assert not leftovers(link.parent)


def test_a_relative_path_is_of_the_directory_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = save_file_async({"a": torch.ones(50 * MIB, dtype=torch.uint8)}, "model.safetensors")
    monkeypatch.chdir(tmp_path / "elsewhere")
    pending.wait(60)
    assert pending.path == str(tmp_path / "model.safetensors")
    assert os.listdir(tmp_path / "elsewhere") == []
    assert (tmp_path / "model.safetensors").stat().st_size == 50 * MIB + 4096


@pytest.mark.parametrize(
    ("name", "code", "advice"),
    [
        ("missing/model.safetensors", errno.ENOENT, "make the directory first"),
        ("model.safetensors/model.safetensors", errno.ENOTDIR, "choose a path that leads through directories"),
        (".", errno.EISDIR, "name a file in it"),
        ("x" * 256, errno.ENAMETOOLONG, "choose a shorter name"),
    ],
)
def test_paths_that_lead_nowhere(name: str, code: int, advice: str, save: Save, old_file: tuple[Path, bytes]) -> None:
    with pytest.raises(WriteError, match=advice) as caught:
        save({"a": torch.ones(1)}, old_file[0].parent / name)
    assert caught.value.errno == code
    assert isinstance(caught.value, OSError)
    assert "4100 bytes wanted" in str(caught.value)


def test_what_is_no_file_is_not_replaced(save: Save, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match="no regular file"):
        save({"a": torch.ones(1)}, tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


AS_NOBODY = """
import os, resource, sys, torch
from gdsstream.save import save_file, save_file_async
from gdsstream.errors import EngineError, WriteError
save_file({"a": torch.ones(1)}, sys.argv[1] + "/warm")  # what is imported late is imported
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[2:]:
    for save in (save_file, lambda *a: save_file_async(*a).wait(60)):
        try:
            save({"a": torch.ones(1)}, path)
            print("saved")
        except WriteError as error:
            print(error.errno, error)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    save_file_async({"a": torch.ones(1)}, sys.argv[-1])
except EngineError as error:
    print(error)
"""


def test_directories_and_files_without_permission(tmp_path: Path) -> None:
    closed, open_ = tmp_path / "closed", tmp_path / "open"
    for folder in (closed, open_):
        folder.mkdir()
        save_file({"old": torch.ones(2)}, folder / "model.safetensors")
    (open_ / "model.safetensors").chmod(0o444)
    content = (open_ / "model.safetensors").read_bytes()
    closed.chmod(0o555)
    open_.chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    out, _ = run_python(AS_NOBODY, tmp_path, closed / "new", open_ / "model.safetensors", open_ / "new")
    lines = out.splitlines()
    assert all(line.startswith(f"{errno.EACCES} ") and "mode or owner" in line for line in lines[:4]), out
    assert all(f"{open_ / 'model.safetensors'} cannot be written" in line for line in lines[2:4])
    assert lines[4:6] == ["saved", "saved"]
    assert lines[6].startswith(f"no thread can be started to save {open_ / 'new'}: ")
    assert lines[6].endswith("; use save_file")
    assert (open_ / "model.safetensors").read_bytes() == content
    assert not leftovers(closed)
    assert not leftovers(open_)
    closed.chmod(0o755)
