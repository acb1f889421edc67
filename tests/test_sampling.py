"""Orders and plans: every record exactly once over ranks and resumes, torch's own batches, and how fast."""

from __future__ import annotations

import time
from typing import NamedTuple, cast, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from gdsstream.errors import ConfigError
from gdsstream.sampling import BatchPlan, EpochOrder, Partition, Shuffle, checked_shuffle

SHUFFLES = st.sampled_from(get_args(Shuffle))
PARTITIONS = st.sampled_from(get_args(Partition))


@st.composite
def orders(draw: st.DrawFn, kinds: tuple[Shuffle, ...] = get_args(Shuffle), most: int = 2000) -> EpochOrder:
    return EpochOrder(
        draw(st.integers(0, most)),
        shuffle=draw(st.sampled_from(kinds)),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        epoch=draw(st.integers(0, 50)),
        block_records=draw(st.integers(1, 300) | st.just(2**62)),
        window_blocks=draw(st.integers(1, 20) | st.just(2**62)),
    )


def all_of(order: EpochOrder) -> NDArray[np.int64]:
    return order.records(np.arange(order.num_records))


# ---- orders


@settings(deadline=None, max_examples=300)
@given(orders(), st.data())
def test_every_record_has_one_position(order: EpochOrder, data: st.DataObject) -> None:
    records = all_of(order)
    assert records.dtype == np.int64
    assert np.array_equal(np.sort(records), np.arange(order.num_records))
    # And is the same whatever else is asked for with it, and by whom.
    if order.num_records:
        positions = data.draw(st.lists(st.integers(0, order.num_records - 1), max_size=20))
        again = EpochOrder(
            order.num_records,
            shuffle=order.shuffle,
            seed=order.seed,
            epoch=order.epoch,
            block_records=order.block_records,
            window_blocks=order.window_blocks,
        )
        assert again.records(positions).tolist() == records[positions].tolist()
        assert [int(again.records(position)) for position in positions] == records[positions].tolist()


