"""The formats of shards: which files are of which, and what a shard of each holds. Only headers are read.

safetensors   dimension 0 of every tensor is the record; a field is a tensor. X.values [total, ...] and X.offsets
              int64 [records + 1] are one ragged field X, whose record i is values[offsets[i]:offsets[i + 1]]
npy           one array; dimension 0 is the record; field "data"
tokens        nothing but elements of one dtype (.bin, .tokens); a record is a window of them; field "tokens"
tar           members of one key are a record (`shard_tar`)
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gdsstream.dtypes import DTYPES, torch_shape
from gdsstream.errors import ConfigError, DatasetError, DtypeError, TruncatedFileError
from gdsstream.header import TensorSpec, read_file
from gdsstream.records import RAGGED, REFUSED, STRIDED, Column, Shard, Words
from gdsstream.regular_files import quote
from gdsstream.shard_npy import ShardFile, read_npy
from gdsstream.shard_tar import read_tar

EXTENSIONS = {".safetensors": "safetensors", ".npy": "npy", ".bin": "tokens", ".tokens": "tokens", ".tar": "tar"}
FORMATS = tuple(dict.fromkeys(EXTENSIONS.values()))
_SCALAR = "is a scalar, which has no record: dimension 0 of a tensor is the record"
_OPTIONS = ("dtype", "record_length", "stride")


@dataclass(frozen=True)
class ShardFormat:
    """A format with its options; `read` turns a file into a Shard.

    Attributes:
        name: one of FORMATS.
        dtype: of tokens: safetensors' name.
        record_length, stride: of tokens: how many make a record, and how many lie between two records' beginnings.
    """

    name: str
    dtype: str | None = None
    record_length: int | None = None
    stride: int | None = None

    @classmethod
    def of(cls, name: str, options: dict[str, Any]) -> ShardFormat:
        """Checked: ConfigError for an unknown format, and for options that do not belong to it or cannot work."""
        if name not in FORMATS:
            close = difflib.get_close_matches(str(name), FORMATS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"format is {name!r}{hint}; it is one of {', '.join(FORMATS)}")
        given = {option: options[option] for option in _OPTIONS if options.get(option) is not None}
        if name != "tokens":
            if given:
                raise ConfigError(
                    f'{", ".join(given)} can be given for token files only (format "tokens"); {name} shards say it '
                    "themselves"
                )
            return cls(name)
        lacking = [option for option in ("dtype", "record_length") if option not in given]
        if lacking:
            raise ConfigError(
                f"token files do not say what they hold: give {' and '.join(lacking)}, as in "
                'ShardDataset(path, dtype="uint16", record_length=2048)'
            )
        length = _whole("record_length", given["record_length"])
        return cls(name, _dtype_name(given["dtype"]), length, _whole("stride", given.get("stride", length)))

    @property
    def key(self) -> str:
        """What an index of shards depends on beside the shards: equal for equal formats and options."""
        return "-".join(
            str(part) for part in (self.name, self.dtype, self.record_length, self.stride) if part is not None
        )

    def read(self, path: str) -> Shard:
        """What the shard at `path` holds.

        Raises DatasetError, HeaderError, TruncatedFileError, CheckpointNotFoundError, CheckpointError, ReadError.
        """
        if self.name == "safetensors":
            return read_safetensors(path)
        if self.name == "npy":
            return read_npy(path)
        if self.name == "tar":
            return read_tar(path)
        return read_tokens(path, str(self.dtype), int(self.record_length or 0), int(self.stride or 0))


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**40:
        raise ConfigError(f"{name} is {quote(value)}; it has to be a whole number of tokens from 1 to 2**40")
    return value


def _dtype_name(dtype: object) -> str:
    """safetensors' name of a dtype given as torch's or numpy's, or by its name in torch or in safetensors."""
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    for info in DTYPES.values():
        if text in (info.name, info.torch_name) and info.torch_name and info.per_element == 1:
            if not hasattr(torch, info.torch_name):
                raise ConfigError(f"dtype {text} is not in torch {torch.__version__}")
            return info.name
    close = difflib.get_close_matches(text, [info.torch_name for info in DTYPES.values() if info.torch_name], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f'dtype is {dtype!r}{hint}; it is one of torch, such as torch.int32 or "uint16"')


