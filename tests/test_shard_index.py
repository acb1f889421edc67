"""The kept index of shards: what is read again, when, and what happens where it cannot be kept."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_files import rows, write_npy, write_ragged, write_safetensors, write_tar, write_tokens
from support import run_python

import gdsstream.shard_index
from gdsstream import notices
from gdsstream.errors import HeaderError, TruncatedFileError
from gdsstream.records import RecordTable, Shard
from gdsstream.shard_formats import ShardFormat
from gdsstream.shard_index import index_name, index_paths, read_shards
from gdsstream.shard_npy import ShardFile
from gdsstream.shard_paths import find_shards

NPY = ShardFormat("npy")


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(notices, "_said", set())
    return tmp_path / "cache" / "gdsstream"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of shards whose headers were read so far."""
    names: list[str] = []
    init = ShardFile.__init__

    def count(self: ShardFile, path: str) -> None:
        names.append(os.path.basename(path))
        init(self, path)

    monkeypatch.setattr(ShardFile, "__init__", count)
    return names


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for number in range(4):
        write_npy(directory / f"{number}.npy", rows(number + 2, 3, first=10 * number))
    return directory


def shards(path: Path | str | list[Path], format: ShardFormat = NPY, **options: bool) -> list[Shard]:
    return read_shards(find_shards(path)[0], format, **options)


def assert_equal(got: list[Shard], expected: list[Shard]) -> None:
    assert [(s.path, s.stamp, s.num_records) for s in got] == [(s.path, s.stamp, s.num_records) for s in expected]
    for one, other in zip(got, expected, strict=True):
        assert len(one.columns) == len(other.columns)
        for column, wanted in zip(one.columns, other.columns, strict=True):
            assert column._replace(words=wanted.words) == wanted
            assert column.words.dtype == np.int64
            assert np.array_equal(column.words, wanted.words)


def test_what_is_kept_is_what_was_read(tmp_path: Path, opened: list[str]) -> None:
    write_tar(tmp_path / "a.tar", [{"x.npy": np.zeros((n, 2)), "y": b"abc", "gz": b""} for n in range(5)])
    write_tar(tmp_path / "b.tar", [{"x.npy": np.zeros((4, 2)), "y": b"abc"} for n in range(3)])
    write_tar(tmp_path / "c.tar", [])
    write_ragged(tmp_path / "a.safetensors", {"r": [rows(2), rows(0), rows(5)]}, f=rows(3, 2, dtype=torch.float16))
    write_tokens(tmp_path / "a.tokens", rows(100))
    formats = {
        "tar": ShardFormat("tar"),
        "safetensors": ShardFormat("safetensors"),
        "tokens": ShardFormat("tokens", "I32", 7, 3),
    }
    for extension, format in formats.items():
        found = find_shards(f"{tmp_path}/*.{extension}")[0]
        fresh = read_shards(found, format)
        assert (tmp_path / index_name(format)).exists()
        opened.clear()
        assert_equal(read_shards(found, format), fresh)
        assert opened == []
        assert_equal(read_shards(found, format, cache=False), fresh)


def test_only_changed_shards_are_read_again(data: Path, opened: list[str]) -> None:
    before = shards(data)
    assert sorted(opened) == ["0.npy", "1.npy", "2.npy", "3.npy"]
    opened.clear()
    assert_equal(shards(data), before)
    assert opened == []
    write_npy(data / "1.npy", rows(9, 3))
    write_npy(data / "10.npy", rows(1, 3))
    (data / "0.npy").unlink()
    after = shards(data)
    assert sorted(opened) == ["1.npy", "10.npy"]
    assert [(os.path.basename(s.path), s.num_records) for s in after] == [
        ("1.npy", 9),
        ("2.npy", 4),
        ("3.npy", 5),
        ("10.npy", 1),
    ]
    opened.clear()
    assert_equal(shards(data), after)
    assert opened == []
    assert_equal(after, shards(data, cache=False))


