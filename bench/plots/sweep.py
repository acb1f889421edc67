"""Throughput against a knob that was swept, with the ceiling of each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import results, stats
from bench.plots import style
from bench.record import MOST_SHARE, ceiling_believed
from bench.sweeps import Line, Sweep, short, value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More lines than this cannot be told apart in one panel; the caption says what was left out.
_MOST = len(style.SERIES)
#: Two points are a comparison, which a table makes better.
LEAST_POINTS = 3


def values(sweep: Sweep) -> list[float]:
    """The knob's values, ascending."""
    return sorted({at for line in sweep.lines for at, _ in line.points})


def draw(sweep: Sweep, path: Path) -> tuple[Path, str]:
    """A panel for each loader where other settings were swept too, else one for all."""
    first = sweep.lines[0].points[0][1][0]
    split = any(line.fixed for line in sweep.lines)
    loaders = list(dict.fromkeys(line.loader for line in sweep.lines)) if split else [""]
    made, panels = style.figure([2.9] * len(loaders))
    known, name = values(sweep), short(sweep.knob)
    # Zero has no place on a logarithmic axis, and beside it a linear one presses the rest together.
    spaced = min(known) <= 0
    place = {at: float(number) if spaced else at for number, at in enumerate(known)}
    left_out = 0
    for loader, panel in zip(loaders, panels, strict=True):
        lines = [line for line in sweep.lines if not split or line.loader == loader]
        lines.sort(key=lambda line: -max(_middle(line)))
        left_out += max(len(lines) - _MOST, 0)
        _panel(panel, lines[:_MOST], loader, place)
        panel.set_ylabel("GB/s")
    last = panels[-1]
    if spaced:
        last.set_xlim(-0.5, len(known) - 0.5)
    elif style.spread_wide(known):
        last.set_xscale("log", base=2)
    style.ticks_at(last.xaxis, list(place.values()), [value(sweep.knob, at) for at in known])
    last.set_xlabel(f"{name}, equally spaced" if spaced else name)
    style.heading(made, f"{_what(sweep)}, {first.cache} cache, {first.env.get('gpu') or first.device}")
    style.save(made, path)
    caption = f"Throughput against {name}: small marks are samples, lines join the medians. "
    caption += f"Bars: the ceilings of the rounds of each point ({first.ceiling['kind']}), with their median across."
    if any(not ceiling_believed(record) for line in sweep.lines for _, found in line.points for record in found):
        caption += f" Open marks: more than {MOST_SHARE:g} % of the ceilings of its own rounds, which is not believed."
    if left_out:
        caption += f" {left_out} slower lines of other settings are left out."
    return path, caption


def _panel(panel: Axes, lines: Sequence[Line], loader: str, place: Mapping[float, float]) -> None:
    # Where each line has a limit of its own, such as ios of another size, it has the line's colour.
    apart = _apart(lines)
    drawn: set[tuple[float, tuple[float, ...]]] = set()
    for number, line in enumerate(lines):
        colour, marker = style.SERIES[number], style.MARKERS[number]
        for at, records in line.points:
            for record in records:
                limits = tuple(record.ceiling["samples"])
                if limits and (place[at], limits) not in drawn:
                    label = "" if drawn else "its ceiling" if apart else "ceiling"
                    drawn.add((place[at], limits))
                    _ceiling(panel, place[at], limits, colour if apart else style.INK, label)
            dots = [rate for record in records for rate in results.rates(record)]
            panel.plot([place[at]] * len(dots), dots, marker, color=colour, markersize=3, alpha=0.45, linestyle="none")
        said = line.fixed if loader and line.fixed else line.loader
        middle = _middle(line)
        x = [place[at] for at, _ in line.points]
        panel.plot(x, middle, color=colour, marker=marker, markersize=5.5, label=said)
        for (at, records), rate in zip(line.points, middle, strict=True):
            if not all(map(ceiling_believed, records)):
                panel.plot(place[at], rate, marker, color=colour, markerfacecolor=style.BACKGROUND, markersize=5.5)
    if not all(ceiling_believed(record) for line in lines for _, records in line.points for record in records):
        panel.plot(
            [], [], "o", color=style.INK, markerfacecolor=style.BACKGROUND, markersize=5.5, label="ceiling not believed"
        )
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", color=style.GRID, linewidth=0.8)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5, labelcolor=style.INK)
    if loader:
        panel.set_title(loader, loc="left", fontsize=9.5, color=style.INK)


def _what(sweep: Sweep) -> str:
    """The scenario, and of transfers the ios where all points have the same."""
    every = [record for line in sweep.lines for _, records in line.points for record in records]
    ios = {results.ios(record) for record in every}
    return ", ".join(filter(None, [sweep.scenario, *(ios if len(ios) == 1 else ())]))


def _ceiling(panel: Axes, at: float, limits: Sequence[float], colour: str, label: str) -> None:
    """From the least to the most of a point's rounds, and the median."""
    panel.plot([at, at], [min(limits), max(limits)], color=colour, linewidth=7, alpha=0.18, solid_capstyle="butt")
    panel.plot(at, stats.median(limits), "_", color=colour, markersize=16, markeredgewidth=1.4, label=label or None)


def _apart(lines: Sequence[Line]) -> bool:
    """Whether there are transfers that differ in what their limit is of, at one place of the axis."""
    limits: dict[float, set[tuple[object, ...]]] = {}
    for line in lines:
        for at, records in line.points:
            found = limits.setdefault(at, set())
            for record in records:
                if record.verb == "transfer":
                    scenario = record.config["scenario"]
                    found.add((*scenario["ops"], *scenario["io_bytes"]))
    return any(len(kinds) > 1 for kinds in limits.values())


def _middle(line: Line) -> list[float]:
    return [stats.median([rate for r in records for rate in results.rates(r)]) for _, records in line.points]
