"""What a pipeline costs beyond compute and transfer: slope overhead and fill. Pure: numbers in, numbers out.

A run of n layers takes T(n) = fill + n x slope. Two runs of different length tell the two apart: the slope is what each
further layer costs, and the fill what the pipeline takes to get going (and to empty), once. No schedule makes the slope
less than the slower of computing a layer and bringing one in, each alone; what it is above that is the overhead. With
20 layers the fill alone would look like 2 to 4 % of it.

Compute, transfer and both runs are measured in the same round, so that drift of the machine cancels in each ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench import stats


class Round(NamedTuple):
    """One round of one route: seconds for a layer of compute and of transfer alone, and of the two runs."""

    compute_s: float
    transfer_s: float
    short_s: float
    long_s: float

    @property
    def bound_s(self) -> float:
        """The least that a layer can take."""
        return max(self.compute_s, self.transfer_s)

    def slope_s(self, short: int, long: int) -> float:
        """Seconds that each further layer takes. Raises ValueError unless `long` is more than `short`."""
        if long <= short:
            raise ValueError(f"runs of {short} and {long} layers have no slope; the second has to be longer")
        return (self.long_s - self.short_s) / (long - short)

    def fill_s(self, short: int, long: int) -> float:
        """Seconds that a run takes beside its layers."""
        return self.short_s - short * self.slope_s(short, long)


def summarise(rounds: Sequence[Round], short: int, long: int) -> dict[str, Any]:
    """Medians over the rounds in seconds, and the overhead as a ratio, 0.01 being 1 %, with interval and range.

    The overhead is the median of the ratios within the rounds; the interval is None for fewer than six of them.
    Raises ValueError for no rounds.
    """
    slopes = [each.slope_s(short, long) for each in rounds]
    ratios = stats.paired_ratios(slopes, [each.bound_s for each in rounds])
    fills = [each.fill_s(short, long) for each in rounds]
    return {
        "compute_s": stats.median([each.compute_s for each in rounds]),
        "transfer_s": stats.median([each.transfer_s for each in rounds]),
        "slope_s": stats.median(slopes),
        "overhead": stats.median(ratios) - 1,
        **_bounds("overhead", ratios),
        "fill_s": stats.median(fills),
        "fill_mad_s": stats.mad(fills),
    }


def difference(measured_s: Sequence[float], predicted_s: Sequence[float]) -> dict[str, Any]:
    """How far measured times lie from those predicted in the same rounds: a ratio, 0.05 being 5 % longer."""
    ratios = stats.paired_ratios(measured_s, predicted_s)
    return {
        "measured_s": stats.median(measured_s),
        "predicted_s": stats.median(predicted_s),
        "difference": stats.median(ratios) - 1,
        **_bounds("difference", ratios),
    }


def _bounds(name: str, ratios: Sequence[float]) -> dict[str, list[float] | None]:
    interval = stats.median_ci95(ratios)
    return {
        f"{name}_ci95": None if interval is None else [bound - 1 for bound in interval],
        f"{name}_range": [min(ratios) - 1, max(ratios) - 1],
    }


def lengths(short: int, long: int, cycle: int, layer_s: float, limit_s: float) -> tuple[int, int]:
    """How many layers the two runs get, so that both together take about `limit_s` at `layer_s` a layer.

    Those asked for where that is short enough; else as many whole cycles of `cycle` layers as fit in the same
    proportion, at least one and two. Raises ValueError where those asked for are no whole cycles themselves.
    """
    if short % cycle or long % cycle or not 0 < short < long:
        raise ValueError(f"runs of {short} and {long} layers are no whole cycles of {cycle}, the second the longer one")
    total_s = (short + long) * layer_s
    if total_s <= limit_s:
        return short, long
    share = limit_s / total_s
    fewer = max(int(short * share) // cycle, 1) * cycle
    return fewer, max(int(long * share) // cycle * cycle, fewer + cycle)
