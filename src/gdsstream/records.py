"""Where every record of every field of a dataset lies: pure arrays, no file is touched here.

A shard is described by columns, one a field, as the reader of its format (`shard_formats`, `shard_tar`) found them.
Records of one size that follow each other are a base and a stride: billions of them cost two numbers a shard. Only
records that lie anywhere (members of a tar) or have lengths of their own (ragged) need arrays as long as the shard:
eight bytes for a place, eight for a length.

What is wrong with a column (some records lack it, its dtype is none of torch's, it is compressed) is a note in it, and
an error only for those who ask for that field: the others can still be read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gdsstream.dtypes import DTYPES, torch_dtype
from gdsstream.errors import ConfigError, DatasetError, DtypeError
from gdsstream.regular_files import FileStamp, quote

if TYPE_CHECKING:
    import torch

Words = NDArray[np.int64]

# How a column places its records, and what its words are.
STRIDED = "strided"  # [base, stride]
PLACED = "placed"  # an offset for each record; all of one shape
RAGGED = "ragged"  # an offset for each record, then as many lengths in bytes
REFUSED = "refused"  # none: the note says why
KINDS = (STRIDED, PLACED, RAGGED, REFUSED)

_MAX_RECORDS = 2**62  # records without bytes can be any number


class Field(NamedTuple):
    """One field of the records: a record of it is [*shape], or [n, *shape] with an n of its own where it is ragged."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]  # in elements of torch; without the ragged dimension
    ragged: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch; DtypeError when torch has none."""
        return torch_dtype(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of torch (for packed dtypes: of the element that holds several values)."""
        info = DTYPES[self.dtype]
        return info.bits * info.per_element // 8

    @property
    def record_bytes(self) -> int:
        """Bytes of one record; of one row of a record, [*shape], where the field is ragged."""
        return prod(self.shape) * self.itemsize


