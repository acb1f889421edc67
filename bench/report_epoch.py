"""The tables of data loaders: a section for each size of a record. Times in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import peers, report_bounds, stats, table
from bench.record import Record
from bench.report_layers import interval, signed
from bench.table import Column, Content, Section


def epochs(records: Sequence[Record]) -> Content:
    """Rates and first batches of every loader, and what it costs a training loop where there was compute."""
    first, found = records[0], _of(records[0])
    computing = "compute_s" in found
    sections = []
    for size in dict.fromkeys(_of(record)["record_bytes"] for record in records):
        rows = [record for record in records if _of(record)["record_bytes"] == size]
        key: Callable[[Record], float] = lambda r: -_rate(r)  # noqa: E731
        if computing:
            key = lambda r: _of(r)["overhead"]  # noqa: E731
        sections.append(Section(sorted(rows, key=key), _limits(rows)))
    shown = [
        "first batch: from asking for it until it can be used on the device, in the samples; in brackets in the very "
        "first epoch.",
        "CPU s/GB: of all processes. bytes: every batch compared, and each record once an epoch.",
    ]
    if computing:
        shown = [
            "stall: between the end of a step and the beginning of the next one on the device. overhead: of the loop "
            "beyond",
            "its compute alone, measured right before it, the first batch excepted.",
            *shown,
        ]
    if broken := dict.fromkeys(record.loader for record in records if (_of(record)["epochs"] or 1) < 1):
        shown.append(
            f"Samples that end within an epoch, and pay for what was read ahead for the rest: {', '.join(broken)}."
        )
    detail = dict.fromkeys(
        f"ceiling at {table.block(_of(r)['record_bytes'])}: {r.ceiling['kind']} ({r.ceiling['detail']}), "
        f"{table.rate(r.ceiling['gb_per_s'])} GB/s."
        for r in records
    )
    columns = _columns(computing, records)
    if not computing and (beside := peers.beside([section.records for section in sections], 120)) is not None:
        columns[-1:-1] = beside.columns
        shown.append(beside.note)
    return Content(
        f"{first.scenario}: {table.size(found['dataset_bytes'])} a dataset, {first.cache} cache, {first.device}",
        columns,
        sections,
        [*shown, *detail],
    )


def _columns(computing: bool, records: Sequence[Record]) -> list[Column]:
    head = [
        Column("loader", lambda r: r.loader + (" †" if r.delivers == "lease" else "")),
        Column("record", lambda r: table.block(_of(r)["record_bytes"])),
        Column("batch", lambda r: f"{_of(r)['batch_size']}", 110),
    ]
    tail = [
        Column("first batch", _first_batch, 90),
        Column("CPU s/GB", lambda r: f"{_of(r)['cpu_s_per_gb_with_workers']:.3f}", 110),
        table.VERIFIED,
    ]
    if computing:
        middle = [
            Column("compute", lambda r: _milliseconds(_of(r)["compute_s"])),
            Column("step", lambda r: _milliseconds(_of(r)["step_s"])),
            Column("stall", lambda r: _milliseconds(_of(r)["stall_s"])),
            Column("overhead %", lambda r: signed(_of(r)["overhead"])),
            report_bounds.column(records, lambda r: report_bounds.of_derived(r, "overhead"), interval, 100),
            table.COUNT,
        ]
        return [*head, *middle, *tail]
    middle = [
        Column("k/s", lambda r: _thousands(r.units_per_s["median"] if r.units_per_s else None)),
        Column("GB/s", lambda r: table.rate(_rate(r))),
        table.SPREAD,
        table.SHARE._replace(from_width=0),
        report_bounds.share(records, 100),
        table.COUNT._replace(from_width=100),
    ]
    return [*head, *middle, *tail]


def _limits(records: Sequence[Record]) -> dict[str, str]:
    ceiling = records[0].ceiling["gb_per_s"]
    size = _of(records[0])["record_bytes"]
    compute = [_of(record)["compute_s"] for record in records if "compute_s" in _of(record)]
    return {
        "loader": "compute alone" if compute else "ceiling",
        "record": table.block(size),
        "compute": _milliseconds(stats.median(compute)) if compute else "",
        "k/s": _thousands(ceiling * 1e9 / size if ceiling else None),
        "GB/s": table.rate(ceiling),
        "% of ceiling": "100.0",
    }


def _of(record: Record) -> dict[str, Any]:
    return record.derived or {}


def _rate(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0


def _first_batch(record: Record) -> str:
    steady, cold = (_of(record)[name] for name in ("first_batch_s", "first_epoch_first_batch_s"))
    return f"{_milliseconds(steady)} ({_milliseconds(cold)})"


def _milliseconds(seconds: float) -> str:
    """Three figures, as a loader's cost to a step can be microseconds."""
    value = 1e3 * seconds
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def _thousands(per_s: float | None) -> str:
    if per_s is None:
        return ""
    value = per_s / 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.4f}"
