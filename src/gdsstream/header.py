"""What is where: safetensors headers read and validated, nothing else of the files touched.

A file is eight bytes of little-endian header length, a JSON object, and the tensors' bytes. The object maps each name
to dtype, shape and `data_offsets`; `__metadata__` maps strings to strings. A header is believed only after everything
that the format promises was checked, since everything behind it reads at these offsets without asking again: shape
times dtype is the length of the bytes, the tensors tile the data without hole or overlap, and the file ends with them.

What safetensors refuses is refused here. Beyond it, these are refused, for they hide a mistake or cannot be used:
duplicate names, a header that starts with anything but `{`, a tensor described by a list instead of an object, and a
dimension or size beyond 2**63 - 1. Unknown fields of a tensor are ignored, as safetensors does.

Speed counts, since models of many experts have 100,000 tensors: while the JSON is parsed, `pairs` turns each
well-formed entry into a tuple, so the loop in `checked_specs` looks at plain values, and only what is unusual takes the
longer way through `_entry`, which knows how to name what is wrong. Specs come in the order of their bytes.
"""

from __future__ import annotations

import json
import posixpath
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from gdsstream.dtypes import DTYPES, DtypeInfo, torch_dtype, torch_shape
from gdsstream.errors import DtypeError, HeaderError, TruncatedFileError
from gdsstream.regular_files import FileStamp, opened, quote, read_at

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # the cap of safetensors itself

_LENGTH_BYTES = 8
_FIRST_READ = 64 * 1024  # most headers arrive with their length, in one read
_MAX_SIZE = 2**63 - 1
_MAX_DEPTH = 128  # levels of JSON that safetensors reads

_Entry: TypeAlias = tuple[Any, Any, str, tuple[Any, ...]]  # begin, end, dtype, shape; numbers not yet checked


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint: what it is, and where its bytes lie."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]  # as in the file, in elements of `dtype`
    file: int  # index in Checkpoint.files
    offset: int  # bytes from the beginning of the file
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch; DtypeError when torch has none."""
        try:
            return torch_dtype(self.dtype)
        except DtypeError as error:
            raise DtypeError(f"tensor {quote(self.name)}: {error}") from None

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape in torch, whose packed types hold several values in an element; DtypeError when they do not fit."""
        try:
            return torch_shape(self.dtype, self.shape)
        except DtypeError as error:
            raise DtypeError(f"tensor {quote(self.name)}: {error}") from None


class CheckpointFile(NamedTuple):
    """One safetensors file: its absolute path, its state when the header was read, and where the data begins."""

    path: str
    stamp: FileStamp
    data_start: int  # bytes from the beginning of the file
    metadata: dict[str, str] | None


def _read_exactly(descriptor: int, path: str, nbytes: int, offset: int) -> bytes:
    """Bytes that the file had when it was opened."""
    found = read_at(descriptor, path, nbytes, offset)
    if len(found) < nbytes:
        end = offset + len(found)
        raise TruncatedFileError(f"{path} was truncated to {end} bytes while it was read; write it again")
    return found


