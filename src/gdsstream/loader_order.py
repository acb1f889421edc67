"""Which records a ShardLoader reads, and in which order: what its arguments about that come to.

A part of ShardLoader, whose attributes these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gdsstream.config import StreamConfig
from gdsstream.epoch_sampler import OwnBatches, epoch_sampler
from gdsstream.feed import Feed, Locator, OrderFeed, SamplerFeed, callers_samplers, told_samplers
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
    drop_last: bool
    seed: int
    partition: Partition
    block_records: int
    window_blocks: int
    config: StreamConfig
    _sampler: Iterable[int] | None
    _batch_sampler: Iterable[Sequence[int]] | None
    _given_ranks: tuple[int | None, int | None]
    _locate: Locator

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError

    @property
    def sampler(self) -> Iterable[int] | None:
        """The one that was given, or one of what the loader reads, as a DataLoader has it; None with batch_sampler."""
        return self._sampler if self._sampler is not None or self._batch_sampler is not None else epoch_sampler(self)

    @property
    def batch_sampler(self) -> Iterable[Sequence[int]]:
        """The one that was given, or one that has a length, and says what to do instead to those who iterate it."""
        return OwnBatches(self) if self._batch_sampler is None else self._batch_sampler

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
        own = not self._sampled
        return Order(
            self.dataset.fingerprint,
            len(self.dataset),
            self.seed if own else 0,
            self.shuffle if own else "sampler" if self._batch_sampler is None else "batch_sampler",
            self.block_records if self.shuffle == "block" else 0,
            self.window_blocks if self.shuffle == "block" else 0,
        )

    @property
    def _sampled(self) -> bool:
        """Whether the order is a sampler's of the caller's."""
        return self._sampler is not None or self._batch_sampler is not None

    @property
    def _sampler_rank(self) -> int | None:
        """Whose share the caller's sampler gives, as it says itself, or else this process's; None without one."""
        if not self._sampled:
            return None
        for sampler in callers_samplers(self._sampler, self._batch_sampler):
            rank = getattr(sampler, "rank", None)
            if isinstance(rank, int):
                return rank
        return self.rank

    @property
    def _padded(self) -> bool:
        """Whether records come twice at an epoch's end, as far as is known."""
        share = self.share()
        return share.world_size > 1 and (
            self._sampled or (self.partition == "pad" and share.num_records % share.world_size > 0)
        )

    def _sampler_epoch(self) -> int | None:
        """The epoch that the caller's sampler was told, where it says so."""
        for sampler in told_samplers(self._sampler, self._batch_sampler):
            epoch = getattr(sampler, "epoch", None)
            if isinstance(epoch, int) and epoch >= 0:
                return epoch
        return None

    def _feed(self, *, reading: bool = True, tell: bool = False) -> Feed:
        """`tell`: let the caller's sampler know the epoch that comes first."""
        if self._sampled:
            return SamplerFeed(
                self._locate,
                num_records=len(self.dataset),
                sampler=self._sampler,
                batch_sampler=self._batch_sampler,
                batch_size=self.batch_size or 1,
                drop_last=self.drop_last,
                tell=tell,
            )
        ahead = reading and self.shuffle == "block" and not self.config.direct_io
        reach = ReadAhead(self.dataset.table, self._locate).reach if ahead else None
        return OrderFeed(self.order_of, self.share(), self._locate, reach)


__all__ = ["LoaderOrder"]
