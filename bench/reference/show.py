"""The comparison with the documents: a table in the terminal, and the first section of report.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bench import report_md, results, table
from bench.config import BenchError
from bench.record import Record
from bench.reference.claims import FAILS, HOLDS, INCOMPARABLE, SHOWN, UNDECIDED, Judged
from bench.reference.figures import Made

_COLOURS = {HOLDS: "green", FAILS: "red", UNDECIDED: "yellow", SHOWN: "default", INCOMPARABLE: "dim"}
_EXPLAINED = (
    "A claim holds where the whole 95 % interval of our figure agrees with what is asked for, and does not hold here "
    "where none of it does. Fewer than six samples have no interval: their range is shown, which holds the median in "
    "75 % of runs with three samples and in 94 % with five, and it decides only where an exact test says so at 5 %, as "
    "the reason then states. Rates are decimal and of the hardware that is named: they are shown, not compared. "
    "% of ceiling is what our row reaches of what this machine can do, measured in the same process; a ? says "
    "that the ceiling is not believed, as the row is faster, and a claim on such shares stays undecided. storage_gpu "
    "issues each io from threads of Python, as kvikio has no other way: below some 256 KiB the interpreter bounds it, "
    "and what it says of small ios is not of the storage. The other routes that claims are of are native."
)


def show(judged: Sequence[Judged], made: Mapping[str, Made], out: Console) -> None:
    """Print the claims, a table for each document and hardware, and the parts that are not complete."""
    rows = [row for part in made.values() for row in part.rows]
    if rows:
        machine = dict(report_md.machine(rows[0]))
        said = "; ".join(f"{name} {machine[name]}" for name in ("GPU", "CPU", "memory") if name in machine)
        out.print(f"Here: {said}. Files: {', '.join(_files(rows))}.", markup=False, highlight=False)
        out.print()
    for (document, hardware), found in _by_document(judged):
        drawn = table.make(f"{document}: {hardware}")
        drawn.add_column("claim", overflow="fold", ratio=1)
        for title in ("theirs", "ours"):
            drawn.add_column(title, justify="right", no_wrap=True)
        drawn.add_column("% of ceiling", justify="right", no_wrap=True)
        drawn.add_column("verdict", overflow="fold", max_width=42)
        for each in found:
            said = each.verdict if each.verdict == SHOWN else f"{each.verdict}: {each.reason}"
            verdict = f"[{_COLOURS[each.verdict]}]{escape(said)}[/]"
            drawn.add_row(
                escape(each.claim.says), theirs(each), ours(each), table.share(each.pct_ceiling, each.believed), verdict
            )
        out.print(drawn)
        out.print()
    for name, part in made.items():
        if part.problem:
            out.print(f"{name}: {part.problem}", style="yellow", markup=False, highlight=False)
    out.print(f"{_count(judged)}", highlight=False)


def write(judged: Sequence[Judged], made: Mapping[str, Made], directory: Path) -> Path:
    """report.md in `directory`: the comparison, the parts, and the tables of their records. Raises BenchError."""
    opening = _opening(judged, made, directory)
    records = directory / results.NAME
    if records.exists() and records.stat().st_size:
        return report_md.write([records], directory, opening=opening)
    target = directory / report_md.NAME
    try:
        target.write_text("\n".join(["# Benchmark report", "", *opening]).rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(
            f"the report cannot be written: {error}; choose another directory with hydra.run.dir="
        ) from error
    return target


def _opening(judged: Sequence[Judged], made: Mapping[str, Made], directory: Path) -> list[str]:
    lines = ["## Claims of the reference documents", "", _EXPLAINED, "", f"{_count(judged)}", ""]
    for (document, hardware), found in _by_document(judged):
        lines += [f"### {document}: {hardware}", ""]
        lines += [
            report_md.row(["claim", "theirs", "ours", "rows", "% of ceiling", "verdict", "asked for, or why not"])
        ]
        lines += ["|---|---:|---:|---|---:|---|---|"]
        lines += [
            report_md.row(
                [
                    each.claim.says,
                    theirs(each),
                    ours(each),
                    " / ".join(each.rows),
                    table.share(each.pct_ceiling, each.believed),
                    each.verdict,
                    each.reason,
                ]
            )
            for each in found
        ]
        lines += [""]
    lines += ["## Parts", "", report_md.row(["part", "rows", "seconds", "what was missing"]), "|---|---:|---:|---|"]
    for name, part in made.items():
        printed = directory / name / "printed.txt"
        shown = f"[{name}]({os.path.relpath(printed, directory)})" if printed.exists() else name
        seconds = "" if part.seconds is None else f"{part.seconds:.0f}"
        lines.append(report_md.row([shown, str(len(part.rows)), seconds, part.problem or ""]))
    return [*lines, ""]


def theirs(each: Judged) -> str:
    """The document's figure with its unit."""
    return "" if each.claim.theirs is None else f"{number(each.claim.theirs)} {each.claim.unit}"


def ours(each: Judged) -> str:
    """Our figure with its unit, and its interval, or else the range or the spread."""
    if each.value is None:
        return ""
    found = f"{number(each.value)} {each.claim.unit}"
    if each.interval is not None:
        return f"{found} [{number(each.interval[0])}, {number(each.interval[1])}]"
    if each.range is not None:
        return f"{found}, range {number(each.range[0])} to {number(each.range[1])} (n={each.n})"
    return found if each.spread is None else f"{found} ± {number(each.spread)}"


def number(value: float) -> str:
    """Three significant digits, and whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _files(rows: Sequence[Record]) -> list[str]:
    """Where the files were, once each."""
    return list(dict.fromkeys(dict(report_md.machine(row)).get("files", "unknown") for row in rows))


def _count(judged: Sequence[Judged]) -> str:
    counts = {name: sum(each.verdict == name for each in judged) for name in _COLOURS}
    return f"{len(judged)} claims: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + "."


def _by_document(judged: Sequence[Judged]) -> list[tuple[tuple[str, str], list[Judged]]]:
    """In the order in which documents and hardware first come."""
    order = list(dict.fromkeys((each.claim.document, each.claim.hardware) for each in judged))
    ordered = sorted(judged, key=lambda each: order.index((each.claim.document, each.claim.hardware)))
    return [
        (key, list(found)) for key, found in groupby(ordered, lambda each: (each.claim.document, each.claim.hardware))
    ]
