"""Reading below a root: what is absent, what may not be read, and links that try to leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trees

from gdsstream.machine import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    builder = trees.Builder(tmp_path)
    builder.file("/sys/number", "0x10")
    builder.file("/sys/words", "Unknown")
    builder.file("/etc/real/cufile.json", "{}")
    return Tree(tmp_path)


def test_what_is_absent_is_none_and_no_failure(tree: Tree):
    assert tree.read("/sys/nothing") is tree.read("/sys/number/below") is tree.read_int("/sys/nothing") is None
    assert tree.listdir("/sys/nothing") == []
    assert tree.readlink("/sys/nothing") is None
    assert not tree.exists("/sys/nothing")
    assert tree.failures == []


def test_numbers(tree: Tree):
    assert tree.read_int("/sys/number") == 16
    assert tree.read_int("/sys/words") is None
    assert tree.failures == [("/sys/words", "'Unknown' is no number")]


def test_a_folder_in_place_of_a_file_is_a_failure_once(tree: Tree):
    for _ in range(2):
        assert tree.read("/etc/real") is None
    assert tree.failures == [("/etc/real", os.strerror(21))]


def test_no_permission_is_a_failure_with_its_reason():
    with trees.open_folder() as root:
        builder = trees.Builder(root)
        builder.file("/sys/secret", 1).chmod(0)
        builder.file("/sys/open", 2)
        (root / "sys/closed").mkdir(mode=0o000)
        tree = Tree(root)
        with trees.without_rights():
            assert tree.read("/sys/secret") is None
            assert tree.listdir("/sys/closed") == []
            assert tree.read("/sys/open") == "2"
        assert tree.failures == [("/sys/secret", "Permission denied"), ("/sys/closed", "Permission denied")]


def test_absolute_links_stay_inside(tree: Tree, tmp_path: Path):
    (tmp_path / "etc/cufile.json").symlink_to("/etc/real/cufile.json")
    assert tree.readlink("/etc/cufile.json") == "/etc/real/cufile.json"
    assert tree.read("/etc/cufile.json") == "{}"


def test_links_cannot_climb_out(tree: Tree, tmp_path: Path):
    (tmp_path / "sys/out").symlink_to("../" * 30 + "etc/hostname")
    (tmp_path.parent / "etc").mkdir()
    (tmp_path.parent / "etc/hostname").write_text("outside")
    assert tree.readlink("/sys/out") is None, "what it would be inside is not there"
    assert tree.read("/sys/out") is None


def test_links_in_a_circle_end(tree: Tree, tmp_path: Path):
    (tmp_path / "sys/a").symlink_to("b")
    (tmp_path / "sys/b").symlink_to("a")
    assert tree.read("/sys/a") is None
    assert tree.failures == [("/sys/a", "its links lead in a circle")]


def test_this_machine():
    tree = Tree()
    assert tree.live
    assert tree.read("/proc/sys/kernel/osrelease") == os.uname().release
    assert tree.readlink("/proc/self") == f"/proc/{os.getpid()}"