def test_a_shard_rewritten_in_the_same_size_is_read_again(data: Path, opened: list[str]) -> None:
    shards(data)
    opened.clear()
    status = (data / "2.npy").stat()
    write_npy(data / "2.npy", rows(4, 3).float())
    assert (data / "2.npy").stat().st_size == status.st_size
    os.utime(data / "2.npy", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert shards(data)[2].columns[0].dtype == "F32"
    assert opened == ["2.npy"]


@pytest.mark.parametrize("how", ["saved in place", "renamed"])
def test_a_shard_replaced_in_the_same_size_and_mtime_is_read_again(data: Path, opened: list[str], how: str) -> None:
    shards(data)
    opened.clear()
    time.sleep(0.02)  # a ctime can be as coarse as the kernel's tick
    status = (data / "2.npy").stat()
    other = write_npy(data / ("2.npy" if how == "saved in place" else "new.npy"), rows(4, 3).float())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(data / "2.npy")
    after = (data / "2.npy").stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert shards(data)[2].columns[0].dtype == "F32"
    assert opened == ["2.npy"]


def test_a_part_of_a_directory_adds_to_its_index(data: Path, opened: list[str]) -> None:
    shards(f"{data}/[01].npy")
    shards([data / "3.npy", data / "0.npy"])
    assert sorted(opened) == ["0.npy", "1.npy", "3.npy"]
    opened.clear()
    assert [s.num_records for s in shards([data / "3.npy", data / "1.npy", data / "3.npy"])] == [5, 3, 5]
    assert opened == []
    shards(data)
    assert opened == ["2.npy"]
    assert [path.name for path in data.iterdir() if path.name.startswith(".")] == [index_name(NPY)]


def test_shards_of_several_directories_have_an_index_each(tmp_path: Path, opened: list[str]) -> None:
    paths = []
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        paths.append(write_npy(tmp_path / name / "0.npy", rows(2, 3)))
    before = shards(paths)
    assert [s.path for s in before] == [str(path) for path in paths]
    opened.clear()
    assert_equal(shards(paths), before)
    assert opened == []


def test_options_have_an_index_each(tmp_path: Path, opened: list[str]) -> None:
    write_tokens(tmp_path / "a.bin", rows(100))
    counts = {}
    for _ in range(2):
        for length, stride in ((10, 10), (10, 5), (20, 20)):
            format = ShardFormat("tokens", "I32", length, stride)
            counts[length, stride] = read_shards(find_shards(tmp_path / "a.bin")[0], format)[0].num_records
    assert counts == {(10, 10): 10, (10, 5): 19, (20, 20): 5}
    assert len(opened) == 3


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped", "other arrays", "other version", "wrong length"])
def test_a_damaged_index_is_made_anew_and_says_so(
    data: Path, opened: list[str], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    before = shards(data)
    index = data / index_name(NPY)
    raw = index.read_bytes()
    with np.load(index) as arrays:
        held = dict(arrays)
    if damage == "empty":
        index.write_bytes(b"")
    elif damage == "text":
        index.write_text("no index")
    elif damage == "cut":
        index.write_bytes(raw[: len(raw) // 2])
    elif damage == "flipped":
        at = raw.index(held["words"].tobytes())
        index.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    elif damage == "other arrays":
        with index.open("wb") as file:
            np.savez(file, other=np.zeros(3))
    elif damage == "other version":
        meta = {**json.loads(held["meta"].tobytes()), "version": 99}
        with index.open("wb") as file:
            np.savez(file, **{**held, "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)})
    else:
        with index.open("wb") as file:
            np.savez(file, **{**held, "words": held["words"][:-1]})
    opened.clear()
    with caplog.at_level(logging.WARNING, "gdsstream"):
        assert_equal(shards(data), before)
    assert len(opened) == 4
    assert len(caplog.records) == 1
    assert f"the shard index {index} is damaged" in caplog.text
    opened.clear()
    caplog.clear()
    assert_equal(shards(data), before)
    assert (opened, caplog.records) == ([], [])


@pytest.mark.parametrize(("field", "bit"), [(8, 0), (10, 1), (42, 7), (28, 3)])
def test_a_bit_of_the_indexs_directory_costs_no_more_than_the_headers(
    data: Path, opened: list[str], caplog: pytest.LogCaptureFixture, field: int, bit: int
) -> None:
    before = shards(data)
    index = data / index_name(NPY)
    raw = bytearray(index.read_bytes())
    raw[raw.index(b"PK\x01\x02") + field] ^= 1 << bit  # flags, method, place, length of the name
    index.write_bytes(raw)
    opened.clear()
    with caplog.at_level(logging.WARNING, "gdsstream"):
        assert_equal(shards(data), before)
    assert len(opened) == 4
    assert f"the shard index {index} " in caplog.text


def forge(index: Path, *, array: str = "", at: Any = None, schema: object = None, **meta: object) -> None:
    """Put -1 into an array of an index, or other things into its first schema or its meta."""
    with np.load(index) as arrays:
        held = dict(arrays)
    told = {**json.loads(held["meta"].tobytes()), **meta}
    if schema is not None:
        told["schemas"][0] = schema
    if array:
        held[array][at] = -1
    with index.open("wb") as file:
        np.savez(file, **{**held, "meta": np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)})


@pytest.mark.parametrize(
    "forged",
    [
        {"names": [0, 1, 2, 3]},
        {"names": ["0.npy", ["1.npy"], "2.npy", "3.npy"]},
        {"version": float("inf")},
        {"schemas": 5},
        {"array": "words", "at": 0},
        *({"array": "shards", "at": (0, column)} for column in (0, 3, 4, 5)),
        *(
            {"schema": [["data", "I32", shape, "strided", ""]]}
            for shape in ([-1], [float("inf")], [float("nan")], ["3"], [1.5], [10**30], [None], 3)
        ),
        {"schema": [[5, "I32", [3], "strided", ""]]},
        {"schema": [["data", "I32", [3], "strided", 5]]},
        {"schema": [["data", ["I32"], [3], "strided", ""]]},
        {"schema": [["data", "I32", [3], "strided"]]},
    ],
)
def test_an_index_that_holds_what_none_does_is_made_anew(
    data: Path, opened: list[str], caplog: pytest.LogCaptureFixture, forged: dict[str, Any]
) -> None:
    before = shards(data)
    index = data / index_name(NPY)
    forge(index, **forged)
    opened.clear()
    with caplog.at_level(logging.WARNING, "gdsstream"):
        assert_equal(shards(data), before)
    assert len(opened) == 4
    assert f"the shard index {index} is damaged" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to itself"])
def test_what_only_has_an_indexs_name_is_not_waited_for(
    data: Path, opened: list[str], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    index = data / index_name(NPY)
    if kind == "pipe":
        os.mkfifo(index)
    elif kind == "directory":
        index.mkdir()
    else:
        index.symlink_to(index.name)
    with caplog.at_level(logging.WARNING, "gdsstream"):
        assert len(shards(data)) == 4
    assert f"the shard index {index} cannot be read" in caplog.text
    opened.clear()
    assert len(shards(data)) == 4
    assert opened == []


def test_headers_are_read_where_no_thread_can_be_started(data: Path) -> None:
    """The main thread has ended, and with it the threads of pools; the one that is left goes on."""
    out, err = run_python(
        """
import sys, threading
from gdsstream import ShardDataset

def later():
    threading.main_thread().join()
    print(len(ShardDataset(sys.argv[1], index_cache=False)))

threading.Thread(target=later).start()
""",
        data,
    )
    assert out.split() == [str(sum(shard.num_records for shard in shards(data)))]
    assert "headers of shards are read one after another" in err


@pytest.fixture
def unwritable(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory nobody writes to, not even root, whom its mode does not stop: what a read-only mount answers."""
    data.chmod(0o555)
    if os.geteuid() == 0:
        real = os.open

        def refuse(path: str, flags: int, *more: int, **options: int) -> int:
            if flags & os.O_CREAT and str(path).startswith(str(data)):
                raise OSError(30, "Read-only file system", str(path))
            return real(path, flags, *more, **options)

        monkeypatch.setattr(os, "open", refuse)
    yield data
    data.chmod(0o755)


def test_where_the_directory_is_read_only_the_users_cache_keeps_the_index(
    unwritable: Path, user_cache: Path, opened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gdsstream"):
        before = shards(unwritable)
        assert [path.name for path in unwritable.iterdir() if path.name.startswith(".")] == []
        assert len(list(user_cache.iterdir())) == 1
        os.utime(unwritable / "0.npy")
        shards(unwritable)
    assert len(caplog.records) == 1  # said once, not each time
    assert f"the shard index of {unwritable} is kept in {user_cache}" in caplog.text
    opened.clear()
    assert [s.num_records for s in shards(unwritable)] == [s.num_records for s in before]
    assert opened == []


def test_a_stale_index_beside_the_data_does_not_hide_the_users(
    data: Path, user_cache: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards(data)
    write_npy(data / "1.npy", rows(9, 3))
    beside, cached = index_paths(str(data), NPY)
    write = gdsstream.shard_index._write

    def refuse(path: str, arrays: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
        if path == beside:
            raise PermissionError(13, "Permission denied")
        write(path, arrays)

    monkeypatch.setattr(gdsstream.shard_index, "_write", refuse)
    assert shards(data)[1].num_records == 9
    opened.clear()
    assert shards(data)[1].num_records == 9
    assert opened == []
    assert os.path.exists(cached)


def test_without_any_place_for_an_index_the_headers_are_read(
    unwritable: Path, user_cache: Path, opened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    user_cache.parent.write_text("a file where a directory would have to be")
    with caplog.at_level(logging.WARNING, "gdsstream"):
        for _ in range(2):
            assert len(shards(unwritable)) == 4
    assert len(opened) == 8
    assert len(caplog.records) == 1
    assert "is not kept, so that headers are read at each start" in caplog.text


def test_an_index_is_replaced_whole(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shards(data)
    index = data / index_name(NPY)
    held = index.read_bytes()
    os.utime(data / "0.npy")

    def fail(file: object, **arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    assert [s.num_records for s in shards(data)] == [s.num_records for s in before]
    assert index.read_bytes() == held
    assert sorted(path.name for path in data.iterdir() if path.name.startswith(".")) == [index_name(NPY)]


def test_the_first_bad_shard_is_named_and_nothing_is_kept(data: Path) -> None:
    os.truncate(data / "1.npy", 140)
    (data / "3.npy").write_bytes(b"junk")
    for _ in range(2):
        with pytest.raises(TruncatedFileError, match=f"{data}/1.npy"):
            shards(data)
    with pytest.raises(HeaderError, match=f"{data}/3.npy"):
        shards([data / "3.npy", data / "1.npy"])
    assert not (data / index_name(NPY)).exists()


def test_no_thread_and_no_descriptor_is_left(data: Path, no_leaks: None) -> None:
    before = threading.active_count()
    shards(data)
    os.truncate(data / "1.npy", 140)
    with pytest.raises(TruncatedFileError):
        shards(data, cache=False)
    assert threading.active_count() == before


def test_ten_thousand_shards_open_in_less_than_a_second(tmp_path: Path) -> None:
    count = 10_000
    first = write_safetensors(tmp_path / "shard-0.safetensors", x=rows(2, 4), y=rows(2)).read_bytes()
    for number in range(1, count):
        (tmp_path / f"shard-{number}.safetensors").write_bytes(first)
    format = ShardFormat("safetensors")
    fresh = read_shards(find_shards(tmp_path)[0], format)
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        table = RecordTable.of(read_shards(find_shards(tmp_path)[0], format))
        best = min(best, time.process_time() - start)
    assert table.num_records == 2 * count
    assert table.paths[-1] == fresh[-1].path == str(tmp_path / f"shard-{count - 1}.safetensors")
    assert best < 1.0  # 0.2 where nothing else runs
