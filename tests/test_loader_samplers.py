"""Samplers of the caller's: what they are told, as by a DataLoader, and what a state knows of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_files import rows, write_npy, write_tokens
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from gdsstream import EngineClosedError, LoaderStateError, ShardDataset, ShardLoader

COUNT = 22


@pytest.fixture
def dataset(tmp_path: Path) -> ShardDataset:
    write_npy(tmp_path / "0.npy", rows(COUNT, dtype=torch.int64))
    return ShardDataset(tmp_path)


def open_loader(dataset: Any, **options: Any) -> ShardLoader[Any]:
    return ShardLoader(dataset, **{"device": "cpu", "num_threads": 1, **options})


def records(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def shared(dataset: ShardDataset, rank: int = 0) -> DistributedSampler[Any]:
    return DistributedSampler(dataset, 2, rank, shuffle=True, seed=4)  # type: ignore[arg-type]


def in_batches(sampler: Any) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}


def by_itself(sampler: Any) -> dict[str, Any]:
    return {"sampler": sampler, "batch_size": 4}


GIVEN = pytest.mark.parametrize("given", [by_itself, in_batches])


# ---- which epoch it is


@GIVEN
@pytest.mark.parametrize("epochs", [[5, 6, 7], [5, 5, 2], [None, None], [3, None, 4, None]])
def test_a_samplers_epoch_is_its_callers(
    dataset: ShardDataset, given: Callable[[Any], dict[str, Any]], epochs: list[int | None]
) -> None:
    """As with a DataLoader, also where nobody ever tells it."""
    theirs, ours = shared(dataset), shared(dataset)
    reference = DataLoader(dataset, **given(theirs))  # type: ignore[arg-type]
    with open_loader(dataset, **given(ours)) as loader:
        for epoch in epochs:
            for sampler in (theirs, ours):
                if epoch is not None:
                    sampler.set_epoch(epoch)
            assert records(loader) == records(reference)
            assert ours.epoch == theirs.epoch


@GIVEN
def test_a_sampler_is_told_what_the_loader_is(dataset: ShardDataset, given: Callable[[Any], dict[str, Any]]) -> None:
    sampler, other = shared(dataset), shared(dataset)
    with open_loader(dataset, epochs=2, **given(sampler)) as loader:
        epochs = []
        for epoch in range(5):
            other.set_epoch(epoch)
            epochs.append(records(DataLoader(dataset, **given(other))))  # type: ignore[arg-type]
        loader.set_epoch(3)
        assert records(loader) == epochs[3] + epochs[4], "across the border of two epochs"
        sampler.set_epoch(1)
        early = iter(loader)
        loader.set_epoch(0)
        assert records(early) == epochs[0] + epochs[1], "an iterator that has not begun"
        begun = iter(loader)
        next(begun)
        loader.set_epoch(2)
        assert len(records(begun)) == 2 * len(epochs[0]) - 1
        assert records(loader) == epochs[2] + epochs[3], "the one after it"
        sampler.set_epoch(1)
        loader.set_epoch(loader.epoch)
        assert sampler.epoch == 1, "it is told when it is iterated"
        assert loader.epoch == 4
        assert next(iter(loader)).tolist() == epochs[4][0]


@GIVEN
def test_a_sampler_is_told_once(dataset: ShardDataset, given: Callable[[Any], dict[str, Any]]) -> None:
    """Afterwards its epoch is its caller's again."""
    sampler = shared(dataset)
    reference = DataLoader(dataset, **given(shared(dataset)))  # type: ignore[arg-type]

    def before_an_iterator(loader: ShardLoader[Any]) -> None:
        loader.set_epoch(3)
        list(loader)

    def an_iterator_that_has_not_begun(loader: ShardLoader[Any]) -> None:
        early = iter(loader)
        loader.set_epoch(3)
        list(early)

    def the_epoch_that_it_has(loader: ShardLoader[Any]) -> None:
        early = iter(loader)
        loader.set_epoch(loader.epoch)
        list(early)

    def after_one_that_has_begun(loader: ShardLoader[Any]) -> None:
        begun = iter(loader)
        next(begun)
        loader.set_epoch(3)
        list(loader)

    def by_a_state(loader: ShardLoader[Any]) -> None:
        loader.load_state_dict(loader.state_dict())
        list(loader)

    with open_loader(dataset, **given(sampler)) as loader:
        for how in (
            before_an_iterator,
            an_iterator_that_has_not_begun,
            the_epoch_that_it_has,
            after_one_that_has_begun,
            by_a_state,
        ):
            how(loader)
            sampler.set_epoch(0)
            assert records(loader) == records(reference), how.__name__


@GIVEN
def test_epochs_of_one_iterator_go_on_from_the_callers(
    dataset: ShardDataset, given: Callable[[Any], dict[str, Any]]
) -> None:
    epochs = [records(DataLoader(dataset, **given(told(shared(dataset), epoch)))) for epoch in (7, 8, 9)]  # type: ignore[arg-type]
    with open_loader(dataset, epochs=3, **given(told(shared(dataset), 7))) as loader:
        assert records(loader) == epochs[0] + epochs[1] + epochs[2]


