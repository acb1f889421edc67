"""Every sample of a run as a dot, so that drift, outliers and two clouds in one median can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import peers, results, table
from bench.measure import NOT_COLD
from bench.plots import style
from bench.record import Record, ceiling_believed

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_ROW_INCHES = 0.3
#: How far from the middle of its row the first and the last sample are.
_REACH = 0.3


def draw(records: Sequence[Record], path: Path) -> tuple[Path, str]:
    """One panel for each part of the run, a row for each loader, fastest first."""
    parts = list(dict.fromkeys(results.part(record) for record in records))
    rows = {part: sorted((r for r in records if results.part(r) == part), key=lambda r: -_median(r)) for part in parts}
    made, panels = style.figure([0.35 + _ROW_INCHES * len(rows[part]) for part in parts])
    for part, panel in zip(parts, panels, strict=True):
        _panel(panel, rows[part], part)
    panels[-1].set_xlabel("GB/s")
    panels[0].set_xlim(left=0)
    first = records[0]
    style.heading(made, f"{first.scenario}, {first.cache} cache, {first.env.get('gpu') or first.device}: every sample")
    style.legend(made, _legend(records))
    style.save(made, path)
    caption = (
        "A dot is a sample, the first at the top of its row; the bar is the median. Outliers are counted. "
        f"The ceiling ({first.ceiling['kind']}) is drawn as its median and range. At the right: median, share of it."
    )
    if not all(map(ceiling_believed, records)):
        caption += " ?: the ceiling is not believed."
    return path, caption


def _panel(panel: Axes, rows: Sequence[Record], part: str) -> None:
    limits = rows[0].ceiling["samples"]
    if limits:
        panel.axvspan(min(limits), max(limits), color=style.GRID, linewidth=0)
        panel.axvline(rows[0].ceiling["gb_per_s"], color=style.INK, linestyle=(0, (4, 3)), linewidth=1)
    for number, record in enumerate(rows):
        colour = _colour(record)
        values = results.all_rates(record)
        step = 2 * _REACH / max(len(values) - 1, 1)
        for index, (value, labels) in enumerate(zip(values, record.sample_labels, strict=True)):
            height = number - _REACH + index * step if len(values) > 1 else number
            if NOT_COLD in labels:
                panel.plot(value, height, "x", color=style.DIM, markersize=4)
            else:
                face = style.BACKGROUND if "outlier" in labels else colour
                panel.plot(value, height, "o", color=colour, markerfacecolor=face, markersize=3.6, markeredgewidth=0.9)
        panel.plot([_median(record)] * 2, [number - 0.42, number + 0.42], color=colour, linewidth=2, alpha=0.55)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    style.ticks_at(panel.yaxis, range(len(rows)), [record.loader for record in rows])
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=style.GRID, linewidth=0.8)
    beside = panel.secondary_yaxis("right")
    beside.tick_params(axis="y", length=0, labelcolor=style.INK, labelsize=8.5)
    beside.spines["right"].set_visible(False)
    # Figure spaces are as wide as digits.
    said = [
        f"{table.rate(_median(r)):>5} GB/s{table.percent(r.pct_ceiling):>6} %{' ' if ceiling_believed(r) else '?':>2}"
        for r in rows
    ]
    said = [text.replace(" ", "\u2007") for text in said]
    style.ticks_at(beside.yaxis, range(len(rows)), said)
    if part:
        panel.set_title(part, loc="left", fontsize=9.5, color=style.INK)


def _legend(records: Sequence[Record]) -> dict[str, Artist]:
    """Of what there is to see in these records."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def dot(colour: str, marker: str = "o", face: str | None = None) -> Artist:
        return Line2D(
            [], [], color=colour, marker=marker, markerfacecolor=face or colour, markersize=4, linestyle="none"
        )

    colours = {_colour(record) for record in records}
    labels = {label for record in records for found in record.sample_labels for label in found}
    names = {
        "gdsstream": style.BLUE,
        "other libraries": style.VERMILION,
        "plain ios, written by hand": style.OLIVE,
        "the hardware alone": style.DIM,
    }
    shown: dict[str, Artist] = {name: dot(colour) for name, colour in names.items() if colour in colours}
    if "outlier" in labels:
        shown["outlier"] = dot(style.INK, face=style.BACKGROUND)
    if NOT_COLD in labels:
        shown["not cold, not counted"] = dot(style.DIM, "x")
    shown["ceiling"] = Line2D([], [], color=style.INK, linestyle=(0, (4, 3)), linewidth=1)
    shown["its range"] = Patch(color=style.GRID)
    return shown


def _colour(record: Record) -> str:
    if peers.is_plain(record):
        return style.OLIVE
    if peers.is_peer(record):
        return style.VERMILION
    return style.BLUE if peers.is_own(record) else style.DIM


def _median(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0