def _read_header(path: str) -> tuple[FileStamp, bytes]:
    """The file's stamp and the header's JSON, of which only length and first character are checked."""
    with opened(path) as (descriptor, stamp):
        first = _read_exactly(descriptor, path, min(stamp.size, _FIRST_READ), 0)
        if stamp.size < _LENGTH_BYTES:
            raise TruncatedFileError(
                f"{path} has {stamp.size} bytes, where a safetensors file begins with 8 bytes of header length; "
                "the download or the copy is incomplete"
            )
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            if first.startswith(b"version https://git-lfs"):
                raise HeaderError(f"{path} is a Git LFS pointer, not the file it stands for; run `git lfs pull`")
            raise HeaderError(
                f"{path}: header length {length} is beyond the format's {MAX_HEADER_BYTES}; "
                "this is no safetensors file, or its beginning is damaged"
            )
        if length > stamp.size - _LENGTH_BYTES:
            raise TruncatedFileError(
                f"{path} ends within its header: {length} bytes promised, {stamp.size - _LENGTH_BYTES} are there, "
                f"{length - stamp.size + _LENGTH_BYTES} missing; the download or the copy is incomplete"
            )
        if length == 0 or first[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
            raise HeaderError(f"{path}: the header has to start with '{{'; this is no safetensors file")
        end = _LENGTH_BYTES + length
        rest = _read_exactly(descriptor, path, end - len(first), len(first)) if end > len(first) else b""
        return stamp, first[_LENGTH_BYTES:end] + rest


def parse_table(path: str, raw: bytes) -> dict[str, Any]:
    """A JSON object, refusing what Python's parser lets pass and a strict one would not. Entries become `_Entry`s."""

    def pairs(items: list[tuple[str, Any]]) -> Any:
        found = dict(items)
        if len(found) != len(items):
            twice = Counter(name for name, _ in items).most_common(1)[0][0]
            raise HeaderError(
                f"{path}: the name {quote(twice)} appears twice in one object; which one counts is unknown"
            )
        if len(found) == 3:
            try:
                dtype, shape, (begin, end) = found["dtype"], found["shape"], found["data_offsets"]
            except (KeyError, TypeError, ValueError):
                return found
            if type(dtype) is str and type(shape) is list and type(found["data_offsets"]) is list:
                return begin, end, dtype, tuple(shape)
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    def integer(digits: str) -> int | float:
        return -0.0 if digits == "-0" else int(digits)  # to strict readers, -0 is no integer

    try:
        text = raw.decode()
        parse_int = integer if "-0" in text else None
        found = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse, parse_int=parse_int)
        if "\\u" in text:  # only an escape can hide half of a surrogate pair
            json.dumps(found, ensure_ascii=False).encode()
    except HeaderError:
        raise
    except UnicodeDecodeError as error:
        raise HeaderError(f"{path}: the JSON is not UTF-8 at its byte {error.start}; the file is damaged") from error
    except UnicodeEncodeError as error:
        raise HeaderError(f"{path}: a string of the JSON has half of a surrogate pair; write the file again") from error
    except RecursionError as error:
        raise HeaderError(f"{path}: the JSON is nested deeper than {_MAX_DEPTH} levels") from error
    except ValueError as error:
        raise HeaderError(f"{path}: invalid JSON: {error}; the file is damaged") from error
    if isinstance(found, dict):
        return found
    raise HeaderError(f"{path}: the JSON is not an object of names")


