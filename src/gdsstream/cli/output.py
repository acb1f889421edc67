"""What a command says: one `Report`, shown as tables of at most 100 columns or as JSON.

A report holds its facts twice: `data`, plain values for scripts, and `blocks`, the same for people. The exit code
comes from the report as well, so that both forms agree on it. Colour only marks what the words say already, and only
on a terminal (and not with NO_COLOR).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from gdsstream.findings import Status

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SCHEMA_VERSION = 1
WIDTH = 100
FOUND_A_PROBLEM = 1


_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red", Status.INFO: "dim"}


@dataclass(frozen=True, slots=True)
class Marked:
    """Text in the colour of a status."""

    text: str
    status: Status


Cell = str | Marked


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its heading; "left" or "right"; `width` in characters, None for what its cells need.

    `wrap` lets long cells take several lines; without it they keep one, and other columns make room.
    """

    heading: str
    justify: str = "left"
    width: int | None = None
    wrap: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows, `gap` blanks apart, under headings (unless all are empty); a `note` below; `empty` where there are none."""

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    empty: str = "none"
    gap: int = 2


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, one below the other, each wrapped with a hanging indent where it starts with "- "."""

    lines: Sequence[Cell]
    title: str = ""


Block = Table | Lines


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found.

    Attributes:
        command: its name, as in `gdsstream COMMAND`.
        data: JSON values by name; "schema_version" and "command" are put in front of them.
        blocks: the same for people, from top to bottom.
        problem: whether something is wrong that the exit code has to tell (1).
    """

    command: str
    data: Mapping[str, Any]
    blocks: Sequence[Block] = field(default_factory=tuple)
    problem: bool = False

    @property
    def exit_code(self) -> int:
        """0, or 1 where a problem was found."""
        return FOUND_A_PROBLEM if self.problem else 0


def emit(report: Report, *, as_json: bool = False) -> None:
    """Print the report to stdout and end the command with its exit code."""
    if as_json:
        click.echo(to_json(report))
    else:
        _print(report)
    click.get_current_context().exit(report.exit_code)


def to_json(report: Report) -> str:
    """The report as one JSON document."""
    head = {"schema_version": SCHEMA_VERSION, "command": report.command}
    return json.dumps({**head, **report.data}, indent=2, ensure_ascii=False, allow_nan=False)


def json_option(function: Any) -> Any:
    """The --json flag that every command has; its value arrives as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of tables.")(function)


def device_option(function: Any) -> Any:
    """The --device of commands that read to one."""
    text = '"cpu", "cuda" or "cuda:N"; a GPU where there is one.'
    return click.option("--device", metavar="DEVICE", help=text)(function)


def _print(report: Report) -> None:
    # Rich takes 50 ms to import, which --help and --json need not wait for.
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    _print_blocks(console, report)


def to_text(report: Report, *, colour: bool = False, width: int = WIDTH) -> str:
    """The report as people see it, for what prints it by itself."""
    from rich.console import Console

    text = StringIO()
    _print_blocks(Console(file=text, width=width, force_terminal=colour, highlight=False, soft_wrap=False), report)
    return text.getvalue()


def _print_blocks(console: Console, report: Report) -> None:
    for number, block in enumerate(report.blocks):
        if number:
            console.print()
        if block.title:
            console.print(block.title, style="bold", markup=False)
        if isinstance(block, Table):
            _print_table(console, block)
        else:
            _print_lines(console, block)


def _print_table(console: Console, block: Table) -> None:
    from rich.table import Table as RichTable

    if not block.rows:
        console.print(f"  {block.empty}", style="dim", markup=False)
    else:
        columns = [Column(one) if isinstance(one, str) else one for one in block.columns]
        table = RichTable(
            box=None,
            show_header=any(column.heading for column in columns),
            pad_edge=False,
            padding=(0, block.gap, 0, 0),
            header_style="dim",
        )
        for column in columns:
            table.add_column(
                column.heading,
                justify="right" if column.justify == "right" else "left",
                width=column.width,
                no_wrap=not column.wrap,
                overflow="fold" if column.wrap else "ellipsis",
            )
        for row in block.rows:
            table.add_row(*(_text(cell) for cell in row))
        _print_trimmed(console, table)
    if block.note:
        console.print(block.note, style="dim", markup=False)


def _print_lines(console: Console, block: Lines) -> None:
    from rich.table import Table as RichTable

    for line in block.lines:
        text = line.text if isinstance(line, Marked) else line
        if not text.startswith("- "):
            _print_trimmed(console, _text(line))
            continue
        grid = RichTable.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        rest = text.removeprefix("- ")
        grid.add_row("-", _text(Marked(rest, line.status) if isinstance(line, Marked) else rest))
        _print_trimmed(console, grid)


def _text(cell: Cell) -> RenderableType:
    from rich.text import Text

    return Text(cell.text, style=_STYLES[cell.status]) if isinstance(cell, Marked) else Text(cell)


def _print_trimmed(console: Console, renderable: RenderableType) -> None:
    """Print without the blanks that fill a table's lines: they end up in files and in what people copy."""
    with console.capture() as capture:
        console.print(renderable)
    for line in capture.get().splitlines():
        # What is captured carries its colours already.
        console.file.write(line.rstrip() + "\n")


__all__ = [
    "WIDTH",
    "Cell",
    "Column",
    "Lines",
    "Marked",
    "Report",
    "Status",
    "Table",
    "device_option",
    "emit",
    "json_option",
    "to_json",
    "to_text",
]
