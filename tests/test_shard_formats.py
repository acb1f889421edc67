"""Readers of shards' headers: what they find, and how they name what is wrong."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_files import (
    Content,
    as_file,
    rows,
    write_members,
    write_npy,
    write_ragged,
    write_safetensors,
    write_tar,
    write_tokens,
)

from gdsstream import shard_npy
from gdsstream.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DatasetError,
    HeaderError,
    TruncatedFileError,
)
from gdsstream.records import Column, Field, RecordTable, Shard
from gdsstream.regular_files import FileStamp, read_at
from gdsstream.shard_formats import ShardFormat


def read(path: Path, **options: Any) -> Shard:
    """The shard at a path whose extension is its format."""
    return ShardFormat.of("tokens" if options else path.suffix.removeprefix("."), options).read(str(path))


def contents(shard: Shard) -> dict[str, list[bytes]]:
    """The bytes of every record of every field, as the columns say where they lie."""
    table = RecordTable.of([shard])
    data = Path(shard.path).read_bytes()
    found = {}
    for field in table.fields:
        _, offset, nbytes = table.locate(field.name, np.arange(shard.num_records))
        found[field.name] = [data[o : o + n] for o, n in zip(offset.tolist(), nbytes.tolist(), strict=True)]
    return found


def fields(shard: Shard) -> tuple[Field, ...]:
    return RecordTable.of([shard]).fields


def raw(tensor: torch.Tensor | np.ndarray[Any, Any]) -> list[bytes]:
    array = tensor.view(torch.uint8).numpy() if isinstance(tensor, torch.Tensor) else tensor
    return [row.tobytes() for row in array]


def cut(path: Path, nbytes: int) -> Path:
    os.truncate(path, path.stat().st_size - nbytes)
    return path


# --- safetensors ----------------------------------------------------------------------------------------------------


def test_tensors_of_a_safetensors_file_are_fields(tmp_path: Path) -> None:
    image, label = rows(6, 3, 5, dtype=torch.float16), rows(6, dtype=torch.int64)
    shard = read(write_safetensors(tmp_path / "a.safetensors", image=image, label=label))
    assert shard.num_records == 6
    assert shard.stamp == FileStamp.of(tmp_path / "a.safetensors")
    assert fields(shard) == (Field("image", "F16", (3, 5), False), Field("label", "I64", (), False))
    assert contents(shard) == {"image": raw(image.flatten(1)), "label": raw(label[:, None])}


def test_values_and_offsets_are_one_ragged_field(tmp_path: Path) -> None:
    records = [rows(n, 2, dtype=torch.int16, first=10 * n) for n in (3, 0, 1, 5)]
    shard = read(write_ragged(tmp_path / "a.safetensors", {"text": records}, label=rows(4)))
    assert fields(shard) == (Field("label", "I32", (), False), Field("text", "I16", (2,), True))
    assert contents(shard)["text"] == [record.numpy().tobytes() for record in records]


def test_values_without_offsets_are_a_field_of_their_own(tmp_path: Path) -> None:
    shard = read(write_safetensors(tmp_path / "a.safetensors", **{"x.values": rows(2, 3)}))
    assert fields(shard) == (Field("x.values", "I32", (3,), False),)


def test_packed_dtypes_have_torchs_shape(tmp_path: Path) -> None:
    packed = rows(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    shard = read(write_safetensors(tmp_path / "a.safetensors", x=packed))
    assert fields(shard) == (Field("x", "F4", (4,), False),)
    assert contents(shard)["x"] == raw(rows(3, 4, dtype=torch.uint8))


def test_a_safetensors_shard_can_be_without_records(tmp_path: Path) -> None:
    assert read(write_safetensors(tmp_path / "a.safetensors", x=rows(0, 3))).num_records == 0
    assert read(write_ragged(tmp_path / "b.safetensors", {"x": [rows(0, 3)]})).num_records == 1


def test_a_scalar_beside_the_records_is_refused_when_asked_for(tmp_path: Path) -> None:
    shard = read(write_safetensors(tmp_path / "a.safetensors", x=rows(3), version=torch.tensor(4)))
    table = RecordTable.of([shard], ["x"])
    assert (table.num_records, table.fields) == (3, (Field("x", "I32", (), False),))
    for chosen in (None, ["version"]):
        with pytest.raises(DatasetError, match=f"{shard.path}: field 'version' is a scalar.*; or leave the field out"):
            RecordTable.of([shard], chosen)


def ragged_tensors(values: int, *offsets: int) -> dict[str, torch.Tensor]:
    return {"x.values": rows(values, 2), "x.offsets": torch.tensor(offsets, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"x": rows(3), "y": rows(4)}, "field 'y' has 4 records, but 'x' has 3"),
        ({"x": torch.tensor(5)}, "tensor 'x' is a scalar"),
        ({}, "has no tensor"),
        (ragged_tensors(4, 0, 3, 2, 4), "x.offsets falls from 3 to 2 at record 1"),
        (ragged_tensors(4, 0, 3), "x.offsets goes from 0 to 3; it has to go from 0 to 4"),
        (ragged_tensors(4, 1, 4), "x.offsets goes from 1 to 4"),
        (ragged_tensors(4), "x.offsets is I64 of shape \\[0\\]"),
        ({"x.values": rows(4), "x.offsets": rows(2)}, "x.offsets is I32 of shape \\[2\\]"),
        ({**ragged_tensors(4, 0, 4), "x": rows(1)}, "field 'x' is there twice"),
        (
            {**ragged_tensors(4, 0, 4), "y": rows(3)},
            "field 'y' has 3 records, but 'x' has 1|'x' has 1 records, but 'y'",
        ),
    ],
)
def test_tensors_that_are_no_records_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], why: str) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", **tensors)
    with pytest.raises(DatasetError, match=f"{path}.*({why})"):
        read(path)


def test_a_damaged_safetensors_shard_is_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", x=rows(100))
    with pytest.raises(TruncatedFileError, match=f"{path} is truncated in tensor 'x': 7 of its 400 bytes are missing"):
        read(cut(path, 7))
    path.write_bytes(b"\x10" + path.read_bytes()[1:])
    with pytest.raises(HeaderError, match=f"{path}: "):
        read(path)


# --- npy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", "<c8"]
)
def test_rows_of_an_npy_array_are_records(tmp_path: Path, dtype: str) -> None:
    array = np.arange(24).reshape(4, 3, 2).astype(dtype)
    shard = read(write_npy(tmp_path / "a.npy", array))
    assert fields(shard)[0].torch_dtype == torch.from_numpy(array).dtype
    assert fields(shard)[0].shape == (3, 2)
    assert contents(shard) == {"data": raw(array)}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy_is_read(tmp_path: Path, version: tuple[int, int]) -> None:
    array = np.arange(6, dtype=np.int16).reshape(3, 2)
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    assert contents(read(tmp_path / "a.npy")) == {"data": raw(array)}


def test_one_column_in_fortran_order_is_as_good_as_in_c(tmp_path: Path) -> None:
    header = b"{'descr': '<i4', 'fortran_order': True, 'shape': (3,), }\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + bytes(12))
    assert read(tmp_path / "a.npy").num_records == 3


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros(3, dtype=[("a", "<i4"), ("b", "<f4")]), "is a structured array"),
        (np.zeros((3, 2), dtype=">f4"), r"is big-endian \(>f4\)"),
        (np.asfortranarray(np.zeros((3, 2))), "is in Fortran order"),
        (np.zeros(3, dtype="<c16"), r"has the dtype <c16 \(complex128\), which gdsstream does not read"),
        (np.array(["a", "bc"]), "has the dtype <U2"),
        (np.zeros(2, dtype="V2"), r"has the dtype \|V2"),
        (np.array(5), "is a scalar"),
    ],
)
def test_arrays_that_cannot_be_read_are_refused(tmp_path: Path, array: np.ndarray[Any, Any], why: str) -> None:
    path = write_npy(tmp_path / "a.npy", array)
    with pytest.raises(DatasetError, match=f"{path} {why}"):
        read(path)


def test_a_damaged_npy_shard_is_refused(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "a.npy", np.zeros((10, 4), dtype="<f4"))
    whole = path.read_bytes()
    with pytest.raises(TruncatedFileError, match=rf"{path} has 283 bytes .* \(5 missing\): F32 of shape \[10, 4\]"):
        read(cut(path, 5))
    for data, kind, why in (
        (whole + b"x", HeaderError, "1 more bytes follow"),
        (whole[:40], TruncatedFileError, "ends within its header"),
        (whole[:5], HeaderError, "does not begin as a .npy array"),
        (b"", HeaderError, "does not begin as a .npy array"),
        (b"PK" + whole, HeaderError, "does not begin as a .npy array"),
        (whole[:6] + b"\x07" + whole[7:], HeaderError, "version 7"),
        (whole.replace(b"'descr'", b"'decsr'"), HeaderError, "no dict of descr"),
        (whole.replace(b"'<f4'", b"'<q9'"), HeaderError, "dtype '<q9' is not known"),
        (whole.replace(b"(10, 4)", b"(-1, 4)"), HeaderError, r"shape \(-1, 4\)"),
        (whole.replace(b"{'descr'", b"__import_"), HeaderError, "no dict of descr"),
    ):
        path.write_bytes(data)
        with pytest.raises(kind, match=f"{path}.*{why}"):
            read(path)


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("{[1]: 2}", "no dict of descr"),
        ("{'descr': ',f4', 'fortran_order': False, 'shape': (1,)}", "dtype ',f4' is not known"),
        ("{'descr': '04,f4', 'fortran_order': False, 'shape': (1,)}", "dtype '04,f4' is not known"),
        ("{'descr': '7}4', 'fortran_order': False, 'shape': (1,)}", "dtype '7}4' is not known"),
        (f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30}, 0)}}", "overflows"),
        (f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, 0, {10**30})}}", "overflows"),
        (f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**62 + 5}, 0)}}", "overflows"),
    ],
)
def test_headers_that_numpy_never_wrote_are_refused(tmp_path: Path, header: str, why: str) -> None:
    (tmp_path / "a.npy").write_bytes(npy(header))
    write_members(tmp_path / "a.tar", [("0.npy", npy(header))])
    for path in (tmp_path / "a.npy", tmp_path / "a.tar"):
        with pytest.raises(HeaderError, match=f"{path}.*{why}"):
            read(path)


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "stride", "expected"),
    [
        (4, None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, 3, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]),
        (4, 6, [[0, 1, 2, 3], [6, 7, 8, 9]]),
        (10, None, [list(range(10))]),
        (1, 5, [[0], [5]]),
    ],
)
def test_windows_of_tokens_are_records(
    tmp_path: Path, length: int, stride: int | None, expected: list[list[int]]
) -> None:
    path = write_tokens(tmp_path / "a.bin", torch.arange(10).to(torch.uint16))
    shard = read(path, dtype="uint16", record_length=length, stride=stride)
    assert fields(shard) == (Field("tokens", "U16", (length,), False),)
    assert contents(shard)["tokens"] == [np.array(window, dtype="<u2").tobytes() for window in expected]


def test_a_file_shorter_than_a_window_has_no_record(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", torch.arange(10).to(torch.uint16))
    assert read(path, dtype="U16", record_length=11).num_records == 0
    assert read(path, dtype=np.uint16, record_length=5).num_records == 2


def test_half_a_token_is_a_truncated_file(tmp_path: Path) -> None:
    path = cut(write_tokens(tmp_path / "a.bin", torch.arange(10)), 3)
    with pytest.raises(TruncatedFileError, match=f"{path} has 77 bytes, which are not whole tokens of I64.* 3 missing"):
        read(path, dtype=torch.int64, record_length=2)


@pytest.mark.parametrize("dtype", ["int32", "I32", torch.int32, "torch.int32"])
def test_a_dtype_has_several_names(dtype: object) -> None:
    assert ShardFormat.of("tokens", {"dtype": dtype, "record_length": 2}).dtype == "I32"


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("parquet", {}, "format is 'parquet'; it is one of safetensors, npy, tokens, tar"),
        ("saftensors", {}, "did you mean 'safetensors'"),
        ("npy", {"dtype": "int32", "stride": 4}, "dtype, stride can be given for token files only"),
        ("tokens", {}, "give dtype and record_length"),
        ("tokens", {"dtype": "int32"}, "give record_length"),
        ("tokens", {"dtype": "int33", "record_length": 4}, "did you mean 'int32'"),
        ("tokens", {"dtype": 32, "record_length": 4}, "dtype is 32"),
        ("tokens", {"dtype": "int32", "record_length": 0}, "record_length is 0"),
        ("tokens", {"dtype": "int32", "record_length": 2**41}, r"record_length is 2199023255552; .* from 1 to 2\*\*40"),
        ("tokens", {"dtype": "int32", "record_length": True}, "record_length is True"),
        ("tokens", {"dtype": "int32", "record_length": 4, "stride": -1}, "stride is -1"),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ShardFormat.of(name, options)


# --- tar ------------------------------------------------------------------------------------------------------------


def samples(count: int = 4) -> list[dict[str, Content]]:
    return [
        {
            "npy": np.arange(6, dtype=np.float32).reshape(2, 3) + number,
            "ids.npy": np.arange(number + 1, dtype=np.int64) * 100,
            "safetensors": {"mask": rows(3, dtype=torch.uint8, first=number), "seq": rows(number, 2)},
            "aux.safetensors": {"mask": torch.tensor(number, dtype=torch.int16)},
            "cls": str(number * 1000).encode(),
        }
        for number in range(count)
    ]


def expected(records: list[dict[str, Content]]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {"npy": [], "ids": [], "mask": [], "seq": [], "aux.mask": [], "cls": []}
    for record in records:
        found["npy"].append(record["npy"].tobytes())  # type: ignore[union-attr]
        found["ids"].append(record["ids.npy"].tobytes())  # type: ignore[union-attr]
        for prefix in ("", "aux."):
            tensors = record[f"{prefix}safetensors"]
            assert isinstance(tensors, Mapping)
            for name, tensor in tensors.items():
                found[prefix + name].append(tensor.numpy().tobytes())
        found["cls"].append(record["cls"])  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "a directory.with dots/" + "x" * 90 + "/" + "ü" * 60 + "/"])
def test_members_of_a_tar_are_fields_read_in_place(tmp_path: Path, format: int, prefix: str) -> None:
    records = samples()
    members = [
        (f"{prefix}{at:03d}.{ext}", content) for at, record in enumerate(records) for ext, content in record.items()
    ]
    if format == tarfile.USTAR_FORMAT and len(prefix) > 100:
        members = [(name.replace("ü", ""), content) for name, content in members]
    shard = read(write_members(tmp_path / "a.tar", members, format=format))
    assert shard.num_records == 4
    assert contents(shard) == expected(records)
    assert fields(shard) == (
        Field("aux.mask", "I16", (), False),
        Field("cls", "U8", (), True),
        Field("ids", "I64", (), True),
        Field("mask", "U8", (3,), False),
        Field("npy", "F32", (2, 3), False),
        Field("seq", "I32", (2,), True),
    )


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_is_of_its_own_member_only(tmp_path: Path, format: int) -> None:
    members: list[tuple[str, Content]] = [(f"{'d' * 99}/{'x' * 60}.cls", b"long"), ("1.cls", b"short"), ("2.cls", b"")]
    shard = read(write_members(tmp_path / "a.tar", members, format=format))
    assert contents(shard) == {"cls": [b"long", b"short", b""]}


def test_the_times_of_gnu_headers_are_no_part_of_the_name(tmp_path: Path) -> None:
    path = write_members(tmp_path / "a.tar", [("0.a", b"1"), ("0.b", b"2")], format=tarfile.GNU_FORMAT)
    reseal(path, 345, b"14722354433\x00")  # where ustar has the beginning of a long name
    assert contents(read(path)) == {"a": [b"1"], "b": [b"2"]}


def reseal(path: Path, offset: int, data: bytes) -> None:
    """Put bytes into the first header of a tar, and its checksum right."""
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(data)] = data
    whole[148:156] = b" " * 8
    whole[148:156] = b"%06o\0 " % sum(whole[:512])
    path.write_bytes(whole)


def test_what_is_no_record_in_a_tar_is_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("README", b"x"), ("__meta__.json", b"{}"), ("d/._0.cls", b"x"), ("d/0.CLS", b"yes")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    shard = read(tmp_path / "a.tar")
    assert contents(shard) == {"cls": [b"yes"]}


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.AREGTYPE])
def test_a_directory_with_a_size_has_no_data(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("d/", *(f"d/{number}.cls" for number in range(6))):
            info = tarfile.TarInfo(name)
            info.type = kind if name == "d/" else tarfile.REGTYPE
            info.size = 0 if name == "d/" else len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    reseal(path, 124, b"00000004000\0")
    with tarfile.open(path) as tar:
        assert len(tar.getmembers()) == 7
    assert contents(read(path)) == {"cls": [f"d/{number}.cls".encode() for number in range(6)]}


def test_a_tar_can_be_without_records(tmp_path: Path) -> None:
    assert read(write_tar(tmp_path / "a.tar", [])).num_records == 0


def test_global_and_large_headers_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_members(path, [("0.cls", b"abc")], format=tarfile.PAX_FORMAT, pax_headers={"comment": "made for tests"})
    assert contents(read(path)) == {"cls": [b"abc"]}
    # GNU writes sizes beyond 8 GiB in base 256; any size can be written so.
    write_members(path, [("0.cls", b"abc")], format=tarfile.GNU_FORMAT)
    reseal(path, 124, b"\x80" + (3).to_bytes(11, "big"))
    assert contents(read(path)) == {"cls": [b"abc"]}


def column(shard: Shard, name: str) -> Column:
    return next(each for each in shard.columns if each.name == name)


@pytest.mark.parametrize(
    ("records", "name", "why"),
    [
        ([{"a": b"1", "b": b"1"}, {"a": b"2"}], "b", r"is missing from record 1 \('000001'\)"),
        ([{"a": b"1"}, {"a": b"2", "b": b"2"}], "b", r"is missing from record 0 \('000000'\)"),
        ([{"x.npy": np.zeros(3)}, {"x.npy": np.zeros(3, dtype="f4")}], "x", "is F32 in member '000001.x.npy', but F64"),
        (
            [{"x.npy": np.zeros((3, 2))}, {"x.npy": np.zeros((3, 4))}],
            "x",
            r"has shape \[3, 4\] in member '000001.x.npy'",
        ),
        ([{"x.npy": np.zeros(3)}, {"x.npy": np.zeros(())}], "x", r"has shape \[\] in member '000001.x.npy', but \[3\]"),
        ([{"x.npy.gz": b"1"}], "x.npy.gz", r"is compressed \(member '000000.x.npy.gz'\)"),
        ([{"npz": b"1"}], "npz", "is compressed"),
    ],
)
def test_fields_that_not_every_record_has_alike_are_refused_when_asked_for(
    tmp_path: Path, records: list[dict[str, Content]], name: str, why: str
) -> None:
    shard = read(write_tar(tmp_path / "a.tar", [{**record, "ok": b"1"} for record in records]))
    assert RecordTable.of([shard], ["ok"]).num_records == len(records)
    with pytest.raises(DatasetError, match=f"{shard.path}: field {name!r} {why}"):
        RecordTable.of([shard], [name])


def test_fields_stored_one_after_the_other_are_no_records(tmp_path: Path) -> None:
    members: list[tuple[str, Content]] = [(f"{key}.{ext}", b"1") for ext in ("a", "b") for key in range(3)]
    shard = read(write_members(tmp_path / "a.tar", members))
    with pytest.raises(DatasetError, match="members of a record have to follow one another"):
        RecordTable.of([shard], ["a"])


@pytest.mark.parametrize("kind", ["hard link", "symbolic link", "pipe", "device"])
def test_members_that_are_no_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    types = {
        "hard link": tarfile.LNKTYPE,
        "symbolic link": tarfile.SYMTYPE,
        "pipe": tarfile.FIFOTYPE,
        "device": tarfile.CHRTYPE,
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("0.cls")
        info.type, info.linkname = types[kind], "other"
        tar.addfile(info)
    hint = {
        "hard link": r" \(write the tar with --hard-dereference\)",
        "symbolic link": r" \(write the tar with -h --hard-dereference\)",
    }
    with pytest.raises(DatasetError, match=f"member '0.cls' is a {kind}; a shard holds files{hint.get(kind, '')}$"):
        read(tmp_path / "a.tar")


def test_sparse_members_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_members(path, [("0.npy", b"abc")], format=tarfile.GNU_FORMAT)
    reseal(path, 156, b"S")
    with pytest.raises(DatasetError, match=r"member '0\.npy' is sparse"):
        read(path)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("0.npy")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(info)
    with pytest.raises(DatasetError, match=r"member '0\.npy' is sparse"):
        read(path)


def test_one_field_twice_in_a_record_is_refused(tmp_path: Path) -> None:
    path = write_members(tmp_path / "a.tar", [("0.x.npy", np.zeros(2)), ("0.x", b"1")])
    with pytest.raises(DatasetError, match=r"record 0 \('0'\) has field 'x' twice, in member '0.x'"):
        read(path)


def test_a_truncated_tar_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", samples(2))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    end += -end % 512
    for size in {0, 1, 511, 512, 700, *range(1024, end + 1, 512), end - 100, end + 100}:
        path.write_bytes(whole[:size])
        with pytest.raises(TruncatedFileError, match=str(path)):
            read(path)
    path.write_bytes(whole[:600])
    with pytest.raises(TruncatedFileError, match=r"member '000000\.npy' is truncated: 64 of its 152 bytes are missing"):
        read(path)
    path.write_bytes(whole[: end + 512])  # half of an end-of-archive block is still one
    assert read(path).num_records == 2


def test_a_damaged_tar_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [{"a": b"x" * 600}, {"a": b"y"}])
    whole = path.read_bytes()
    path.write_bytes(whole[:1536] + b"Z" + whole[1537:])
    with pytest.raises(HeaderError, match=f"{path}: the tar header at byte 1536 has a wrong checksum"):
        read(path)
    path.write_bytes(whole + whole)
    with pytest.raises(DatasetError, match=f"{path}: more follows the end of the archive"):
        read(path)
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(DatasetError, match=rf"{path} is compressed \(gzip\)"):
        read(path)


@pytest.mark.parametrize("size", [b"-0000001000", b"+0000000003", b"000_0000003", b"0o000000003", b"00000000009"])
@pytest.mark.parametrize("kind", [b"0", b"5", b"g", b"L"])
def test_a_size_in_a_tar_is_octal_digits(tmp_path: Path, kind: bytes, size: bytes) -> None:
    path = write_members(tmp_path / "a.tar", [("0.cls", b"abc"), ("1.cls", b"abc")])
    reseal(path, 124, size + b"\0")
    reseal(path, 156, kind)
    with pytest.raises(HeaderError, match=f"{path}: the tar header at byte 0 has no size"):
        read(path)


def test_a_checksum_in_a_tar_is_octal_digits(tmp_path: Path) -> None:
    path = write_members(tmp_path / "a.tar", [("0.cls", b"abc")])
    whole = path.read_bytes()
    path.write_bytes(whole[:148] + b"+" + whole[149:])
    with pytest.raises(HeaderError, match="wrong checksum"):
        read(path)


@pytest.mark.parametrize("size", ["9" * 21, "9" * 5000, "-1", "1_0", ""])
def test_a_size_in_an_extended_header_is_a_number(tmp_path: Path, size: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("0.cls")
        info.pax_headers = {"size": size}
        tar.addfile(info)
    with pytest.raises(HeaderError, match=rf"{path}: the tar header at byte \d+ has the size '{size[:20]}"):
        read(path)


@pytest.mark.parametrize("zeros", [0, 512, 20 * 512, 3 << 20])
@pytest.mark.parametrize("members", range(1, 11))
def test_a_tar_behind_a_tar_is_refused_whatever_lies_between(tmp_path: Path, members: int, zeros: int) -> None:
    path = write_members(tmp_path / "a.tar", [(f"{number}.cls", b"x") for number in range(members)])
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(zeros))
    assert read(path).num_records == members
    path.write_bytes(whole + bytes(zeros) + whole)
    with pytest.raises(DatasetError, match=f"{path}: more follows the end of the archive"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "kind", "why"),
    [
        ("0.npy", as_file(np.zeros(8))[:-3], HeaderError, "its header promises 64 bytes of data, 61 are there"),
        ("0.npy", as_file(np.zeros(8))[:50], TruncatedFileError, "ends within its header"),
        ("0.npy", b"", HeaderError, "does not begin as a .npy array"),
        ("0.npy", as_file(np.zeros(8, dtype=">i4")), DatasetError, "is big-endian"),
        ("0.safetensors", as_file({"x": rows(8)})[:-3], HeaderError, "its header promises 32 bytes of data, 29 are"),
        (
            "0.safetensors",
            as_file({"x": rows(8)})[:30],
            HeaderError,
            "has 30 bytes, where its safetensors header alone",
        ),
        ("0.safetensors", b"abc", HeaderError, "has 3 bytes"),
        ("0.safetensors", b"\x02" + bytes(7) + b"[]", HeaderError, "the JSON is not an object"),
    ],
)
def test_damaged_members_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, kind: type[Exception], why: str
) -> None:
    path = write_members(tmp_path / "a.tar", [(name, content), ("1.txt", bytes(5000))])
    with pytest.raises(kind, match=f"{path}: member '{name}'.*{why}"):
        read(path)


def test_payloads_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", [{"x.npy": np.zeros(1_000_000), "bin": bytes(3_000_000)} for _ in range(5)])
    total: list[int] = []

    def counted(descriptor: int, path: str, nbytes: int, offset: int) -> bytes:
        total.append(nbytes)
        return read_at(descriptor, path, nbytes, offset)

    monkeypatch.setattr(shard_npy, "read_at", counted)
    assert read(path).num_records == 5
    assert 0 < sum(total) < 100_000


# --- what is no shard -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npy", "a.tar", "a.safetensors", "a.bin"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    options = {"dtype": "int32", "record_length": 1} if name.endswith("bin") else {}
    with pytest.raises(CheckpointNotFoundError, match=f"{name} does not exist"):
        read(tmp_path / name, **options)
    (tmp_path / name).mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=f"{name} is no regular file|{name} is a directory"):
        read(tmp_path / name, **options)
    assert os.listdir("/proc/self/fd") == before
