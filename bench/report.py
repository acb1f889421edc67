"""The tables in the terminal, at most 120 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import stats
from bench.record import Record

_WIDTH = 120


def console() -> Console:
    """A console of at most 120 columns; exactly 120 where the output is not a terminal."""
    found = Console()
    return Console(width=min(found.width, _WIDTH) if found.is_terminal else _WIDTH, soft_wrap=False)


def show(records: Sequence[Record], out: Console) -> None:
    """Print what was measured, fastest first, and what was not, with the reason."""
    measured = [record for record in records if record.status == "ok"]
    if measured:
        _measured(sorted(measured, key=lambda record: -_median(record)), out)
        out.print()
    rest = [record for record in records if record.status != "ok"]
    if rest:
        table = _table("Not measured")
        table.add_column("loader", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("reason", overflow="fold")
        for record in rest:
            reason = (record.reason or "").strip().partition("\n")[0]
            colour = "red" if record.status == "failed" else "dim"
            table.add_row(record.loader, f"[{colour}]{record.status}[/]", escape(reason))
        out.print(table)


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


class _Column(NamedTuple):
    """A column, its cell, and the width of terminal from which on it is shown."""

    title: str
    cell: Callable[[Record], str]
    from_width: int = 0


def _columns(verb: str, width: int) -> list[_Column]:
    columns = [
        _Column("loader", lambda r: r.loader + ("" if r.delivers == "owned" else " †")),
        _Column("GB/s", lambda r: _rate(_median(r))),
        _Column("± MAD", lambda r: _rate(r.gb_per_s["mad"] if r.gb_per_s else None), 110),
        _Column("% of ceiling", lambda r: _percent(r.pct_ceiling)),
        _Column("95 % CI", lambda r: "-".join(map(_percent, r.pct_ceiling_ci95 or [])), 80),
        _Column("n", lambda r: f"{r.gb_per_s['n']:.0f}" if r.gb_per_s else "", 80),
        _Column("returned", lambda r: _time(stats.median(r.lazy_return_s)), 110),
        _Column("first", lambda r: _time(r.first_s), 95),
        _Column("start-up", lambda r: _time(r.startup_s), 95),
        _Column("CPU s/GB", lambda r: "" if r.cpu_s_per_gb is None else f"{r.cpu_s_per_gb:.3f}", 110),
        _Column("bytes", lambda r: "[green]ok[/]" if r.verified else "[red]wrong[/]"),
    ]
    if verb == "gather":
        columns.insert(1, _Column("k/s", lambda r: f"{r.units_per_s['median'] / 1e3:.0f}" if r.units_per_s else ""))
        columns = [column for column in columns if column.title != "returned"]
    return [column for column in columns if width >= column.from_width]


def _measured(records: Sequence[Record], out: Console) -> None:
    first, ceiling = records[0], records[0].ceiling
    size = f"{first.bytes / 1e9:.2f} GB" if first.bytes >= 1e9 else f"{first.bytes / 1e6:.1f} MB"
    title = f"{first.scenario}: {size} a sample, {first.units} {first.unit}, {first.cache} cache, {first.device}"
    table = _table(title)
    columns = _columns(first.verb, out.width)
    for number, column in enumerate(columns):
        table.add_column(column.title, justify="left" if number == 0 else "right", no_wrap=True)
    for record in records:
        table.add_row(*(column.cell(record) for column in columns))
    table.add_section()
    limits = {"loader": "ceiling", "GB/s": _rate(ceiling["gb_per_s"]), "% of ceiling": _percent(100.0)}
    table.add_row(*(f"[dim]{limits.get(column.title, '')}" for column in columns))
    out.print(table)
    notes = [
        f"ceiling: {ceiling['kind']} ({ceiling['detail']}), sampled every round. Times in seconds.",
        "GB/s counts until every byte could be used; returned is when the call came back.",
    ]
    if any(record.delivers != "owned" for record in records):
        notes.append("†: the tensors still share the file's pages at the end; the others own their memory.")
    for label, meaning in (("outlier", "outliers: labelled, kept and counted"), ("not_cold", "not cold: not counted")):
        found = sum(label in labels for record in records for labels in record.sample_labels)
        if found:
            notes.append(f"{found} of {sum(len(record.samples_s) for record in records)} samples are {meaning}.")
    load, cores = first.env.get("load_average"), first.env.get("cores")
    if load is not None and cores and load > cores / 2:
        notes.append(f"The machine was busy with other work before this run (load {load:.1f} on {cores} cores).")
    for note in notes:
        out.print(note, style="dim", markup=False, highlight=False)


def _median(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _time(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"
