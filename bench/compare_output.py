"""What bench.compare prints: the verdicts, what could not be compared, and in what the environments differ."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from bench import stats, table
from bench.compare import Comparison
from bench.config import BenchError

_COLOURS = {"faster": "green", "slower": "red", "same": "dim", "ambiguous": "yellow"}


def show(found: Comparison, out: Console) -> None:
    """Print everything that was found, the rows in the order of A."""
    if found.rows:
        _verdicts(found, out)
    else:
        out.print("No row is in both files with the same settings.", style="yellow")
    if found.unmatched:
        out.print()
        left = table.make("Not compared")
        for name in ("scenario", "loader", "why"):
            left.add_column(name, overflow="fold")
        for row in found.unmatched:
            scenario = ", ".join(filter(None, (row.scenario, row.part, "cold" if row.cache == "cold" else "")))
            left.add_row(escape(scenario), escape(row.loader), escape(row.why))
        out.print(left)
    if found.environment:
        out.print()
        out.print("The environments differ, so that a difference may not be the code's:", style="yellow")
        for name, (a, b) in found.environment.items():
            out.print(f"  {name}: {a} and {b}", markup=False, highlight=False)


def fail(error: BenchError) -> None:
    """Beside the output, which may be a JSON document."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))


def _verdicts(found: Comparison, out: Console) -> None:
    unit = "GB/s" if found.by == "rate" else "% of ceiling"
    shown = table.make(f"B beside A, {unit}")
    shown.add_column("scenario", overflow="fold")
    shown.add_column("loader", overflow="fold")
    for title in ("A", "B", "B / A", "95 % CI", "n", "verdict"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in found.rows:
        scenario = ", ".join(filter(None, (row.scenario, row.part, "cold" if row.cache == "cold" else "")))
        interval = f"{row.ratio_ci95[0]:.3f}..{row.ratio_ci95[1]:.3f}" if row.ratio_ci95 else ""
        shown.add_row(
            escape(scenario),
            escape(row.loader),
            _figure(row.a, found.by),
            _figure(row.b, found.by),
            f"{row.ratio:.3f}",
            interval,
            f"{row.n[0]}, {row.n[1]}",
            f"[{_COLOURS[row.verdict]}]{row.verdict}[/]",
        )
    out.print(shown)
    counts = {name: sum(row.verdict == name for row in found.rows) for name in _COLOURS}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    above = 1 + found.threshold
    out.print(
        f"{said}. faster: the interval lies above {above:.3f}; slower: below {1 / above:.3f}; same: between the two.",
        style="dim",
        highlight=False,
    )
    if any(row.ratio_ci95 is None for row in found.rows):
        out.print(
            f"A row of fewer than {stats.LEAST_FOR_INTERVAL} samples on a side has no interval: measure more rounds.",
            style="dim",
        )


def _figure(value: float, by: str) -> str:
    return table.rate(value) if by == "rate" else table.percent(100 * value)
