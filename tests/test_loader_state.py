"""Resuming: exactly at the next unseen batch, on other ranks, and never in another order."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_files import rows, write_safetensors
from torch.utils.data import BatchSampler, RandomSampler

from gdsstream import LoaderStateError, ShardDataset, ShardLoader
from gdsstream.loader_state import Order, Progress, from_state, to_state

COUNT = 29


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """29 records in three shards, each its own number."""
    folder = tmp_path_factory.mktemp("records")
    for number, part in enumerate(rows(COUNT, dtype=torch.int64).split([11, 4, 14])):
        write_safetensors(folder / f"{number}.safetensors", n=part)
    return ShardDataset(folder)


def open_loader(dataset: ShardDataset, batch_size: int = 4, **options: Any) -> ShardLoader[Any]:
    return ShardLoader(dataset, batch_size, **{"device": "cpu", "num_threads": 1, "shuffle": True, **options})


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


def records(batches: Iterator[torch.Tensor] | ShardLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# ---- one rank


@pytest.mark.parametrize("shuffle", [True, "block", False])
@pytest.mark.parametrize("prefetch_batches", [0, 2, 9])
def test_resumes_at_the_next_unseen_batch(dataset: ShardDataset, shuffle: Any, prefetch_batches: int) -> None:
    options = {"shuffle": shuffle, "prefetch_batches": prefetch_batches, "block_records": 3, "window_blocks": 2}
    with open_loader(dataset, **options) as loader:
        epochs = [records(loader) for _ in range(3)]
    for taken in range(len(epochs[0]) + 1):
        with open_loader(dataset, **options) as loader:
            records(loader)
            batches = iter(loader)
            assert [next(batches).tolist() for _ in range(taken)] == epochs[1][:taken]
            state = through_json(loader.state_dict())
        with open_loader(dataset, **options) as other:
            other.load_state_dict(state)
            assert other.epoch == 1
            assert records(other) == epochs[1][taken:], f"after {taken} batches"
            assert other.epoch == 2
            assert records(other) == epochs[2], "the next epoch is whole"


def test_the_state_after_an_epoch_is_the_next_one(dataset: ShardDataset) -> None:
    with open_loader(dataset) as loader:
        records(loader)
        state = loader.state_dict()
        second = records(loader)
    with open_loader(dataset) as other:
        other.load_state_dict(state)
        assert records(other) == second


def test_a_loaded_state_is_used_once(dataset: ShardDataset) -> None:
    with open_loader(dataset) as loader:
        batches = iter(loader)
        first = next(batches).tolist()
        state = loader.state_dict()
        loader.load_state_dict(state)
        rest = iter(loader)
        next(rest)
        assert next(iter(loader)).tolist() == first, "an epoch that was left begins anew"


def test_a_state_survives_the_iterator(dataset: ShardDataset) -> None:
    with open_loader(dataset) as loader:
        for taken, _ in enumerate(loader, 1):
            if taken == 3:
                break
        assert loader.state_dict()["position"] == 12
        assert loader.state_dict()["batches"] == 3
        loader.load_state_dict(loader.state_dict())
        assert loader.state_dict()["position"] == 12
        assert len(records(loader)) == len(loader) - 3


def test_set_epoch_and_a_loaded_state(dataset: ShardDataset) -> None:
    """What training scripts do: they set the epoch that they resume in, or Lightning, the one after."""
    with open_loader(dataset) as loader:
        epochs = [records(loader) for _ in range(3)]
        loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        middle = loader.state_dict()
        for _ in batches:
            last = loader.state_dict()
    with open_loader(dataset) as other:
        other.load_state_dict(middle)
        other.set_epoch(1)
        assert records(other) == epochs[1][5:]
        other.load_state_dict(middle)
        other.set_epoch(2)
        assert records(other) == epochs[2]
        other.load_state_dict(last)
        other.set_epoch(1)
        assert records(other) == [], "all of epoch 1 was seen"
        other.load_state_dict(last)
        late = iter(other)
        other.set_epoch(2)
        assert records(late) == epochs[2]


def test_several_epochs(dataset: ShardDataset) -> None:
    with open_loader(dataset, epochs=3) as loader:
        everything = records(loader)
        after = records(loader)
    for taken in (3, 8, 11, 16, 23):
        with open_loader(dataset, epochs=3) as loader:
            batches = iter(loader)
            for _ in range(taken):
                next(batches)
            state = loader.state_dict()
        with open_loader(dataset, epochs=3) as other:
            other.load_state_dict(state)
            assert records(other) == everything[taken:]
            assert records(other) == after
    with open_loader(dataset, epochs=None) as endless:
        batches = iter(endless)
        for _ in range(11):
            next(batches)
        endless.load_state_dict(endless.state_dict())
        assert records(itertools.islice(iter(endless), 13)) == everything[11:24]


def test_a_state_does_not_bring_the_number_of_epochs(dataset: ShardDataset) -> None:
    """One that resumes runs through as many as it has itself, counted from where the first iterator began."""
    with open_loader(dataset, epochs=6) as loader:
        everything = records(loader)
    per_epoch = len(everything) // 6

    def rest(saved: int | None, here: int | None, taken: int, limit: int | None = None) -> list[list[int]]:
        with open_loader(dataset, epochs=saved) as loader:
            batches = iter(loader)
            for _ in range(taken):
                next(batches)
            state = through_json(loader.state_dict())
        with open_loader(dataset, epochs=here) as loader:
            loader.load_state_dict(state)
            return records(itertools.islice(iter(loader), limit))

    assert rest(1, 3, 5) == everything[5 : 3 * per_epoch]
    assert rest(3, 1, per_epoch + 2) == everything[per_epoch + 2 : 2 * per_epoch], "the epoch it is in is finished"
    assert rest(1, None, 5, 20) == everything[5:25]
    assert rest(None, 2, 5) == everything[5 : 2 * per_epoch]


@pytest.mark.parametrize("name", ["seed", "block_records", "window_blocks", "batch_size", "prefetch_batches", "epochs"])
def test_states_are_plain_whatever_the_numbers_were(dataset: ShardDataset, name: str) -> None:
    with (
        open_loader(dataset, **{"shuffle": "block", name: np.int64(3)}) as loader,
        open_loader(dataset, **{"shuffle": "block", name: 3}) as other,
    ):
        assert type(getattr(loader, name)) is int
        loader.set_epoch(np.int64(1))  # type: ignore[arg-type]
        next(iter(loader))
        state = through_json(loader.state_dict())
        assert {type(value) for value in loader.state_dict().values()} <= {str, int, type(None)}
        other.load_state_dict(state)
        assert other.epoch == 1


@pytest.mark.parametrize("which", ["sampler", "batch_sampler"])
def test_samplers_are_asked_again(dataset: ShardDataset, which: str) -> None:
    def options() -> dict[str, Any]:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
        chosen = sampler if which == "sampler" else BatchSampler(sampler, 4, drop_last=False)
        return {"shuffle": False, "batch_size": 4 if which == "sampler" else 1, which: chosen}

    with open_loader(dataset, **options()) as loader:
        everything = records(loader)
    with open_loader(dataset, **options()) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = through_json(loader.state_dict())
    with open_loader(dataset, **options()) as other:
        other.load_state_dict(state)
        assert records(other) == everything[3:]
    if which == "sampler":
        with open_loader(dataset, **{**options(), "batch_size": 6}) as other:
            other.load_state_dict(state)
            assert records(other)[0] == everything[3] + everything[4][:2]


# ---- ranks


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stages=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4
    ),
    shuffle=st.sampled_from([True, "block", False]),
    partition=st.sampled_from(["pad", "drop", "uneven"]),
    seed=st.integers(0, 10),
    epoch=st.integers(0, 3),
)
def test_exactly_once_over_ranks_and_resumes(
    dataset: ShardDataset,
    stages: list[tuple[int, int, int, int]],
    shuffle: Any,
    partition: Any,
    seed: int,
    epoch: int,
) -> None:
    """Each stage is (ranks, batch size, batches taken, prefetched): all ranks take as many, and the next stage resumes
    from one rank's state. The last stage goes to the end."""
    options = {"shuffle": shuffle, "partition": partition, "seed": seed, "block_records": 3, "window_blocks": 2}
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    for number, (ranks, batch_size, taken, prefetched) in enumerate(stages):
        states = []
        for rank in range(ranks):
            with open_loader(
                dataset, batch_size, rank=rank, world_size=ranks, prefetch_batches=prefetched, **options
            ) as loader:
                if state is None:
                    loader.set_epoch(epoch)
                else:
                    loader.load_state_dict(state)
                    assert loader.epoch == epoch
                batches = iter(loader)
                wanted = None if number == len(stages) - 1 else taken
                for batch in itertools.islice(batches, wanted):
                    seen.update(batch.tolist())
                states.append(through_json(loader.state_dict()))
        # `islice` ran into the end, or just up to it.
        if any(state["epoch"] != epoch or state["position"] == COUNT for state in states):
            break
        assert len({state["position"] for state in states}) == 1, "any rank's state does for all"
        state = states[-1]
    last_ranks = stages[number][0]
    if partition == "uneven":
        assert seen == Counter(range(COUNT))
    elif partition == "pad":
        assert set(seen) == set(range(COUNT))
        assert seen.total() - COUNT < last_ranks, "padding only at the end, and never a whole round"
    else:
        assert max(seen.values(), default=1) == 1
        assert COUNT - seen.total() < last_ranks


