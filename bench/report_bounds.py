"""The columns that say how sure a figure is: its 95 % interval, or the range of its samples where they are too few.

A range is never called an interval: the column's title, or in a table of both the cell, says of how many samples it is,
and a note how often such a range holds the median.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench import results, stats, table
from bench.record import Record
from bench.table import Column


class Bounds(NamedTuple):
    """From `low` to `high`, of `n` samples; an interval of 95 % unless n is below stats.LEAST_FOR_INTERVAL."""

    low: float
    high: float
    n: int

    @property
    def exact(self) -> bool:
        return self.n >= stats.LEAST_FOR_INTERVAL


def of_share(record: Record) -> Bounds | None:
    """Of the share of the ceiling, in per cent."""
    n = _n(record)
    if n >= stats.LEAST_FOR_INTERVAL:
        return _bounds(record.pct_ceiling_ci95, n)
    found = results.shares(record)
    return Bounds(100 * min(found), 100 * max(found), n) if len(found) > 1 else None


def of_derived(record: Record, name: str) -> Bounds | None:
    """Of what the scenario derived as `name`."""
    derived, n = record.derived or {}, _n(record)
    found = derived.get(f"{name}_{'ci95' if n >= stats.LEAST_FOR_INTERVAL else 'range'}")
    return _bounds(found, n) if n > 1 else None


def column(
    records: Sequence[Record], bounds: Callable[[Record], Bounds | None], shown: Callable[[Bounds], str], width: int
) -> Column:
    """The column of `bounds`, shown from that width of terminal on."""
    found = [each for each in map(bounds, records) if each is not None]
    few = any(not each.exact for each in found)
    mixed = few and any(each.exact for each in found)
    counts = sorted({each.n for each in found})

    def cell(record: Record) -> str:
        each = bounds(record)
        if each is None:
            return ""
        return f"{shown(each)} (n={each.n})" if mixed and not each.exact else shown(each)

    if mixed:
        return Column("95 % CI / range", cell, width)
    return Column(f"range (n={'-'.join(map(str, {counts[0]: 0, counts[-1]: 0}))})" if few else "95 % CI", cell, width)


def percents(each: Bounds) -> str:
    """Of bounds in per cent."""
    return f"{table.percent(each.low)}-{table.percent(each.high)}"


def share(records: Sequence[Record], width: int) -> Column:
    """The column of the shares of the ceiling."""
    return column(records, of_share, percents, width)


def notes(records: Sequence[Record]) -> list[str]:
    """What a range is worth, where there is one."""
    counts = sorted({_n(record) for record in records} & set(range(2, stats.LEAST_FOR_INTERVAL)))
    if not counts:
        return []
    said = ", ".join(f"{100 * stats.range_coverage(n):.4g} % (n={n})" for n in counts)
    return [f"range: the least and most of too few samples for a 95 % CI; it holds the true median in {said} of runs."]


def _bounds(ends: Sequence[float] | None, n: int) -> Bounds | None:
    return Bounds(ends[0], ends[1], n) if ends else None


def _n(record: Record) -> int:
    return int(record.gb_per_s["n"]) if record.gb_per_s else 0
