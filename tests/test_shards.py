"""ShardDataset: records of every format by number, alone and in batches, here and in DataLoader's workers."""

from __future__ import annotations

import glob
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_files import (
    as_file,
    rows,
    write_dataset,
    write_members,
    write_npy,
    write_ragged,
    write_safetensors,
    write_tar,
    write_tokens,
)
from support import run_python
from torch.utils.data import DataLoader

import gdsstream
from gdsstream.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DatasetError,
    FileChangedError,
    GdsStreamError,
    HeaderError,
    ReadError,
    TruncatedFileError,
)
from gdsstream.records import Field
from gdsstream.shard_formats import FORMATS
from gdsstream.shards import ShardDataset

TOKENS: dict[str, Any] = {"dtype": "int32", "record_length": 4}


def open_dataset(path: Path | str | Sequence[Path], format: str, **more: Any) -> ShardDataset:
    return ShardDataset(path, **(TOKENS if format == "tokens" else {}), **more)


@pytest.fixture(params=FORMATS)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ShardDataset, torch.Tensor]:
    """A dataset of each format, and all its records int32 [15, 4]."""
    everything = write_dataset(tmp_path / "data", request.param)
    return open_dataset(tmp_path / "data", request.param), everything


def test_records_come_by_number(dataset: tuple[ShardDataset, torch.Tensor]) -> None:
    data, everything = dataset
    assert len(data) == 15
    assert data.fields[0]._replace(name="") == Field("", "I32", (4,), False)
    for number in range(-15, 15):
        record = data[number]
        assert isinstance(record, torch.Tensor)
        assert record.device.type == "cpu"
        assert torch.equal(record, everything[number])
    assert torch.equal(data[np.int64(3)], everything[3])  # type: ignore[arg-type]
    assert torch.equal(data[torch.tensor(4)], everything[4])  # type: ignore[arg-type]


def test_records_come_in_batches(dataset: tuple[ShardDataset, torch.Tensor]) -> None:
    data, everything = dataset
    for numbers in ([], [7], [0, 14, 3, 3, -1, 9], list(range(15))):
        batch = data.__getitems__(numbers)
        assert len(batch) == len(numbers)
        for number, record in zip(numbers, batch, strict=True):
            assert torch.equal(record, everything[number])  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [15, -16, 2**62, 2**70, -(2**63) - 1])
def test_a_record_that_does_not_exist_is_an_index_error(
    dataset: tuple[ShardDataset, torch.Tensor], number: int
) -> None:
    data, _ = dataset
    with pytest.raises(IndexError, match=f"no record {number}; there are 15"):
        data[number]
    with pytest.raises(IndexError, match=f"no record {number}"):
        data.__getitems__([0, number])


def test_what_is_no_number_is_a_type_error(dataset: tuple[ShardDataset, torch.Tensor]) -> None:
    data, _ = dataset
    for wrong in (1.0, "1", None, slice(2)):
        with pytest.raises(TypeError, match="record numbers are integers"):
            data[wrong]  # type: ignore[index]
    assert [int(record[0]) for record in list(data)] == [4 * number for number in range(15)]  # ends by IndexError


def test_fields_of_a_record_are_a_dict(tmp_path: Path) -> None:
    image, label = rows(6, 3, 2, dtype=torch.bfloat16), rows(6, dtype=torch.int64)
    write_safetensors(tmp_path / "0.safetensors", image=image[:4], label=label[:4])
    write_safetensors(tmp_path / "1.safetensors", label=label[4:], image=image[4:])
    data = ShardDataset(tmp_path)
    for number, record in enumerate(data.__getitems__(range(6))):
        assert isinstance(record, dict)
        assert list(record) == ["image", "label"]
        assert torch.equal(record["image"], image[number])
        assert torch.equal(record["label"], label[number])
        assert record["label"].shape == ()
    chosen = ShardDataset(tmp_path, fields=["label"])
    assert [int(each) for each in chosen.__getitems__([5, 0])] == [5, 0]  # type: ignore[arg-type]
    assert list(ShardDataset(tmp_path, fields=["label", "image"])[1]) == ["label", "image"]
    assert chosen.fingerprint == data.fingerprint


