"""From the records of a batch to its tensors: shapes, places and extents. Only `Jagged` computes with torch.

A field whose records are all alike becomes one stacked tensor, [B, *shape]. Ragged records become a `Jagged`: their
rows end to end, [total, *shape], and where each record begins; or, where padding was asked for, [B, longest, *shape].
Each way a record is one extent, from its place in a shard to its place in the tensor, so that a whole batch is one
native call.

Places are counted in bytes from the beginning of each field's tensor, as in a ReadPlan, whose buffers the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gdsstream.dtypes import DTYPES, torch_dtype
from gdsstream.errors import ConfigError
from gdsstream.plan import ReadPlan
from gdsstream.records import Field, Located
from gdsstream.regular_files import quote

# Shard numbers up to here are looked up in a table that is made for each batch.
_LOOKED_UP = 16384

# What index_put does not take, and what has the same bytes; older torch has not all of them.
_AS_SIGNED = {
    getattr(torch, name, None): signed
    for name, signed in (
        ("uint16", torch.int16),
        ("uint32", torch.int32),
        ("uint64", torch.int64),
        ("float8_e8m0fnu", torch.int8),
    )
}

Pad: TypeAlias = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Records of different lengths, end to end: what torch.nested calls a jagged tensor.

    Attributes:
        values: [total, *shape], the rows of all records.
        offsets: int64 [B + 1] on the same device; record i is values[offsets[i] : offsets[i + 1]].

    `len` is the number of records. Indexing and iterating look at the offsets, so that on a GPU they wait for it.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        """Record `index`, [n, *shape], a view. Raises IndexError."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of a batch of {len(self)}")
        begin, end = self.offsets[index % len(self) :][:2].tolist()
        return self.values[begin:end]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.unbind())

    def unbind(self) -> list[torch.Tensor]:
        """The records, views of `values`."""
        return list(torch.split(self.values, self.lengths().tolist()))

    def lengths(self) -> torch.Tensor:
        """Rows of each record: int64 [B] on the same device."""
        return self.offsets.diff()

    def nested(self) -> torch.Tensor:
        """As a torch.nested tensor of layout torch.jagged, [B, *, *shape]; it shares the memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def to_padded(self, value: float = 0) -> torch.Tensor:
        """[B, longest, *shape], filled up with `value`. Waits for the GPU, which knows how long the longest is."""
        lengths = self.lengths()
        longest = int(lengths.max()) if len(self) else 0
        padded = self.values.new_full((len(self), longest, *self.values.shape[1:]), value)
        rows = torch.repeat_interleave(lengths, output_size=len(self.values))
        columns = torch.arange(len(self.values), device=rows.device) - self.offsets[rows]
        signed = _AS_SIGNED.get(padded.dtype)
        if signed is None:
            padded[rows, columns] = self.values
        else:  # no gradient goes through a view as another dtype, and none of these has one
            padded.view(signed)[rows, columns] = self.values.view(signed)
        return padded

    def to(self, *arguments: Any, **options: Any) -> Jagged:
        """On another device; a dtype applies to the values only. As torch.Tensor.to."""
        values = self.values.to(*arguments, **options)
        return Jagged(values, self.offsets.to(values.device, non_blocking=bool(options.get("non_blocking"))))

    def pin_memory(self) -> Jagged:
        return Jagged(self.values.pin_memory(), self.offsets.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """As torch.Tensor.record_stream, for both."""
        self.values.record_stream(stream)
        self.offsets.record_stream(stream)


Value: TypeAlias = torch.Tensor | Jagged


class FieldFormat(NamedTuple):
    """One field, and what becomes of its records in a batch."""

    field: Field
    dtype: torch.dtype
    row_bytes: int  # of one record; of one row where records are ragged
    pad: float | None


class FieldLayout(NamedTuple):
    """One field's tensor in one batch."""

    format: FieldFormat
    shape: tuple[int, ...]
    nbytes: int
    offsets: NDArray[np.int64] | None  # [B + 1] in rows, for a Jagged

    @property
    def filled(self) -> bool:
        """Whether the tensor has to be filled with the padding value before records are read into it."""
        return self.format.pad is not None


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """The tensors of one batch and the extents that fill them. `files` are the shards' numbers that the plan indexes.

    `stride` is what one record takes where the batch is one field of fixed records, which one gather reads: record i
    goes to i * stride. 0 for all others.
    """

    parts: tuple[FieldLayout, ...]
    files: NDArray[np.int64]
    plan: ReadPlan
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(part.nbytes for part in self.parts)

    def only(self, first: int, last: int) -> ReadPlan:
        """The extents of files[first:last], counted from `first`."""
        chosen = (self.plan.file >= first) & (self.plan.file < last)
        plan = self.plan
        return ReadPlan(
            file=plan.file[chosen] - np.int32(first),
            file_offset=plan.file_offset[chosen],
            nbytes=plan.nbytes[chosen],
            buffer=plan.buffer[chosen],
            buffer_offset=plan.buffer_offset[chosen],
            group=plan.group[chosen],
            buffer_bytes=plan.buffer_bytes,
            num_groups=1,
            placements=(),
        )


def batch_formats(fields: Sequence[Field], pad: Pad) -> tuple[FieldFormat, ...]:
    """What becomes of each field. Raises ConfigError for padding of what is not ragged or not there, DtypeError."""
    ragged = [field.name for field in fields if field.ragged]
    if isinstance(pad, Mapping):
        wanted = dict(pad)
        for name in wanted:
            if name not in ragged:
                raise ConfigError(
                    f"pad names {name!r}, which is no ragged field; ragged: {', '.join(map(repr, ragged)) or 'none'}"
                )
    else:
        wanted = dict.fromkeys(ragged, pad) if pad is not None else {}
    for name, value in wanted.items():
        if not isinstance(value, Real):
            raise ConfigError(f"pad for {name!r} is {value!r}; it has to be a number")
    made = tuple(
        FieldFormat(field, torch_dtype(field.dtype), field.record_bytes, wanted.get(field.name)) for field in fields
    )
    for form in made:
        _check_pad(form)
    return made


