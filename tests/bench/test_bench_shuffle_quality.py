"""How good orders are, by what bench/shuffle_quality.py measures, and what that says of orders that are not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.shuffle_quality import quality
from gdsstream.sampling import EpochOrder

N = 200_000


def all_of(order: EpochOrder) -> NDArray[np.int64]:
    return order.records(np.arange(order.num_records))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (0, 2), (1, 0), (2**64 - 1, 7), (12345, 99)])
def test_a_full_shuffle_is_as_good_as_numpys(seed: int, epoch: int) -> None:
    measured = quality(all_of(EpochOrder(N, shuffle="full", seed=seed, epoch=epoch)))
    assert abs(measured.spread) < 4
    assert abs(measured.correlation) < 4
    assert measured.neighbours < 4
    assert abs(measured.distance - 1) < 0.01
    assert abs(measured.clumping - 1) < 0.25
    # What the thresholds are worth: chance passes them, and the stored order and a shuffle of blocks alone do not.
    by_numpy = quality(np.random.default_rng([seed, epoch]).permutation(N))
    assert max(abs(by_numpy.spread), abs(by_numpy.correlation)) < 4
    assert abs(by_numpy.clumping - 1) < 0.25


def test_what_no_shuffle_and_blocks_alone_measure() -> None:
    stored = quality(np.arange(N))
    assert stored.neighbours > 10_000
    assert min(stored.spread, stored.correlation, stored.clumping) > 100
    blocks = quality(all_of(EpochOrder(N, shuffle="block", seed=0, epoch=0, block_records=256, window_blocks=1)))
    assert min(blocks.spread, blocks.correlation, blocks.clumping) > 100


def test_a_block_shuffle_is_as_good_as_its_window_is_large() -> None:
    measured = {
        window: [
            quality(all_of(EpochOrder(N, shuffle="block", seed=s, epoch=0, block_records=64, window_blocks=window)))
            for s in range(4)
        ]
        for window in (4, 16, 64, 256, 1024)
    }
    clumping = {window: float(np.mean([q.clumping for q in found])) for window, found in measured.items()}
    # A batch comes from one window, whose mean is off by the variance of a record, over its number of blocks.
    for window, found in clumping.items():
        assert found == pytest.approx(1 + 256 / window * (1 - window / (N / 64)), rel=0.3), window
    # Two records that follow each other are of one block once in window_blocks times.
    for window in (16, 64, 256):
        same = np.mean([q.distance for q in measured[window]])
        assert same == pytest.approx(1 - 1 / window, abs=0.02)


def test_the_records_of_a_window_are_shuffled_well() -> None:
    order = EpochOrder(10**6, shuffle="block", seed=5, epoch=0, block_records=1024, window_blocks=64)
    for window in range(order.num_windows):
        begin, end = order.window_range(window)
        records = order.records(np.arange(begin, end))
        within = np.argsort(np.argsort(records))  # ranks inside of the window
        measured = quality(within, parts=16)
        assert abs(measured.spread) < 4
        assert abs(measured.correlation) < 4
        assert measured.neighbours < 4
        assert abs(measured.clumping - 1) < 0.35
