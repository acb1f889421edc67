"""Safetensors files and indices that break one promise of the format each, and how they have to be refused.

`ATTACKS` holds them by name. `build` writes the files into an empty directory and returns what to open; `mentions` are
the words that the message has to contain beside the path; `stricter` marks what safetensors itself lets pass.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gdsstream.errors import CheckpointError, CheckpointNotFoundError, HeaderError, TruncatedFileError


class Attack(NamedTuple):
    build: Callable[[Path], Path]
    error: type[CheckpointError]
    mentions: tuple[str, ...] = ()
    stricter: bool = False
    is_file: bool = True  # one plain file, which safetensors can be asked about


def tensor(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """One entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def pack(header: bytes | str | dict[str, Any], data: int | bytes = 0, length: int | None = None) -> bytes:
    """A file of a header and `data`, or so many zeros; `length` is what the file says of its header, where not true."""
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    said = len(raw) if length is None else length
    return struct.pack("<Q", said) + raw + (bytes(data) if isinstance(data, int) else data)


def _file(content: bytes) -> Callable[[Path], Path]:
    def build(directory: Path) -> Path:
        path = directory / "model.safetensors"
        path.write_bytes(content)
        return path

    return build


def _header(
    header: bytes | str | dict[str, Any],
    data: int = 0,
    *mentions: str,
    error: type[CheckpointError] = HeaderError,
    stricter: bool = False,
    length: int | None = None,
) -> Attack:
    return Attack(_file(pack(header, data, length)), error, mentions, stricter)


def _index(index: Any, *mentions: str, error: type[CheckpointError] = HeaderError, **shards: bytes) -> Attack:
    def build(directory: Path) -> Path:
        for name, content in shards.items():
            (directory / f"{name}.safetensors").write_bytes(content)
        path = directory / "model.safetensors.index.json"
        path.write_text(index if isinstance(index, str) else json.dumps(index))
        return path

    return Attack(build, error, mentions, is_file=False)


def _huge_header(directory: Path) -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{}")
    os.truncate(path, 8 + 100_000_001)  # sparse: really as long as it says
    return path


def _fifo(directory: Path) -> Path:
    path = directory / "model.safetensors"
    os.mkfifo(path)
    return path


def _socket(directory: Path) -> Path:
    path = directory / "s"
    here = os.getcwd()
    os.chdir(directory)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
    finally:
        os.chdir(here)
    return path


def _link(target: str) -> Callable[[Path], Path]:
    def build(directory: Path) -> Path:
        path = directory / "model.safetensors"
        path.symlink_to(target)
        return path

    return build


def _files(**files: bytes) -> Callable[[Path], Path]:
    def build(directory: Path) -> Path:
        for name, content in files.items():
            (directory / f"{name}.safetensors").write_bytes(content)
        return directory

    return build


def _huge_index(directory: Path) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text("{}")
    os.truncate(path, 100_000_001)
    return path


