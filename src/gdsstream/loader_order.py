"""Which records a ShardLoader reads, and in which order: what its arguments about that come to.

A part of ShardLoader, whose attributes these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gdsstream.config import StreamConfig
from gdsstream.epoch_sampler import epoch_sampler
from gdsstream.feed import Feed, Locator, OrderFeed, SamplerFeed
from gdsstream.loader_arguments import ranks_here
from gdsstream.loader_state import Order
from gdsstream.readahead import ReadAhead
from gdsstream.sampling import BatchPlan, EpochOrder, Partition, Shuffle
from gdsstream.shards import ShardDataset


class LoaderOrder:
    """What a loader needs to know of its order; see ShardLoader for the attributes."""

    dataset: ShardDataset
    batch_size: int | None
    shuffle: Shuffle
    batch_sampler: Iterable[Sequence[int]] | None
    drop_last: bool
    seed: int
    partition: Partition
    block_records: int
    window_blocks: int
    config: StreamConfig
    _sampler: Iterable[int] | None
    _given_ranks: tuple[int | None, int | None]
    _locate: Locator

    @property
    def epoch(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError

    @property
    def sampler(self) -> Iterable[int] | None:
        """The one that was given, or one of what the loader reads, as a DataLoader has it; None with batch_sampler."""
        return self._sampler if self._sampler is not None or self.batch_sampler is not None else epoch_sampler(self)

    @property
    def rank(self) -> int:
        return ranks_here(*self._given_ranks)[0]

    @property
    def world_size(self) -> int:
        return ranks_here(*self._given_ranks)[1]

    def order_of(self, epoch: int) -> EpochOrder:
        """The order of an epoch, over all ranks."""
        return EpochOrder(
            len(self.dataset),
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            block_records=self.block_records,
            window_blocks=self.window_blocks,
        )

    def share(self) -> BatchPlan:
        """This rank's share of a whole epoch."""
        rank, world_size = ranks_here(*self._given_ranks)
        return BatchPlan(len(self.dataset), 0, self.batch_size or 1, rank, world_size, self.drop_last, self.partition)

    def _order(self) -> Order:
        own = self._sampler is None and self.batch_sampler is None
        return Order(
            self.dataset.fingerprint,
            len(self.dataset),
            self.seed if own else 0,
            self.shuffle if own else "sampler" if self.batch_sampler is None else "batch_sampler",
            self.block_records if self.shuffle == "block" else 0,
            self.window_blocks if self.shuffle == "block" else 0,
        )

    def _feed(self, *, reading: bool = True) -> Feed:
        if self._sampler is not None or self.batch_sampler is not None:
            return SamplerFeed(
                self._locate,
                num_records=len(self.dataset),
                sampler=self._sampler,
                batch_sampler=self.batch_sampler,
                batch_size=self.batch_size or 1,
                drop_last=self.drop_last,
            )
        ahead = reading and self.shuffle == "block" and not self.config.direct_io
        reach = ReadAhead(self.dataset.table, self._locate).reach if ahead else None
        return OrderFeed(self.order_of, self.share(), self._locate, reach)


__all__ = ["LoaderOrder"]
