"""Robust statistics of a few samples. Pure: numbers in, numbers out.

Below LEAST_FOR_INTERVAL samples there is no 95 % interval of a median, of any kind that assumes nothing about how they
are distributed: even from the least to the most of three samples holds it in three of four runs only. Such rows say
their range instead, and how often one holds the median (`range_coverage`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: A modified z-score above this labels an outlier (Iglewicz and Hoaglin, 1993).
OUTLIER_SCORE = 3.5
#: The least and the most of fewer hold the median in less than 95 % of runs.
LEAST_FOR_INTERVAL = 6
#: What an exact test decides at, one-sided.
LEVEL = 0.05
#: Scales the MAD of a normal distribution to its standard deviation.
_MAD_TO_SIGMA = 1.4826


class Summary(NamedTuple):
    """Location and spread of `n` samples, in the unit of the samples."""

    n: int
    median: float
    mad: float
    iqr: float
    min: float
    max: float


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises ValueError for no values."""
    if not values:
        raise ValueError("no samples to take the median of")
    return float(np.median(np.asarray(values, dtype=np.float64)))


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median, unscaled."""
    centre = median(values)
    return median([abs(value - centre) for value in values])


def iqr(values: Sequence[float]) -> float:
    """Distance between the quartiles, linearly interpolated. Raises ValueError for no values."""
    if not values:
        raise ValueError("no samples to take quartiles of")
    low, high = np.percentile(np.asarray(values, dtype=np.float64), [25.0, 75.0])
    return float(high - low)


def summarise(values: Sequence[float]) -> Summary:
    """All of the above. Raises ValueError for no values."""
    return Summary(len(values), median(values), mad(values), iqr(values), float(min(values)), float(max(values)))


def outliers(values: Sequence[float]) -> list[bool]:
    """True for each value whose modified z-score passes OUTLIER_SCORE. Outliers are labelled, never removed.

    Fewer than four values, or values of which most are equal (MAD 0), give no basis to call anything an outlier.
    """
    if len(values) < 4:
        return [False] * len(values)
    centre, spread = median(values), mad(values)
    if spread == 0.0:
        return [False] * len(values)
    return [abs(value - centre) / (_MAD_TO_SIGMA * spread) > OUTLIER_SCORE for value in values]


def paired_ratios(samples: Sequence[float], ceilings: Sequence[float]) -> list[float]:
    """Sample by sample, the share of the ceiling that was measured in the same round."""
    if len(samples) != len(ceilings):
        raise ValueError(f"{len(samples)} samples cannot be paired with {len(ceilings)} ceilings")
    if any(ceiling <= 0.0 for ceiling in ceilings):
        raise ValueError("a ceiling is not positive")
    return [sample / ceiling for sample, ceiling in zip(samples, ceilings, strict=True)]


def median_ci95(values: Sequence[float]) -> tuple[float, float] | None:
    """Exact interval of the median between two order statistics, the narrowest of at least 95 % that is symmetrical;
    None for fewer than LEAST_FOR_INTERVAL values.

    How many of n independent samples lie below their true median is binomial (n, 1/2), whatever their distribution, so
    that the k-th smallest and the k-th largest hold it with probability 1 - 2 P(fewer than k lie below) or more where
    it is not continuous (Thompson 1936; David and Nagaraja, Order Statistics, 3rd ed., section 7.1).
    """
    n = len(values)
    if n < LEAST_FOR_INTERVAL:
        return None
    # In whole numbers: twice the ways for fewer than k to lie below, of 2^n, have to be at most one in 20.
    k, below = 0, 1
    while 2 * 20 * below <= 2**n:
        k += 1
        below += math.comb(n, k)
    ordered = sorted(values)
    return float(ordered[k - 1]), float(ordered[n - k])


def spread(values: Sequence[float]) -> float | None:
    """Half the width of the median's interval over the median; None where there is no interval, or the median is 0."""
    interval, centre = median_ci95(values), median(values)
    return None if interval is None or centre == 0 else (interval[1] - interval[0]) / 2 / abs(centre)


def range_coverage(n: int) -> float:
    """How often the least and the most of `n` samples hold the median between them: 0.75 for three."""
    return 1 - 2.0 ** (1 - n) if n else 0.0


def sign_test(n: int) -> float:
    """How likely it is at most that all of `n` samples lie on one named side of a value when their median does not:
    2^-n, the one-sided value of the exact sign test."""
    return 0.5**n


def permutation_test(above: Sequence[float], below: Sequence[float]) -> float:
    """How likely it is that all of one group lie above all of the other by chance, when nothing but chance divides
    the samples into groups: one of the ways to divide them, 1/20 for three and three; 1 where they overlap."""
    if not above or not below or min(above) <= max(below):
        return 1.0
    return 1 / math.comb(len(above) + len(below), len(above))


def ratio_of_medians_ci95(
    first: Sequence[float], second: Sequence[float], resamples: int = 4000, seed: int = 0
) -> tuple[float, float] | None:
    """95 % percentile-bootstrap interval of median(second) / median(first), of samples that were not taken in pairs:
    each side is resampled on its own. None where a side has fewer than LEAST_FOR_INTERVAL. Raises
    ValueError where a sample is not positive.
    """
    if min(len(first), len(second)) < LEAST_FOR_INTERVAL:
        return None
    below, above = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if below.min() <= 0.0 or above.min() <= 0.0:
        raise ValueError("a sample is not positive, and a ratio needs both sides to be")
    random = np.random.default_rng(seed)
    medians = [
        np.median(values[random.integers(0, len(values), size=(resamples, len(values)))], axis=1)
        for values in (below, above)
    ]
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    return float(low), float(high)
