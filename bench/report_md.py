"""`python -m bench.report RESULTS.jsonl... [--out DIR]`: report.md with plots, from records alone.

    --out DIR      where report.md and the PNG files go; beside the first file of records otherwise
    --no-plots     tables only

The tables are those of the terminal (report.py and what it calls), all columns shown; a file's rows are grouped by
`results.groups`. Nothing is computed here that is not in a table's columns, and no row is left out: what was not
measured is listed with its reason. Plots need matplotlib (`pip install 'gdsstream[bench]'`); without it the report says
that they are missing. Exit status: 0, or 2 where the records cannot be read or the report cannot be written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from bench import report, results, sweeps_best
from bench.config import BenchError
from bench.record import Record
from bench.results import Group
from bench.table import Content

NAME = "report.md"
_NUMBER = re.compile(r"(\d+)")
NO_PLOTS = "Plots are missing: matplotlib is not installed; `pip install 'gdsstream[bench]'` and make the report again."


def write(paths: Sequence[Path], directory: Path, *, plots: bool = True, opening: Sequence[str] = ()) -> Path:
    """Make the report of these files of records in `directory`, and return its path. Raises BenchError.

    `opening` are lines that come before everything that is made of the records.
    """
    found = [(path, group) for path in paths for group in results.groups(results.read(path))]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        pictures: list[list[tuple[Path, str]]] = [[] for _ in found]
        sweeps: list[tuple[Path, str]] = []
        note = ""
        if plots and importlib.util.find_spec("matplotlib") is None:
            note = NO_PLOTS
        elif plots:
            from bench import plots as drawing

            pictures = [drawing.of_group(group, f"{path.stem}", directory) for path, group in _numbered(found)]
            sweeps = drawing.of_sweeps([row for _, group in found for row in group.measured], directory)
        target = directory / NAME
        target.write_text(_document(found, pictures, sweeps, note, directory, opening), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"the report cannot be written: {error}; choose another directory with --out") from error
    return target


def _numbered(found: Sequence[tuple[Path, Group]]) -> Iterable[tuple[Path, Group]]:
    """Files of several groups get a number for each in the names of their plots."""
    counts: dict[Path, int] = {}
    several = {path for number, (path, _) in enumerate(found) if path in [other for other, _ in found[:number]]}
    for path, group in found:
        counts[path] = counts.get(path, 0) + 1
        yield (path.with_name(f"{path.stem}-{counts[path]}.jsonl") if path in several else path), group


def _document(
    found: Sequence[tuple[Path, Group]],
    pictures: Sequence[Sequence[tuple[Path, str]]],
    sweeps: Sequence[tuple[Path, str]],
    note: str,
    directory: Path,
    opening: Sequence[str],
) -> str:
    machines = list(dict.fromkeys(machine(group.first) for _, group in found))
    lines = ["# Benchmark report", "", *opening, "Rates are decimal (1 GB = 10^9 bytes), medians over n samples.", ""]
    lines += [
        "Start-up and first load happen once each.",
    ]
    lines += ["", note] if note else []
    lines += ["", "## Environment", ""]
    for number, each in enumerate(machines, 1):
        lines += [f"**Environment {number}**", ""] if len(machines) > 1 else []
        lines += [row(["", ""]), "|---|---|", *(row(pair) for pair in each), ""]
    scenario = None
    for (path, group), drawn in zip(found, pictures, strict=True):
        if group.first.scenario != scenario:
            scenario = group.first.scenario
            lines += [f"## {scenario}", ""]
        where = f", environment {machines.index(machine(group.first)) + 1}" if len(machines) > 1 else ""
        lines += [f"Records: {_link(path, directory)}{where}, commit {group.first.env.get('commit') or 'unknown'}.", ""]
        if group.measured:
            content = report.content(group.measured)
            lines += [
                f"### {content.title}",
                "",
                *_table(content),
                "",
                *content.notes,
                "",
                *_routes(group.measured),
                "",
            ]
            for beside in report.more(group.measured):
                lines += [f"### {beside.title}", "", *_table(beside), "", *beside.notes, ""]
        lines += _missing(group.rest)
        for picture, caption in drawn:
            lines += _picture(picture, caption)
    best = sweeps_best.lines([row for _, group in found for row in group.measured])
    if sweeps or best:
        lines += ["## Sweeps", ""]
        for picture, caption in sweeps:
            lines += _picture(picture, caption)
        lines += [f"- {_escaped(line)}" for line in best]
    return "\n".join(lines).rstrip() + "\n"


def _table(content: Content) -> list[str]:
    titles = [column.title for column in content.columns]
    lines = [row(titles), "|" + "|".join(["---", *["---:"] * (len(titles) - 1)]) + "|"]
    for section in content.sections:
        lines += [row(_plain(column.cell(record)) for column in content.columns) for record in section.records]
        limits = [section.limits.get(title, "") for title in titles]
        if section.limits:
            lines.append(row(f"*{cell}*" if cell else "" for cell in limits))
    return lines


def _routes(measured: Sequence[Record]) -> list[str]:
    """By which ways the bytes went, and what was set: what two rows differ in cannot be seen from their names."""
    said: dict[str, dict[str, None]] = {}
    for record in measured:
        options = record.config.get("loaders", {}).get(record.loader, {})
        given = ", ".join(f"{k}={v}" for k, v in options.items() if k != "kind" and v is not None)
        text = "; ".join(part for part in (record.route, given) if part)
        if text:
            said.setdefault(record.loader, {})[text] = None
    lines = []
    for loader, texts in said.items():
        ways = [_escaped(way) for way in _without_counts(list(texts))]
        lines += [f"- `{loader}`: {ways[0]}"] if len(ways) == 1 else [f"- `{loader}`:", *(f"  - {way}" for way in ways)]
    return lines


def _without_counts(texts: Sequence[str]) -> list[str]:
    """Texts that differ in nothing but numbers as one, with an N for each number that differs: the table has those."""
    alike: dict[str, list[list[str]]] = {}
    for text in texts:
        alike.setdefault(_NUMBER.sub("", text), []).append(_NUMBER.split(text))
    return [
        "".join(words[0] if len(set(words)) == 1 else "N" for words in zip(*found, strict=True))
        for found in alike.values()
    ]


def _picture(path: Path, caption: str) -> list[str]:
    return [f"![{path.stem}]({path.name})", "", f"*{caption}*", ""]


def _missing(rest: Sequence[Record]) -> list[str]:
    if not rest:
        return []
    rows = [row([each.loader, each.status, report.reason(each)]) for each in report.not_measured(rest)]
    return ["Not measured:", "", row(["loader", "status", "reason"]), "|---|---|---|", *rows, ""]


def machine(record: Record) -> tuple[tuple[str, str], ...]:
    """What a figure was taken on, for people."""
    env = record.env
    memory, place = env.get("memory_bytes"), env.get("filesystem")
    said: dict[str, Any] = {
        "GPU": env.get("gpu") or "none",
        "driver": env.get("driver"),
        "CPU": f"{env.get('cpu_model') or 'unknown'}, {env.get('cores')} cores",
        "memory": f"{memory / 2**30:.0f} GiB" if memory else None,
        "kernel": env.get("kernel"),
        "files": _place(place) if isinstance(place, Mapping) else None,
        "Python": env.get("python"),
        "versions": _pairs(env.get("versions")),
        "variables": _pairs(env.get("variables"), "="),
    }
    return tuple((name, str(value)) for name, value in said.items() if value)


def _place(found: Mapping[str, Any]) -> str:
    network = f", {found['network']}: not this machine's own storage" if "network" in found else ""
    return f"{found['type']} at {found['mount']} ({found['source']}){network}"


def _pairs(values: Any, between: str = " ") -> str:
    return ", ".join(f"{name}{between}{value}" for name, value in values.items()) if isinstance(values, Mapping) else ""


def row(cells: Iterable[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _plain(cell: str) -> str:
    """Without the colours of the terminal."""
    return Text.from_markup(cell).plain


def _link(path: Path, directory: Path) -> str:
    relative = Path(os.path.relpath(path.resolve(), directory.resolve()))
    # A way out of the folder is of this machine only.
    return path.name if ".." in relative.parts else f"[{path.name}]({relative.as_posix()})"


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `python -m bench.report`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description="Write report.md and its plots from records of the bench."
    )
    parser.add_argument(
        "results", nargs="+", type=results.given, metavar="RESULTS", help="records of bench.run, or its directory"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the directory for them; the first file's own otherwise"
    )
    parser.add_argument("--no-plots", action="store_true", help="tables only")
    options = parser.parse_args(arguments)
    out = report.console()
    try:
        target = write(options.results, options.out or options.results[0].parent, plots=not options.no_plots)
    except BenchError as error:
        out.print(Text.assemble(("error: ", "bold red"), str(error)))
        raise SystemExit(2) from None
    if NO_PLOTS in target.read_text(encoding="utf-8"):
        out.print(NO_PLOTS, style="yellow", markup=False, highlight=False)
    out.print(f"report: {target}", markup=False, highlight=False)
