"""ShardLoader: batches of records from shards, on the device, read ahead: what a DataLoader does, without workers.

    feed -> prefetch -> the caller
    which   begun, landed, finished, handed out
    records

There is no thread of Python's here. Asking for a batch begins the reads of the next ones, waits for its own, and queues
the transforms of those that have landed meanwhile; native threads do the rest. What a loader has handed out is its
`Progress`, and so its state: what was read ahead does not count.

It is no torch DataLoader: frameworks take those apart and build others of the parts, in which nothing of this would be
left. What they need of an iterable of batches (a length, `sampler.set_epoch`, a state) is here.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import torch

from gdsstream.batches import Pad, batch_formats
from gdsstream.config import StreamConfig
from gdsstream.devices import default_device, parse_device
from gdsstream.engine import merge
from gdsstream.errors import EngineClosedError
from gdsstream.feed import Locator
from gdsstream.loader_arguments import (
    check_arguments,
    default_prefetch,
    draw_seed,
    open_dataset,
    split_knobs,
    whole,
)
from gdsstream.loader_engine import LoaderEngine, close_at_exit
from gdsstream.loader_iterator import LoaderIterator
from gdsstream.loader_order import LoaderOrder
from gdsstream.loader_state import Progress, Standing, from_state, to_state
from gdsstream.loader_stats import LoaderStats
from gdsstream.prefetch import Prefetcher
from gdsstream.records import chosen_fields
from gdsstream.sampling import (
    BLOCK_RECORDS,
    WINDOW_BLOCKS,
    Partition,
    Shuffle,
    checked_shuffle,
)
from gdsstream.shards import ShardDataset

Batch = TypeVar("Batch")


class ShardLoader(LoaderOrder, Generic[Batch]):
    """Iterate over a dataset's shards in batches on a device: torch's DataLoader, with the reads made natively.

    Args:
        path_or_dataset: a ShardDataset, or what one is opened with: a directory, a glob, a file, a list of files.
        batch_size: records in a batch of this rank. None only with a batch_sampler: nothing is read record by record.
        shuffle: False or "none", True or "full" (every record anywhere), or "block": large reads, shuffled inside
            windows of `window_blocks` blocks of `block_records` records, themselves shuffled.
        sampler, batch_sampler: as a DataLoader's: what gives record numbers, or lists of them, for this rank. Ranks are
            then the sampler's business, and so is which epoch it gives; it is told where `set_epoch`, a state or
            `epochs` say so. Resuming needs one that repeats itself, and fails where it does not.
        collate_fn: called with the list of a batch's samples (views of its rows, on the device), before `transform`.
        drop_last: leave the last batch out where it is not full.
        generator: what the seed is drawn from, once, where `seed` is not given.
        seed: of the shuffle; None is 0, or drawn from `generator`. Has to be the same on all ranks.
        device: "cuda", "cuda:1", a CUDA ordinal or "cpu"; None is "cuda" where there is one. "cuda" is the device that
            is current when the loader is first iterated.
        prefetch_batches: how many batches are read ahead of the one that is handed out. 0 or more; None takes 2, and
            of small ones as many as keep the staging ring and the link busy (192 MiB, but 12 at most).
        rank, world_size: whose share of the records this is; None asks torch.distributed where it is initialised. Give
            both, or neither.
        partition: what becomes of the records at an epoch's end that are too few for all ranks: "pad" repeats the
            epoch's first ones and "drop" leaves them out, as DistributedSampler does; "uneven" gives the first ranks
            one record more.
        fields: which fields, in this order; None is all of the dataset's.
        transform: called with each batch on the loader's own stream, beside what the caller computes; what it returns
            is handed out.
        pad: fill ragged records up to the longest of the batch, with this value (or one by field). None gives a Jagged.
        borrow: hand out views of `prefetch_batches` + 1 buffers, allocated once: a batch is valid until the next is
            asked for. False gives each batch memory of its own.
        epochs: how many epochs one iterator runs through, reading across their borders; None has no end.
        on_error: "raise", or "skip": leave out the records of shards that cannot be read any more (gone, truncated, bad
            sectors), count them in `stats` and log each shard once. Batches get smaller then, and may be fewer.
        format, dtype, record_length, stride, index_cache: see ShardDataset.
        block_records, window_blocks: for shuffle="block"; 1024 and 64.
        config, **knobs: see StreamConfig. What a DataLoader takes for its workers is taken as well, where it asks for
            none (num_workers=0, persistent_workers=False and so on), and pin_memory, and means nothing.

    Iterating yields a tensor, or a dict of them by field where there are several: stacked [B, *shape] for fields whose
    records are alike, a Jagged for ragged ones. On a GPU they can be used at once on the current stream. All arguments
    are kept as attributes. `len` is the number of batches of one iterator, this rank's, from an epoch's beginning. What
    builds a DataLoader of a loader's parts, as accelerate's skip_first_batches does, fails: go on with a state instead.

    Each epoch that comes to its end advances `epoch`; an iterator begins its epoch at the beginning, but once after
    `load_state_dict`, where it goes on: a loop that leaves each epoch early sees its first batches again, unless it
    calls `set_epoch`. One iterator is live at a time: a new one ends the one before. Not thread-safe.

    Raises:
        DatasetError, CheckpointError and their kinds: see ShardDataset. ConfigError: arguments that do not fit.
        From `next`: ReadError and its kinds, where the storage fails; TransformError, where transform or collate_fn
        raised; MemoryBudgetError. The loader can go on with the batch after the one that failed. After an interrupt
        (KeyboardInterrupt, or what else is no Exception) it goes on with the same batch, and nothing is lost, repeated
        or changed; collate_fn and transform get a batch anew that was read again, where the interrupt hit them. A
        sampler whose generator it hit is asked again, and a ConfigError where that gives other records than before.
        LoaderStateError: a state of another dataset or order; from `next`, of a sampler that gives other records.
        ForkedProcessError: used in a child of the process that reads on a GPU. EngineClosedError: after `close`.
    """

    # Some look here before they decide how to treat a loader, or make another one with the same arguments.
    num_workers = 0
    pin_memory = False
    pin_memory_device = ""
    prefetch_factor = None
    persistent_workers = False
    worker_init_fn = None
    multiprocessing_context = None
    timeout = 0
    in_order = True

    def __init__(
        self,
        path_or_dataset: ShardDataset | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int | None = 1,
        shuffle: bool | Shuffle = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        prefetch_batches: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        partition: Partition = "pad",
        fields: Sequence[str] | None = None,
        transform: Callable[[Any], Batch] | None = None,
        pad: Pad = None,
        borrow: bool = False,
        epochs: int | None = 1,
        on_error: Literal["raise", "skip"] = "raise",
        block_records: int | None = None,
        window_blocks: int | None = None,
        config: StreamConfig | None = None,
        **knobs: Any,
    ) -> None:
        self._closed = False
        self._iterator: weakref.ref[LoaderIterator] | None = None
        check_arguments(
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            rank=rank,
            world_size=world_size,
            partition=partition,
            epochs=epochs,
            on_error=on_error,
            collate_fn=collate_fn,
            generator=generator,
            transform=transform,
            borrow=borrow,
        )
        options, knobs = split_knobs(knobs, signature(ShardLoader).parameters)
        fields = None if fields is None else chosen_fields(fields)
        self.dataset = open_dataset(path_or_dataset, fields, options)
        table = self.dataset.table
        chosen = list(table.fields) if fields is None else [table.field(name) for name in fields]
        self._formats = batch_formats(chosen, pad)
        self._locate = Locator(table, [field.name for field in chosen])
        self.batch_size = whole("batch_size", batch_size, 1) if batch_sampler is None else None
        self.shuffle = checked_shuffle(shuffle)
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.generator = generator
        self.seed = draw_seed(seed, generator)
        self.prefetch_batches = (
            default_prefetch(self._formats, self.batch_size or 1)
            if prefetch_batches is None
            else whole("prefetch_batches", prefetch_batches, 0)
        )
        self.partition: Partition = partition
        self.fields = tuple(field.name for field in chosen)
        self.transform = transform
        self.pad = pad
        self.borrow = borrow
        self.epochs = None if epochs is None else whole("epochs", epochs, 1)
        self.on_error = on_error
        self.block_records = BLOCK_RECORDS if block_records is None else whole("block_records", block_records, 1)
        self.window_blocks = WINDOW_BLOCKS if window_blocks is None else whole("window_blocks", window_blocks, 1)
        self._wanted_device = default_device() if device is None else device
        target = parse_device(self._wanted_device)
        self.config = merge(config, knobs, path=self.dataset.paths[0], device=target, native=True)
        if self.shuffle == "block" and self.config.direct_io is None:
            # What the windows are read ahead into.
            self.config = replace(self.config, direct_io=False)
        self._given_ranks = (rank, world_size)
        self._sampler, self._batch_sampler = sampler, batch_sampler
        self._engine = LoaderEngine(self.dataset, self._wanted_device, self.config)
        self._standing = Standing(Progress())
        self._resumed = False  # a state was loaded, and no iterator has begun since
        self._wanted_epoch: int | None = None  # by set_epoch, for the iterator after this one
        self._told = False  # which epoch the next iterator begins with, by set_epoch or a state
        self._sampler_was: int | None = None  # in this epoch, when the state was loaded
        self._stats = LoaderStats()
        self._said: set[str] = set()
        close_at_exit(self)
        self.order_of(0)  # refuses what no order can be made of
        if not self._sampled:
            self._feed(reading=False)

    # ---- iterating

    def __iter__(self) -> Iterator[Batch]:
        self._check_usable()
        self._end_iterator()
        progress, own = self._standing.progress, self._sampler_epoch()
        went_on = self._resumed and own not in (self._sampler_was, progress.epoch)  # to another epoch: the caller
        told = self._told and not went_on
        if self._wanted_epoch is not None:
            progress = self._whole(self._wanted_epoch)
        elif went_on or not self._resumed:
            # An epoch that was not finished begins anew; one that was is over. A sampler's epoch is its caller's.
            own = None if told else own
            progress = self._whole(progress.epoch + self._standing.over if own is None else own)
        elif progress.until is None:
            progress = progress._replace(until=self._whole(progress.epoch).until)
        standing, feed = Standing(progress), self._feed(tell=told)
        iterator = LoaderIterator(
            self, self._prefetcher(), feed, standing, self.prefetch_batches, self._stats, padded=self._padded
        )
        self._standing, self._resumed, self._wanted_epoch, self._told = standing, False, None, False
        self._iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a loader with epochs=None has no length")
        return self._feed(reading=False).batches_per_epoch() * self.epochs

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or that the next iterator reads; 0 at first."""
        return self._standing.progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator read epoch `epoch`. One that has handed out a batch goes on undisturbed; one that has
        not begins `epoch`. What `load_state_dict` loaded stays, where it is of this epoch. Raises ConfigError."""
        epoch, live, self._told = whole("epoch", epoch, 0), self._live(), True
        if live is not None and live.begun:
            self._wanted_epoch = epoch
            return
        if epoch == self.epoch and not self._standing.over:
            self._told = live is None
            return
        progress = Progress(epoch) if live is None else self._whole(epoch)
        self._standing.progress, self._standing.over, self._resumed = progress, False, False
        if live is not None:
            live.restart(self._feed(tell=True))
            self._told = False

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain values: the batch behind the last one that was handed out.

        Any rank's state does for all ranks, of which there may be others and with another batch_size when it is loaded
        (with samplers: the same). Take it when all ranks were given equally many batches.
        """
        return to_state(self._order(), self._standing.progress, self.epochs, self._sampler_rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the next iterator. Raises LoaderStateError, naming what differs."""
        progress = from_state(state_dict, self._order(), self.epochs, self._sampler_rank)
        self._end_iterator()
        self._standing, self._resumed, self._wanted_epoch, self._told = Standing(progress), True, None, True
        self._sampler_was = self._sampler_epoch()

    # ---- where and who

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self._engine.device

    @property
    def route(self) -> str:
        """What moved the bytes, as the engine reports it."""
        return self._engine.route

    def stats(self) -> LoaderStats:
        """Counters since the loader was made; a copy."""
        return replace(self._stats, skipped_by_shard=dict(self._stats.skipped_by_shard))

    # ---- the end

    def close(self) -> None:
        """End the iterator and give up engine, files and buffers, once nothing is written to them. Idempotent."""
        if self._closed or self._engine.foreign:
            return
        self._closed = True
        try:
            self._end_iterator()
        finally:
            self._engine.close()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_said"):
            self.close()

    def __repr__(self) -> str:
        parts = [repr(self.dataset), f"batch_size={self.batch_size}"]
        parts += [
            f"{name}={getattr(self, name)!r}"
            for name, default in (("shuffle", "none"), ("drop_last", False), ("partition", "pad"), ("borrow", False))
            if getattr(self, name) != default
        ]
        parts += [
            f"{name}=..."
            for name, given in (("sampler", self._sampler), ("batch_sampler", self._batch_sampler))
            if given is not None
        ]
        rank, world_size = self._given_ranks
        parts += [f"rank={rank}, world_size={world_size}"] if rank is not None else []
        parts += [
            f"device={str(self._wanted_device)!r}",
            f"prefetch_batches={self.prefetch_batches}",
            f"epoch={self.epoch}",
        ]
        return f"{type(self).__name__}({', '.join(parts)}{', closed' if self._closed else ''})"

    def __getstate__(self) -> dict[str, Any]:
        # Where the loader stands goes along; engine and iterator stay.
        return {**vars(self), "_iterator": None, "_engine": None, "_standing": replace(self._standing)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._engine = LoaderEngine(self.dataset, self._wanted_device, self.config)
        close_at_exit(self)

    # ---- inside

    def _whole(self, epoch: int) -> Progress:
        """The beginning of an iterator at an epoch's."""
        return Progress(epoch, until=None if self.epochs is None else epoch + self.epochs)

    def _live(self) -> LoaderIterator | None:
        return self._iterator() if self._iterator is not None else None

    def _end_iterator(self) -> None:
        live = self._live()
        self._iterator = None
        if live is not None:
            live.close()

    def _check_usable(self) -> None:
        if self._engine.foreign:
            self._engine.adopt()
            self._iterator = None
        if self._closed:
            raise EngineClosedError("the loader was closed; make a new one")

    def _prefetcher(self) -> Prefetcher:
        engine, files = self._engine.open()
        return Prefetcher(
            engine,
            files,
            self.dataset.table,
            self._formats,
            batch_size=self.batch_size or 1,
            depth=self.prefetch_batches,
            borrow=self.borrow,
            skip=self.on_error == "skip",
            collate_fn=self.collate_fn,
            transform=self.transform,
            stats=self._stats,
            said=self._said,
        )


__all__ = ["Batch", "ShardLoader"]
