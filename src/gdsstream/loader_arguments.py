"""What a loader is asked for, checked; and what it finds out where it is not told: ranks, seed, device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields as knobs_of
from operator import index
from typing import Any, SupportsIndex, get_args

import torch

from gdsstream.batches import FieldFormat
from gdsstream.config import StreamConfig, nearest
from gdsstream.errors import ConfigError
from gdsstream.permutation import checked_integer
from gdsstream.regular_files import PathLike
from gdsstream.sampling import Partition, checked_shuffle
from gdsstream.shards import ShardDataset

# With less under way, the reader threads and the link wait for each other at the border of batches: 16 MiB batches came
# at 0.80 of the link with 2 ahead, and 64 MiB ones at 0.89. More than the staging ring holds adds nothing.
_PREFETCH_BYTES = 192 << 20
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 12
_DATASET_OPTIONS = ("format", "dtype", "record_length", "stride", "index_cache")
# What a DataLoader needs for its worker processes and its copies, and what says there that none are wanted. Batches are
# on their device whether memory is pinned for that or not.
_FOR_WORKERS: dict[str, tuple[object, ...]] = {
    "num_workers": (0,),
    "pin_memory": (None, False, True),
    "pin_memory_device": ("",),
    "prefetch_factor": (None,),
    "persistent_workers": (False,),
    "worker_init_fn": (None,),
    "multiprocessing_context": (None,),
    "timeout": (0,),
    "in_order": (True,),
}


def check_arguments(
    *,
    batch_size: object,
    shuffle: object,
    sampler: object,
    batch_sampler: object,
    drop_last: object,
    prefetch_batches: object,
    rank: object,
    world_size: object,
    partition: object,
    epochs: object,
    on_error: object,
    collate_fn: object,
    generator: object,
    transform: object,
    borrow: object,
) -> None:
    """Raise ConfigError for arguments of ShardLoader that cannot work, or not together."""
    if batch_size is None and batch_sampler is None:
        raise ConfigError(
            "batch_size is None, which would read records one by one; give batch_size=1, or iterate a ShardDataset"
        )
    if batch_size is not None:
        whole("batch_size", batch_size, 1)
    if prefetch_batches is not None:
        whole("prefetch_batches", prefetch_batches, 0)
    if epochs is not None:
        whole("epochs", epochs, 1)
    if rank is not None:
        whole("rank", rank, 0)
    if world_size is not None:
        whole("world_size", world_size, 1)
    if rank is not None or world_size is not None:
        ranks_here(rank, world_size)  # type: ignore[arg-type]
    for name, value in (("drop_last", drop_last), ("borrow", borrow)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it is True or False")
    for name, value, known in (
        ("partition", partition, get_args(Partition)),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; it has to be one of {', '.join(map(repr, known))}")
    for name, value in (("collate_fn", collate_fn), ("transform", transform)):
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is {value!r}; it has to be a function, or None")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator is {generator!r}; it has to be a torch.Generator, or None")
    shuffled = checked_shuffle(shuffle) != "none"  # type: ignore[arg-type]
    if batch_sampler is not None:
        if batch_size not in (None, 1) or shuffled or sampler is not None or drop_last:
            raise ConfigError("batch_sampler decides alone: leave out batch_size, shuffle, sampler and drop_last")
    elif sampler is not None and shuffled:
        raise ConfigError("sampler decides the order alone: leave out shuffle, or the sampler")
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None and not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
            raise ConfigError(f"{name} is {value!r}, which cannot be iterated")


def split_knobs(knobs: dict[str, Any], arguments: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ShardDataset's options, and StreamConfig's knobs. What a DataLoader takes for workers goes where that is none.

    Raises ConfigError where it asks for some, and for what is none of all these; `arguments` are the loader's own.
    """
    options: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    known = {knob.name for knob in knobs_of(StreamConfig)}
    for name, value in knobs.items():
        if name in _DATASET_OPTIONS:
            options[name] = value
        elif name in known:
            rest[name] = value
        elif name not in _FOR_WORKERS:
            close = nearest(name, known | {*arguments, *_DATASET_OPTIONS})
            raise ConfigError(f"{name!r} is no knob, and no argument of ShardLoader{close}")
        elif value not in _FOR_WORKERS[name]:
            neutral = " or ".join(map(repr, _FOR_WORKERS[name]))
            raise ConfigError(
                f"{name} is {value!r}: it is for the worker processes of a DataLoader, of which there are none here; "
                f"leave it out, or give {neutral} (prefetch_batches says how far to read ahead)"
            )
    return options, rest


def open_dataset(
    path_or_dataset: ShardDataset | PathLike | Sequence[PathLike], fields: Sequence[str] | None, options: dict[str, Any]
) -> ShardDataset:
    """The dataset, opened with `options` where it is a path; they are a ConfigError where it is open already."""
    if not isinstance(path_or_dataset, ShardDataset):
        return ShardDataset(path_or_dataset, fields=fields, **options)
    if options:
        raise ConfigError(f"{', '.join(options)}: the dataset is open already; give them to ShardDataset")
    return path_or_dataset


def draw_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """The seed: as given, or drawn from a generator, or 0. An int, for states."""
    if seed is not None:
        return checked_integer("seed", seed, -(2**63), 2**64 - 1)
    if generator is None:
        return 0
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator).item())


def default_prefetch(formats: Sequence[FieldFormat], batch_size: int) -> int:
    """How many batches to read ahead: two, or enough small ones. What a ragged field takes is not known before."""
    if any(form.field.ragged for form in formats):
        return _LEAST_PREFETCH
    nbytes = batch_size * sum(form.row_bytes for form in formats)
    return max(_LEAST_PREFETCH, min(_PREFETCH_BYTES // max(nbytes, 1), _MOST_PREFETCH))


def ranks_here(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, or torch.distributed's where it is initialised, or 0 and 1.

    Raises ConfigError where they do not fit, and where one of them is given and nothing says the other.
    """
    if rank is None or world_size is None:
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not group and (rank is not None or world_size not in (None, 1)):
            raise ConfigError(
                f"rank is {rank} and world_size is {world_size}, and torch.distributed is not initialised; give both, "
                "or initialise it first"
            )
        rank = (torch.distributed.get_rank() if group else 0) if rank is None else rank
        world_size = (torch.distributed.get_world_size() if group else 1) if world_size is None else world_size
    if rank >= world_size:
        raise ConfigError(f"rank is {rank} and world_size is {world_size}; ranks count from 0 to world_size - 1")
    return rank, world_size


def whole(name: str, value: object, least: int) -> int:
    """An int, also of what only acts as one (numpy's, but no bool). Raises ConfigError below `least`."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool) or index(value) < least:
        raise ConfigError(f"{name} is {value!r}; it has to be a whole number, at least {least}")
    return index(value)


__all__ = ["check_arguments", "default_prefetch", "draw_seed", "open_dataset", "ranks_here", "split_knobs", "whole"]
