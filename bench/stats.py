"""Robust statistics of a few samples. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: A modified z-score above this labels an outlier (Iglewicz and Hoaglin, 1993).
OUTLIER_SCORE = 3.5
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


def bootstrap_ci95(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> tuple[float, float] | None:
    """95 % percentile-bootstrap interval of the median; None for fewer than three values, which cannot carry one."""
    if len(values) < 3:
        return None
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(resamples, len(data)))
    low, high = np.percentile(np.median(data[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def ratio_of_medians_ci95(
    first: Sequence[float], second: Sequence[float], resamples: int = 4000, seed: int = 0
) -> tuple[float, float] | None:
    """95 % percentile-bootstrap interval of median(second) / median(first), of samples that were not taken in pairs:
    each side is resampled on its own. None where a side has fewer than three. Raises ValueError where a sample is not
    positive.
    """
    if min(len(first), len(second)) < 3:
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
