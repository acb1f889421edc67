"""Where a loader stands, and what a saved state says: plain values, checked before they are believed.

A state names the next batch that nobody has seen: batches that were read ahead do not count. For the loader's own
orders it is a position in the epoch's global order, common to all ranks, so that any number of ranks can go on from it.
A sampler's order is known only to the sampler: what it gave is counted, and skipped on the way back, once it is seen
to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gdsstream.errors import LoaderStateError

VERSION = 2


class Progress(NamedTuple):
    """Where a loader stands: in front of the batch that comes next.

    Attributes:
        epoch: its number.
        position: how far all ranks together are in the epoch's order; 0 with samplers.
        batches: how many batches of the epoch this rank was given.
        samples: how many records that were.
        until: the epoch in front of which the present iterator ends; None where none began, or it has no end.
        checksum: of what a sampler gave in the epoch, as SamplerPass makes it; None where that is not known.
    """

    epoch: int = 0
    position: int = 0
    batches: int = 0
    samples: int = 0
    until: int | None = None
    checksum: int | None = 0


@dataclass(slots=True)
class Standing:
    """Where a loader stands now: moved by its iterator, with each batch that it hands out.

    Attributes:
        progress: in front of the next batch.
        over: whether the last batch of `progress.epoch`, for this rank, was handed out.
    """

    progress: Progress
    over: bool = False


class Order(NamedTuple):
    """What has to be the same for a position to mean the same: part of every state."""

    fingerprint: str
    num_records: int
    seed: int
    shuffle: str
    block_records: int
    window_blocks: int


_NAMES = {
    "fingerprint": "the dataset (names, sizes, fields of its shards)",
    "num_records": "the number of records",
    "seed": "the seed",
    "shuffle": "shuffle",
    "block_records": "block_records",
    "window_blocks": "window_blocks",
}


#: What a state has beside the order.
_PLACE = ("epoch", "position", "batches", "samples", "first_epoch", "checksum", "sampler_rank")


def to_state(order: Order, progress: Progress, epochs: int | None, sampler_rank: int | None) -> dict[str, Any]:
    """A state: a dict of str, int, bool and None, for torch.save, JSON or anything else.

    epochs: how many the present iterator runs through. sampler_rank: whose share a sampler gives; None without one.
    """
    epoch, position, batches, samples, until, checksum = progress
    first = None if until is None or epochs is None else until - epochs
    place = dict(zip(_PLACE, (epoch, position, batches, samples, first, checksum, sampler_rank), strict=True))
    return {"version": VERSION, **order._asdict(), **place}


def from_state(state: object, order: Order, epochs: int | None, sampler_rank: int | None) -> Progress:
    """What `to_state` made, where it belongs to `order`. Of the iterator's `epochs` those are left that were not begun,
    and the present one. What another rank's sampler gave is not known here.

    Raises LoaderStateError that names everything that differs, as "saved -> here", or is no state at all.
    """
    if not isinstance(state, Mapping):
        raise LoaderStateError(f"a loader's state is a dict as state_dict() returns it, not {type(state).__name__}")
    if state.get("version") != VERSION:
        raise LoaderStateError(
            f"a state of version {state.get('version')!r} cannot be read here, only of version {VERSION}; "
            "pass what state_dict() returned, or load it with the version of gdsstream that wrote it"
        )
    missing = [name for name in (*Order._fields, *_PLACE) if name not in state]
    if missing:
        raise LoaderStateError(f"the state lacks {', '.join(missing)}; pass what state_dict() returned, unchanged")
    different = [
        f"{_NAMES[name]}: {state[name]!r} -> {value!r}"
        for name, value in order._asdict().items()
        if state[name] != value
    ]
    if different:
        raise LoaderStateError(
            f"the state does not belong to this loader: saved -> here, {'; '.join(different)}. A position means "
            "nothing in another order: open the same data with the same arguments, or begin anew without the state"
        )
    numbers = {name: state[name] for name in ("epoch", "position", "batches", "samples")}
    optional = {name: state[name] for name in _PLACE if name not in numbers and state[name] is not None}
    for name, value in {**numbers, **optional}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise LoaderStateError(f"the state's {name} is {value!r}; it is a whole number, at least 0")
    if numbers["position"] > order.num_records:
        raise LoaderStateError(
            f"the state's position is {numbers['position']}, and an epoch has {order.num_records} records"
        )
    first = optional.get("first_epoch")
    until = None if first is None or epochs is None else max(first + epochs, numbers["epoch"] + 1)
    same = optional.get("sampler_rank") == sampler_rank
    return Progress(**numbers, until=until, checksum=optional.get("checksum") if same else None)


__all__ = ["VERSION", "Order", "Progress", "Standing", "from_state", "to_state"]
