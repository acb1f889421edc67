"""Every table of README.md and docs/performance.md is made by the one command below it: it composes, and its rows are
those of the record that is named with it, with the same settings."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ROOT
from test_bench_config import composed

from bench import config, loaders, results, subject
from bench.record import Record

DOCUMENTS = ("README.md", "docs/performance.md")
_OVERRIDE = re.compile(r"(scenario|storage|cache|device)\b.*=")
#: What says where a run keeps its lines or when it gives a row up, and not what it measures.
_HOW = ("output", "resume", "isolate", "allow_busy_gpu", "hang_seconds", "reference")


class Table(NamedTuple):
    """A table, the commands between it and the next text or table, and the records that are named below them."""

    name: str
    header: list[str]
    rows: list[list[str]]
    commands: list[str]
    records: list[Path]


class Row(NamedTuple):
    """What a command makes, or a record was made with: everything that a figure depends on."""

    loader: str
    settings: dict[str, Any]


def tables(document: str) -> Iterator[Table]:
    """In the order of the document. A command is an indented block; `\\` at the end of a line goes on with the next."""
    path = ROOT / document
    blocks = [block for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")) if block.strip()]
    for number, block in enumerate(blocks):
        if not block.startswith("|"):
            continue
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        heading = next((b for b in reversed(blocks[:number]) if b.startswith("#")), document)
        below = itertools.takewhile(lambda b: b.startswith(("    ", "Records:")), blocks[number + 1 :])
        commands, records = [], []
        for each in below:
            if each.startswith("Records:"):
                records += [path.parent / target for target in re.findall(r"\]\(([^)]+)\)", each)]
            else:
                commands += joined(each).splitlines()
        yield Table(f"{document}: {heading.lstrip('# ')}, {lines[0][0]}", lines[0], lines[2:], commands, records)


def joined(text: str) -> str:
    """Lines that go on, as a shell joins them: not inside of quotes, where it would keep the backslash."""
    for before in text.split("\\\n")[:-1]:
        assert before.rpartition("\n")[2].count("'") % 2 == 0, f"a line ends inside of quotes: {before}"
    return text.replace("\\\n", " ")


EVERY = [table for document in DOCUMENTS for table in tables(document) if table.header[0] != "name"]


def points(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each run: several for a sweep (-m), whose values are parted by commas."""
    if "-m" not in words:
        return [tuple(words)]
    values = [
        [f"{key}={value}" for value in values.split(",")] if "[" not in values else [f"{key}={values}"]
        for key, _, values in (word.partition("=") for word in words if word != "-m")
    ]
    return [tuple(point) for point in itertools.product(*values)]


def plain(settings: config.BenchConfig, name: str) -> Row:
    """With the options of a loader as it is built, so that those which did not exist have their defaults."""
    options = settings.loaders[name]
    loader = loaders.build(name, options)
    found = {key: value for key, value in dataclasses.asdict(settings).items() if key not in (*_HOW, "loaders")}
    chosen = {option: getattr(loader, option) for option in loaders.option_names(options["kind"])}
    return Row(name, found | {"loader": {"kind": options["kind"], **chosen}})


@cache
def made(overrides: tuple[str, ...]) -> list[Row]:
    """The rows that a run with these overrides makes."""
    config.check_overrides(overrides)
    with composed(*overrides) as tree:
        settings = config.build(tree)
    parts = [dataclasses.replace(settings, scenario=part) for part in config.parts(settings.scenario)]
    return [plain(part, name) for part in parts for name in settings.loaders]


read = cache(results.read)


def taken(record: Record) -> Row:
    """What a record was made with."""
    known = {key: value for key, value in record.config.items() if key not in _HOW}
    return plain(config.from_mapping(config.BenchConfig, known, ""), record.loader)


def differences(row: Row, record: Record) -> list[str]:
    """In what a row of a command differs from a record; the time limit counts only where it ended the record's run."""
    one, other = _flat(row.settings), _flat(taken(record).settings)
    if record.status != "ok" or len(record.samples_s) >= other["scenario.rounds"]:
        other["scenario.max_seconds"] = one["scenario.max_seconds"]
    return [
        f"{key}: {one.get(key)!r}, recorded {other.get(key)!r}" for key in one | other if one.get(key) != other.get(key)
    ]