def _check_pad(form: FieldFormat) -> None:
    """Raise ConfigError where the padding value would become another one."""
    if form.pad is None:
        return
    where = f"pad for {form.field.name!r} is {quote(form.pad)}, and the field is {form.field.dtype}"
    if DTYPES[form.field.dtype].per_element > 1:
        raise ConfigError(f"{where}, which torch cannot fill; leave it unpadded")
    if form.dtype.is_floating_point or form.dtype.is_complex:
        if not _holds(form.dtype, form.pad):
            bounds = torch.finfo(form.dtype)
            raise ConfigError(f"{where}; it has to be a number from {bounds.min} to {bounds.max}")
        return
    if form.dtype is torch.bool:
        least, most = 0, 1
    else:
        least, most = torch.iinfo(form.dtype).min, torch.iinfo(form.dtype).max
    if not least <= form.pad <= most or form.pad != int(form.pad):
        raise ConfigError(f"{where}; it has to be a whole number from {least} to {most}")


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a floating-point dtype has that number, rounded if need be; not all have infinity, 0 or a sign."""
    if value == value and abs(value) != inf:
        return torch.finfo(dtype).min <= value <= torch.finfo(dtype).max
    # All complex dtypes have both.
    held = value if dtype.is_complex else torch.tensor(value, dtype=torch.float64).to(dtype).item()
    return held == value or (held != held and value != value)


def lay_out(formats: Sequence[FieldFormat], located: Sequence[Located]) -> BatchLayout:
    """The layout of a batch whose records lie at `located`, one entry a field, all of one length."""
    files, numbers = _numbered(located)
    if len(formats) == 1 and not formats[0].field.ragged:
        return _one_field(formats[0], located[0], files, numbers[0])
    parts: list[FieldLayout] = []
    places: list[NDArray[np.int64]] = []
    for form, where in zip(formats, located, strict=True):
        part, place = _place(form, where)
        parts.append(part)
        places.append(place)
    nbytes = np.concatenate([where.nbytes for where in located])
    kept = nbytes > 0
    counts = [len(where.nbytes) for where in located]
    plan = ReadPlan(
        file=np.concatenate(numbers)[kept],
        file_offset=np.concatenate([where.offset for where in located])[kept],
        nbytes=nbytes[kept],
        buffer=np.repeat(np.arange(len(parts), dtype=np.int32), counts)[kept],
        buffer_offset=np.concatenate(places)[kept],
        group=np.zeros(int(kept.sum()), dtype=np.int32),
        buffer_bytes=tuple(part.nbytes for part in parts),
        num_groups=1,
        placements=(),
    )
    return BatchLayout(tuple(parts), files, plan, 0)


def _one_field(form: FieldFormat, where: Located, files: NDArray[np.int64], number: NDArray[np.int32]) -> BatchLayout:
    count, row = len(where.file), form.row_bytes
    zeros = np.zeros(count if row else 0, dtype=np.int32)
    plan = ReadPlan(
        file=number[: len(zeros)],
        file_offset=np.ascontiguousarray(where.offset[: len(zeros)]),
        nbytes=np.ascontiguousarray(where.nbytes[: len(zeros)]),
        buffer=zeros,
        buffer_offset=np.arange(len(zeros), dtype=np.int64) * row,
        group=zeros,
        buffer_bytes=(count * row,),
        num_groups=1,
        placements=(),
    )
    part = FieldLayout(form, (count, *form.field.shape), count * row, None)
    return BatchLayout((part,), files, plan, row)


def _numbered(located: Sequence[Located]) -> tuple[NDArray[np.int64], list[NDArray[np.int32]]]:
    """The shards that are used, and for each field which of them holds each record."""
    first = located[0].file
    if len(first) and int(first.max()) < _LOOKED_UP:
        # An eighth of what a sort would take.
        files = np.flatnonzero(np.bincount(first))
        numbers = np.empty(int(files[-1]) + 1, dtype=np.int32)
        numbers[files] = np.arange(len(files), dtype=np.int32)
        number = numbers[first]
    else:
        files, inverse = np.unique(first, return_inverse=True)
        number = inverse.astype(np.int32)
    # The fields of a record lie in one shard.
    return files.astype(np.int64), [number] * len(located)


def _place(form: FieldFormat, where: Located) -> tuple[FieldLayout, NDArray[np.int64]]:
    """One field's tensor, and where in it each record begins, in bytes."""
    count, row = len(where.nbytes), form.row_bytes
    if not form.field.ragged:
        part = FieldLayout(form, (count, *form.field.shape), count * row, None)
        return part, np.arange(count, dtype=np.int64) * row
    rows = where.nbytes // row if row else np.zeros(count, dtype=np.int64)
    if form.pad is not None:
        longest = int(rows.max()) if count else 0
        shape = (count, longest, *form.field.shape)
        return FieldLayout(form, shape, count * longest * row, None), np.arange(count, dtype=np.int64) * (longest * row)
    offsets = np.concatenate(([0], np.cumsum(rows)))
    total = int(offsets[-1])
    return FieldLayout(form, (total, *form.field.shape), total * row, offsets), offsets[:-1] * row


__all__ = ["BatchLayout", "FieldFormat", "FieldLayout", "Jagged", "Pad", "Value", "batch_formats", "lay_out"]
