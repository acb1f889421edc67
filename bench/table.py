"""What a table of records is, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from bench.record import MOST_SHARE, Record, ceiling_believed


class Column(NamedTuple):
    """A column, its cell, and the width of terminal from which on it is shown."""

    title: str
    cell: Callable[[Record], str]
    from_width: int = 0


class Section(NamedTuple):
    """Rows that belong together, and the row of limits below them: cells by the columns' titles."""

    records: Sequence[Record]
    limits: Mapping[str, str]


class Content(NamedTuple):
    """A table and the notes below it."""

    title: str
    columns: Sequence[Column]
    sections: Sequence[Section]
    notes: Sequence[str]


#: The `from_width` of a column that only a report has room for.
REPORT_ONLY = 1000
_MANY_COLUMNS = 12
_NO_LIMIT = 10_000

VERIFIED = Column("bytes", lambda r: "[green]ok[/]" if r.verified else "[yellow]not checked[/]")
SPREAD = Column("± MAD", lambda r: rate(r.gb_per_s["mad"] if r.gb_per_s else None), REPORT_ONLY)
COUNT = Column("n", lambda r: f"{r.gb_per_s['n']:.0f}" if r.gb_per_s else "", REPORT_ONLY)
SHARE = Column("% of ceiling", lambda r: share(r.pct_ceiling, ceiling_believed(r)), REPORT_ONLY)


def make(title: str, gap: int = 1) -> Table:
    """An empty table in the style of all; `gap` is added to the one space between columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )


def show(content: Content, out: Console) -> None:
    """Print the columns that the terminal is wide enough for, and the notes."""
    columns = [column for column in content.columns if out.width >= column.from_width]
    table = _filled(content, columns, gap=1 if len(columns) < _MANY_COLUMNS else 0)
    if Measurement.get(out, out.options.update(max_width=_NO_LIMIT), table).maximum > out.width:
        table = _filled(content, columns, gap=0)
    out.print(table)
    for note in content.notes:
        out.print(note, style="dim", markup=False, highlight=False)


def _filled(content: Content, columns: Sequence[Column], gap: int) -> Table:
    table = make(content.title, gap)
    # Where there is no room for all, names go on in the next line, and figures stay whole.
    table.add_column(columns[0].title, overflow="fold")
    for column in columns[1:]:
        table.add_column(column.title, justify="right", no_wrap=True)
    for section in content.sections:
        for record in section.records:
            table.add_row(*(column.cell(record) for column in columns))
        table.add_section()
        if section.limits:
            table.add_row(*(f"[dim]{section.limits.get(column.title, '')}" for column in columns))
            table.add_section()
    return table


def size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def block(nbytes: float) -> str:
    """Of a record, chunk or read: in binary units where it is a whole, short number of them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0 and nbytes // unit < 10_000:
            return f"{nbytes // unit:.0f} {name}"
    return f"{nbytes / 1e9:g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:g} MB" if nbytes >= 1e6 else f"{nbytes:g} B"


def rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def share(value: float | None, believed: bool) -> str:
    """Per cent of a ceiling, marked where it is more than a ceiling allows (`disbelief`)."""
    return percent(value) if believed else f"{percent(value)} ?"


def disbelief(records: Sequence[Record]) -> list[str]:
    """The note that explains the mark of shares above 100 %."""
    found = list(dict.fromkeys(record.loader for record in records if not ceiling_believed(record)))
    if not found:
        return []
    return [
        f"?: ceiling not believed. Above {MOST_SHARE:g} % of it, what was found is not what the hardware can do: "
        f"{', '.join(found)}."
    ]


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def milliseconds(value: float | None) -> str:
    """From seconds."""
    if value is None:
        return ""
    return (
        f"{1e3 * value:.2f}" if abs(value) < 0.1 else f"{1e3 * value:.1f}" if abs(value) < 1 else f"{1e3 * value:.0f}"
    )