def wrong(command: str, path: Path) -> list[str]:
    """What a command makes otherwise than the record says; empty where it makes it again."""
    words = shlex.split(command)
    assert words[:2] == ["python", "-m"], command
    if words[2] != "bench.run":
        module = importlib.import_module(words[2])
        expected = subject.settings(module.parser().parse_args(words[3:]))
        lines = subject.read(path)
        return [f"{line.row}: {line.settings}" for line in lines if line.settings != expected]
    records, found = read(path), []
    for row in [row for overrides in points(words[3:]) for row in made(overrides)]:
        beside = [differences(row, record) for record in records if record.loader == row.loader]
        if [] not in beside:
            found.append(f"{row.loader}: {min(beside, key=len) if beside else 'no such row'}")
    return found


def measured(command: str, path: Path) -> list[Record]:
    """The records of a command's rows that were measured, in the order of the command."""
    records = [record for record in read(path) if record.status == "ok"]
    rows = [row for overrides in points(shlex.split(command)[3:]) for row in made(overrides)]
    return [next(r for r in records if not differences(row, r)) for row in rows if _has(row, records)]


def _has(row: Row, records: Sequence[Record]) -> bool:
    return any(record.loader == row.loader and not differences(row, record) for record in records)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def test_the_documents_have_their_tables() -> None:
    assert len([table for table in EVERY if table.name.startswith("README")]) >= 1
    assert len(EVERY) >= 12


@pytest.mark.parametrize("table", EVERY, ids=lambda table: table.name)
def test_a_table_is_what_the_one_command_below_it_made(table: Table) -> None:
    assert len(table.commands) == 1, "a table has one command, in an indented block right below it"
    assert len(table.records) == 1, "and one 'Records:' line with a link below that"
    ((command,), (path,)) = table.commands, table.records
    assert wrong(command, path) == []
    if "bench.run" not in command:
        names = [line.row for line in subject.read(path)]
        assert len(table.rows) in (len(names), len({name.partition(", ")[0] for name in names}))
        return
    rows = measured(command, path)
    names, parts = {record.loader for record in rows}, len(rows) // len({record.loader for record in rows})
    # Parts and points of a sweep are rows or columns.
    assert len(table.rows) in (len(rows), len(names), parts)
    if "GB/s" in table.header and len(table.rows) == len(rows):
        shown = sorted(float(row[table.header.index("GB/s")].strip("*")) for row in table.rows)
        medians = sorted(record.gb_per_s["median"] for record in rows if record.gb_per_s)
        assert shown == pytest.approx(medians, rel=0.01)


@pytest.mark.parametrize("table", EVERY, ids=lambda table: table.name)
def test_another_override_is_found(table: Table) -> None:
    (command,), (path,) = table.commands, table.records
    if "bench.run" not in command:
        for name, value in subject.read(path)[0].settings.items():
            another = value + 1 if isinstance(value, int) else f"{value}x"
            assert wrong(f"{command} --{name.replace('_', '-')} {another}", path) != [], name
        return
    words = shlex.split(command)
    if not any(map(_OVERRIDE.match, words)):
        assert wrong(f"{command} scenario.rounds=99", path) != []
    for place, word in enumerate(words):
        if _OVERRIDE.match(word):
            # Its last number is another one; what has none is left out.
            changed = re.sub(r"\d+(?=\D*$)", lambda found: str(int(found[0]) + 4), word)
            others = [*words[:place], *([changed] if changed != word else []), *words[place + 1 :]]
            assert wrong(shlex.join(others), path) != [], f"{word} changes nothing"


def test_every_other_command_of_the_documents_composes() -> None:
    found = []
    for document in DOCUMENTS:
        text = joined((ROOT / document).read_text(encoding="utf-8"))
        found += re.findall(r"^    (python -m bench\.run .*)$|`(python -m bench\.run [^`]*)`", text, re.MULTILINE)
    commands = [first or second for first, second in found]
    assert len(commands) > len(EVERY)
    for command in commands:
        for overrides in points(shlex.split(command)[3:]):
            if not any(word.isupper() or "NAME" in word or word == "experiment=reference" for word in overrides):
                assert made(overrides)