def read_tokens(path: str, dtype: str, record_length: int, stride: int) -> Shard:
    """A flat file of tokens; what is left at its end and does not fill a record is no part of any."""
    itemsize = DTYPES[dtype].bits // 8
    with ShardFile(path) as file:
        tokens, odd = divmod(file.stamp.size, itemsize)
        if odd:
            raise TruncatedFileError(
                f"{path} has {file.stamp.size} bytes, which are not whole tokens of {dtype} ({odd} too many, or "
                f"{itemsize - odd} missing); the dtype is another, or the copy is incomplete"
            )
        count = (tokens - record_length) // stride + 1 if tokens >= record_length else 0
        words = np.array([0, stride * itemsize], dtype=np.int64)
        return Shard(path, file.stamp, count, (Column("tokens", dtype, (record_length,), STRIDED, words),))


def read_safetensors(path: str) -> Shard:
    """A safetensors file whose tensors have one record a row."""
    file, specs = read_file(path, 0)
    if not specs:
        raise DatasetError(f"{path} has no tensor; a shard holds at least one")
    by_name = {spec.name: spec for spec in specs}
    columns: list[Column] = []
    scalars: list[Column] = []
    counts: dict[str, int] = {}
    for spec in specs:
        base, _, part = spec.name.rpartition(".")
        if part == "values" and f"{base}.offsets" in by_name:
            column, count = _ragged(path, base, spec, by_name[f"{base}.offsets"], by_name)
        elif part == "offsets" and f"{base}.values" in by_name:
            continue
        elif not spec.shape:
            scalars.append(Column(spec.name, spec.dtype, (), REFUSED, np.empty(0, dtype=np.int64), _SCALAR))
            continue
        else:
            column, count = _rows(path, spec)
        columns.append(column)
        counts[column.name] = count
    if not columns:
        raise DatasetError(f"{path}: tensor {quote(scalars[0].name)} {_SCALAR}, and no other has one")
    first = columns[0].name
    for name, count in counts.items():
        if count != counts[first]:
            raise DatasetError(
                f"{path}: field {quote(name)} has {count} records, but {quote(first)} has {counts[first]}; "
                "dimension 0 of every tensor of a shard is the record"
            )
    return Shard(path, file.stamp, counts[first], tuple(sorted(columns + scalars, key=lambda column: column.name)))


def _rows(path: str, spec: TensorSpec) -> tuple[Column, int]:
    count = spec.shape[0]
    words = np.array([spec.offset, spec.nbytes // count if count else 0], dtype=np.int64)
    return Column(spec.name, spec.dtype, _row_shape(path, spec), STRIDED, words), count


def _row_shape(path: str, spec: TensorSpec) -> tuple[int, ...]:
    try:
        return torch_shape(spec.dtype, spec.shape[1:])
    except DtypeError as error:
        raise DatasetError(f"{path}: a record of tensor {quote(spec.name)}: {error}") from None


def _ragged(
    path: str, name: str, values: TensorSpec, offsets: TensorSpec, others: dict[str, TensorSpec]
) -> tuple[Column, int]:
    where = f"{path}: field {quote(name)}"
    if name in others:
        raise DatasetError(f"{where} is there twice: as a tensor, and as {name}.values; rename one")
    if offsets.dtype != "I64" or len(offsets.shape) != 1 or not offsets.shape[0]:
        raise DatasetError(
            f"{where}: {name}.offsets is {offsets.dtype} of shape {list(offsets.shape)}; beside {name}.values it "
            "has to be I64 of shape [records + 1]"
        )
    if not values.shape:
        raise DatasetError(f"{where}: {name}.values is a scalar; it has to be of shape [total, ...]")
    ends = _read_offsets(path, offsets)
    total = values.shape[0]
    falls = np.flatnonzero(ends[1:] < ends[:-1])
    if len(falls):
        at = int(falls[0])
        raise DatasetError(f"{where}: {name}.offsets falls from {ends[at]} to {ends[at + 1]} at record {at}")
    if ends[0] != 0 or ends[-1] != total:
        raise DatasetError(
            f"{where}: {name}.offsets goes from {ends[0]} to {ends[-1]}; it has to go from 0 to {total}, the rows of "
            f"{name}.values"
        )
    row_bytes = values.nbytes // total if total else 0
    words = np.concatenate((values.offset + ends[:-1] * row_bytes, np.diff(ends) * row_bytes))
    return Column(name, values.dtype, _row_shape(path, values), RAGGED, words), len(ends) - 1


def _read_offsets(path: str, spec: TensorSpec) -> Words:
    with ShardFile(path) as file:
        raw = file.read(spec.offset, spec.nbytes, f"tensor {quote(spec.name)}")
    return np.frombuffer(raw, dtype="<i8").astype(np.int64, copy=False)


__all__ = ["EXTENSIONS", "FORMATS", "ShardFormat", "read_safetensors", "read_tokens"]