def test_from_eight_ranks_to_three(dataset: ShardDataset) -> None:
    seen: Counter[int] = Counter()
    for rank in range(8):
        with open_loader(dataset, 1, rank=rank, world_size=8) as loader:
            batches = iter(loader)
            for _ in range(2):
                seen.update(next(batches).tolist())
            state = loader.state_dict()
    assert seen.total() == len(seen) == 16
    for rank in range(3):
        with open_loader(dataset, 2, rank=rank, world_size=3, partition="uneven") as loader:
            loader.load_state_dict(state)
            for batch in loader:
                seen.update(batch.tolist())
    assert seen == Counter(range(COUNT))


# ---- what is refused


def changed(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**copy.deepcopy(state), **values}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2}, r"the seed: 1 -> 2"),
        ({"shuffle": "block"}, r"shuffle: 'full' -> 'block'"),
        ({"shuffle": False}, r"shuffle: 'full' -> 'none'"),
        ({"shuffle": False, "sampler": [1, 2]}, r"shuffle: 'full' -> 'sampler'"),
    ],
)
def test_states_of_other_orders_are_refused(dataset: ShardDataset, options: dict[str, Any], message: str) -> None:
    with open_loader(dataset, seed=1) as loader:
        state = loader.state_dict()
    with open_loader(dataset, **{"seed": 1, **options}) as other:
        with pytest.raises(LoaderStateError, match=message):
            other.load_state_dict(state)
        assert len(records(other)) == len(other), "the loader goes on as if nothing had been loaded"


