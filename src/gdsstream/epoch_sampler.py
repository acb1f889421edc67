"""What a loader's own order looks like to those who know samplers: `loader.sampler`, as every DataLoader has one, and
`loader.batch_sampler`.

Lightning, for one, calls its `set_epoch` before each epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NoReturn, Protocol

from torch.utils.data import Sampler, SequentialSampler

from gdsstream.errors import ConfigError, EngineClosedError
from gdsstream.sampling import BatchPlan, EpochOrder, Shuffle
from gdsstream.shards import ShardDataset


class Ordered(Protocol):
    """What is asked of a loader."""

    dataset: ShardDataset
    shuffle: Shuffle

    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def share(self) -> BatchPlan: ...
    def order_of(self, epoch: int) -> EpochOrder: ...
    def __len__(self) -> int: ...


class EpochSampler(Sampler[int]):
    """The records that a loader reads in its present epoch, from its beginning, in their order: this rank's share."""

    def __init__(self, loader: Ordered) -> None:
        # Not held: the loader goes when its last user lets go of it.
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        loader = self._use()
        order, share = loader.order_of(loader.epoch), loader.share()
        for number in range(share.num_batches):
            yield from order.records(share.batch(number)).tolist()

    def __len__(self) -> int:
        share = self._use().share()
        return min(share.num_samples, share.num_batches * share.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """As ShardLoader.set_epoch."""
        self._use().set_epoch(epoch)

    def _use(self) -> Ordered:
        return _alive(self._loader)


def _alive(reference: weakref.ref[Ordered]) -> Ordered:
    loader = reference()
    if loader is None:
        raise EngineClosedError("the loader of this sampler is gone; keep a reference to it")
    return loader


class _Sequential(EpochSampler, SequentialSampler):
    """Known for what it is to those who ask whether an order is shuffled."""

    def __init__(self, loader: Ordered) -> None:
        super().__init__(loader)
        self.data_source = loader.dataset


def epoch_sampler(loader: Ordered) -> EpochSampler:
    """The sampler of a loader without one of the caller's."""
    return _Sequential(loader) if loader.shuffle == "none" else EpochSampler(loader)


class OwnBatches(Sampler[list[int]]):
    """Stands where a DataLoader has a batch sampler. Who builds another DataLoader of it would read without what the
    loader is for, and without its transform, and is told so."""

    def __init__(self, loader: Ordered) -> None:
        self._loader = weakref.ref(loader)

    def __len__(self) -> int:
        return len(_alive(self._loader))

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "a DataLoader built of a ShardLoader's parts would read without the native engine and without its "
            "transform. Iterate the ShardLoader itself: accelerator.prepare(loader) leaves it as it is, and "
            "load_state_dict goes on in the middle of an epoch, where skip_first_batches would skip"
        )


__all__ = ["EpochSampler", "OwnBatches", "epoch_sampler"]