@settings(deadline=None, max_examples=300)
@given(orders(("block", "none")))
def test_a_window_is_made_of_its_blocks_and_no_others(order: EpochOrder) -> None:
    records = all_of(order)
    position = 0
    seen = 0
    lengths = []
    for window in range(order.num_windows):
        begin, end = order.window_range(window)
        assert begin == position < end
        assert {order.window_of(begin), order.window_of(end - 1)} == {window}
        blocks = order.blocks_of_window(window)
        assert len(blocks) <= order.window_blocks
        assert blocks == sorted(blocks)
        assert np.array_equal(np.sort(records[begin:end]), np.concatenate([np.arange(f, f + n) for f, n in blocks]))
        assert all(first % order.block_records == 0 for first, _ in blocks)
        lengths += [count for _, count in blocks]
        seen += len(blocks)
        if window < order.num_windows - 1:
            assert len(blocks) == order.window_blocks
        position = end
    assert position == order.num_records
    # All blocks are full but at most one, the stored order's last, which may be in any window.
    assert seen == -(-order.num_records // order.block_records)
    assert sum(count < order.block_records for count in lengths) <= 1


@settings(deadline=None, max_examples=100)
@given(orders(("none",)))
def test_no_shuffle_is_the_stored_order(order: EpochOrder) -> None:
    assert np.array_equal(all_of(order), np.arange(order.num_records))


@settings(deadline=None, max_examples=100)
@given(st.integers(2**33, 2**62), st.integers(1, 2**40), st.integers(1, 2**40), st.data())
def test_orders_of_any_size(n: int, block: int, window: int, data: st.DataObject) -> None:
    order = EpochOrder(n, shuffle="block", seed=3, epoch=1, block_records=block, window_blocks=window)
    positions = data.draw(st.lists(st.integers(0, n - 1) | st.sampled_from([0, n - 1, n // 2]), unique=True))
    records = order.records(positions).tolist()
    assert len(set(records)) == len(positions)
    assert all(0 <= record < n for record in records)
    windows = {position: order.window_of(position) for position in positions}
    for one, its in zip(positions, records, strict=True):
        begin, end = order.window_range(windows[one])
        assert begin <= one < end
        assert int(order.records(one)) == its
        if order.window_blocks <= 100:
            assert any(first <= its < first + count for first, count in order.blocks_of_window(windows[one]))


def test_the_short_block_is_moved_like_any_other() -> None:
    where = set()
    for epoch in range(200):
        order = EpochOrder(1001, shuffle="block", seed=0, epoch=epoch, block_records=100, window_blocks=2)
        where |= {w for w in range(order.num_windows) if order.blocks_of_window(w)[-1] == (1000, 1)}
    assert where == set(range(6))


GOLDEN_FULL = [492413, 203557, 165657, 68810, 106937, 369956, 279348, 938505]
GOLDEN_BLOCK = [654070, 233986, 624104, 578826, 654086, 233949, 654048, 799536]
GOLDEN_BLOCK_FAR = [196433, 702643, 294377, 539935]
GOLDEN_TEN = [7, 8, 2, 0, 9, 5, 1, 4, 3, 6]


def test_orders_never_change() -> None:
    # These are part of what saved states mean. A change of any of them needs another version of the state.
    full = EpochOrder(1_000_003, shuffle="full", seed=42, epoch=3)
    assert full.records(np.arange(8)).tolist() == GOLDEN_FULL
    block = EpochOrder(1_000_003, shuffle="block", seed=42, epoch=3, block_records=100, window_blocks=10)
    assert block.records(np.arange(8)).tolist() == GOLDEN_BLOCK
    assert block.records([999, 1000, 500_000, 1_000_002]).tolist() == GOLDEN_BLOCK_FAR
    assert EpochOrder(10, shuffle="block", seed=-1, epoch=0, block_records=4).records(range(10)).tolist() == GOLDEN_TEN


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    for shuffle in ("full", "block"):
        drawn = [
            all_of(EpochOrder(20_000, shuffle=shuffle, seed=s, epoch=e, block_records=50, window_blocks=40))
            for s, e in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2**63, 0)]
        ]
        for index, one in enumerate(drawn):
            for other in drawn[:index]:
                assert (one == other).sum() < 12  # one is expected
                assert (np.diff(one) == np.diff(other)).sum() < 20
    negative = EpochOrder(1000, shuffle=True, seed=-5, epoch=0)
    assert np.array_equal(all_of(negative), all_of(EpochOrder(1000, shuffle=True, seed=2**64 - 5, epoch=0)))


def test_names_of_shuffles() -> None:
    assert [checked_shuffle(given) for given in (True, False, "full", "block", "none")] == [
        "full",
        "none",
        "full",
        "block",
        "none",
    ]
    assert EpochOrder(3, shuffle=True, seed=0, epoch=0).shuffle == "full"
    for wrong in ("Full", None, 1, [True]):
        with pytest.raises(ConfigError, match="shuffle is"):
            checked_shuffle(cast(Shuffle, wrong))


def test_orders_that_cannot_be() -> None:
    for name, wrong in [
        ("num_records", -1),
        ("num_records", 2**62 + 1),
        ("seed", 2**64),
        ("seed", None),
        ("epoch", -1),
        ("epoch", 0.5),
        ("block_records", 0),
        ("window_blocks", 0),
    ]:
        arguments = {"num_records": 10, "seed": 0, "epoch": 0, name: wrong}
        with pytest.raises(ConfigError, match=f"{name} is"):
            EpochOrder(shuffle="block", **arguments)  # type: ignore[arg-type]


def test_what_is_outside_is_named() -> None:
    for shuffle in ("full", "block", "none"):
        order = EpochOrder(10, shuffle=shuffle, seed=0, epoch=0, block_records=4, window_blocks=2)
        for position in (-1, 10):
            with pytest.raises(IndexError, match=rf"position {position} is outside \[0, 10\)"):
                order.records([0, position])
        with pytest.raises(ConfigError, match="have to be integers"):
            order.records([0.5])
        assert order.records([]).tolist() == []
        assert order.records(np.zeros((2, 0), int)).shape == (2, 0)
        assert order.records(np.array([[0, 1], [9, 3]], np.uint8)).shape == (2, 2)
        if shuffle == "full":
            with pytest.raises(ConfigError, match="no windows"):
                _ = order.num_windows
            for ask in (order.window_of, order.window_range, order.blocks_of_window):
                with pytest.raises(ConfigError, match="no windows"):
                    ask(0)
            continue
        assert order.num_windows == 2
        for window in (-1, 2):
            with pytest.raises(IndexError, match=rf"window {window} is outside \[0, 2\)"):
                order.blocks_of_window(window)
        with pytest.raises(IndexError, match="position 10 is outside"):
            order.window_of(10)
    assert EpochOrder(0, shuffle="block", seed=0, epoch=0).num_windows == 0


def test_records_are_a_new_array() -> None:
    for shuffle in get_args(Shuffle):
        positions = np.arange(10)
        records = EpochOrder(10, shuffle=shuffle, seed=0, epoch=0).records(positions)
        records[:] = -1
        assert np.array_equal(positions, np.arange(10))


# ---- plans: torch's batches


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans())
def test_from_the_beginning_it_is_distributed_samplers_order(
    n: int, world_size: int, batch_size: int, drop: bool, drop_last: bool
) -> None:
    for rank in range(world_size):
        sampler: DistributedSampler[int] = DistributedSampler(
            cast("torch.utils.data.Dataset[int]", range(n)), world_size, rank, shuffle=False, drop_last=drop
        )
        expected = list(BatchSampler(sampler, batch_size, drop_last))
        plan = BatchPlan(n, 0, batch_size, rank, world_size, drop_last, "drop" if drop else "pad")
        assert plan.num_samples == len(sampler)
        assert plan.num_batches == plan.num_steps == len(expected)
        assert [plan.batch(k).tolist() for k in range(plan.num_batches)] == expected


@given(st.integers(0, 60), st.integers(1, 9), st.booleans(), PARTITIONS)
def test_of_one_rank_it_is_batch_samplers(n: int, batch_size: int, drop_last: bool, partition: Partition) -> None:
    expected = list(BatchSampler(SequentialSampler(range(n)), batch_size, drop_last))
    plan = BatchPlan(n, 0, batch_size, drop_last=drop_last, partition=partition)
    assert [plan.batch(k).tolist() for k in range(plan.num_batches)] == expected


# ---- plans: exactly once, whatever the ranks


class Leg(NamedTuple):
    """So many ranks take so many batches, or all there are, and stop."""

    world_size: int
    batch_size: int
    batches: int


LEGS = st.lists(st.builds(Leg, st.integers(1, 9), st.integers(1, 7), st.integers(0, 6)), max_size=6)


def walk(
    n: int, legs: list[Leg], partition: Partition, drop_last: bool = False
) -> tuple[list[list[int]], BatchPlan, int]:
    """The positions seen in each leg, by step and rank, after a last leg to the end; that leg's plan, and its start."""
    position = 0
    seen: list[list[int]] = []
    for leg in [*legs, Leg(4, 2, 10**9)]:
        plans = [
            BatchPlan(n, position, leg.batch_size, rank, leg.world_size, drop_last, partition)
            for rank in range(leg.world_size)
        ]
        steps = min(leg.batches, plans[0].num_steps)
        assert len({plan.position_after(steps) for plan in plans}) == 1
        seen.append([p for k in range(steps) for plan in plans if k < plan.num_batches for p in plan.batch(k).tolist()])
        last, start, position = plans[0], position, plans[0].position_after(steps)
        if position == n:
            break
    return seen, last, start


@settings(deadline=None, max_examples=400)
@given(st.integers(1, 150), LEGS, PARTITIONS)
def test_every_position_is_seen_once_however_often_ranks_and_batches_change(
    n: int, legs: list[Leg], partition: Partition
) -> None:
    seen, last, start = walk(n, legs, partition)
    flat = [position for leg in seen for position in leg]
    spare = (n - start) % last.world_size
    if partition == "uneven":
        assert sorted(flat) == list(range(n))
    elif partition == "drop":
        assert sorted(flat) == list(range(n - spare))
    else:
        # The epoch's first positions repeat, as many as fill the last leg's ranks, and nowhere but in its end.
        padding = -spare % last.world_size
        assert sorted(flat) == sorted([*range(n), *(position % n for position in range(padding))])
        assert all(len(set(leg)) == len(leg) for leg in seen[:-1])
    # Each leg saw one range of positions and no other: what comes after it need not know how it was dealt.
    begin = 0
    for leg in seen[:-1]:
        assert sorted(leg) == list(range(begin, begin + len(leg)))
        begin += len(leg)
    assert begin == start


@settings(deadline=None, max_examples=100)
@given(orders(most=400), LEGS)
def test_so_every_record_is_read_once(order: EpochOrder, legs: list[Leg]) -> None:
    if order.num_records:
        seen, _, _ = walk(order.num_records, legs, "uneven")
        records = np.concatenate([order.records(leg) for leg in seen])
        assert np.array_equal(np.sort(records), np.arange(order.num_records))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 150), LEGS, PARTITIONS)