class Column(NamedTuple):
    """What one shard holds of one field."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of a record, in elements of torch; without the ragged dimension
    kind: str  # one of KINDS
    words: Words
    note: str = ""


class Shard(NamedTuple):
    """One shard as its reader found it."""

    path: str  # absolute
    stamp: FileStamp
    num_records: int
    columns: tuple[Column, ...]


class Located(NamedTuple):
    """Where records lie; one entry each, offsets and lengths in bytes."""

    file: NDArray[np.int32]  # number of the shard in RecordTable.paths
    offset: Words
    nbytes: Words


class _Layout(NamedTuple):
    """A field over all shards: base and stride of each shard, or an offset of each record, and lengths if ragged."""

    base: Words | None
    stride: Words | None
    offset: Words | None
    nbytes: Words | None


class RecordTable:
    """Where every record of some fields lies, over all shards in their order.

    Attributes:
        fields: those that were chosen, in the order in which they were.
        num_records: of all shards together.
        paths: absolute, one a shard; a shard without records has its place.
        stamps: of the shards, when their headers were read or found unchanged.
        starts: int64 [num_shards + 1], the number of each shard's first record, and at the end `num_records`.
        fingerprint: hex; equal for datasets with the same shard names (below their common directory), sizes, record
            counts, fields, whichever were chosen, and bytes from one record to the next. It does not depend on times
            or on where the directory is.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        stamps: tuple[FileStamp, ...],
        starts: Words,
        fields: tuple[Field, ...],
        layouts: tuple[_Layout, ...],
        fingerprint: str,
    ) -> None:
        self.paths = paths
        self.stamps = stamps
        self.starts = starts
        self.fields = fields
        self.fingerprint = fingerprint
        self.num_records = int(starts[-1])
        self._layouts = dict(zip((field.name for field in fields), layouts, strict=True))
        self._fields = {field.name: field for field in fields}

    @classmethod
    def of(cls, shards: Sequence[Shard], fields: Sequence[str] | None = None) -> Self:
        """The table of `shards`; `fields` chooses some, None takes all, which every shard then has to agree on.

        Raises DatasetError where there is no record, or more than 2**62, where shards disagree or lack a field, or a
        field cannot be read; ConfigError as `chosen_fields`.
        """
        if sum(shard.num_records for shard in shards) > _MAX_RECORDS:
            most = max(shards, key=lambda shard: shard.num_records)
            raise DatasetError(
                f"more than 2**62 records in {len(shards)} shard(s), {most.num_records} of them in {most.path}; "
                "check what wrote their headers"
            )
        counts = np.array([shard.num_records for shard in shards], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        full = [shard for shard in shards if shard.num_records]
        if not full:
            where = f"{shards[0].path} for one; check that they were written to the end" if shards else "name one"
            raise DatasetError(f"no record in {len(shards)} shard(s), {where}")
        names = _chosen(full, fields)
        columns = [_columns(full, name) for name in names]
        made = [_unite(name, column, full) for name, column in zip(names, columns, strict=True)]
        return cls(
            paths=tuple(shard.path for shard in shards),
            stamps=tuple(shard.stamp for shard in shards),
            starts=starts,
            fields=tuple(field for field, _ in made),
            layouts=tuple(_spread(layout, counts) for _, layout in made),
            fingerprint=_fingerprint(shards, counts),
        )

    def field(self, name: str) -> Field:
        """The field of that name; ConfigError when it is not among the chosen ones."""
        try:
            return self._fields[name]
        except KeyError:
            raise ConfigError(f"no field {quote(name)}; there are {', '.join(self._fields)}") from None

    def shard_of(self, records: NDArray[np.int64]) -> NDArray[np.int32]:
        """The number of the shard that holds each record, int32 [n]. ConfigError for a record that does not exist."""
        if len(records) and not 0 <= int(records.min()) <= int(records.max()) < self.num_records:
            bad = records[(records < 0) | (records >= self.num_records)]
            raise ConfigError(f"no record {int(bad[0])}; there are {self.num_records}, counted from 0")
        # Behind all equal starts, so that a shard without records is never found.
        return (np.searchsorted(self.starts, records, side="right") - 1).astype(np.int32)

    def locate(self, field: str, records: NDArray[np.int64]) -> Located:
        """Where records of a field lie: int64 [n] record numbers in any order, repeats allowed.

        Raises ConfigError for a field or a record that does not exist.
        """
        self.field(field)
        records = np.asarray(records, dtype=np.int64)
        return self._locate(field, records, self.shard_of(records))

    def locate_all(self, records: NDArray[np.int64]) -> tuple[Located, ...]:
        """As `locate`, for every field in the order of `fields`; the shards are searched once."""
        records = np.asarray(records, dtype=np.int64)
        shards = self.shard_of(records)
        return tuple(self._locate(field.name, records, shards) for field in self.fields)

    def _locate(self, name: str, records: Words, shards: NDArray[np.int32]) -> Located:
        layout = self._layouts[name]
        if layout.offset is not None:
            offset = layout.offset[records]
        else:
            assert layout.base is not None
            assert layout.stride is not None
            offset = (records - self.starts[shards]) * layout.stride[shards] + layout.base[shards]
        if layout.nbytes is not None:
            return Located(shards, offset, layout.nbytes[records])
        return Located(shards, offset, np.full(len(records), self._fields[name].record_bytes, dtype=np.int64))


def chosen_fields(fields: Iterable[str]) -> list[str]:
    """The fields that a caller names, in that order. ConfigError unless they are names, at least one and each once."""
    if isinstance(fields, str):
        raise ConfigError(f"fields is a list of names; for one field write [{fields!r}]")
    if not isinstance(fields, Iterable):
        raise ConfigError(f"fields is {quote(fields)}; it has to be a list of names, or be left out to take all")
    names = list(fields)
    if not names:
        raise ConfigError("fields is empty; name at least one, or leave it out to take all")
    for at, name in enumerate(names):
        if not isinstance(name, str):
            raise ConfigError(f"fields has {quote(name)}, which is no name; it has to be a list of names")
        if name in names[:at]:
            raise ConfigError(f"fields has {quote(name)} twice; name each once")
    return names


def _chosen(shards: Sequence[Shard], fields: Sequence[str] | None) -> list[str]:
    if fields is None:
        first = [column.name for column in shards[0].columns]
        known: tuple[str, ...] | None = None
        for shard in shards:
            names = tuple(column.name for column in shard.columns)
            if names == known:
                continue
            known = names
            if set(names) != set(first):
                odd = sorted(set(first) ^ set(names))[0]
                has, lacks = (shard, shards[0]) if odd in names else (shards[0], shard)
                raise DatasetError(
                    f"{lacks.path} has no field {quote(odd)}, which {has.path} has; "
                    "write it again, or choose fields that every shard has (fields=[...])"
                )
        return first
    return chosen_fields(fields)


def _columns(shards: Sequence[Shard], name: str) -> list[Column]:
    found = []
    for shard in shards:
        column = next((column for column in shard.columns if column.name == name), None)
        if column is None:
            there = ", ".join(quote(column.name) for column in shard.columns)
            raise DatasetError(f"{shard.path} has no field {quote(name)}; it has {there}")
        if column.kind == REFUSED:
            raise DatasetError(
                f"{shard.path}: field {quote(name)} {column.note}; or leave the field out (fields=[...])"
            )
        found.append(column)
    return found


def _unite(name: str, columns: Sequence[Column], shards: Sequence[Shard]) -> tuple[Field, _Layout]:
    """One field out of its columns in all shards that have records."""
    first = columns[0]
    try:
        torch_dtype(first.dtype)
    except DtypeError as error:
        raise DatasetError(f"{shards[0].path}: field {quote(name)}: {error}; or leave the field out") from None
    for column, shard in zip(columns, shards, strict=True):
        if column.dtype != first.dtype:
            raise DatasetError(
                f"field {quote(name)} is {column.dtype} in {shard.path}, but {first.dtype} in {shards[0].path}; "
                "write all shards with one dtype"
            )
    shapes = {(column.kind, column.shape) for column in columns}
    rows = first.shape if first.kind == RAGGED else first.shape[1:]
    if prod(rows) == 0 and (first.kind == RAGGED or len(shapes) > 1):
        raise DatasetError(
            f"{shards[0].path}: the rows of field {quote(name)}, of shape {list(rows)}, have no bytes, so that "
            "they cannot be counted; leave the field out (fields=[...])"
        )
    if len(shapes) == 1:
        field = Field(name, first.dtype, first.shape, first.kind == RAGGED)
        if first.kind == STRIDED:
            pairs = np.concatenate([column.words for column in columns]).reshape(-1, 2)
            return field, _Layout(pairs[:, 0].copy(), pairs[:, 1].copy(), None, None)
        if first.kind == PLACED:
            return field, _Layout(None, None, np.concatenate([column.words for column in columns]), None)
        return field, _ragged(columns, shards, [0] * len(shards))
    # Members of one shape in each shard, but of another length in the next, are ragged records over all shards.
    for column, shard in zip(columns, shards, strict=True):
        same = (column.kind, column.shape) == (first.kind, first.shape)
        if not same and (_row(column) is None or _row(column) != _row(first)):
            raise DatasetError(
                f"field {quote(name)} has records of shape {_shown(column)} in {shard.path}, "
                f"but {_shown(first)} in {shards[0].path}; write all shards with one shape"
            )
    field = Field(name, first.dtype, rows, ragged=True)
    whole = [Field(name, first.dtype, column.shape, ragged=False).record_bytes for column in columns]
    return field, _ragged(columns, shards, whole)


def _row(column: Column) -> tuple[int, ...] | None:
    """The shape of a row of the records, where they can be of any number of rows."""
    if column.kind == RAGGED:
        return column.shape
    return column.shape[1:] if column.kind == PLACED and column.shape else None


def _ragged(columns: Sequence[Column], shards: Sequence[Shard], whole: Sequence[int]) -> _Layout:
    offsets, lengths = [], []
    for column, shard, nbytes in zip(columns, shards, whole, strict=True):
        offsets.append(column.words[: shard.num_records])
        uniform = column.kind == PLACED
        lengths.append(
            np.full(shard.num_records, nbytes, dtype=np.int64) if uniform else column.words[shard.num_records :]
        )
    return _Layout(None, None, np.concatenate(offsets), np.concatenate(lengths))


def _spread(layout: _Layout, counts: Words) -> _Layout:
    """Bases and strides with entries for shards without records, so that shard numbers index them."""
    if layout.base is None or layout.stride is None or len(layout.base) == len(counts):
        return layout
    base, stride = np.zeros_like(counts), np.zeros_like(counts)
    base[counts > 0], stride[counts > 0] = layout.base, layout.stride
    return _Layout(base, stride, None, None)


def _shown(column: Column) -> str:
    return f"[{', '.join((['n'] if column.kind == RAGGED else []) + [str(size) for size in column.shape])}]"


def _fingerprint(shards: Sequence[Shard], counts: Words) -> str:
    directory = os.path.commonpath({os.path.dirname(shard.path) for shard in shards}).rstrip("/") + "/"
    names = [
        shard.path[len(directory) :] if shard.path.startswith(directory) else os.path.relpath(shard.path, directory)
        for shard in shards
    ]
    sizes = np.array([shard.stamp.size for shard in shards], dtype="<i8")
    seen: dict[str, None] = {}
    for shard in shards:
        for name, dtype, shape, kind, words, _ in shard.columns:
            seen[f"{name}\0{dtype}\0{shape}\0{kind}\0{words[1] if kind == STRIDED else 0}"] = None
    digest = hashlib.blake2b(digest_size=16)
    for part in ("\n".join(names).encode(errors="surrogateescape"), "\n".join(sorted(seen)).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(sizes.tobytes() + counts.astype("<i8").tobytes())
    return digest.hexdigest()


__all__ = [
    "KINDS",
    "PLACED",
    "RAGGED",
    "REFUSED",
    "STRIDED",
    "Column",
    "Field",
    "Located",
    "RecordTable",
    "Shard",
    "chosen_fields",
]