def test_ragged_records_have_their_own_length(tmp_path: Path) -> None:
    texts = [rows(n, 2, dtype=torch.int16, first=100 * n) for n in (3, 0, 1, 5, 0, 2)]
    write_ragged(tmp_path / "0.safetensors", {"text": texts[:4]}, label=rows(4))
    write_ragged(tmp_path / "1.safetensors", {"text": texts[4:]}, label=rows(2))
    data = ShardDataset(tmp_path, fields=["text", "label"])
    assert data.fields[0] == Field("text", "I16", (2,), True)
    for order in ([5, 0, 1, 3], [1], [1, 4], range(6)):
        batch = data.__getitems__(list(order))
        for number, record in zip(order, batch, strict=True):
            assert isinstance(record, dict)
            assert torch.equal(record["text"], texts[number])
            assert int(record["label"]) == number % 4


def test_members_of_a_tar_are_records(tmp_path: Path) -> None:
    records = [
        {"x.npy": np.full((2, 3), n, dtype=np.float32), "safetensors": {"ids": rows(n)}, "txt": f"text {n}".encode()}
        for n in range(5)
    ]
    write_tar(tmp_path / "a-9.tar", records[:2])
    write_tar(tmp_path / "a-10.tar", records[2:], first=2)
    data = ShardDataset(tmp_path)
    assert [Path(path).name for path in data.paths] == ["a-9.tar", "a-10.tar"]
    for number, record in enumerate(data.__getitems__(range(5))):
        assert isinstance(record, dict)
        assert torch.equal(record["x"], torch.full((2, 3), float(number)))
        assert torch.equal(record["ids"], rows(number))
        assert bytes(record["txt"].tolist()) == f"text {number}".encode()


@pytest.mark.parametrize("stride", [None, 3, 1])
def test_windows_of_tokens_can_overlap(tmp_path: Path, stride: int | None) -> None:
    tokens = torch.randint(0, 2**16, (100,)).to(torch.uint16)
    write_tokens(tmp_path / "a.bin", tokens)
    write_tokens(tmp_path / "b.bin", tokens[:2])  # shorter than a window
    data = ShardDataset(tmp_path, dtype="uint16", record_length=8, stride=stride)
    windows = tokens.view(torch.int16).unfold(0, 8, stride or 8)
    assert len(data) == len(windows)
    for number, record in enumerate(data.__getitems__(range(len(data)))):
        assert isinstance(record, torch.Tensor)
        assert record.dtype == torch.uint16
        assert torch.equal(record.view(torch.int16), windows[number])


