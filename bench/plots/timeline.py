"""When each layer of a pipeline arrived and was computed with: two lanes a row, from the moments in its record.

The moments are of a run of their own (bench/moments.py), from its beginning on, so that the filling of the slots is
seen. Transfers take turns in the two halves of their lane: one may have begun before the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import results, stats
from bench.moments import Moments
from bench.plots import style
from bench.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What is shown: so many layers of the middle row of all, so that a slow one leaves the others visible.
_LAYERS = 8
#: Of the width: a bar that is narrower has no number.
_LEAST = 0.02


def moments(record: Record) -> Moments | None:
    """Those of a row; None where it has none."""
    found: Moments | None = (record.derived or {}).get("moments")
    return found


def draw(records: Sequence[Record], path: Path) -> tuple[Path, str]:
    """One panel for each part of the run. Every record has moments."""
    parts = list(dict.fromkeys(results.part(record) for record in records))
    rows = {part: [record for record in records if results.part(record) == part] for part in parts}
    made, panels = style.figure([0.3 + 0.72 * len(rows[part]) for part in parts], sharex=False)
    for part, panel in zip(parts, panels, strict=True):
        _panel(panel, [(record.loader, found) for record in rows[part] if (found := moments(record)) is not None])
        panel.set_title(part, loc="left", fontsize=9.5, color=style.INK)
    panels[-1].set_xlabel("ms from the beginning of the run")
    marks = style.labelled(panels)
    order = ("transfer", "compute")
    style.legend(made, {name: marks[name] for name in order if name in marks})
    style.heading(made, f"{records[0].scenario}, {records[0].env.get('gpu') or records[0].device}: the first layers")
    style.save(made, path)
    return path, (
        "When each layer arrived (upper lane of a row) and was computed with (lower lane), by marks on the device, in "
        "one run beside those that are timed; numbers are the layers in the order of use. A transfer begins when it "
        "was asked for and its slot is free, and shares the way with the one before it until that has ended. Gaps in "
        "the lower lane are stalls."
    )


def _panel(panel: Axes, rows: Sequence[tuple[str, Moments]]) -> None:
    limit = stats.median([found["compute"][: _LAYERS + 1][-1][1] for _, found in rows])
    for number, (_, found) in enumerate(rows):
        for step, span in enumerate(found["transfer"]):
            _bar(panel, number - (0.1 if step % 2 else 0.28), 0.16, span, step, limit, "transfer")
        for step, span in enumerate(found["compute"]):
            _bar(panel, number + 0.17, 0.32, span, step, limit, "compute")
    panel.set_xlim(0, 1e3 * limit)
    panel.set_ylim(len(rows) - 0.45, -0.55)
    style.ticks_at(panel.yaxis, range(len(rows)), [name for name, _ in rows])
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=style.GRID, linewidth=0.8)


def _bar(panel: Axes, at: float, height: float, span: Sequence[float], step: int, limit: float, lane: str) -> None:
    """One layer in one lane; a lighter one for each second layer, so that neighbours are told apart."""
    begin, end = span[0], min(span[1], limit)
    if begin >= limit:
        return
    colour = style.BLUE if lane == "transfer" else style.VERMILION
    panel.barh(
        at, 1e3 * (end - begin), height, left=1e3 * begin, color=colour, alpha=0.55 if step % 2 else 1.0,
        linewidth=0, label="_" if step else lane,
    )  # fmt: skip
    if end - begin > _LEAST * limit:
        panel.text(
            5e2 * (begin + end), at, str(step), ha="center", va="center_baseline", fontsize=6.5,
            color=style.INK if step % 2 else style.BACKGROUND,
        )  # fmt: skip