def test_dropping_short_batches_drops_only_at_the_end(n: int, legs: list[Leg], partition: Partition) -> None:
    seen, last, start = walk(n, legs, partition, drop_last=True)
    flat = [position for leg in seen for position in leg]
    left = n - start
    if partition != "pad":
        assert len(set(flat)) == len(flat)
        # Of a rank, less than a batch; of all ranks, only what comes after a rank's last full batch.
        assert len(flat) > n - last.batch_size * last.world_size
        assert set(flat) >= set(range(start + left // (last.batch_size * last.world_size)))
    assert all(len(leg) % last.batch_size == 0 for leg in seen[-1:])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 100), st.data(), st.integers(1, 9), st.integers(1, 7), st.booleans(), PARTITIONS)
def test_going_on_with_the_same_ranks_is_going_on(
    n: int, data: st.DataObject, world_size: int, batch_size: int, drop_last: bool, partition: Partition
) -> None:
    start = data.draw(st.integers(0, n))
    for rank in range(world_size):
        plan = BatchPlan(n, start, batch_size, rank, world_size, drop_last, partition)
        batches = [plan.batch(k).tolist() for k in range(plan.num_batches)]
        assert sum(map(len, batches)) == plan.num_samples - (plan.num_samples % batch_size if drop_last else 0)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert plan.num_steps - plan.num_batches in ((0, 1) if partition == "uneven" else (0,))
        for done in range(plan.num_steps + 1):
            rest = BatchPlan(n, plan.position_after(done), batch_size, rank, world_size, drop_last, partition)
            assert [rest.batch(k).tolist() for k in range(rest.num_batches)] == batches[done:]
            assert rest.num_steps == plan.num_steps - done


