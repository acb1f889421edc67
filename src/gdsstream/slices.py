"""Indexing a stored tensor before it is read: an index -> the runs of bytes it selects. Pure.

Leading dimensions select runs of the file; what follows the last narrowed dimension is contiguous in it. Where the
runs would be many and tiny (a column of a matrix), the covering rows are read instead and indexed on the device: a
read of 64 bytes costs as much as one of 4 KiB.
"""

from __future__ import annotations

from itertools import product
from math import prod
from numbers import Integral
from types import EllipsisType
from typing import NamedTuple, TypeAlias

from gdsstream.errors import ConfigError

Index: TypeAlias = int | slice | EllipsisType
_SMALL_RUN_BYTES = 4096
_FEW_RUNS = 64


class Selection(NamedTuple):
    """Bytes to read, and what to do with them.

    `runs` are (offset, nbytes) relative to the tensor's first byte, to be laid end to end; they hold a tensor of
    `shape`, to which `then` is applied as an index where it is not None.
    """

    runs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    then: tuple[Index, ...] | None


def select(shape: tuple[int, ...], item_bytes: int, index: object) -> Selection:
    """What `tensor[index]` needs, for ints, slices with positive steps and one Ellipsis.

    Raises ConfigError for anything else, and IndexError where an int is out of range, as torch does.
    """
    full = _expand(shape, index)
    ranges = [_range(axis, size, item) for axis, (size, item) in enumerate(zip(shape, full, strict=True))]
    kept = [axis for axis, item in enumerate(full) if not isinstance(item, int)]
    result = tuple(len(ranges[axis]) for axis in kept)
    if 0 in result:
        return Selection((), result, None)
    # The tail that is taken whole is contiguous, and so is the narrowed dimension before it.
    tail = len(shape)
    while tail > 0 and len(ranges[tail - 1]) == shape[tail - 1]:
        tail -= 1
    tail_bytes = prod(shape[tail:]) * item_bytes
    if tail == 0:
        return Selection(((0, tail_bytes),), result, None)
    inner = ranges[tail - 1]
    run_bytes = tail_bytes * (len(inner) if inner.step == 1 else 1)
    outer = ranges[: tail - 1] if inner.step == 1 else ranges[:tail]
    count = prod(len(r) for r in outer)
    if count > _FEW_RUNS and run_bytes < _SMALL_RUN_BYTES:
        return _covering(shape, item_bytes, ranges, full)
    strides = [prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape))]
    last = inner.start * strides[tail - 1] if inner.step == 1 else 0
    runs = [
        (sum(position * stride for position, stride in zip(at, strides, strict=False)) + last, run_bytes)
        for at in product(*outer)
    ]
    return Selection(_joined(runs), result, None)


def _expand(shape: tuple[int, ...], index: object) -> list[int | slice]:
    items = [_plain(item) for item in (index if isinstance(index, tuple) else (index,))]
    ellipses = [axis for axis, item in enumerate(items) if item is ...]
    if len(ellipses) > 1:
        raise ConfigError("an index has at most one Ellipsis")
    if len(items) - len(ellipses) > len(shape):
        raise IndexError(f"too many indices: {len(items)} for a tensor of {len(shape)} dimension(s)")
    at = ellipses[0] if ellipses else len(items)
    filler: list[int | slice] = [slice(None)] * (len(shape) - (len(items) - len(ellipses)))
    return [*items[:at], *filler, *items[at + len(ellipses) :]]  # type: ignore[list-item]


def _plain(item: object) -> Index:
    if isinstance(item, slice | EllipsisType):
        return item
    if isinstance(item, bool) or not isinstance(item, Integral):
        raise ConfigError(
            f"a stored tensor is indexed by ints, slices and one Ellipsis, not {type(item).__name__}; "
            "for anything else read it with get_tensor and index the tensor"
        )
    return int(item)


def _range(axis: int, size: int, item: int | slice) -> range:
    if isinstance(item, int):
        if not -size <= item < size:
            raise IndexError(f"index {item} is out of range for dimension {axis} of size {size}")
        return range(item % size, item % size + 1)
    try:
        chosen = range(*item.indices(size))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{item} cannot index dimension {axis}: {error}") from None
    if chosen.step < 0:
        raise ConfigError("slices need a positive step, as in torch")
    return chosen if len(chosen) else range(0)


def _covering(shape: tuple[int, ...], item_bytes: int, ranges: list[range], full: list[int | slice]) -> Selection:
    first, last = ranges[0][0], ranges[0][-1]
    row_bytes = prod(shape[1:]) * item_bytes
    rows = ((first * row_bytes, (last - first + 1) * row_bytes),)
    head: Index = 0 if isinstance(full[0], int) else slice(0, last - first + 1, ranges[0].step)
    return Selection(rows, (last - first + 1, *shape[1:]), (head, *full[1:]))


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for offset, nbytes in runs:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((offset, nbytes))
    return tuple(joined)


__all__ = ["Index", "Selection", "select"]
