"""Throughput against a knob that was swept, with the ceiling of each point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import results, stats
from bench.plots import style
from bench.sweeps import Line, Sweep, short, value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More lines than this cannot be told apart in one panel; the caption says what was left out.
_MOST = len(style.SERIES)


def draw(sweep: Sweep, path: Path) -> tuple[Path, str]:
    """A panel for each loader where other settings were swept too, else one for all."""
    first = sweep.lines[0].points[0][1][0]
    split = any(line.fixed for line in sweep.lines)
    loaders = list(dict.fromkeys(line.loader for line in sweep.lines)) if split else [""]
    made, panels = style.figure([2.9] * len(loaders))
    left_out = 0
    for loader, panel in zip(loaders, panels, strict=True):
        lines = [line for line in sweep.lines if not split or line.loader == loader]
        lines.sort(key=lambda line: -max(_middle(line)))
        left_out += max(len(lines) - _MOST, 0)
        _panel(panel, lines[:_MOST], loader)
        panel.set_ylabel("GB/s")
    values = sorted({at for line in sweep.lines for at, _ in line.points})
    last, name = panels[-1], short(sweep.knob)
    if style.spread_wide(values):
        last.set_xscale("log", base=2)
    style.ticks_at(last.xaxis, values, [value(sweep.knob, at) for at in values])
    last.set_xlabel(name)
    style.heading(made, f"{sweep.scenario}, {first.cache} cache, {first.env.get('gpu') or first.device}")
    style.save(made, path)
    caption = f"Throughput against {name}: small marks are samples, lines join the medians. "
    caption += f"Dashed: the ceiling of the same run ({first.ceiling['kind']})."
    if left_out:
        caption += f" {left_out} slower lines of other settings are left out."
    return path, caption


def _panel(panel: Axes, lines: Sequence[Line], loader: str) -> None:
    # Where each line has a limit of its own, such as ios of another size, it has the line's colour.
    apart = _apart(lines)
    ceilings: dict[int | None, dict[float, list[float]]] = {}
    for number, line in enumerate(lines):
        colour, marker = style.SERIES[number], style.MARKERS[number]
        for at, records in line.points:
            found = ceilings.setdefault(number if apart else None, {}).setdefault(at, [])
            found.extend(rate for r in records for rate in r.ceiling["samples"])
            dots = [rate for record in records for rate in results.rates(record)]
            panel.plot([at] * len(dots), dots, marker, color=colour, markersize=3, alpha=0.45, linestyle="none")
        said = line.fixed if loader and line.fixed else line.loader
        panel.plot(
            [at for at, _ in line.points], _middle(line), color=colour, marker=marker, markersize=5.5, label=said
        )
    for of, limits in ceilings.items():
        known = sorted((at, stats.median(rates)) for at, rates in limits.items() if rates)
        colour = style.INK if of is None else style.SERIES[of]
        label = "ceiling" if of is None else "its ceiling" if of == 0 else None
        panel.plot(*zip(*known, strict=True), color=colour, linestyle=(0, (4, 3)), linewidth=1, label=label)
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", color=style.GRID, linewidth=0.8)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5, labelcolor=style.INK)
    if loader:
        panel.set_title(loader, loc="left", fontsize=9.5, color=style.INK)


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