def test_uneven_ranks_differ_by_one_sample_at_most() -> None:
    plans = [BatchPlan(10, 0, 1, rank, 4, partition="uneven") for rank in range(4)]
    assert [plan.num_samples for plan in plans] == [3, 3, 2, 2]
    assert [plan.num_batches for plan in plans] == [3, 3, 2, 2]
    assert {plan.num_steps for plan in plans} == {3}
    # The third rank has no more batches, but the epoch is not over before the first has had its third.
    assert plans[2].position_after(2) == plans[0].position_after(2) == 8
    assert plans[2].position_after(3) == 10


def test_more_ranks_than_records() -> None:
    padded = [BatchPlan(2, 0, 4, rank, 5).batch(0).tolist() for rank in range(5)]
    assert padded == [[0], [1], [0], [1], [0]]
    assert [BatchPlan(2, 0, 4, rank, 5, partition="drop").num_batches for rank in range(5)] == [0] * 5
    assert [BatchPlan(2, 0, 4, rank, 5, partition="uneven").num_batches for rank in range(5)] == [1, 1, 0, 0, 0]


def test_an_epoch_that_is_over_has_no_batches() -> None:
    for partition in get_args(Partition):
        for plan in (BatchPlan(7, 7, 2, 0, 3, partition=partition), BatchPlan(0, 0, 2, 0, 3, partition=partition)):
            assert plan.num_samples == plan.num_batches == plan.num_steps == 0
            assert plan.position_after(0) == plan.num_records
            with pytest.raises(IndexError, match="batch 0 is outside"):
                plan.batch(0)
    # Dropped, not left for a resume with other ranks.
    assert BatchPlan(15, 0, 1, 0, 8, partition="drop").position_after(1) == 15
    assert BatchPlan(5, 0, 8, drop_last=True).position_after(0) == 5


def test_plans_that_cannot_be() -> None:
    for name, wrong in [
        ("num_records", -1),
        ("start", -1),
        ("start", 11),
        ("batch_size", 0),
        ("batch_size", 1.5),
        ("rank", 2),
        ("rank", -1),
        ("world_size", 0),
        ("partition", "padded"),
    ]:
        arguments = {"num_records": 10, "start": 0, "batch_size": 2, "world_size": 2, name: wrong}
        with pytest.raises(ConfigError, match=f"{name} is"):
            BatchPlan(**arguments)  # type: ignore[arg-type]
    plan = BatchPlan(np.int64(10), np.int64(0), np.int32(3))  # type: ignore[arg-type]
    assert type(plan.position_after(1)) is int
    for batch in (-1, 4):
        with pytest.raises(IndexError, match=rf"batch {batch} is outside \[0, 4\) of rank 0"):
            plan.batch(batch)
    for batches in (-1, 5):
        with pytest.raises(IndexError, match=rf"{batches} batches are outside \[0, 4\]"):
            plan.position_after(batches)


# ---- speed


def test_speed_and_size() -> None:
    # Full and block: 60 and 20 million a second, 40 and 50 us a batch, where nothing else runs; the limits are for a
    # machine that is busy.
    for shuffle in ("full", "block", "none"):
        order = EpochOrder(10**10, shuffle=shuffle, seed=0, epoch=0)
        many, few = np.arange(2**20), np.arange(256) * 8 + 12_345
        for positions, limit in ((many, 2**20 / 5e6), (few, 250e-6)):
            times = []
            for _ in range(5 if positions is many else 100):
                begin = time.perf_counter()
                order.records(positions)
                times.append(time.perf_counter() - begin)
            assert min(times) < limit, (shuffle, positions.size)
