"""How all plots look. A plot carries its own light background, so that it reads the same on a light and a dark page.

Colours are told apart by people who see few of them (Okabe and Ito, 2008; the two that are too pale on white are darker
here), and never alone: series differ in their markers, limits are dashed lines, and rows carry their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
DIM = "#5f5f5f"
GRID = "#e4e4e4"
BACKGROUND = "#ffffff"
BLUE, VERMILION, GREEN, PURPLE, OLIVE = "#0072B2", "#D55E00", "#00805e", "#AA3377", "#8A6D00"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, OLIVE, "#56B4E9", "#E69F00", DIM)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 9.0
_DPI = 130

# matplotlib types the keys of its settings one by one.
_SETTINGS: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": DIM,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.4,
}


def figure(heights: Sequence[float], *, sharex: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of panels below each other, each `heights` inches high beside its axis."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        made = Figure(figsize=(WIDTH, sum(heights) + 0.9), layout="constrained", facecolor=BACKGROUND)
        grid = made.subplots(
            len(heights), 1, sharex=sharex, squeeze=False, gridspec_kw={"height_ratios": list(heights)}
        )
        panels = [row[0] for row in grid]
    for panel in panels:
        panel.set_facecolor(BACKGROUND)
        # Labels that are made later ask for their colours then.
        panel.tick_params(colors=DIM, labelcolor=INK, labelsize=8.5)
    return made, panels


def save(made: Figure, path: Path) -> None:
    """Write the PNG. Raises OSError."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        made.savefig(path, dpi=_DPI, metadata={"Software": None})


def heading(made: Figure, text: str) -> None:
    """What is drawn, above all panels."""
    made.suptitle(text, x=0.01, ha="left", fontsize=10.5, color=INK, fontweight="bold")


def legend(made: Figure, handles: Mapping[str, Artist]) -> None:
    """What the marks mean, by what is written beside each, below all panels."""
    columns = min(len(handles), 6)
    made.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower left",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
    )


def labelled(panels: Sequence[Axes]) -> dict[str, Artist]:
    """Everything in the panels that was drawn with a label, once each."""
    found: dict[str, Artist] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found = dict(zip(labels, handles, strict=True)) | found
    return found


def ticks_at(axis: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    """Ticks at these values and nowhere else."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter(list(labels)))
    axis.set_minor_locator(NullLocator())


def spread_wide(values: Sequence[float]) -> bool:
    """Whether positive values are so far apart that only a logarithmic axis shows them."""
    return min(values) > 0 and max(values) / min(values) >= 8
