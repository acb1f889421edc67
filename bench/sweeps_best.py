"""Which of the settings that were swept is the fastest, for each loader, and whether the next one may be as fast. Pure.

Only what a user can choose is named: options of a loader, threads, ios in flight, the size of an io. Of what was swept
beside, other options of the same loader compete; another operation, record or file is other work, with a line of its
own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from bench import results, stats, sweeps, table
from bench.record import Record
from bench.sweeps import Sweep

#: Beside the options of loaders.
_CHOSEN = ("scenario.threads", "scenario.depth", "scenario.registered")
_KNOBS = (*_CHOSEN, "scenario.io_bytes")


class Setting(NamedTuple):
    """A point of a sweep: what it is called, and the rates of its samples in GB/s."""

    says: str
    rates: list[float]

    @property
    def median(self) -> float:
        return stats.median(self.rates)

    @property
    def bounds(self) -> tuple[float, float]:
        """The median's interval, or the samples' range."""
        return stats.median_ci95(self.rates) or (min(self.rates), max(self.rates))

    def __str__(self) -> str:
        low, high = self.bounds
        few = len(self.rates) < stats.LEAST_FOR_INTERVAL
        kind = f"range (n={len(self.rates)})" if few else "95 % CI"
        return f"{self.says}: {table.rate(self.median)} GB/s, {kind} {low:.2f}-{high:.2f}"


def lines(records: Sequence[Record]) -> list[str]:
    """A line for each loader and work of which a setting was swept; empty where none was."""
    found: dict[str, None] = {}
    named: set[frozenset[int]] = set()
    for sweep in sweeps.find(records):
        if not sweep.knob.startswith("loader.") and sweep.knob not in _KNOBS:
            continue
        for (loader, work), points in _competing(sweep).items():
            # A grid of two knobs is two sweeps of the same points.
            same = frozenset(id(record) for _, rows in points for record in rows)
            settings = [Setting(says, [rate for row in rows for rate in results.rates(row)]) for says, rows in points]
            settings = sorted((each for each in settings if each.rates), key=lambda each: -each.median)
            if same in named or len(settings) < 2:
                continue
            named.add(same)
            best, second = settings[:2]
            apart = second.bounds[1] < best.bounds[0]
            end = "lies below it" if apart else "overlaps, so that either may be the best"
            said = f"Best of {len(settings)} for {', '.join(filter(None, (sweep.scenario, loader, work)))}: {best}."
            found[f"{said} The next, {second}, {end}."] = None
    return list(found)


def _competing(sweep: Sweep) -> dict[tuple[str, str], list[tuple[str, list[Record]]]]:
    """The points of each loader and work, named by what can be chosen."""
    keys = {key for line in sweep.lines for key in line.beside}
    differing = [key for key in sorted(keys) if len({_plain(line.beside.get(key)) for line in sweep.lines}) > 1]
    # Threads and ios in flight belong together, so that one is named with the other.
    chosen = [key for key in sorted(keys) if key in _CHOSEN or (key in differing and key.startswith("loader."))]
    found: dict[tuple[str, str], list[tuple[str, list[Record]]]] = {}
    for line in sweep.lines:
        work = ", ".join(_said(key, line.beside.get(key)) for key in differing if key not in chosen)
        for at, rows in line.points:
            names = [_said(sweep.knob, at), *(_said(key, line.beside.get(key)) for key in chosen if key in line.beside)]
            found.setdefault((line.loader, work), []).append((", ".join(names), rows))
    return found


def _said(key: str, value: object) -> str:
    return f"{sweeps.short(key)} {sweeps.value(key, value)}"


def _plain(value: object) -> str:
    return json.dumps(value, default=str)
