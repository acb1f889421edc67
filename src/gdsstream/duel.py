"""Is one setting really faster than another? Pairs of measurements in turns, and what follows from them. Pure.

What else a machine does meets both of a pair, so that their ratio says more than either figure. A challenger has won
when even the lower bound of the median ratio, at 95 % confidence, lies above 1, and the median by a margin that is
worth a profile. The bound is one by order statistics, which asks nothing of the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95
#: A smaller gain is not worth settings that have to be looked after.
LEAST_GAIN = 1.03


@dataclass(frozen=True, slots=True)
class Duel:
    """Default and challenger, pair by pair, in GB/s."""

    default: tuple[float, ...]
    tuned: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [tuned / default for default, tuned in zip(self.default, self.tuned, strict=True)]

    @property
    def gain(self) -> float | None:
        """The median of the pairs' ratios; None without pairs."""
        return median(self.ratios) if self.default else None

    @property
    def at_least(self) -> float | None:
        """What the ratio's median exceeds with 95 % confidence; None for too few pairs to say."""
        return lower_bound(self.ratios)

    @property
    def won(self) -> bool:
        """Whether the challenger is really better."""
        gain, bound = self.gain, self.at_least
        return gain is not None and bound is not None and bound > 1 and gain >= LEAST_GAIN


def lower_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """What the median of the distribution exceeds at that confidence; None where the values are too few.

    The k-th smallest of n values is above the median only if fewer than k are below it, each of which is as likely as
    heads: P = sum of C(n, i) / 2^n for i < k.
    """
    ordered, n = sorted(values), len(values)
    tail, found = 0.0, None
    for k in range(n):
        tail += comb(n, k) / 2**n
        if tail > 1 - confidence:
            break
        found = ordered[k]
    return found


def spread(values: Sequence[float]) -> float:
    """Median absolute deviation from the median."""
    centre = median(values)
    return median(abs(value - centre) for value in values)


__all__ = ["CONFIDENCE", "LEAST_GAIN", "Duel", "lower_bound", "spread"]