def _two_indices(directory: Path) -> Path:
    for name in ("a", "b"):
        (directory / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    return directory


def _nested(depth: int) -> str:
    return '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":' + "[" * depth + "]" * depth + "}}"


def _raw(shape: str = "[1]", offsets: str = "[0,1]", dtype: str = '"U8"', more: str = "", name: str = "w") -> str:
    return f'{{"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


_GOOD = pack({"w": tensor("U8", [4], 0, 4)}, 4)
_TWO = {"v": tensor("F32", [2], 0, 8), "w": tensor("F32", [3], 8, 20)}

ATTACKS: dict[str, Attack] = {
    # what is not there, or not a file
    "missing file": Attack(lambda d: d / "model.safetensors", CheckpointNotFoundError, ("does not exist",)),
    "parent is a file": Attack(lambda d: _file(b"x")(d) / "x", CheckpointNotFoundError, is_file=False),
    "empty directory": Attack(lambda d: d, CheckpointNotFoundError, ("no *.safetensors",), is_file=False),
    "dangling link": Attack(_link("../blobs/gone"), CheckpointNotFoundError, ("../blobs/gone",)),
    "link to itself": Attack(_link("model.safetensors"), CheckpointError),
    "nul in path": Attack(lambda d: d / "a\0b", CheckpointNotFoundError, is_file=False),
    "path too long": Attack(lambda d: d / ("a" * 300), CheckpointError, is_file=False),
    "pipe": Attack(_fifo, CheckpointError, ("pipe",), is_file=False),
    "socket": Attack(_socket, CheckpointError, ("socket",), is_file=False),
    "device": Attack(lambda d: Path("/dev/zero"), CheckpointError, ("device",), is_file=False),
    "two indices": Attack(_two_indices, CheckpointError, ("a.safetensors.index", "b.safetensors.index"), is_file=False),
    # header length and text
    "empty file": Attack(_file(b""), TruncatedFileError, ("0 bytes",)),
    "seven bytes": Attack(_file(b"\x02" + bytes(6)), TruncatedFileError, ("7 bytes",)),
    "length only": Attack(_file(struct.pack("<Q", 2)), TruncatedFileError, ("2 missing",)),
    "length zero": _header("", 0, "start with"),
    "length 2^63": _header("{}", 0, str(2**63), length=2**63),
    "length 2^64-1": _header("{}", 0, str(2**64 - 1), length=2**64 - 1),
    "length above the cap": Attack(_huge_header, HeaderError, ("100000001",)),
    "length beyond the file": _header("{}", 0, "1 missing", error=TruncatedFileError, length=3),
    "length cuts the header": _header("{}", 0, "invalid JSON", length=1),
    "git lfs pointer": Attack(_file(b"version https://git-lfs.github.com/spec/v1\n"), HeaderError, ("git lfs pull",)),
    "list": _header("[]", 0, "start with"),
    "number": _header("17", 0, "start with"),
    "leading space": _header(" {}", 0, "start with", stricter=True),
    "byte order mark": _header(b"\xef\xbb\xbf{}", 0, "start with"),
    "utf-16": _header("{}".encode("utf-16-le"), 0, "invalid JSON"),
    "invalid utf-8": _header(b'{"\xff":1}', 0, "UTF-8", "byte 2"),
    "surrogate in utf-8": _header(b'{"\xed\xa0\x80":1}', 0, "UTF-8"),
    "half a surrogate pair": _header(_raw(name="\\ud800"), 1, "surrogate"),
    "half a surrogate pair, ignored": _header(_raw(more=',"x":"\\udc00"'), 1, "surrogate"),
    "padding of zeros": _header(b"{}\0\0", 0, "invalid JSON"),
    "two objects": _header("{}{}", 0, "invalid JSON"),
    "trailing comma": _header('{"w":1,}', 0, "invalid JSON"),
    "control character": _header(b'{"\x01":1}', 0, "invalid JSON"),
    "nan": _header(_raw(more=',"x":NaN'), 1, "NaN"),
    "infinity": _header(_raw(more=',"x":-Infinity'), 1, "Infinity"),
    "float out of range": _header(_raw(more=',"x":1e999'), 1, "'w'", "range"),
    "integer out of range": _header(_raw(more=',"x":' + "9" * 400), 1, "'w'", "range"),
    "integer of 10,000 digits": _header(_raw(shape="[" + "9" * 10_000 + "]"), 1, "invalid JSON"),
    "nested 126": _header(_nested(126), 1, "'a'", "nested"),
    "nested 100,000": _header(_nested(100_000), 1, "nested"),
    "nested objects": _header('{"a":' * 50_000 + "1" + "}" * 50_000, 0, "nested"),
    # names
    "duplicate tensor": _header(
        '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        "'w'",
        "twice",
        stricter=True,
    ),
    "duplicate by escape": _header(
        '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0077":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        1,
        "'w'",
        "twice",
    ),
    "duplicate field": _header(_raw(more=',"shape":[1]'), 1, "'shape'", "twice"),
    "duplicate metadata": _header('{"__metadata__":{},"__metadata__":{}}', 0, "'__metadata__'", "twice"),
    "duplicate metadata key": _header('{"__metadata__":{"k":"1","k":"2"}}', 0, "'k'", "twice", stricter=True),
    "metadata list": _header('{"__metadata__":[]}', 0, "__metadata__"),
    "metadata number": _header('{"__metadata__":{"k":1}}', 0, "__metadata__"),
    "metadata nested": _header('{"__metadata__":{"k":{}}}', 0, "__metadata__"),
    "metadata like a tensor": _header({"__metadata__": tensor("U8", [1], 0, 1)}, 1, "__metadata__"),
    # entries
    "entry null": _header('{"w":null}', 0, "'w'"),
    "entry string": _header('{"w":"U8"}', 0, "'w'"),
    "entry list": _header('{"w":["U8",[1],[0,1]]}', 1, "'w'", "object", stricter=True),
    "no dtype": _header('{"w":{"shape":[1],"data_offsets":[0,1]}}', 1, "'w'", "no dtype"),
    "no shape": _header('{"w":{"dtype":"U8","data_offsets":[0,1]}}', 1, "'w'", "no shape"),
    "no offsets": _header('{"w":{"dtype":"U8","shape":[1]}}', 1, "'w'", "no data_offsets"),
    "no field": _header('{"w":{}}', 0, "'w'", "no dtype and no shape and no data_offsets"),
    "another field instead": _header('{"w":{"dtype":"U8","shape":[1],"offsets":[0,1]}}', 1, "'w'", "no data_offsets"),
    "dtype number": _header(_raw(dtype="8"), 1, "'w'", "dtype"),
    "dtype list": _header(_raw(dtype="[]"), 1, "'w'", "dtype"),
    "dtype unknown": _header(_raw(dtype='"F128"'), 1, "'w'", "'F128'"),
    "dtype lower case": _header(_raw(dtype='"u8"'), 1, "'w'", "'u8'"),
    "shape number": _header(_raw(shape="1"), 1, "'w'", "shape"),
    "shape string": _header(_raw(shape='"1"'), 1, "'w'", "shape"),
    "shape null": _header(_raw(shape="null"), 1, "'w'", "shape"),
    "dimension true": _header(_raw(shape="[true]"), 1, "'w'", "shape"),
    "dimension float": _header(_raw(shape="[1.0]"), 1, "'w'", "shape"),
    "dimension string": _header(_raw(shape='["1"]'), 1, "'w'", "shape"),
    "dimension list": _header(_raw(shape="[[1]]"), 1, "'w'", "shape"),
    "dimension negative": _header(_raw(shape="[-1]"), 1, "'w'", "-1"),
    "dimensions negative twice": _header(_raw(shape="[-1,-1]"), 1, "'w'", "-1"),
    "dimension minus zero": _header(_raw(shape="[-0]", offsets="[0,0]"), 0, "'w'", "-0"),
    "dimension 2^63": _header(_raw(shape=f"[0,{2**63}]", offsets="[0,0]"), 0, "'w'", "overflows", stricter=True),
    "dimension 2^64": _header(_raw(shape=f"[0,{2**64}]", offsets="[0,0]"), 0, "'w'", "overflows"),
    "product wraps to zero": _header(_raw(shape=f"[{2**32},{2**32}]", offsets="[0,0]"), 0, "'w'", "overflows"),
    "product wraps to the size": _header(_raw(shape=f"[{2**32},{2**32 + 1}]"), 1, "'w'", "overflows"),
    "product overflows before a zero": _header(_raw(shape=f"[{2**40},{2**40},0]", offsets="[0,0]"), 0, "overflows"),
    "bytes overflow": _header(_raw(dtype='"F64"', shape=f"[{2**61}]", offsets="[0,0]"), 0, "'w'", "overflows"),
    "offsets none": _header(_raw(offsets="[]"), 1, "'w'", "data_offsets"),
    "offsets three": _header(_raw(offsets="[0,1,1]"), 1, "'w'", "data_offsets"),
    "offsets object": _header(_raw(offsets='{"0":0,"1":1}'), 1, "'w'", "data_offsets"),
    "offsets string": _header(_raw(offsets='"01"'), 1, "'w'", "data_offsets"),
    "offset true": _header(_raw(offsets="[0,true]"), 1, "'w'", "data_offsets"),
    "offset float": _header(_raw(offsets="[0.0,1]"), 1, "'w'", "data_offsets"),
    "offset minus zero": _header(_raw(offsets="[-0,1]"), 1, "'w'", "data_offsets"),
    "offset negative": _header(_raw(offsets="[-1,0]"), 1, "'w'", "-1"),
    "offset huge": _header(_raw(offsets=f"[{2**63 - 1},{2**63}]"), 1, "'w'", "overflows"),
    "offset beyond 64 bits": _header(_raw(offsets=f"[{2**70},{2**70 + 1}]"), 1, "'w'", "overflows"),
    # bytes
    "too few bytes": _header({"w": tensor("F32", [2], 0, 7)}, 7, "'w'", "8 bytes", "7"),
    "too many bytes": _header({"w": tensor("F32", [2], 0, 9)}, 9, "'w'", "8 bytes", "9"),
    "scalar without bytes": _header({"w": tensor("F32", [], 0, 0)}, 0, "'w'", "4 bytes"),
    "empty with bytes": _header({"w": tensor("F32", [0, 3], 0, 4)}, 4, "'w'", "0 bytes"),
    "half a byte": _header({"w": tensor("F4", [3], 0, 1)}, 1, "'w'", "12 bits"),
    "half a byte, rounded up": _header({"w": tensor("F4", [3], 0, 2)}, 2, "'w'", "12 bits"),
    "six bits": _header({"w": tensor("F6_E2M3", [1], 0, 1)}, 1, "'w'", "6 bits"),
    "begin behind end": _header({"w": tensor("U8", [1], 1, 0)}, 1, "'w'", "behind"),
    "begin behind end, empty": _header({"w": tensor("U8", [0], 1, 0)}, 1, "'w'", "behind"),
    "overlap": _header({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [4], 2, 6)}, 6, "'w'", "overlaps", "'v'"),
    "same bytes": _header({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [4], 0, 4)}, 4, "'w'", "overlaps", "'v'"),
    "one inside another": _header({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [1], 1, 2)}, 4, "'w'", "overlaps"),
    "empty one inside another": _header({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [0], 2, 2)}, 4, "'w'"),
    "hole": _header({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [4], 5, 9)}, 9, "'w'", "hole of 1", "'v'"),
    "hole before the first": _header({"w": tensor("U8", [4], 8, 12)}, 12, "'w'", "hole of 8"),
    "empty one behind the end": _header({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [0], 9, 9)}, 4, "'w'"),
    "one byte short": _header(_TWO, 19, "'w'", "1 of its 12", error=TruncatedFileError),
    "cut in the first tensor": _header(_TWO, 3, "'v'", "5 of its 8", "17 missing", error=TruncatedFileError),
    "cut between tensors": _header(_TWO, 8, "'w'", "12 of its 12", error=TruncatedFileError),
    "no data": _header(_TWO, 0, "'v'", "8 of its 8", error=TruncatedFileError),
    "one byte too many": _header(_TWO, 21, "1 more bytes"),
    "bytes behind no tensors": _header("{}", 5, "5 more bytes"),
    # indices and lists of files
    "index empty": _index("", "invalid JSON"),
    "index too large": Attack(_huge_index, HeaderError, ("100000001",), is_file=False),
    "index list": _index("[]", "not an object"),
    "index without weight_map": _index({"metadata": {}}, "weight_map"),
    "index weight_map list": _index({"weight_map": []}, "weight_map"),
    "index shard number": _index({"weight_map": {"w": 1}}, "'w'"),
    "index shard empty": _index({"weight_map": {"w": ""}}, "'w'"),
    "index shard missing": _index({"weight_map": {"w": "gone.safetensors"}}, "'w'", error=CheckpointNotFoundError),
    "index shard nul": _index({"weight_map": {"w": "a\0"}}, error=CheckpointNotFoundError),
    "index shard absolute": _index({"weight_map": {"w": "/etc/passwd"}}, "'w'", "'/etc/passwd'"),
    "index shard above": _index({"weight_map": {"w": "../m.safetensors"}}, "'w'", "outside"),
    "index shard above, hidden": _index({"weight_map": {"w": "x/../../m.safetensors"}}, "'w'", "outside"),
    "index shard is the directory": _index({"weight_map": {"w": "."}}, "directory", error=CheckpointError),
    "index duplicate": _index('{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}', "'w'", a=_GOOD, b=_GOOD),
    "index names what the shard lacks": _index(
        {"weight_map": {"w": "a.safetensors", "x": "a.safetensors"}}, "'x'", "a.safetensors", a=_GOOD
    ),
    "index of a truncated shard": _index(
        {"weight_map": {"w": "a.safetensors"}}, "'w'", "a.safetensors", error=TruncatedFileError, a=_GOOD[:-1]
    ),
    "same name in two files": Attack(
        _files(a=_GOOD, b=_GOOD), HeaderError, ("'w'", "a.safetensors", "b.safetensors"), is_file=False
    ),
}
