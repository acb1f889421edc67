"""The tables of the scenarios that stream layers, from what each record derived. Times in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import report_bounds, stats, table
from bench.record import Record
from bench.report_bounds import Bounds
from bench.table import Column, Content, Section

_STALLS = ("storage", "link", "slots", "order")


def pipeline(records: Sequence[Record]) -> Content:
    """Compute, transfer, slope, overhead and fill of every route, a section for each number of tokens."""
    first = _of(records[0])
    sections = []
    for tokens in dict.fromkeys(_of(record)["tokens"] for record in records):
        rows = sorted((r for r in records if _of(r)["tokens"] == tokens), key=lambda r: _of(r)["slope_s"])
        sections.append(Section(rows, _pipeline_limits(rows)))
    lengths = dict.fromkeys((_of(record)["short_layers"], _of(record)["long_layers"]) for record in records)
    short, long = next(iter(lengths))
    notes = [
        f"slope: (T{long} - T{short}) / {long - short}, what each further layer takes. overhead: of the slope above "
        "the",
        f"slower of compute and transfer, each alone, in the same round. fill: T{short} - {short} slopes. GB/s: of the "
        "long run.",
        "least: the slower of compute and transfer of the best route. stall: of a layer, with its main cause. Times in "
        "ms.",
        f"consumed: {first['consumed']}.",
        f"{table.size(first['distinct_bytes'])} of distinct layers, used in turn; {first['num_slots']} slots.",
        _ceiling(records[0]),
    ]
    for record in records:
        other = (_of(record)["short_layers"], _of(record)["long_layers"])
        note = f"{record.loader} is slow: its slope is of runs of {other[0]} and {other[1]} layers."
        if other != (short, long) and note not in notes:
            notes.append(note)
    return Content(
        f"{records[0].scenario}, {first['pass']}: layers of {table.size(first['layer_bytes'])}, {records[0].device}",
        [
            Column("loader", lambda r: r.loader),
            Column("tokens", lambda r: f"{_of(r)['tokens']}"),
            _time("compute", "compute_s"),
            _time("transfer", "transfer_s"),
            _time("slope", "slope_s"),
            Column("overhead %", lambda r: signed(_of(r)["overhead"])),
            report_bounds.column(records, lambda r: report_bounds.of_derived(r, "overhead"), interval, 100),
            _time("fill", "fill_s"),
            Column("GB/s", lambda r: table.rate(r.gb_per_s["median"] if r.gb_per_s else None), 110),
            table.SPREAD,
            table.SHARE,
            table.COUNT,
            Column("stall", lambda r: _stall(r, _of(r)["long_layers"]), 120),
            _HOST,
            table.VERIFIED,
        ],
        sections,
        notes,
    )


def training(records: Sequence[Record]) -> Content:
    """Measured and predicted steps, and the resident model's."""
    first = _of(records[0])
    sections = []
    for tokens in dict.fromkeys(_of(record)["tokens"] for record in records):
        rows = sorted((r for r in records if _of(r)["tokens"] == tokens), key=lambda r: _of(r)["measured_s"])
        resident = stats.median([_of(record)["resident_s"] for record in rows])
        limits = {"loader": "resident", "tokens": f"{tokens}", "measured": table.milliseconds(resident)}
        sections.append(Section(rows, limits))
    return Content(
        f"{records[0].scenario}: {first['layers']} layers of {table.size(first['layer_bytes'])}, {first['num_slots']} "
        f"slots, {'recomputed' if first['recompute'] else 'activations kept'}, {records[0].device}",
        [
            Column("loader", lambda r: r.loader),
            Column("tokens", lambda r: f"{_of(r)['tokens']}"),
            Column("reads", lambda r: f"{_of(r)['reads_per_step']:.1f}", 110),
            _time("compute", "resident_s"),
            _time("transfer", "transfer_s", 90),
            _time("predicted", "predicted_s"),
            _time("measured", "measured_s"),
            Column("diff %", lambda r: signed(_of(r)["difference"])),
            report_bounds.column(records, lambda r: report_bounds.of_derived(r, "difference"), interval, 100),
            table.SHARE,
            table.COUNT,
            Column("stall", lambda r: _stall(r, _of(r)["steps"]), 120),
            _HOST,
            table.VERIFIED,
        ],
        sections,
        [
            "predicted: the schedule's steady step for the compute of each use and the transfer of each layer, both of "
            "the same round.",
            "compute: of a step of the resident twin. transfer: of a layer. stall: of a step, with its main cause. "
            "Times in ms.",
            f"{table.size(first['distinct_bytes'])} of distinct layers, used in turn. bytes: the adapters' gradients "
            "equal the twin's.",
            _ceiling(records[0]),
        ],
    )


def _pipeline_limits(records: Sequence[Record]) -> dict[str, str]:
    """The least that a layer could take by what was measured in this section."""
    compute = stats.median([_of(record)["compute_s"] for record in records])
    transfer = min(_of(record)["transfer_s"] for record in records)
    least = max(compute, transfer)
    return {
        "loader": "least",
        "tokens": f"{_of(records[0])['tokens']}",
        "compute": table.milliseconds(compute),
        "transfer": table.milliseconds(transfer),
        "slope": table.milliseconds(least),
        "GB/s": table.rate(_of(records[0])["layer_bytes"] / least / 1e9),
    }


def _of(record: Record) -> dict[str, Any]:
    return record.derived or {}


def _time(title: str, key: str, from_width: int = 0) -> Column:
    cell: Callable[[Record], str] = lambda record: table.milliseconds(_of(record)[key])  # noqa: E731
    return Column(title, cell, from_width)


def signed(ratio: float) -> str:
    """Of a ratio, in per cent; three figures are as many as it has."""
    value = 100 * ratio
    return f"{value:+.2f}" if abs(value) < 10 else f"{value:+.1f}" if abs(value) < 100 else f"{value:+.0f}"


def interval(bounds: Bounds) -> str:
    """Of a ratio, as it is shown."""
    return f"{signed(bounds.low)}..{signed(bounds.high)}"


def _stall(record: Record, count: int) -> str:
    """Milliseconds that the consumer stood still, for each of `count`, and what most of it was due to."""
    if "stall_s" not in record.figures:
        return ""
    found = {cause: stats.median(record.figures[f"stall_{cause}_s"]) for cause in _STALLS}
    total = stats.median(record.figures["stall_s"])
    return f"{1e3 * total / count:.2f} {max(_STALLS, key=found.__getitem__)}" if total else "none"


def _host(record: Record) -> str:
    return f"{stats.median(record.figures['host_us']):.0f}" if "host_us" in record.figures else ""


_HOST = Column("host us", _host, 120)


def _ceiling(record: Record) -> str:
    found = record.ceiling
    return f"ceiling of the hardware: {found['kind']} ({found['detail']}), {table.rate(found['gb_per_s'])} GB/s."
