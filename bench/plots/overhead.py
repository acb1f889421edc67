"""What streaming a layer costs, against the number of tokens it is computed with: from link-bound to compute-bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import stats
from bench.plots import style
from bench.record import Record
from bench.report_layers import signed
from bench.table import milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A route this many times the middle value away would press all others into one line; its figures are written instead.
_FAR = 4.0
#: Overheads below this, in per cent, never count as far from each other.
_LEAST_OVERHEAD = 3.0

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def draw(records: Sequence[Record], path: Path) -> tuple[Path, str] | None:
    """Time of a layer above, overhead below; None where there are fewer than two numbers of tokens to draw against."""
    found = [record.derived for record in records if record.verb == "pipeline" and record.derived]
    tokens = sorted({each["tokens"] for each in found})
    if len(tokens) < 2:
        return None
    rows = {
        name: sorted((r.derived for r in records if r.loader == name and r.derived), key=lambda each: each["tokens"])
        for name in dict.fromkeys(record.loader for record in records)
    }
    made, (above, below) = style.figure([2.5, 2.5])
    _limits(above, found, tokens)
    middle = stats.median([each["slope_s"] for each in found])
    slow = [name for name, mine in rows.items() if min(each["slope_s"] for each in mine) > _FAR * middle]
    _lines(above, rows, slow, lambda each: 1e3 * each["slope_s"])
    _beside(above, rows, slow, lambda each: f"{milliseconds(each['slope_s'])}", "ms")
    above.set_ylim(bottom=0)
    usual = max(stats.median([abs(100 * each["overhead"]) for each in found]), _LEAST_OVERHEAD)
    far = [name for name, mine in rows.items() if min(abs(100 * each["overhead"]) for each in mine) > _FAR * usual]
    _lines(below, rows, far, lambda each: 100 * each["overhead"], interval="overhead")
    _beside(below, rows, far, lambda each: signed(each["overhead"]), "%")
    below.axhline(0, color=style.INK, linewidth=0.8)
    above.set_ylabel("ms a layer")
    below.set_ylabel("overhead, %")
    below.set_xlabel("tokens")
    below.set_xscale("log", base=2)
    style.ticks_at(below.xaxis, tokens, [f"{count:,}" for count in tokens])
    for panel in (above, below):
        panel.grid(axis="y", color=style.GRID, linewidth=0.8)
    style.legend(made, style.labelled([above, below]))
    first = records[0]
    hardware = first.env.get("gpu") or first.device
    style.heading(
        made, f"{first.scenario}, {found[0]['pass']}, layers of {found[0]['layer_bytes'] / 1e6:g} MB, {hardware}"
    )
    style.save(made, path)
    return path, (
        "Above: what each further layer takes (the slope), with compute alone and the best route's transfer alone. "
        "Below: the slope's overhead over the slower of compute and transfer of the same round, "
        "with 95 % intervals; dotted: the range of fewer than six samples."
    )


def _limits(panel: Axes, found: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> None:
    of = [[each for each in found if each["tokens"] == count] for count in tokens]
    compute = [1e3 * stats.median([each["compute_s"] for each in rows]) for rows in of]
    transfer = [1e3 * min(each["transfer_s"] for each in rows) for rows in of]
    panel.plot(tokens, compute, color=style.INK, linestyle=(0, (5, 2)), linewidth=1, label="compute alone")
    panel.plot(tokens, transfer, color=style.INK, linestyle=(0, (1, 2)), linewidth=1.4, label="best transfer alone")


def _lines(
    panel: Axes, rows: Rows, far: Sequence[str], value: Callable[[Mapping[str, Any]], float], interval: str = ""
) -> None:
    for number, (name, mine) in enumerate(rows.items()):
        if name in far:
            continue
        colour, marker = style.SERIES[number % 8], style.MARKERS[number % 8]
        # Intervals at one number of tokens would hide each other: each route stands a little beside the last.
        x = [each["tokens"] * (1 + 0.012 * (number - (len(rows) - 1) / 2)) for each in mine]
        panel.plot(x, [value(each) for each in mine], color=colour, marker=marker, markersize=5, label=name)
        for at, each in zip(x, mine, strict=True):
            ends = each.get(f"{interval}_ci95") or each.get(f"{interval}_range")
            if interval and ends:
                style_of = "-" if each.get(f"{interval}_ci95") else (0, (1, 1))
                panel.plot([at, at], [100 * end for end in ends], color=colour, linewidth=1.1, linestyle=style_of)


def _beside(panel: Axes, rows: Rows, far: Sequence[str], said: Callable[[Mapping[str, Any]], str], unit: str) -> None:
    lines = [f"{name}: {' / '.join(said(each) for each in rows[name])} {unit}, beyond this axis" for name in far]
    if lines:
        panel.set_title("\n".join(lines), loc="right", fontsize=8.5, color=style.DIM)
