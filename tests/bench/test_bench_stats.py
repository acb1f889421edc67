from __future__ import annotations

import statistics

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


def test_the_interval_holds_the_median_and_is_reproducible() -> None:
    values = [0.90, 0.93, 0.95, 0.96, 0.97, 0.99, 1.01]
    interval = stats.bootstrap_ci95(values)
    assert interval is not None
    assert interval[0] < statistics.median(values) < interval[1]
    assert stats.bootstrap_ci95(values) == interval
    assert stats.bootstrap_ci95(values[:2]) is None


def test_the_interval_covers_the_true_median() -> None:
    random = np.random.default_rng(7)
    covered = 0
    for seed in range(200):
        interval = stats.bootstrap_ci95(list(random.normal(10.0, 1.0, 25)), resamples=400, seed=seed)
        assert interval is not None
        covered += interval[0] <= 10.0 <= interval[1]
    assert 0.88 <= covered / 200 <= 0.99
