"""Tar shards in the layout of WebDataset: members `key.field` that follow each other and share a key are one record.

    000001.npy           an array: field "npy"            000001.image.npy        field "image"
    000001.safetensors   fields named as its tensors      000001.x.safetensors    fields "x." + their names
    000001.cls           anything else: its bytes, ragged U8, field "cls"

The key ends at the first dot of the member's name without directories; the rest counts in lower case. Arrays and
tensors are read where they lie in the tar, whole: a field whose records differ in dimension 0 is ragged. As in
WebDataset, directories, members without an extension and those named __like_this__ belong to no record.

Headers are ustar, GNU (long names) or pax. A tar has to end with its end-of-archive block: without it nobody could say
that no record is missing.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from gdsstream.dtypes import torch_shape
from gdsstream.errors import DatasetError, DtypeError, HeaderError, TruncatedFileError

# A member is a safetensors file within another, which `header.read_file` does not take.
from gdsstream.header import MAX_HEADER_BYTES, checked_specs, parse_table
from gdsstream.records import PLACED, RAGGED, REFUSED, Column, Shard
from gdsstream.regular_files import quote
from gdsstream.shard_npy import ShardFile, npy_header

log = logging.getLogger(__name__)

_BLOCK = 512
_END_BYTES = 1 << 20  # looked at in one piece behind the end, which tar pads with about 10 KiB
_ZEROS = bytes(_BLOCK)
_MAX_NAME_BYTES = 1 << 20  # of long names and pax headers
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_MAX_DIGITS = 20  # of a size; 2**63 has 19
_SUM = struct.Struct("148B8x356B")
_REGULAR = frozenset(("\0", "0", "7"))
_KINDS = {"1": "a hard link", "2": "a symbolic link", "3": "a device", "4": "a device", "6": "a pipe"}
# Options of GNU tar that store what a link leads to; -h alone makes hard links of two links to one file.
_FOLLOW = {"1": "--hard-dereference", "2": "-h --hard-dereference"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".npz")
_SIGNATURES = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
}  # fmt: skip

# name, dtype, shape, offset from the beginning of the data, nbytes
_Tensor: TypeAlias = tuple[str, str, tuple[int, ...], int, int]


class Member(NamedTuple):
    """One file in a tar."""

    name: str
    offset: int  # of its data
    nbytes: int


def read_tar(path: str) -> Shard:
    """The records of one tar shard.

    Raises TruncatedFileError and HeaderError for one that is damaged, DatasetError for members that cannot be read.
    """
    with ShardFile(path) as file:
        records = _Records(file)
        nameless = 0
        for member in members(file):
            directory, slash, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if not stem or not extension or (stem.startswith("__") and stem.endswith("__")):
                nameless += 1
                continue
            records.add(directory + slash + stem, extension.lower(), member)
        if nameless:
            log.info("%s: %d member(s) without key and extension belong to no record", path, nameless)
        return Shard(path, file.stamp, len(records.keys), records.columns())


def members(file: ShardFile) -> Iterator[Member]:
    """The regular files of a tar, in their order."""
    path, size = file.path, file.stamp.size
    start = file.read(0, min(size, 6), "the tar")
    if found := next((what for signature, what in _SIGNATURES.items() if start.startswith(signature)), None):
        raise DatasetError(f"{path} is compressed ({found}); records are read in place, so decompress it first")
    offset, name, pax, common = 0, "", {}, {}
    while True:
        if size - offset < _BLOCK:
            raise TruncatedFileError(
                f"{path} ends at byte {size} without tar's end-of-archive block; the download, the copy or its writer "
                "was interrupted"
            )
        block = file.read(offset, _BLOCK, "a tar header")
        if block == _ZEROS:
            _check_end(file, offset)
            return
        nbytes, kind = _check_header(path, offset, block), chr(block[156])
        data = offset + _BLOCK
        if kind in "xgLK":
            offset = data + _padded(nbytes)
            if nbytes > _MAX_NAME_BYTES:
                raise HeaderError(f"{path}: a tar header at byte {data} has {nbytes} bytes; the tar is damaged")
            raw = file.read(data, nbytes, "an extended tar header")
            if kind == "L":
                name = _text(raw)
            elif kind == "x":
                pax = _pax(path, data, raw)
            elif kind == "g":
                common.update(_pax(path, data, raw))
            continue
        keywords = {**common, **pax}
        full = keywords.get("path") or name or _plain_name(block)
        if "size" in keywords:
            nbytes = _decimal(path, offset, keywords["size"])
        where = f"{path}: member {quote(full)}"
        if kind == "S" or any(keyword.startswith("GNU.sparse.") for keyword in keywords):
            raise DatasetError(f"{where} is sparse, so that its bytes do not lie together; write the tar without -S")
        if kind not in _REGULAR and kind != "5":
            what = _KINDS.get(kind, f"of the unknown type {kind!r}")
            hint = f" (write the tar with {_FOLLOW[kind]})" if kind in _FOLLOW else ""
            raise DatasetError(f"{where} is {what}; a shard holds files{hint}")
        # A directory has no data, whatever size its header gives; in old tars only its name tells that it is one.
        directory = kind == "5" or (kind == "\0" and full.endswith("/"))
        offset, name, pax = data + (0 if directory else _padded(nbytes)), "", {}
        if directory or full.endswith("/"):
            continue
        if data + nbytes > size:
            raise TruncatedFileError(
                f"{where} is truncated: {data + nbytes - size} of its {nbytes} bytes are missing; "
                "the download or the copy is incomplete"
            )
        yield Member(full, data, nbytes)


def _check_header(path: str, offset: int, block: bytes) -> int:
    """The size that a header gives. Raises HeaderError unless its checksum holds."""
    # Eight blanks stand where the sum itself is.
    if _octal(block[148:156]) != sum(_SUM.unpack(block)) + 256:
        raise HeaderError(f"{path}: the tar header at byte {offset} has a wrong checksum; the tar is damaged or none")
    field = block[124:136]
    if field[0] & 0x80:  # too large for octal digits
        return int.from_bytes(field, "big") & ~(0x80 << 88)
    nbytes = _octal(field)
    if nbytes is None:
        raise HeaderError(f"{path}: the tar header at byte {offset} has no size; the tar is damaged")
    return nbytes


def _octal(field: bytes) -> int | None:
    """The number in a field of a header; None for what is none. `int` alone would take signs, _ and 0o."""
    found = _OCTAL.fullmatch(field)
    return int(found[1] or b"0", 8) if found else None


def _check_end(file: ShardFile, offset: int) -> None:
    # To the end of the file: how many zeros lie between two joined tars depends on their writers.
    for at in range(offset, file.stamp.size, _END_BYTES):
        if file.read(at, min(file.stamp.size - at, _END_BYTES), "the end of the tar").strip(b"\0"):
            raise DatasetError(
                f"{file.path}: more follows the end of the archive at byte {offset}, as after `cat a.tar b.tar`; "
                "keep them apart, or join them with `tar -A`"
            )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="surrogateescape")


def _plain_name(block: bytes) -> str:
    name = _text(block[:100])
    # GNU's own format has times where ustar has the name's beginning.
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _pax(path: str, offset: int, raw: bytes) -> dict[str, str]:
    """Records "length keyword=value\\n" of an extended header."""
    found, at = {}, 0
    while at < len(raw) and raw[at]:
        digits, _, _ = raw[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        keyword, equals, value = raw[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if not equals or raw[at + length - 1 : at + length] != b"\n":
            raise HeaderError(f"{path}: the extended tar header at byte {offset} is not valid; the tar is damaged")
        found[keyword.decode(errors="surrogateescape")] = value.decode(errors="surrogateescape")
        at += length
    return found


def _decimal(path: str, offset: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise HeaderError(f"{path}: the tar header at byte {offset} has the size {quote(text)}; the tar is damaged")
    return int(text)


class _Records:
    """The records of a shard while its members go by."""

    def __init__(self, file: ShardFile) -> None:
        self.keys: list[str] = []
        self._file = file
        self._seen: set[str] = set()  # fields of the record that goes by
        self._fields: dict[str, _Field] = {}
        self._layouts: dict[bytes, list[_Tensor]] = {}  # records mostly have the same header

    def add(self, key: str, extension: str, member: Member) -> None:
        if not self.keys or self.keys[-1] != key:
            self.keys.append(key)
            self._seen.clear()
        where = f"{self._file.path}: member {quote(member.name)}"
        if extension.endswith(_COMPRESSED) or f".{extension}" in _COMPRESSED:
            self._refuse(extension, member)
        elif extension == "npy" or extension.endswith(".npy"):
            header = npy_header(self._file, member.offset, member.offset + member.nbytes, where)
            if header.data_start + header.nbytes != member.offset + member.nbytes:
                raise HeaderError(
                    f"{where}: its header promises {header.nbytes} bytes of data, "
                    f"{member.offset + member.nbytes - header.data_start} are there; write it again"
                )
            name = extension.removesuffix("npy").removesuffix(".") or "npy"
            self._place(name, member, header.dtype, header.shape, header.data_start, header.nbytes)
        elif extension == "safetensors" or extension.endswith(".safetensors"):
            prefix = extension.removesuffix("safetensors")
            start, tensors = self._tensors(member, where)
            for name, dtype, shape, begin, nbytes in tensors:
                self._place(prefix + name, member, dtype, shape, start + begin, nbytes)
        else:
            field = self._field(extension, member, "U8", ())
            field.ragged = True
            field.offsets.append(member.offset)
            field.lengths.append(member.nbytes)

    def columns(self) -> tuple[Column, ...]:
        return tuple(self._fields[name].column(self.keys) for name in sorted(self._fields))

    def _place(self, name: str, member: Member, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> None:
        field = self._field(name, member, dtype, shape)
        field.offsets.append(offset)
        field.lengths.append(nbytes)
        if shape == field.shape and dtype == field.dtype:
            return
        if dtype != field.dtype:
            field.refuse(f"is {dtype} in member {quote(member.name)}, but {field.dtype} in {quote(field.first)}")
        elif len(shape) != len(field.shape) or shape[1:] != field.shape[1:]:
            field.refuse(
                f"has shape {list(shape)} in member {quote(member.name)}, but {list(field.shape)} in "
                f"{quote(field.first)}; only dimension 0 can vary: write all with one shape"
            )
        field.ragged = True

    def _refuse(self, name: str, member: Member) -> None:
        self._field(name, member, "U8", ()).refuse(
            f"is compressed (member {quote(member.name)}), which cannot be read in place; write it without compression"
        )

    def _field(self, name: str, member: Member, dtype: str, shape: tuple[int, ...]) -> _Field:
        if name in self._seen:
            raise DatasetError(
                f"{self._file.path}: record {len(self.keys) - 1} ({quote(self.keys[-1])}) has field {quote(name)} "
                f"twice, in member {quote(member.name)} for the second time; names have to differ behind the first dot"
            )
        self._seen.add(name)
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = _Field(name, dtype, shape, member.name)
        if len(field.offsets) != len(self.keys) - 1:
            field.lack(len(field.offsets), self.keys)
        return field

    def _tensors(self, member: Member, where: str) -> tuple[int, list[_Tensor]]:
        """Where the data of a safetensors member begins, and its tensors."""
        raw = self._file.read(member.offset, min(member.nbytes, 8), where)
        length = int.from_bytes(raw, "little")
        if len(raw) < 8 or length > min(member.nbytes - 8, MAX_HEADER_BYTES):
            raise HeaderError(
                f"{where} has {member.nbytes} bytes, where its safetensors header alone promises {length}"
            )
        raw = self._file.read(member.offset + 8, length, f"the header of {where}")
        tensors = self._layouts.get(raw)
        if tensors is None:
            header = parse_table(where, raw)
            header.pop("__metadata__", None)
            tensors = []
            for spec in checked_specs(where, header, 0, 0):
                try:
                    shape = torch_shape(spec.dtype, spec.shape)
                except DtypeError as error:
                    raise DatasetError(f"{where}: tensor {quote(spec.name)}: {error}") from None
                tensors.append((spec.name, spec.dtype, shape, spec.offset, spec.nbytes))
            self._layouts[raw] = tensors
        end = tensors[-1][3] + tensors[-1][4] if tensors else 0
        if end != member.nbytes - 8 - length:
            there = member.nbytes - 8 - length
            raise HeaderError(f"{where}: its header promises {end} bytes of data, {there} are there; write it again")
        return member.offset + 8 + length, tensors


class _Field:
    """One field of a shard while its members go by."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], first: str) -> None:
        self.name, self.dtype, self.shape, self.first = name, dtype, shape, first
        self.ragged = False
        self.note = ""
        self.offsets: list[int] = []
        self.lengths: list[int] = []

    def refuse(self, why: str) -> None:
        self.note = self.note or why

    def lack(self, record: int, keys: list[str]) -> None:
        self.refuse(
            f"is missing from record {record} ({quote(keys[record])}); every record needs it, and the members of a "
            "record have to follow one another"
        )

    def column(self, keys: list[str]) -> Column:
        if len(self.offsets) != len(keys):
            self.lack(len(self.offsets), keys)
        if self.note:
            return Column(self.name, self.dtype, (), REFUSED, np.empty(0, dtype=np.int64), self.note)
        if not self.ragged:
            return Column(self.name, self.dtype, self.shape, PLACED, np.array(self.offsets, dtype=np.int64))
        words = np.array(self.offsets + self.lengths, dtype=np.int64)
        return Column(self.name, self.dtype, self.shape[1:], RAGGED, words)


__all__ = ["Member", "members", "read_tar"]
