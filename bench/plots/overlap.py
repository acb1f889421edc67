"""How compute and transfer lie over each other, from what the records hold.

Records of pipelines hold the moments of single layers, which are drawn as they were (timeline.py). Those of before, and
of steps and batches, hold the time of a layer's compute and of its transfer, each alone, of a run's layers (the slope),
and how long the consumer stood still. Of these this is the budget of one layer, step or batch in the steady state, and
no trace: bars begin together where in a run they are shifted against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench import results, stats, table
from bench.plots import style, timeline
from bench.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A row that takes this many times the middle one is cut at the edge, with its figure beside it.
_FAR = 4.0


class Budget(NamedTuple):
    """Seconds of one layer or step; None where the records do not say."""

    label: str
    compute_s: float
    transfer_s: float | None
    stall_s: float | None
    measured_s: float
    predicted_s: float | None


def budget(record: Record) -> Budget | None:
    """Of a measured row; None for a scenario without compute."""
    found = record.derived or {}
    stall = stats.median(record.figures["stall_s"]) if record.figures.get("stall_s") else None
    if record.verb == "pipeline":
        each = stall / found["long_layers"] if stall is not None else None
        return Budget(record.loader, found["compute_s"], found["transfer_s"], each, found["slope_s"], None)
    if record.verb == "train":
        each = stall / found["steps"] if stall is not None else None
        transfer = found["reads_per_step"] * found["transfer_s"]
        return Budget(record.loader, found["resident_s"], transfer, each, found["measured_s"], found.get("predicted_s"))
    if record.verb == "epoch" and "compute_s" in found:
        return Budget(record.loader, found["compute_s"], None, found["stall_s"], found["step_s"], None)
    return None


def draw(records: Sequence[Record], path: Path) -> tuple[Path, str] | None:
    """One panel for each part of the run; None where nothing is computed. Rows without moments are not among those that
    have them, as their lanes would be empty."""
    if watched := [record for record in records if timeline.moments(record) is not None]:
        return timeline.draw(watched, path)
    rows = [(record, found) for record in records if (found := budget(record)) is not None]
    if not rows:
        return None
    parts = list(dict.fromkeys(results.part(record) for record, _ in rows))
    of_part = {
        part: sorted((b for record, b in rows if results.part(record) == part), key=lambda b: b.measured_s)
        for part in parts
    }
    made, panels = style.figure([0.35 + 0.42 * len(of_part[part]) for part in parts])
    longest = [max(b.measured_s, b.compute_s + (b.transfer_s or 0.0)) for _, b in rows]
    limit = 1.06 * max(value for value in longest if value <= _FAR * stats.median(longest))
    for part, panel in zip(parts, panels, strict=True):
        _panel(panel, of_part[part], part, limit)
    verb = records[0].verb
    what = {"pipeline": "layer", "train": "step", "epoch": "batch"}[verb]
    panels[-1].set_xlabel(f"ms a {what}")
    panels[-1].set_xlim(0, 1e3 * limit)
    marks = style.labelled(panels)
    order = ("compute alone", "stall", "transfer alone", "measured", "predicted", "one after the other")
    style.legend(made, {name: marks[name] for name in order if name in marks})
    style.heading(made, f"{records[0].scenario}, {records[0].env.get('gpu') or records[0].device}: one {what}")
    style.save(made, path)
    alone = "compute and transfer each alone" if any(b.transfer_s is not None for _, b in rows) else "compute alone"
    return path, (
        f"The budget of one {what} in the steady state, medians: {alone}, and what a {what} takes with everything. "
        "This is no trace: bars begin together. Stalls, in which the "
        "consumer stood still, are counted over the whole run with its beginning, and so do not add up with the "
        "compute to the time measured."
    )


def _panel(panel: Axes, rows: Sequence[Budget], part: str, limit: float) -> None:
    seen: set[str] = set()

    def label(text: str) -> str:
        new = text not in seen
        seen.add(text)
        return text if new else "_"

    for number, row in enumerate(rows):
        up, down = number - 0.17, number + 0.17
        end = 1e3 * limit
        panel.barh(up, 1e3 * row.compute_s, 0.3, color=style.VERMILION, label=label("compute alone"))
        if row.stall_s:
            panel.barh(
                up, 1e3 * row.stall_s, 0.3, left=1e3 * row.compute_s, facecolor=style.BACKGROUND, hatch="////",
                edgecolor=style.VERMILION, linewidth=0.6, label=label("stall"),
            )  # fmt: skip
        if row.transfer_s is not None:
            panel.barh(down, 1e3 * row.transfer_s, 0.3, color=style.BLUE, label=label("transfer alone"))
            both = row.compute_s + row.transfer_s
            if both <= limit:
                panel.plot(
                    1e3 * both, number, "D", color=style.DIM, markerfacecolor="none", markersize=5, linestyle="none",
                    label=label("one after the other"),
                )  # fmt: skip
        if row.measured_s <= limit:
            panel.plot(
                [1e3 * row.measured_s] * 2, [number - 0.4, number + 0.4], color=style.INK, linewidth=2,
                label=label("measured"),
            )  # fmt: skip
        else:
            said = f"{table.milliseconds(row.measured_s)} ms measured →"
            panel.text(end, up, said, ha="right", va="center", fontsize=8.5, color=style.INK)
        if row.predicted_s is not None and row.predicted_s <= limit:
            panel.plot(
                [1e3 * row.predicted_s] * 2, [number - 0.4, number + 0.4], color=style.GREEN, linewidth=2,
                linestyle=(0, (2, 1.5)), label=label("predicted"),
            )  # fmt: skip
    panel.set_ylim(len(rows) - 0.45, -0.55)
    style.ticks_at(panel.yaxis, range(len(rows)), [row.label for row in rows])
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=style.GRID, linewidth=0.8)
    if part:
        panel.set_title(part, loc="left", fontsize=9.5, color=style.INK)
