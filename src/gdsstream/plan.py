"""Which bytes go where: tensor specs and a placement -> extents. Pure: no I/O, no torch, no device.

Two placements. *Separate* gives each tensor a buffer of its own: what a caller owns. *Packed* puts tensors into one
buffer and keeps the file's layout for runs of neighbours, so that a run stays one read and one copy; a run starts
where its first tensor is 256-byte aligned (what GPU kernels and torch's own allocator assume), and a tensor leaves its
run only where its dtype would be misaligned there, its group ends, or a fused tensor claims it. A *fused* tensor is
several stored ones laid end to end (per-expert matrices as one stack), at no cost: only offsets change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gdsstream.checkpoint import TensorSpec
from gdsstream.dtypes import DTYPES, torch_shape
from gdsstream.errors import ConfigError

ALIGNMENT_BYTES = 256


class Placement(NamedTuple):
    """Where a tensor ends up: `nbytes` at `offset` of a buffer, to be seen as `dtype` (safetensors' name), `shape`
    (torch's)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int
    offset: int
    nbytes: int


class Fused(NamedTuple):
    """A tensor made of stored ones, laid end to end in this order; `shape` is the whole's, in elements."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Extents, one entry each in arrays of equal length, ordered by group, file and file offset; all in bytes.

    Attributes:
        file: int32, index of the file.
        file_offset: int64, from the beginning of the file.
        nbytes: int64, never 0.
        buffer, buffer_offset: int32 and int64, where the bytes go.
        group: int32; a group can be waited for on its own.
        buffer_bytes: the size of each buffer.
        num_groups: how many groups there are, empty ones included.
        placements: the tensors, in the order in which they were asked for.
    """

    file: NDArray[np.int32]
    file_offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    buffer: NDArray[np.int32]
    buffer_offset: NDArray[np.int64]
    group: NDArray[np.int32]
    buffer_bytes: tuple[int, ...]
    num_groups: int
    placements: tuple[Placement, ...]

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


# file, file_offset, nbytes, buffer, buffer_offset, group
Row: TypeAlias = tuple[int, int, int, int, int, int]


def plan_separate(specs: Iterable[TensorSpec], group_of: Callable[[str], int] | None = None) -> ReadPlan:
    """A plan that gives each tensor its own buffer; buffer i belongs to placement i. Raises ConfigError, DtypeError."""
    rows: list[Row] = []
    placements: list[Placement] = []
    for index, (name, dtype, shape, file, offset, nbytes) in enumerate(specs):
        if DTYPES[dtype].per_element != 1:
            shape = torch_shape(dtype, shape)
        placements.append(Placement(name, dtype, shape, index, 0, nbytes))
        rows.append((file, offset, nbytes, index, 0, group_of(name) if group_of else 0))
    return build_plan(rows, tuple(p.nbytes for p in placements), placements)


def plan_packed(
    specs: Sequence[TensorSpec],
    group_of: Callable[[str], int] | None = None,
    fuse: Mapping[str, Fused] | None = None,
    align_bytes: int = 1,
) -> ReadPlan:
    """A plan with one buffer for all tensors.

    `group_of(name)` says which group a tensor (of the file) belongs to; a fused tensor's members may differ. `fuse`
    maps a new name to the stored tensors it is made of, which then appear under the new name only. `align_bytes` is
    what a kernel needs beyond its dtype: a tensor of at least so many bytes that would lie otherwise leaves its run.

    Raises ConfigError where a fused tensor does not fit its members, and DtypeError for dtypes torch lacks.
    """
    by_name = {spec.name: spec for spec in specs}
    group = {name: (group_of(name) if group_of else 0) for name in by_name}
    claimed = {name for whole in (fuse or {}).values() for name in whole.names}
    placements: dict[str, Placement] = {}
    rows: list[Row] = []
    cursor = 0
    run_end: tuple[int, int, int] | None = None  # group, file and offset at which the next tensor would continue

    for spec in sorted((s for s in specs if s.name not in claimed), key=lambda s: (group[s.name], s.file, s.offset)):
        if not spec.nbytes:
            # Without bytes it is aligned anywhere, and must not part the neighbours that it lies between.
            placements[spec.name] = Placement(spec.name, spec.dtype, spec.torch_shape, 0, 0, 0)
            rows.append((spec.file, spec.offset, 0, 0, 0, group[spec.name]))
            continue
        continues = run_end == (group[spec.name], spec.file, spec.offset)
        if not continues or cursor % _least_alignment(spec, align_bytes):
            cursor = _align(cursor)
        placements[spec.name] = Placement(spec.name, spec.dtype, spec.torch_shape, 0, cursor, spec.nbytes)
        rows.append((spec.file, spec.offset, spec.nbytes, 0, cursor, group[spec.name]))
        cursor += spec.nbytes
        run_end = (group[spec.name], spec.file, spec.offset + spec.nbytes)

    for name, whole in (fuse or {}).items():
        if name in placements:
            raise ConfigError(f"fused tensor {name!r} has the name of a stored one that is read too; rename it")
        cursor = _align(cursor)
        members = [_member(by_name, name, part) for part in whole.names]
        placements[name] = _fuse(name, whole, members, cursor)
        for spec in members:
            rows.append((spec.file, spec.offset, spec.nbytes, 0, cursor, group[spec.name]))
            cursor += spec.nbytes

    order = [s.name for s in specs if s.name not in claimed] + list(fuse or {})
    return build_plan(rows, (cursor,), [placements[name] for name in order])


def _item_bytes(dtype: str) -> int:
    return max(1, DTYPES[dtype].bits // 8)


def _least_alignment(spec: TensorSpec, align_bytes: int) -> int:
    item = _item_bytes(spec.dtype)
    return max(item, align_bytes) if spec.nbytes >= align_bytes else item


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _member(by_name: Mapping[str, TensorSpec], fused: str, name: str) -> TensorSpec:
    if name not in by_name:
        raise ConfigError(f"fused tensor {fused!r} is to hold {name!r}, which is not among the tensors to read")
    return by_name[name]


def _fuse(name: str, whole: Fused, members: Sequence[TensorSpec], offset: int) -> Placement:
    dtypes = {spec.dtype for spec in members}
    if len(dtypes) != 1:
        raise ConfigError(
            f"fused tensor {name!r} has members of different dtypes: {', '.join(sorted(dtypes)) or 'none'}"
        )
    dtype = dtypes.pop()
    nbytes = sum(spec.nbytes for spec in members)
    wanted = prod(whole.shape) * DTYPES[dtype].bits // 8
    if wanted != nbytes:
        raise ConfigError(
            f"fused tensor {name!r} of shape {whole.shape} and dtype {dtype} has {wanted} bytes, its "
            f"{len(members)} member(s) have {nbytes}"
        )
    return Placement(name, dtype, torch_shape(dtype, whole.shape), 0, offset, nbytes)


def build_plan(rows: Sequence[Row], buffer_bytes: tuple[int, ...], placements: Sequence[Placement]) -> ReadPlan:
    """The plan of rows in any order; neighbours both in the file and in the buffer become one extent."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    if len(table) and (table[:, 5] < 0).any():
        raise ConfigError(f"group {int(table[:, 5].min())} is negative; groups count from 0")
    num_groups = int(table[:, 5].max()) + 1 if len(table) else 1
    table = table[table[:, 2] > 0]  # empty tensors count for their group only
    table = table[np.lexsort((table[:, 1], table[:, 0], table[:, 5]))]
    file, offset, nbytes, buffer, start, group = table.T
    if len(table) > 1:
        joins = (
            (file[1:] == file[:-1])
            & (offset[1:] == offset[:-1] + nbytes[:-1])
            & (buffer[1:] == buffer[:-1])
            & (start[1:] == start[:-1] + nbytes[:-1])
            & (group[1:] == group[:-1])
        )
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        nbytes = np.add.reduceat(nbytes, first)
        file, offset, buffer, start, group = (column[first] for column in (file, offset, buffer, start, group))
    return ReadPlan(
        file=file.astype(np.int32),
        file_offset=np.ascontiguousarray(offset),
        nbytes=np.ascontiguousarray(nbytes),
        buffer=buffer.astype(np.int32),
        buffer_offset=np.ascontiguousarray(start),
        group=group.astype(np.int32),
        buffer_bytes=buffer_bytes,
        num_groups=num_groups,
        placements=tuple(placements),
    )


__all__ = [
    "ALIGNMENT_BYTES",
    "Fused",
    "Placement",
    "ReadPlan",
    "Row",
    "build_plan",
    "plan_packed",
    "plan_separate",
]
