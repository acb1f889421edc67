"""The table of MLPerf Storage's workloads: a section for each, a row for each loader with what both parts measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import peers, report_bounds, stats, table
from bench.record import Record
from bench.report_bounds import Bounds
from bench.report_layers import signed
from bench.table import Column, Content, Section

#: Above so many times what the rate sustains, a utilisation is marked.
_BORROWED = 1.1


def workloads(records: Sequence[Record]) -> Content:
    """The utilisation of an accelerator that each loader feeds, and beside it the loader's rate without compute.

    Both parts of a row are records of their own; the one with compute is the row's, where there is one.
    """
    names = list(dict.fromkeys(_of(record)["workload"] for record in records))
    rates = {_key(record): record for record in records if not _computes(record)}
    rows = [record for record in records if _computes(record)]
    rows += [rates[key] for key in rates if key not in map(_key, rows)]
    sections = []
    for name in names:
        found = sorted((row for row in rows if _of(row)["workload"] == name), key=lambda row: _order(row, rates))
        sections.append(Section(found, _limits(found, rates)))

    def rate(cell: Callable[[Record], str]) -> Callable[[Record], str]:
        return lambda row: cell(rates[_key(row)]) if _key(row) in rates else ""

    columns = [
        Column("loader", lambda r: r.loader + (" †" if r.delivers == "lease" else "")),
        Column("workload", lambda r: _of(r)["workload"]),
        Column("on", lambda r: _of(r)["accelerator"]),
        Column("AU %", lambda r: _utilisation(r, rates.get(_key(r)))),
        Column("± MAD", lambda r: _percent(r, "utilisation_mad"), 90),
        report_bounds.column(rows, lambda r: report_bounds.of_derived(r, "utilisation"), _bounds, 110),
        Column("target", lambda r: f"{100 * _of(r)['target_utilisation']:.0f}"),
        Column("stall", lambda r: table.milliseconds(_of(r).get("stall_s"))),
        Column("first", lambda r: table.milliseconds(_of(r)["first_batch_s"]), table.REPORT_ONLY),
        Column("n", lambda r: f"{r.gb_per_s['n']:.0f}" if r.gb_per_s else "", table.REPORT_ONLY),
        Column("GB/s", rate(lambda r: table.rate(_rate(r)))),
        Column("± GB/s", rate(table.SPREAD.cell), table.REPORT_ONLY),
        Column("% of ceiling", rate(table.SHARE.cell), 100),
        Column("feeds", rate(lambda r: _count(_of(r)["accelerators_fed"]))),
        table.VERIFIED,
    ]
    notes = [
        "AU: of the device's time from the end of each epoch's first step on, the share that its compute takes alone, "
        "measured",
        "right before; green where it reaches the target. stall: between two steps, in ms, the mean.",
    ]
    if rates:
        notes += [
            "GB/s, % of ceiling: without compute. feeds: how many such accelerators' need at the target that rate is.",
        ]
        by_workload = [[rates[_key(row)] for row in section.records if _key(row) in rates] for section in sections]
        if any(_borrowed(row, rates.get(_key(row))) for row in rows):
            notes.append("‡: more than that rate sustains: samples that lived on what had been read ahead, or noise.")
        if (beside := peers.beside(by_workload, 110)) is not None:
            columns[-2:-2] = [each._replace(cell=rate(each.cell)) for each in beside.columns]
            notes.append(beside.note)
    for section in sections:
        notes += _described(section.records, rates)
    first = records[0]
    return Content(
        f"{first.scenario}: {', '.join(names)}, {first.cache} cache, {first.device}", columns, sections, notes
    )


def _described(rows: Sequence[Record], rates: dict[tuple[str, str], Record]) -> list[str]:
    """What a section's dataset and compute were."""
    found = _of(rows[0])
    size = f"{found['record_bytes'] / 1e6:.3g} MB" if found["record_bytes"] >= 1e5 else f"{found['record_bytes']} B"
    if found["sample_bytes_std"]:
        size += f" ± {found['sample_bytes_std'] / 1e6:.2g}"
    said = [
        f"{found['workload']}: {found['num_records']} samples of {size}, batches of {found['batch_size']}; "
        f"{found['target_utilisation']:.0%} need {found['needed_gb_per_s']:.3g} GB/s.",
    ]
    computed = [_of(row)["compute_s"] for row in rows if _computes(row)]
    if computed:
        compute = stats.median(computed)
        scaled = "" if found["compute_scale"] == 1 else f" (scaled by {found['compute_scale']:g})"
        said.append(
            f"  compute: {_milliseconds(found['table_compute_s'])} ms on {found['accelerator']}{scaled}, emulated by "
            f"{_milliseconds(compute)} ms ({signed(compute / found['table_compute_s'] - 1)} %)."
        )
    ceiling = next((rates[_key(row)].ceiling for row in rows if _key(row) in rates), None)
    if ceiling is not None:
        said.append(f"  ceiling: {ceiling['kind']} ({ceiling['detail']}), {table.rate(ceiling['gb_per_s'])} GB/s.")
    return said


def _limits(rows: Sequence[Record], rates: dict[tuple[str, str], Record]) -> dict[str, str]:
    ceiling = next((rates[_key(row)].ceiling["gb_per_s"] for row in rows if _key(row) in rates), None)
    needed = _of(rows[0])["needed_gb_per_s"]
    return {
        "loader": "ceiling" if ceiling else "",
        "workload": _of(rows[0])["workload"] if ceiling else "",
        "AU %": "100.0" if ceiling else "",
        "GB/s": table.rate(ceiling),
        "% of ceiling": "100.0" if ceiling else "",
        "feeds": _count(ceiling / needed) if ceiling else "",
    }


def _order(row: Record, rates: dict[tuple[str, str], Record]) -> tuple[float, float]:
    other = rates.get(_key(row))
    return -_of(row).get("utilisation", -1.0), -_rate(other) if other is not None else 0.0


def _utilisation(row: Record, rate: Record | None) -> str:
    if not _computes(row):
        return ""
    colour = "green" if _of(row)["passes"] else "red"
    return f"[{colour}]{_percent(row, 'utilisation')}[/]{' ‡' if _borrowed(row, rate) else ''}"


def _borrowed(row: Record, rate: Record | None) -> bool:
    """Whether the utilisation is beyond what the rate without compute sustains, by more than the noise."""
    if rate is None or not _computes(row):
        return False
    sustained = _of(rate)["accelerators_fed"] * _of(rate)["target_utilisation"]
    return bool(_of(row)["utilisation"] > _BORROWED * sustained)


def _percent(row: Record, key: str) -> str:
    return f"{100 * _of(row)[key]:.1f}" if key in _of(row) else ""


def _bounds(found: Bounds) -> str:
    return f"{100 * found.low:.1f}-{100 * found.high:.1f}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _rate(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0


def _computes(record: Record) -> bool:
    return "utilisation" in _of(record)


def _key(record: Record) -> tuple[str, str]:
    return _of(record)["workload"], record.loader


def _of(record: Record) -> dict[str, Any]:
    return record.derived or {}