def test_records_without_bytes_are_records(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", rows(3, 0))
    assert [tuple(record.shape) for record in ShardDataset(tmp_path).__getitems__([2, 0])] == [(0,), (0,)]  # type: ignore[union-attr]


def test_a_record_alone_owns_its_memory(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", rows(100, 4))
    record = ShardDataset(tmp_path / "a.npy")[7]
    assert isinstance(record, torch.Tensor)
    assert record.untyped_storage().nbytes() == 16


def test_more_shards_than_stay_open(tmp_path: Path, no_leaks: None) -> None:
    for number in range(150):
        write_npy(tmp_path / f"{number}.npy", rows(2, 4, first=number))
    data = ShardDataset(tmp_path)
    expected = [int(rows(2, 4, first=n // 2)[n % 2, 0]) for n in range(300)]
    data[0]  # opens the engine
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        batch = data.__getitems__(range(300))
        assert [int(record[0]) for record in batch] == expected  # type: ignore[index,call-overload]
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/fd")) - before >= 70 and time.monotonic() < deadline:
            time.sleep(0.01)  # the engine's threads let go of the last transfer in their own time
        assert len(os.listdir("/proc/self/fd")) - before < 70
    del data, batch


def test_a_batch_from_more_shards_than_can_be_open(tmp_path: Path) -> None:
    for number in range(1000):
        write_npy(tmp_path / f"{number}.npy", rows(1, 2, first=number))
    data = ShardDataset(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, limits[1]))
    try:
        batch = data.__getitems__(range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [int(record[0]) for record in batch] == [2 * number for number in range(1000)]  # type: ignore[index,call-overload]


def test_several_threads_read_one_dataset(tmp_path: Path) -> None:
    everything = write_dataset(tmp_path / "data", "npy", [40] * 80)
    data = ShardDataset(tmp_path / "data")
    wrong: list[int] = []

    def read(seed: int) -> None:
        for numbers in np.random.default_rng(seed).integers(0, len(data), (20, 64)).tolist():
            batch = torch.stack(data.__getitems__(numbers))  # type: ignore[arg-type]
            if not torch.equal(batch, everything[numbers]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("host_cache_bytes", ["0", "1MiB"])
def test_engines_that_were_released_are_opened_anew(
    dataset: tuple[ShardDataset, torch.Tensor], host_cache_bytes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, everything = dataset
    monkeypatch.setenv("GDSSTREAM_HOST_CACHE_BYTES", host_cache_bytes)
    for number in (2, 9):
        assert torch.equal(data[number], everything[number])  # type: ignore[arg-type]
        gdsstream.release_engines()


# --- DataLoader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("used_before", [False, True])
def test_an_ordinary_dataloader_reads_it(
    dataset: tuple[ShardDataset, torch.Tensor], workers: int, used_before: bool
) -> None:
    data, everything = dataset
    if used_before:  # the workers are forks of a process whose engine runs
        assert torch.equal(data[3], everything[3])  # type: ignore[arg-type]
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        generator=order,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    expected = torch.randperm(15, generator=_after_base_seed(5)).split(4)
    batches = list(loader)
    assert len(batches) == 4
    for batch, numbers in zip(batches, expected, strict=True):
        assert torch.equal(batch, everything[numbers])
    assert torch.equal(data[3], everything[3])  # type: ignore[arg-type]


def _after_base_seed(seed: int) -> torch.Generator:
    """The generator that RandomSampler draws with: DataLoader's iterator draws a number for its workers first."""
    generator = torch.Generator().manual_seed(seed)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator


def test_dicts_are_collated_in_workers(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", x=rows(10, 3), y=rows(10))
    data = ShardDataset(tmp_path)
    batches = list(DataLoader(data, batch_size=5, num_workers=2, multiprocessing_context="fork"))  # type: ignore[arg-type]
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), rows(10, 3))
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), rows(10))


def test_spawned_workers_get_it_pickled(tmp_path: Path) -> None:
    everything = write_dataset(tmp_path / "data", "npy")
    code = """
import sys, torch
from torch.utils.data import DataLoader
from gdsstream.shards import ShardDataset

if __name__ == "__main__":
    data = ShardDataset(sys.argv[1])
    data[0]
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    print(torch.cat(list(loader)).flatten().tolist())
"""
    out, _ = run_python(code, tmp_path / "data")
    assert out.strip() == str(everything.flatten().tolist())


def test_pickling_keeps_what_was_read_of_the_headers(dataset: tuple[ShardDataset, torch.Tensor]) -> None:
    data, everything = dataset
    assert torch.equal(data[1], everything[1])  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[14], everything[14])
    assert copy.fingerprint == data.fingerprint
    assert repr(copy) == repr(data)
    assert "15 records in 3" in repr(data)


def test_a_fork_reads_on_by_itself(dataset: tuple[ShardDataset, torch.Tensor]) -> None:
    data, everything = dataset
    expected = [everything[number].tolist() for number in range(15)]
    assert [record.tolist() for record in data.__getitems__(range(15))] == expected  # type: ignore[union-attr]
    assert data._reader is not None
    data._reader._lock.acquire()  # as by another thread, which the child does not have
    child = os.fork()
    if child:
        data._reader._lock.release()
    else:
        signal.alarm(30)
        status = 1
        try:
            status = int([record.tolist() for record in data.__getitems__(range(15))] != expected)  # type: ignore[union-attr]
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert data[3].tolist() == expected[3]  # type: ignore[union-attr]


# --- paths -----------------------------------------------------------------------------------------------------------


def test_shards_come_in_natural_order_or_in_the_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (10, 9, 1):
        write_npy(tmp_path / f"shard-{number}.npy", rows(1, first=number))
    (tmp_path / ".hidden.npy").write_bytes(b"junk")
    (tmp_path / "README.md").write_bytes(b"text")
    monkeypatch.chdir(tmp_path)
    by_number = [1, 9, 10]
    for path in (tmp_path, str(tmp_path), ".", tmp_path / "*.npy", "shard-*.npy"):
        assert [int(record) for record in ShardDataset(path).__getitems__(range(3))] == by_number  # type: ignore[arg-type]
    listed = ShardDataset([tmp_path / "shard-9.npy", "shard-1.npy", "shard-9.npy"])
    assert [int(record) for record in listed.__getitems__(range(3))] == [9, 1, 9]  # type: ignore[arg-type]
    assert all(os.path.isabs(path) for path in listed.paths)
    assert len(ShardDataset("shard-1?.npy")) == 1


@pytest.mark.parametrize("listed", [["s1.npy", "s01.npy", "s001.npy"], ["s001.npy", "s01.npy", "s1.npy"]])
def test_names_whose_numbers_are_equal_have_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    for name in listed:
        write_npy(tmp_path / name, rows(1))
    monkeypatch.setattr(os, "listdir", lambda path: listed)
    monkeypatch.setattr(glob, "glob", lambda path, recursive: [str(tmp_path / name) for name in listed])
    for path in (tmp_path, tmp_path / "*.npy"):
        names = [os.path.basename(each) for each in ShardDataset(path, index_cache=False).paths]
        assert names == ["s001.npy", "s01.npy", "s1.npy"]


def test_a_name_with_a_patterns_characters_is_a_name(tmp_path: Path) -> None:
    write_npy(tmp_path / "a[1].npy", rows(2))
    assert len(ShardDataset(tmp_path / "a[1].npy")) == 2


def test_the_format_can_be_given(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.dat", rows(12))
    assert len(ShardDataset(tmp_path / "tokens.dat", format="tokens", **TOKENS)) == 3
    write_npy(tmp_path / "a.npy", rows(5))
    write_tar(tmp_path / "a.tar", [{"x": b"1"}])
    assert len(ShardDataset(tmp_path, format="npy")) == 5
    assert len(ShardDataset(tmp_path, format="tar")) == 1
    with pytest.raises(DatasetError, match=r"several formats: .*/a\.npy is npy, .*/a\.tar is tar"):
        ShardDataset(tmp_path)
    with pytest.raises(DatasetError, match="several formats"):
        ShardDataset([tmp_path / "a.tar", tmp_path / "a.npy"])


@pytest.mark.parametrize(
    ("files", "path", "kind", "why"),
    [
        ([], "", DatasetError, r"has no shard \(.safetensors, .npy, .bin, .tokens, .tar\); it is empty"),
        (["README", "b.json"], "", DatasetError, r"it has 2 other file\(s\), README for one"),
        (["a.tar.gz"], "", DatasetError, "a.tar.gz is compressed: decompress it"),
        (["a.tar.gz"], "a.tar.gz", DatasetError, "a.tar.gz is compressed: decompress it"),
        (["a.parquet"], "a.parquet", DatasetError, "the extension tells no format; give one"),
        ([], "none", CheckpointNotFoundError, "none does not exist"),
        ([], "none*.npy", DatasetError, "nothing matches .*none"),
    ],
)
def test_where_there_is_no_dataset(
    tmp_path: Path, files: list[str], path: str, kind: type[Exception], why: str
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(kind, match=why):
        ShardDataset(f"{tmp_path}/{path}")


def test_braces_are_names_or_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    for pattern in ("{000..010}.tar", "shard-{a,b}.tar", "{000..010}-*.tar"):
        for path in (tmp_path / pattern, [tmp_path / pattern]):
            with pytest.raises(GdsStreamError, match="; braces are not expanded here: give a glob"):
                ShardDataset(path)
    write_npy(tmp_path / "{0..1}.npy", rows(2))
    assert len(ShardDataset(tmp_path / "{0..1}.npy")) == 2


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    write_npy(tmp_path / "0.npy", rows(2))
    os.rename(tmp_path / "0.npy", folder + b"/caf\xe9.npy")
    for path in (tmp_path, tmp_path / "*.npy", [os.fsdecode(folder + b"/caf\xe9.npy")]):
        with pytest.raises(DatasetError, match=r"the path b'/.*/caf\\xe9\.npy' of a shard is not UTF-8.*; rename it"):
            ShardDataset(path)  # type: ignore[arg-type]
    os.rename(folder + b"/caf\xe9.npy", tmp_path / "café.npy")
    assert torch.equal(ShardDataset(tmp_path)[1], rows(2)[1])  # type: ignore[arg-type]


def test_what_is_no_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.npy is a directory"):
        ShardDataset([tmp_path / "folder.npy"])
    with pytest.raises(DatasetError, match="list of shards is empty"):
        ShardDataset([])
    for wrong in (5, [5], None, b"bytes"):
        with pytest.raises(ConfigError, match=r"is a path|path is a string"):
            ShardDataset(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="format is 'nyp'; did you mean 'npy'"):
        ShardDataset(tmp_path, format="nyp")


# --- what is wrong with shards ---------------------------------------------------------------------------------------


def test_shards_without_records_are_skipped(tmp_path: Path) -> None:
    for number, count in enumerate((0, 2, 0, 3, 0)):
        write_npy(tmp_path / f"{number}.npy", rows(count, 4, first=number) if count else np.zeros((0, 9), dtype="f8"))
    data = ShardDataset(tmp_path)
    assert len(data) == 5
    assert data.fields[0].shape == (4,)
    assert torch.equal(data[4], rows(3, 4, first=3)[2])  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match=r"no record in 1 shard"):
        ShardDataset(tmp_path / "0.npy")


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"x": rows(2, 3).float(), "y": rows(2)}, "field 'x' is F32 in .*/b.safetensors, but I32 in .*/a.safetensors"),
        ({"x": rows(2, 4), "y": rows(2)}, r"field 'x' has records of shape \[4\] in .*/b.safetensors, but \[3\]"),
        ({"x": rows(2, 3)}, "b.safetensors has no field 'y', which .*/a.safetensors has"),
        ({"x": rows(2, 3), "y": rows(2), "z": rows(2)}, "a.safetensors has no field 'z', which .*/b.safetensors has"),
    ],
)
def test_shards_that_disagree_are_refused(tmp_path: Path, odd: dict[str, torch.Tensor], why: str) -> None:
    write_safetensors(tmp_path / "a.safetensors", x=rows(3, 3), y=rows(3))
    write_safetensors(tmp_path / "b.safetensors", **odd)
    for _ in range(2):  # from the headers, and from the index
        with pytest.raises(DatasetError, match=why):
            ShardDataset(tmp_path)
    with pytest.raises(DatasetError, match=r"a\.safetensors has no field 'w'; it has 'x', 'y'"):
        ShardDataset(tmp_path, fields=["w"])


