"""Records of what is no loader: `python -m bench.SUBJECT`, where SUBJECT is floor, shuffle_quality or stats_cost.

A subject is a module with `parser()`, `measure(options)` and `said(line)`. Each row of its table is one JSON line: what
was set, every figure with one number for each round, and what was made of them. Times are seconds, ratios and shares
fractions, rates decimal GB/s. `bench.report` and `bench.compare` are about loaders and do not read these lines.
Exit status: 0, or 2 where it could not be measured as asked.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from bench import report, stats
from bench.config import BenchError

SCHEMA_VERSION = 1
#: Arguments that say where the lines go, and not what is measured.
_HOW = ("output",)


@dataclass(frozen=True, slots=True)
class Line:
    """One row. `figures` hold a list for each name, all of one length; `derived` numbers, intervals and words."""

    subject: str
    row: str
    settings: dict[str, Any]
    figures: dict[str, list[float]]
    derived: dict[str, Any]
    env: dict[str, Any]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line, without a newline."""
        return json.dumps(asdict(self), allow_nan=False)


def parser(subject: str, description: str | None) -> argparse.ArgumentParser:
    """With the arguments that every subject has."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{subject}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the records to this file")
    return made


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a figure depends on, as a record holds them."""
    kept = {name: value for name, value in vars(options).items() if name not in _HOW}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}


def run(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[Line]],
    said: Callable[[Line], str],
) -> None:
    """Measure, print a line of text for each row, and append the records where `--output` says."""
    out = report.console()
    path: Path | None = options.output
    try:
        lines = measure(options)
        for line in lines:
            out.print(said(line), markup=False, highlight=False, soft_wrap=True)
        if path is not None:
            _append(path, lines)
            out.print(f"records: {path}", style="dim", highlight=False)
    except BenchError as error:
        out.print(Text.assemble(("error: ", "bold red"), str(error)))
        raise SystemExit(2) from None


def _append(path: Path, lines: Sequence[Line]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line.to_json() + "\n" for line in lines)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from error


def read(path: Path) -> list[Line]:
    """The lines of a file. Raises BenchError for one that is no such line, with its number."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(text)
        except ValueError as error:
            raise BenchError(f"{path}:{number} is no JSON ({error})") from error
        if wrong := problems(row):
            raise BenchError(f"{path}:{number} is no line of a subject: {'; '.join(wrong)}")
        found.append(Line(**row))
    return found


def problems(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a parsed line; empty when it is valid."""
    kinds = {"subject": str, "row": str, "settings": dict, "figures": dict, "derived": dict, "env": dict}
    found = [
        f"{name}: missing or no {kind.__name__}" for name, kind in kinds.items() if not isinstance(row.get(name), kind)
    ]
    found += [f"{name}: unknown" for name in row if name not in {*kinds, "schema_version"}]
    if row.get("schema_version") != SCHEMA_VERSION:
        found.append(f"schema_version: {row.get('schema_version')} is not {SCHEMA_VERSION}")
    if found:
        return found
    for name, values in row["figures"].items():
        if not isinstance(values, list) or not values or not all(_finite(value) for value in values):
            found.append(f"figures.{name}: has to be a list of finite numbers")
    if not found and len({len(values) for values in row["figures"].values()}) != 1:
        found.append("figures: have no value for each round")
    return found


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def median(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Their median as `name`, its 95 % interval, which is None for fewer than six, and the least and most of them, as a
    record's `derived` holds them."""
    found = stats.median_ci95(values)
    return {
        name: stats.median(values),
        f"{name}_ci95": list(found) if found else None,
        f"{name}_range": [min(values), max(values)],
    }


def bounds(derived: Mapping[str, Any], name: str, form: str) -> str:
    """What `median` said of `name`, for people: the interval, or that it is a range; numbers in the format `form`."""
    interval = derived[f"{name}_ci95"]
    low, high = interval or derived[f"{name}_range"]
    return f"{'95 % CI' if interval else 'range'} {low:{form}} - {high:{form}}"
