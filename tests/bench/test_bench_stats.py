from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import stats

RATES = st.lists(st.floats(0.001, 1e4), min_size=1, max_size=40)


@given(RATES)
def test_median_agrees_with_the_standard_library(values: list[float]) -> None:
    assert stats.median(values) == pytest.approx(statistics.median(values))


@given(RATES)
def test_summary_agrees_with_numpy(values: list[float]) -> None:
    summary = stats.summarise(values)
    low, high = np.percentile(values, [25, 75])
    assert summary.n == len(values)
    assert summary.iqr == pytest.approx(high - low, abs=1e-9)
    assert summary.mad == pytest.approx(float(np.median(np.abs(np.array(values) - np.median(values)))), abs=1e-9)
    assert (summary.min, summary.max) == (min(values), max(values))


def test_known_samples() -> None:
    assert stats.summarise([1.0, 2.0, 4.0, 8.0, 100.0]) == (5, 4.0, 3.0, 6.0, 1.0, 100.0)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.summarise([])


def test_an_outlier_is_labelled_and_the_others_are_not() -> None:
    assert stats.outliers([10.0, 10.1, 9.9, 10.05, 3.0]) == [False, False, False, False, True]


@pytest.mark.parametrize("values", [[], [1.0, 1.0, 9.0], [5.0, 5.0, 5.0, 5.0, 9.0]])
def test_too_few_or_equal_samples_give_no_outliers(values: list[float]) -> None:
    assert not any(stats.outliers(values))


def test_ratios_are_paired_and_cancel_common_drift() -> None:
    ceilings = [50.0, 25.0, 40.0]
    assert stats.paired_ratios([45.0, 22.5, 36.0], ceilings) == pytest.approx([0.9, 0.9, 0.9])


def test_ratios_refuse_what_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="paired"):
        stats.paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="not positive"):
        stats.paired_ratios([1.0], [0.0])


def below(k: int, n: int) -> Fraction:
    """How likely fewer than k of n samples lie below their median."""
    return Fraction(sum(math.comb(n, i) for i in range(k)), 2**n)


@pytest.mark.parametrize("n", [*range(6, 30), 101])
def test_the_interval_is_the_narrowest_pair_of_order_statistics_that_the_binomial_allows(n: int) -> None:
    found = stats.median_ci95([float(value) for value in reversed(range(1, n + 1))])
    assert found is not None
    low = int(found[0])
    assert found == (low, n + 1 - low)
    assert 1 - 2 * below(low, n) >= Fraction(19, 20)
    assert 1 - 2 * below(low + 1, n) < Fraction(19, 20)


@pytest.mark.parametrize("n", range(1, 6))
def test_too_few_samples_carry_no_interval_and_their_range_says_how_much_it_holds(n: int) -> None:
    assert stats.median_ci95([1.0] * n) is None
    assert stats.range_coverage(n) == 1 - 2 * below(1, n)
    assert stats.range_coverage(n) < 0.95


@pytest.mark.parametrize("n", [3, 6, 7, 25])
def test_the_true_median_is_held_as_often_as_is_said(n: int) -> None:
    # Of a skewed distribution, which the interval knows nothing of.
    samples = np.random.default_rng(n).exponential(1.0, (4000, n))
    found = [stats.median_ci95(list(each)) or (each.min(), each.max()) for each in samples]
    held = np.mean([low <= np.log(2.0) <= high for low, high in found])
    said = stats.range_coverage(n) if n < 9 else 0.95
    assert said - 0.02 <= held <= (said + 0.02 if n < 9 else 0.99)


def test_the_permutation_test_counts_the_ways_to_divide_the_samples() -> None:
    above, below = [5.0, 6.0, 7.0], [1.0, 2.0, 3.0, 4.0]
    sums = [sum(chosen) for chosen in itertools.combinations(above + below, len(above))]
    as_far = sum(total >= sum(above) for total in sums)
    assert stats.permutation_test(above, below) == as_far / len(sums)
    assert stats.permutation_test(below, above) == 1.0
    assert stats.permutation_test(above, [1.0, 5.0]) == 1.0
    assert stats.permutation_test([], below) == 1.0


def test_the_sign_test_counts_the_ways_to_lie() -> None:
    ways = list(itertools.product([False, True], repeat=5))
    assert stats.sign_test(5) == sum(map(all, ways)) / len(ways)