@pytest.mark.parametrize("format", ["safetensors", "npy", "tar"])
def test_a_truncated_shard_is_refused(tmp_path: Path, format: str) -> None:
    write_dataset(tmp_path, format)
    path = tmp_path / f"shard-1.{format}"
    ShardDataset(tmp_path)  # what the index knows of it is no longer so
    os.truncate(path, min(path.stat().st_size, 1500) - 10)
    with pytest.raises(TruncatedFileError, match=str(path)):
        ShardDataset(tmp_path)


def test_a_shard_with_a_corrupt_header_is_refused(tmp_path: Path) -> None:
    for format in ("safetensors", "npy", "tar"):
        write_dataset(tmp_path / format, format)
        path = tmp_path / format / f"shard-2.{format}"
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
        with pytest.raises((HeaderError, TruncatedFileError), match=str(path)):
            ShardDataset(tmp_path / format)


def test_a_shard_that_changes_while_it_is_read_is_an_error(dataset: tuple[ShardDataset, torch.Tensor]) -> None:
    data, everything = dataset
    assert torch.equal(data[0], everything[0])  # type: ignore[arg-type]
    os.utime(data.paths[0])
    os.truncate(data.paths[1], 20)
    os.unlink(data.paths[2])
    with pytest.raises(FileChangedError, match=data.paths[0]):
        data[0]
    with pytest.raises(FileChangedError, match=data.paths[1]):
        data[5]
    with pytest.raises(ReadError, match=data.paths[2]):
        data[14]