def test_windows_of_another_size_are_refused(dataset: ShardDataset) -> None:
    with open_loader(dataset, shuffle="block", block_records=4) as loader:
        state = loader.state_dict()
    with (
        open_loader(dataset, shuffle="block", block_records=5) as other,
        pytest.raises(LoaderStateError, match="block_records: 4 -> 5"),
    ):
        other.load_state_dict(state)


def test_states_of_other_datasets_are_refused(dataset: ShardDataset, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "0.safetensors", n=rows(COUNT + 1, dtype=torch.int64))
    with open_loader(dataset) as loader:
        state = loader.state_dict()
    with (
        open_loader(ShardDataset(tmp_path)) as other,
        pytest.raises(LoaderStateError, match=r"the dataset .*; the number of records: 29 -> 30"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 1}, "version 1"),
        ({"position": -1}, "position is -1"),
        ({"position": COUNT + 1}, "position is 30, and an epoch has 29"),
        ({"position": 1.5}, "position is 1.5"),
        ({"epoch": "1"}, "epoch is '1'"),
        ({"batches": True}, "batches is True"),
        ({"first_epoch": -3}, "first_epoch is -3"),
        ({"checksum": "0"}, "checksum is '0'"),
    ],
)
def test_damaged_states_are_refused(dataset: ShardDataset, values: dict[str, Any], message: str) -> None:
    with open_loader(dataset) as loader, pytest.raises(LoaderStateError, match=message):
        loader.load_state_dict(changed(loader.state_dict(), **values))


@pytest.mark.parametrize("state", [None, [], "state", {}, {"version": 2, "epoch": 3}])
def test_what_is_no_state_is_refused(dataset: ShardDataset, state: Any) -> None:
    with open_loader(dataset) as loader, pytest.raises(LoaderStateError):
        loader.load_state_dict(state)


def test_a_state_and_back() -> None:
    order = Order("abc", 10, -3, "block", 4, 5)
    for progress in (Progress(), Progress(3, 10, 2, 7, 4, 99)):
        assert from_state(through_json(to_state(order, progress, 2, 1)), order, 2, 1) == progress
        assert from_state(to_state(order, progress, 2, 1), order, 2, 0) == progress._replace(checksum=None)
