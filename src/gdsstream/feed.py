"""Which records come in which batch, and where the loader stands behind each. No byte of a record is touched here.

`OrderFeed` is the loader's own order: closed forms, computed for thousands of records at a time, since a call of numpy
costs as much for one batch as for many. `SamplerFeed` asks a sampler, as a DataLoader does. Both go on from a Progress,
cross from one epoch into the next without a gap, and know nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gdsstream.errors import ConfigError
from gdsstream.loader_state import Progress
from gdsstream.records import Located, RecordTable
from gdsstream.sampling import BatchPlan, EpochOrder

# Records that are located together, where batches are smaller.
_TOGETHER = 8192


class Work(NamedTuple):
    """One batch to be read."""

    records: NDArray[np.int64]  # [B]
    located: tuple[Located, ...]  # one entry a field, [B] each
    epoch: int
    number: int  # of the batch in its epoch, for this rank
    after: Progress  # where the loader stands once the batch was handed out
    last: bool  # whether it is this rank's last of the epoch


class Feed(Protocol):
    """What gives out work."""

    def work(self, start: Progress) -> Iterator[Work]:
        """The batches from `start` on, across epochs until `start.until`."""

    def batches_per_epoch(self) -> int:
        """How many batches a whole epoch has for this rank. TypeError where a sampler cannot tell."""


class Locator:
    """Locates the chosen fields of a table."""

    def __init__(self, table: RecordTable, fields: Sequence[str]) -> None:
        self._table = table
        self._fields = tuple(fields)
        self._all = self._fields == tuple(field.name for field in table.fields)

    def __call__(self, records: NDArray[np.int64]) -> tuple[Located, ...]:
        if self._all:
            return self._table.locate_all(records)
        return tuple(self._table.locate(name, records) for name in self._fields)


class OrderFeed:
    """The loader's own order, this rank's share of it.

    Args:
        order_of: the EpochOrder of an epoch.
        share: this rank's share of a whole epoch.
        locate: where records lie.
        reach: called with (order, the next epoch's order or None, position) before each batch: for read-ahead.

    Raises ConfigError where no rank would get a batch.
    """

    def __init__(
        self,
        order_of: Callable[[int], EpochOrder],
        share: BatchPlan,
        locate: Locator,
        reach: Callable[[EpochOrder, EpochOrder | None, int], None] | None = None,
    ) -> None:
        self._order_of = order_of
        self._locate = locate
        self._plan = share
        self._reach = reach
        if share.num_steps == 0:
            raise ConfigError(
                f"an epoch has no batch: {share.num_records} records over {share.world_size} rank(s), with "
                f"batch_size={share.batch_size}, drop_last={share.drop_last} and partition={share.partition!r}; "
                'use a smaller batch_size, drop_last=False or partition="pad"'
            )

    def batches_per_epoch(self) -> int:
        return self._plan.num_batches

    def work(self, start: Progress) -> Iterator[Work]:
        while start.until is None or start.epoch < start.until:
            if start.position == 0 and not self._plan.num_batches:
                return  # a rank without records has none in any epoch
            yield from self._epoch(start)
            start = Progress(start.epoch + 1, until=start.until)

    def _epoch(self, start: Progress) -> Iterator[Work]:
        plan = replace(self._plan, start=start.position)
        order = self._order_of(start.epoch)
        following: EpochOrder | None = None
        if self._reach is not None and (start.until is None or start.epoch + 1 < start.until):
            following = self._order_of(start.epoch + 1)
        total, samples = plan.num_batches, start.samples
        together = max(1, _TOGETHER // plan.batch_size)
        for first in range(0, total, together):
            positions = [plan.batch(number) for number in range(first, min(first + together, total))]
            records = order.records(np.concatenate(positions))
            located = self._locate(records)
            begin = 0
            for number, places in enumerate(positions, first):
                end = begin + len(places)
                samples += len(places)
                after = Progress(
                    start.epoch, plan.position_after(number + 1), start.batches + number + 1, samples, start.until
                )
                if self._reach is not None:
                    self._reach(order, following, int(places[0]))
                yield Work(
                    records[begin:end],
                    tuple(Located(f[begin:end], o[begin:end], n[begin:end]) for f, o, n in located),
                    start.epoch,
                    start.batches + number,
                    after,
                    number + 1 == total,
                )
                begin = end


class SamplerFeed:
    """Batches that a sampler or a batch sampler gives, as torch's DataLoader takes them.

    What was seen before `start` is asked for again and skipped: a sampler has to repeat itself for an epoch, as one
    does that has a seed and set_epoch.
    """

    def __init__(
        self,
        locate: Locator,
        *,
        num_records: int,
        sampler: Iterable[int] | None,
        batch_sampler: Iterable[Sequence[int]] | None,
        batch_size: int,
        drop_last: bool,
    ) -> None:
        self._locate = locate
        self._num_records = num_records
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._batch_size = batch_size
        self._drop_last = drop_last

    def batches_per_epoch(self) -> int:
        if self._batch_sampler is not None:
            return len(self._batch_sampler)  # type: ignore[arg-type]
        count = len(self._sampler)  # type: ignore[arg-type]
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, where it wants to know."""
        for sampler in (self._sampler, self._batch_sampler, getattr(self._batch_sampler, "sampler", None)):
            tell = getattr(sampler, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def work(self, start: Progress) -> Iterator[Work]:
        while start.until is None or start.epoch < start.until:
            empty = True
            self.set_epoch(start.epoch)
            batches, samples = start.batches, start.samples
            following = _looking_ahead(self._batches(start))
            for indices, last in following:
                empty = False
                records = self._records(indices)
                batches, samples = batches + 1, samples + len(records)
                after = Progress(start.epoch, 0, batches, samples, start.until)
                yield Work(records, self._locate(records), start.epoch, batches - 1, after, last)
            if empty and not start.batches and start.until is None:
                return
            start = Progress(start.epoch + 1, until=start.until)

    def _batches(self, start: Progress) -> Iterator[Sequence[int]]:
        if self._batch_sampler is not None:
            yield from islice(iter(self._batch_sampler), start.batches, None)
            return
        assert self._sampler is not None
        indices = islice(iter(self._sampler), start.samples, None)
        while batch := list(islice(indices, self._batch_size)):
            if len(batch) < self._batch_size and self._drop_last:
                return
            yield batch

    def _records(self, indices: Any) -> NDArray[np.int64]:
        records = np.array(indices)
        if records.dtype.kind not in "iu" or records.ndim != 1 or not len(records):
            raise ConfigError(
                f"the sampler gave {indices!r:.200} for a batch; a batch is a list of record numbers, at least one"
            )
        records = records.astype(np.int64)
        wrong = (records < -self._num_records) | (records >= self._num_records)
        if wrong.any():
            raise IndexError(
                f"the sampler gave record {int(records[wrong.argmax()])}; the dataset has {self._num_records}"
            )
        return np.where(records < 0, records + self._num_records, records)


def _looking_ahead(batches: Iterator[Sequence[int]]) -> Iterator[tuple[Sequence[int], bool]]:
    """Each batch, and whether it is the last."""
    for batch in batches:
        for following in batches:
            yield batch, False
            batch = following
        yield batch, True


__all__ = ["Feed", "Locator", "OrderFeed", "SamplerFeed", "Work"]