def test_a_storage_error_names_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npy(tmp_path / "a.npy", rows(10, 4))
    monkeypatch.setenv("GDSSTREAM_FAULTS", "eio@2")
    data = ShardDataset(tmp_path)
    assert torch.equal(data[0], rows(10, 4)[0])  # type: ignore[arg-type]
    with pytest.raises(ReadError, match=r"a\.npy") as raised:
        [data[number] for number in range(10)]
    assert raised.value.errno == 5
    gdsstream.release_engines()


def test_workers_pass_errors_on(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", rows(10, 4))
    data = ShardDataset(tmp_path)
    os.truncate(tmp_path / "a.npy", 150)
    with pytest.raises(GdsStreamError, match=r"a\.npy"):
        list(DataLoader(data, batch_size=5, num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]


def test_a_backend_that_cannot_read_records_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npy(tmp_path / "a.npy", rows(10, 4))
    monkeypatch.setenv("GDSSTREAM_BACKEND", "traditional")
    with pytest.raises(ConfigError, match="backend='traditional'"):
        ShardDataset(tmp_path)[0]


def test_members_that_lie_elsewhere_in_each_tar(tmp_path: Path) -> None:
    first = np.arange(5, dtype=np.int32)
    write_members(tmp_path / "a.tar", [("note", b"x" * 3000), ("k.x.npy", first)])
    write_members(tmp_path / "b.tar", [("k.x.npy", as_file(first + 1)), ("l.x.npy", first + 2)])
    data = ShardDataset(tmp_path)
    assert [record.tolist() for record in data.__getitems__([2, 0, 1])] == [  # type: ignore[union-attr]
        (first + 2).tolist(),
        first.tolist(),
        (first + 1).tolist(),
    ]


def test_without_a_cache_nothing_is_written(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", rows(10, 4))
    ShardDataset(tmp_path, index_cache=False)
    assert os.listdir(tmp_path) == ["a.npy"]
    ShardDataset(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


def test_sources_are_what_an_engine_opens(tmp_path: Path) -> None:
    write_dataset(tmp_path, "npy")
    data = ShardDataset(tmp_path)
    sources = data.sources([2, 0])
    assert [source.path for source in sources] == [data.paths[2], data.paths[0]]
    assert sources[1].stamp.size == os.path.getsize(data.paths[0])
