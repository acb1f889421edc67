"""The table of checkpoints: a section for each model. Times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import peers, report_bounds, table
from bench.record import Record
from bench.table import Column, Content, Section

_BESIDE_WIDTH = 120


def checkpoints(records: Sequence[Record]) -> Content:
    """Rates of saving and reading back, how long training waits, and what of a save is fsync."""
    first = records[0]
    models = dict.fromkeys(_of(record)["model"] for record in records)
    groups = [[record for record in records if _of(record)["model"] == model] for model in models]
    sections = [Section(sorted(rows, key=lambda r: -_rate(r)), _limits(rows)) for rows in groups]
    notes = [
        "saved: until fsync of every file and of the folder has returned; GB/s is of it. waits: until training may go",
        "on and change the tensors. fsync %: of saved, some fsync was under way. read: GB/s onto the device,",
        "by the same library, with the files out of the page cache before it. Times in seconds.",
    ]
    if any(not _of(record)["read_cold"] for record in records):
        notes.append("~: pages stayed in the cache, so it was not read from the storage.")
    notes += dict.fromkeys(map(_scaled, records))
    for rows in groups:
        ceiling = rows[0].ceiling
        notes.append(
            f"ceiling of {_of(rows[0])['model']}: {ceiling['kind']} ({ceiling['detail']}), sampled every round."
        )
    columns = _columns(records)
    if (beside := peers.beside(groups, _BESIDE_WIDTH, _BESIDE_WIDTH)) is not None:
        columns[-1:-1] = beside.columns
        notes.append(beside.note)
    return Content(f"{first.scenario}: Llama 3 shapes, {first.device}", columns, sections, notes)


def _columns(records: Sequence[Record]) -> list[Column]:
    return [
        Column("loader", lambda r: r.loader),
        Column("model", lambda r: str(_of(r)["model"])),
        Column("GB/s", lambda r: table.rate(_rate(r))),
        table.SPREAD,
        table.SHARE._replace(from_width=0),
        report_bounds.share(records, 110),
        table.COUNT._replace(from_width=90),
        Column("saved", lambda r: table.seconds(_of(r)["saved_s"]), 90),
        Column("waits", lambda r: table.seconds(_of(r)["blocked_s"])),
        Column("fsync %", lambda r: table.percent(100 * _of(r)["fsync_share"])),
        Column("read", _read),
        Column("room", lambda r: table.size(int(_of(r)["room_bytes"])), table.REPORT_ONLY),
        Column("first", lambda r: table.seconds(r.first_s), table.REPORT_ONLY),
        Column("start-up", lambda r: table.seconds(r.startup_s), table.REPORT_ONLY),
        Column("CPU s/GB", lambda r: "" if r.cpu_s_per_gb is None else f"{r.cpu_s_per_gb:.2f}", table.REPORT_ONLY),
        table.VERIFIED,
    ]


def _limits(records: Sequence[Record]) -> dict[str, str]:
    ceiling = records[0].ceiling["gb_per_s"]
    return {
        "loader": "ceiling",
        "model": str(_of(records[0])["model"]),
        "GB/s": table.rate(ceiling),
        "% of ceiling": "100.0",
    }


def _read(record: Record) -> str:
    found = _of(record)
    return f"{table.rate(found['read_gb_per_s'])}{'' if found['read_cold'] else ' ~'}"


def _scaled(record: Record) -> str:
    found = _of(record)
    parts = [f"{found['layers']} of {found['model_layers']} layers"]
    if not found["embeddings"]:
        parts.append("no embeddings")
    if found["optimizer"]:
        parts.append("with the optimizer's fp32 state")
    if found["shrink"] > 1:
        parts.append(f"widths divided by {found['shrink']}")
    sizes = f"{table.size(found['checkpoint_bytes'])} of {table.size(found['model_checkpoint_bytes'])}"
    return f"{found['model']}: {sizes} in {found['shards']} files ({', '.join(parts)})."


def _of(record: Record) -> dict[str, Any]:
    return record.derived or {}


def _rate(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0