def _entry(path: str, name: str, value: object) -> _Entry:
    """What `parse_table` left as it was: an entry with unknown fields, or one to refuse."""
    at = f"{path}: tensor {quote(name)}"
    if not isinstance(value, dict):
        raise HeaderError(f"{at} has to be an object with dtype, shape and data_offsets, not {quote(value)}")
    lacking = [key for key in ("dtype", "shape", "data_offsets") if key not in value]
    if lacking:
        raise HeaderError(f"{at} has no {' and no '.join(lacking)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise HeaderError(f"{at}: dtype has to be a string, not {quote(dtype)}")
    if not isinstance(shape, list):
        raise HeaderError(f"{at}: shape has to be a list of integers, not {quote(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise HeaderError(f"{at}: data_offsets has to be [begin, end], not {quote(offsets)}")
    level: list[Any] = list(value.values())
    for _ in range(_MAX_DEPTH - 2):
        if any(isinstance(item, int | float) and abs(item) > sys.float_info.max for item in level):
            raise HeaderError(f"{at} has a number out of range")
        inner = [item for item in level if isinstance(item, dict | list | tuple)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        if not inner:
            return offsets[0], offsets[1], dtype, tuple(shape)
    raise HeaderError(f"{at}: the JSON is nested deeper than {_MAX_DEPTH} levels")


def checked_specs(path: str, header: dict[str, Any], file: int, data_start: int) -> list[TensorSpec]:
    """The tensors of a header, checked, in the order of their bytes, which they tile."""
    specs: list[TensorSpec] = []
    add, known, size_limit = specs.append, DTYPES, _MAX_SIZE
    cursor, in_order = data_start, True
    for name, value in header.items():
        begin, end, dtype, shape = value if type(value) is tuple else _entry(path, name, value)
        info = known.get(dtype)
        if info is None:
            raise HeaderError(f"{path}: tensor {quote(name)} has the unknown dtype {quote(dtype)}")
        elements = 1
        for dimension in shape:
            if type(dimension) is not int or dimension < 0:
                raise HeaderError(
                    f"{path}: tensor {quote(name)}: shape has to hold integers from 0, not {quote(list(shape))}"
                )
            elements *= dimension
            if elements > size_limit or dimension > size_limit:
                raise HeaderError(f"{path}: tensor {quote(name)}: the shape {quote(list(shape))} overflows 2**63 - 1")
        if type(begin) is not int or type(end) is not int or begin < 0:
            raise HeaderError(
                f"{path}: tensor {quote(name)}: data_offsets have to be integers from 0, not {quote([begin, end])}"
            )
        bits = elements * info.bits
        nbytes = end - begin
        if bits != nbytes << 3 or end > size_limit:
            raise HeaderError(f"{path}: tensor {quote(name)} {_mismatch(begin, end, info, shape, bits)}")
        begin += data_start
        if begin != cursor:
            in_order = False
        cursor = begin + nbytes
        add(TensorSpec(name, info.name, shape, file, begin, nbytes))
    if not in_order:
        _sort(path, specs, data_start)
    return specs


def _mismatch(begin: int, end: int, info: DtypeInfo, shape: tuple[int, ...], bits: int) -> str:
    what = f"of dtype {info.name} and shape {quote(list(shape))}"
    if begin > end:
        return f"begins at {begin}, behind its end at {end}"
    if bits > _MAX_SIZE * 8 or end > _MAX_SIZE:
        return f"{what}, data_offsets [{begin}, {end}] overflows 2**63 - 1 bytes"
    if bits % 8:
        return f"{what} has {bits} bits, which are not whole bytes; store it padded"
    return f"{what} has {bits // 8} bytes, but its data_offsets [{begin}, {end}] span {end - begin}"


def _sort(path: str, specs: list[TensorSpec], data_start: int) -> None:
    """Puts specs in the order of their bytes; HeaderError unless they tile the data."""
    # An empty tensor goes before the one that begins where it lies, as in safetensors.
    specs.sort(key=lambda spec: (spec.offset, spec.nbytes))
    cursor, before = data_start, "the beginning of the data"
    for spec in specs:
        if spec.offset != cursor:
            begin, end = spec.offset - data_start, cursor - data_start
            how = f"overlaps {before}" if begin < end else f"leaves a hole of {begin - end} bytes after {before}"
            raise HeaderError(f"{path}: tensor {quote(spec.name)} at {begin} {how}, which ends at {end}")
        cursor, before = spec.offset + spec.nbytes, f"tensor {quote(spec.name)}"


def read_file(path: str, file: int) -> tuple[CheckpointFile, list[TensorSpec]]:
    """One file's header as specs in the order of their bytes."""
    stamp, raw = _read_header(path)
    header = parse_table(path, raw)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise HeaderError(f"{path}: __metadata__ has to map strings to strings, not {quote(metadata)}")
    data_start = _LENGTH_BYTES + len(raw)
    specs = checked_specs(path, header, file, data_start)
    end = specs[-1].offset + specs[-1].nbytes if specs else data_start
    if end > stamp.size:
        cut = next(spec for spec in specs if spec.offset + spec.nbytes > stamp.size)
        there = max(stamp.size - cut.offset, 0)
        raise TruncatedFileError(
            f"{path} is truncated in tensor {quote(cut.name)}: {cut.nbytes - there} of its {cut.nbytes} bytes are "
            f"missing; the file has {stamp.size} bytes where its header promises {end} ({end - stamp.size} missing); "
            "the download or the copy is incomplete"
        )
    if end < stamp.size:
        raise HeaderError(
            f"{path}: the last tensor ends at byte {end}, but {stamp.size - end} more bytes follow; "
            "the format allows none, so header and data are not of one file"
        )
    return CheckpointFile(path, stamp, data_start, metadata), specs


def read_index(path: str) -> dict[str, dict[str, None]]:
    """The names that an index gives to each shard, whose path is relative to the index."""
    with opened(path) as (descriptor, stamp):
        if stamp.size > MAX_HEADER_BYTES:
            raise HeaderError(f"{path} has {stamp.size} bytes, more than an index can have ({MAX_HEADER_BYTES})")
        raw = _read_exactly(descriptor, path, stamp.size, 0) if stamp.size else b""
    weight_map = parse_table(path, raw).get("weight_map")
    if not isinstance(weight_map, dict):
        raise HeaderError(f"{path}: an index has to have a weight_map from tensor names to file names")
    shards: dict[str, dict[str, None]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise HeaderError(f"{path}: tensor {quote(name)} has to be in a file, not in {quote(shard)}")
        if shard.startswith("/") or ".." in shard.split("/"):
            raise HeaderError(f"{path}: tensor {quote(name)}: the file {quote(shard)} is outside the index's directory")
        shards.setdefault(posixpath.normpath(shard), {})[name] = None
    return shards


__all__ = [
    "MAX_HEADER_BYTES",
    "CheckpointFile",
    "TensorSpec",
    "checked_specs",
    "parse_table",
    "read_file",
    "read_index",
]
