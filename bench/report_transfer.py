"""The table of transfers: a section for each part, with ios a second and what an io took. Times in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import config_transfer, peers, report_bounds, results, table
from bench.record import Record
from bench.table import Column, Content, Section

_LARGE_IO = 1 << 20
#: What a terminal has room for.
_MOST_ROUTES = 5
#: What parts have to have in common so that operation and size say which it is.
_ALIKE = (*(name for name in config_transfer.PARTS if name not in ("ops", "io_bytes")), "io_range")


def transfers(records: Sequence[Record]) -> Content:
    """Rates and latencies of every route, fastest first in each part."""
    first = records[0]
    sections = []
    for part in dict.fromkeys(results.part(record) for record in records):
        rows = [record for record in records if results.part(record) == part]
        sections.append(Section(sorted(rows, key=lambda record: -_rate(record)), _limits(rows)))
    notes = [
        "in flight: threads x ios in each of them. p50, p99: of an io, in microseconds; the median of the samples'.",
        "Of *, of a batch or a stretch of ios; without one, nobody can tell when a single io was complete.",
        "bytes: every io compared with what the files hold.",
    ]
    if any(_of(record)["op"].endswith("write") for record in records):
        inside = [record for record in records if _of(record)["fsync"]]
        notes.append(f"Writes end {'with' if inside else 'without'} fsync.")
    if any(record.delivers == "host memory" for record in records):
        notes.append("†: ends in host memory; the others on the GPU.")
    detail = dict.fromkeys(
        f"ceiling of {_of(r)['op']}, {_io(r)}: {r.ceiling['kind']} ({r.ceiling['detail']}), "
        f"{table.rate(r.ceiling['gb_per_s'])} GB/s."
        for r in records
    )
    columns = _columns(records)
    if (beside := peers.beside([section.records for section in sections], 120)) is not None:
        columns[-1:-1] = beside.columns
        notes.append(beside.note)
    return Content(
        f"{first.scenario}: {table.size(_of(first)['dataset_bytes'])} of files, {first.cache} cache, {first.device}",
        columns,
        sections,
        [*notes, *(_folded(detail))],
    )


def beside(records: Sequence[Record]) -> Content | None:
    """Routes beside each other, a row for each operation and size: ios a second below 1 MiB, GB/s from there on. None
    where parts differ in anything else, or where a terminal has no room for all routes."""
    parts = {results.part(record): record for record in reversed(records)}
    routes = list(dict.fromkeys(record.loader for record in records))
    alike = {tuple(str(record.config["scenario"].get(name)) for name in _ALIKE) for record in records}
    if len(parts) < 2 or not 2 <= len(routes) <= _MOST_ROUTES or len(alike) > 1:
        return None
    found = {(results.part(record), record.loader): record for record in records}

    def of(route: str) -> Column:
        return Column(route, lambda r: _figure(found.get((results.part(r), route))))

    columns = [Column("op", lambda r: str(_of(r)["op"])), Column("io", lambda r: table.block(_part_io(r)))]
    limit = Column("ceiling", lambda r: _amount(r.ceiling["gb_per_s"], _part_io(r)))
    rows = [parts[part] for part in dict.fromkeys(results.part(record) for record in records)]
    return Content(
        f"{records[0].scenario}: the routes beside each other",
        [*columns, *map(of, routes), limit],
        [Section(rows, {})],
        [f"ios/s below {table.block(_LARGE_IO)}, GB/s from there on."],
    )


def _figure(record: Record | None) -> str:
    return "" if record is None else _amount(_rate(record), _of(record)["io_bytes"])


def _amount(gb_per_s: float | None, io_bytes: int) -> str:
    if gb_per_s is None:
        return ""
    return f"{gb_per_s:.2f} GB/s" if io_bytes >= _LARGE_IO else _count(gb_per_s * 1e9 / io_bytes)


def _part_io(record: Record) -> int:
    return int(record.config["scenario"]["io_bytes"][0])


def _columns(records: Sequence[Record]) -> list[Column]:
    def wide(name: str) -> int:
        """What all rows have in common needs no room in a terminal."""
        return 0 if len({_of(record).get(name) for record in records} - {None}) > 1 else table.REPORT_ONLY

    return [
        Column("route", lambda r: r.loader + (" †" if r.delivers == "host memory" else "")),
        Column("op", lambda r: str(_of(r)["op"])),
        Column("io", _io),
        Column("in flight", _in_flight, 90),
        Column("a sample", lambda r: table.size(r.bytes), wide("total_bytes")),
        Column("shift", lambda r: f"{_of(r)['shift_bytes']} B", wide("shift_bytes")),
        Column("O_DIRECT", lambda r: _yes(_of(r)["direct"]), wide("direct")),
        Column("registered", lambda r: _yes(_of(r)["registered"]), wide("registered")),
        Column("ios/s", lambda r: _count(r.units_per_s["median"] if r.units_per_s else None)),
        Column("p50", lambda r: _latency(r, "p50"), 100),
        Column("p95", lambda r: _latency(r, "p95"), table.REPORT_ONLY),
        Column("p99", lambda r: _latency(r, "p99"), 100),
        Column("max", lambda r: _latency(r, "max"), table.REPORT_ONLY),
        Column("GB/s", lambda r: table.rate(_rate(r))),
        table.SPREAD._replace(from_width=110),
        table.SHARE._replace(from_width=0),
        report_bounds.share(records, table.REPORT_ONLY),
        table.COUNT._replace(from_width=100),
        Column("CPU s/GB", lambda r: "" if r.cpu_s_per_gb is None else f"{r.cpu_s_per_gb:.3f}", table.REPORT_ONLY),
        Column("start-up s", lambda r: table.seconds(r.startup_s), table.REPORT_ONLY),
        table.VERIFIED,
    ]


def _limits(records: Sequence[Record]) -> dict[str, str]:
    first, ceiling = records[0], records[0].ceiling["gb_per_s"]
    scenario = first.config["scenario"]
    wanted = scenario["io_bytes"][0]
    return {
        "route": "ceiling",
        "op": str(_of(first)["op"]),
        "io": table.block(wanted),
        "ios/s": _count(ceiling * 1e9 / wanted if ceiling and not scenario["io_range"] else None),
        "GB/s": table.rate(ceiling),
        "% of ceiling": "100.0",
    }


def _folded(details: dict[str, None]) -> list[str]:
    """A run of many parts says what its first ceilings were; all of them are in the records."""
    lines = list(details)
    return lines if len(lines) <= 4 else [*lines[:3], f"{len(lines) - 3} more ceilings are in the records."]


def _of(record: Record) -> dict[str, Any]:
    return record.derived or {}


def _rate(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0


def _io(record: Record) -> str:
    spread = record.config["scenario"].get("io_range")
    options = record.config["loaders"].get(record.loader, {})
    if spread and options.get("io_bytes") is None:
        return f"{table.block(spread[0])}-{table.block(spread[1])}"
    return table.block(_of(record)["io_bytes"])


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _in_flight(record: Record) -> str:
    found = _of(record)
    return "own" if found["threads"] is None else f"{found['threads']} x {found['depth']}"


def _latency(record: Record, name: str) -> str:
    found = _of(record)
    value = found.get(f"latency_{name}_us")
    if value is None:
        return ""
    star = "" if found["latency_of"] == "io" else "*"
    return f"{star}{value:.1f}" if value < 100 else f"{star}{value:,.0f}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