def told(sampler: DistributedSampler[Any], epoch: int) -> DistributedSampler[Any]:
    sampler.set_epoch(epoch)
    return sampler


# ---- states


@GIVEN
def test_resumes_in_an_epoch_that_the_caller_chose(
    dataset: ShardDataset, given: Callable[[Any], dict[str, Any]]
) -> None:
    with open_loader(dataset, **given(told(shared(dataset), 5))) as loader:
        everything = records(loader)
    for taken in range(len(everything)):
        with open_loader(dataset, **given(told(shared(dataset), 5))) as loader:
            assert records(itertools.islice(loader, taken)) == everything[:taken]
            state = loader.state_dict()
        sampler = shared(dataset)
        with open_loader(dataset, **given(sampler)) as loader:
            loader.load_state_dict(state)
            assert records(loader) == everything[taken:]
            assert sampler.epoch == 5


@GIVEN
@pytest.mark.parametrize("taken", [1, 3])
def test_a_caller_who_goes_on_to_another_epoch(
    dataset: ShardDataset, given: Callable[[Any], dict[str, Any]], taken: int
) -> None:
    """As with `set_epoch`: what was loaded stays where it is of the epoch that the sampler is told."""
    epochs = {e: records(DataLoader(dataset, **given(told(shared(dataset), e)))) for e in (5, 6)}  # type: ignore[arg-type]
    assert len(epochs[5]) == 3
    with open_loader(dataset, **given(told(shared(dataset), 5))) as loader:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
    for epoch in (5, 6):
        sampler = shared(dataset)
        with open_loader(dataset, **given(sampler)) as loader:
            loader.load_state_dict(state)
            sampler.set_epoch(epoch)
            assert records(loader) == epochs[epoch][taken if epoch == 5 else 0 :]
            assert sampler.epoch == epoch


class Once:
    """Gives other records whenever it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([(number * self.asked) % COUNT for number in range(1, 20)])


def drawn(dataset: ShardDataset) -> RandomSampler:
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(3))


@GIVEN
@pytest.mark.parametrize("prefetch_batches", [0, 3])
@pytest.mark.parametrize("make", [lambda _: Once(), drawn], ids=["once", "drawn"])
def test_a_sampler_that_does_not_repeat_itself_is_refused(
    dataset: ShardDataset, given: Callable[[Any], dict[str, Any]], prefetch_batches: int, make: Callable[[Any], Any]
) -> None:
    with open_loader(dataset, prefetch_batches=prefetch_batches, **given(make(dataset))) as loader:
        list(loader)
        batches = iter(loader)
        next(batches), next(batches)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(LoaderStateError, match="in epoch 1 the sampler does not begin with"):
            next(iter(loader))
        loader.load_state_dict({**loader.state_dict(), "batches": 0, "samples": 0, "checksum": 0})
        assert sum(map(len, records(loader))) >= 19, "the loader goes on"


@GIVEN
def test_a_state_of_another_rank(dataset: ShardDataset, given: Callable[[Any], dict[str, Any]]) -> None:
    """One rank's state does for all: the others cannot compare, but their own next states can."""
    with open_loader(dataset, **given(shared(dataset, 1))) as loader:
        everything = records(loader)
    with open_loader(dataset, **given(shared(dataset, 0))) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with open_loader(dataset, **given(shared(dataset, 1))) as loader:
        loader.load_state_dict(state)
        assert records(itertools.islice(loader, 1)) == everything[1:2]
        state = loader.state_dict()
    with open_loader(dataset, **given(shared(dataset, 1))) as loader:
        loader.load_state_dict(state)
        assert records(loader) == everything[2:]
    with open_loader(dataset, **given(DistributedSampler(dataset, 2, 1, seed=5))) as loader:  # type: ignore[arg-type]
        loader.load_state_dict(state)
        with pytest.raises(LoaderStateError):
            next(iter(loader))


def test_a_state_of_other_windows_is_refused(tmp_path: Path) -> None:
    """Also where there are as many of them."""
    write_tokens(tmp_path / "0.bin", torch.arange(10).to(torch.uint16))
    options = {"format": "tokens", "dtype": "uint16", "record_length": 4, "index_cache": False}
    with (
        open_loader(tmp_path, stride=5, **options) as loader,
        open_loader(tmp_path, stride=6, **options) as other,
    ):
        assert len(loader.dataset) == len(other.dataset) == 2
        with pytest.raises(LoaderStateError, match="the dataset"):
            other.load_state_dict(loader.state_dict())


# ---- from inside


@pytest.mark.parametrize("end", [iter, ShardLoader.close, lambda loader: loader.load_state_dict(loader.state_dict())])
def test_a_transform_that_ends_its_iterator(dataset: ShardDataset, end: Callable[[Any], Any]) -> None:
    loader: ShardLoader[Any]

    def transform(batch: torch.Tensor) -> torch.Tensor:
        end(loader)
        return batch

    with open_loader(dataset, batch_size=4, transform=transform) as loader, pytest.raises(EngineClosedError):
        next(iter(loader))
