"""Which records come in which batch, and where the loader stands behind each. No byte of a record is touched here.

A feed is asked for the batch at a place, and may be asked again: what it keeps between two questions only saves work.
So an interrupt anywhere loses nothing. `OrderFeed` is the loader's own order: closed forms, computed for thousands of
records at a time, since a call of numpy costs as much for one batch as for many. `SamplerFeed` asks a sampler, as a
DataLoader does. Both cross from one epoch into the next without a gap, and know nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gdsstream.errors import ConfigError
from gdsstream.loader_state import Progress
from gdsstream.records import Located, RecordTable
from gdsstream.sampler_pass import SamplerPass
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

    def at(self, place: Progress) -> Work | None:
        """The batch at `place`, or at the beginning of the next epoch that has one; None at `place.until`. The next
        one is at its `after`: places are asked for in this order, each as often as is wanted."""

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


class _Run(NamedTuple):
    """Consecutive batches of an epoch, located together."""

    start: Progress  # of the first
    cuts: list[int]  # where each batch begins in the run, and the last one ends
    plan: BatchPlan  # of the rest of the epoch, from `start` on
    left: int  # batches of the plan
    positions: NDArray[np.int64]
    records: NDArray[np.int64]
    located: tuple[Located, ...]
    order: EpochOrder
    following: EpochOrder | None  # the next epoch's, where it is read ahead


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
        self._run: _Run | None = None
        if share.num_steps == 0:
            raise ConfigError(
                f"an epoch has no batch: {share.num_records} records over {share.world_size} rank(s), with "
                f"batch_size={share.batch_size}, drop_last={share.drop_last} and partition={share.partition!r}; "
                'use a smaller batch_size, drop_last=False or partition="pad"'
            )

    def batches_per_epoch(self) -> int:
        return self._plan.num_batches

    def at(self, place: Progress) -> Work | None:
        run = self._run
        if (
            run is None
            or place.epoch != run.start.epoch
            or not 0 <= place.batches - run.start.batches < len(run.cuts) - 1
        ):
            run = self._run = self._run_at(place)
            if run is None:
                return None
            place = run.start
        start, cuts, number = run.start, run.cuts, place.batches
        index = number - start.batches
        begin, end = cuts[index], cuts[index + 1]
        if self._reach is not None:
            self._reach(run.order, run.following, int(run.positions[begin]))
        index += 1
        return Work(
            run.records[begin:end],
            tuple([Located(f[begin:end], o[begin:end], n[begin:end]) for f, o, n in run.located]),
            start.epoch,
            number,
            Progress(start.epoch, run.plan.position_after(index), number + 1, start.samples + end, start.until),
            index == run.left,
        )

    def _run_at(self, place: Progress) -> _Run | None:
        while place.until is None or place.epoch < place.until:
            if place.position == 0 and not self._plan.num_batches:
                return None  # a rank without records has none in any epoch
            plan = replace(self._plan, start=place.position)
            if plan.num_batches:
                return self._located(plan, plan.num_batches, place)
            place = Progress(place.epoch + 1, until=place.until)
        return None

    def _located(self, plan: BatchPlan, left: int, place: Progress) -> _Run:
        order, following = self._orders(place)
        batches = [plan.batch(number) for number in range(min(max(1, _TOGETHER // plan.batch_size), left))]
        positions = np.concatenate(batches)
        records = order.records(positions)
        # Only the last batch of an epoch is smaller.
        cuts = [*range(0, len(positions), plan.batch_size), len(positions)]
        return _Run(place, cuts, plan, left, positions, records, self._locate(records), order, following)

    def _orders(self, place: Progress) -> tuple[EpochOrder, EpochOrder | None]:
        run = self._run
        if run is not None and run.order.epoch == place.epoch:
            return run.order, run.following
        known = run.following if run is not None else None
        order = known if known is not None and known.epoch == place.epoch else self._order_of(place.epoch)
        more = self._reach is not None and (place.until is None or place.epoch + 1 < place.until)
        return order, self._order_of(place.epoch + 1) if more else None


class SamplerFeed:
    """Batches that a sampler or a batch sampler gives, as torch's DataLoader takes them.

    What was seen before the first place is asked for again and skipped: a sampler has to repeat itself for an epoch, as
    one does that has a seed and set_epoch. It is told of the first epoch only where `tell` is true, as a DataLoader
    leaves that to its caller, and of each one after it.
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
        tell: bool,
    ) -> None:
        self._locate = locate
        self._num_records = num_records
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._tell = tell
        self._pass: SamplerPass | None = None

    def batches_per_epoch(self) -> int:
        if self._batch_sampler is not None:
            return len(self._batch_sampler)  # type: ignore[arg-type]
        count = len(self._sampler)  # type: ignore[arg-type]
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)

    def at(self, place: Progress) -> Work | None:
        while place.until is None or place.epoch < place.until:
            given, indices, last = self._batch(place)
            if indices is not None:
                records = self._records(indices)
                checksum = given.checksum(1 if self._batch_sampler is not None else len(records))
                after = Progress(place.epoch, 0, place.batches + 1, place.samples + len(records), place.until, checksum)
                return Work(records, self._locate(records), place.epoch, place.batches, after, last)
            if not place.batches and place.until is None:
                return None
            place = Progress(place.epoch + 1, until=place.until)
        return None

    def _batch(self, place: Progress) -> tuple[SamplerPass, Sequence[int] | None, bool]:
        """The batch at a place of its epoch, or None behind the last one, and its pass; and whether it is the last."""
        if self._batch_sampler is not None:
            given = self._pass_of(place, self._batch_sampler, place.batches)
            batches = given.items(place.batches, 1, 1, place.checksum)
            return given, (batches[0] if batches else None), len(batches) < 2 and given.error is None
        assert self._sampler is not None
        given = self._pass_of(place, self._sampler, place.samples)
        least = self._batch_size if self._drop_last else 1  # of a batch
        indices = given.items(place.samples, self._batch_size, least, place.checksum)
        if len(indices) < least:
            return given, None, True
        return given, indices[: self._batch_size], len(indices) < self._batch_size + least and given.error is None

    def _pass_of(self, place: Progress, sampler: Iterable[Any], first: int) -> SamplerPass:
        if self._pass is None or self._pass.epoch != place.epoch:
            tell = self._tell_epoch if self._tell or self._pass is not None else None
            self._pass = SamplerPass(place.epoch, sampler, first, place.checksum, tell)
        return self._pass

    def _tell_epoch(self, epoch: int) -> None:
        for sampler in told_samplers(self._sampler, self._batch_sampler):
            sampler.set_epoch(epoch)

    def _records(self, indices: Any) -> NDArray[np.int64]:
        records = np.array(indices)
        if records.dtype.kind not in "iu" or records.ndim != 1 or not len(records):
            raise ConfigError(
                f"the sampler gave {indices!r:.200} for a batch; a batch is a list of record numbers, at least one"
            )
        records = records.astype(np.int64)
        least, most = records.min(), records.max()
        if least < -self._num_records or most >= self._num_records:
            wrong = int(most if most >= self._num_records else least)
            raise IndexError(f"the sampler gave record {wrong}; the dataset has {self._num_records}")
        return records if least >= 0 else np.where(records < 0, records + self._num_records, records)


def callers_samplers(sampler: object, batch_sampler: object) -> list[Any]:
    """Those that were given, and the one inside a batch sampler."""
    given = (sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    return [each for each in given if each is not None]


def told_samplers(sampler: object, batch_sampler: object) -> list[Any]:
    """Those of the caller's that want to know which epoch it is."""
    given = callers_samplers(sampler, batch_sampler)
    return [each for each in given if callable(getattr(each, "set_epoch", None))]


__all__ = ["Feed", "Locator", "OrderFeed", "SamplerFeed", "Work", "callers_samplers", "told_samplers"]
