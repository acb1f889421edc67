"""The tables: one for each verb, and one of what was not measured. In the terminal they are at most 120 columns wide;
`python -m bench.report RESULTS.jsonl` writes the same ones to report.md (report_md.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from bench import (
    environment,
    peers,
    report_bounds,
    report_checkpoint,
    report_epoch,
    report_layers,
    report_mlperf,
    report_transfer,
    stats,
    sweeps_best,
    table,
)
from bench.measure import FEWER_DEVICE_BYTES, NOT_COLD
from bench.record import Record
from bench.table import Column, Content, Section

_WIDTH = 120
#: What samples are labelled with, and what a note says of them.
_LABELS = (
    ("outlier", "outliers: labelled, kept and counted"),
    (NOT_COLD, "not cold: not counted"),
    (FEWER_DEVICE_BYTES, "cold, and yet the disk read less than the files hold: counted"),
)
#: verb -> its table, where it has one of its own
_TABLES: dict[str, Callable[[Sequence[Record]], Content]] = {
    "pipeline": report_layers.pipeline,
    "train": report_layers.training,
    "epoch": report_epoch.epochs,
    "write": report_checkpoint.checkpoints,
    "mlperf": report_mlperf.workloads,
    "transfer": report_transfer.transfers,
}


def console() -> Console:
    """A console of at most 120 columns; exactly 120 where the output is not a terminal."""
    found = Console()
    return Console(width=min(found.width, _WIDTH) if found.is_terminal else _WIDTH, soft_wrap=False)


def show(records: Sequence[Record], out: Console) -> None:
    """Print what was measured, fastest first, and what was not, with the reason."""
    measured = [record for record in records if record.status == "ok"]
    if measured:
        for found in (content(measured), *more(measured)):
            table.show(found, out)
            out.print()
        for line in sweeps_best.lines(measured):
            out.print(line, markup=False, highlight=False)
    rest = not_measured(records)
    if rest:
        left = table.make("Not measured")
        left.add_column("loader", no_wrap=True)
        left.add_column("status", no_wrap=True)
        left.add_column("reason", overflow="fold")
        for record in rest:
            colour = "red" if record.status == "failed" else "dim"
            left.add_row(record.loader, f"[{colour}]{record.status}[/]", escape(reason(record)))
        out.print(left)


def content(measured: Sequence[Record]) -> Content:
    """The table of the measured rows of one run, and its notes."""
    verb = measured[0].verb
    if verb in _TABLES:
        found = _TABLES[verb](measured)
    else:
        found = _loaded(sorted(measured, key=lambda record: -_median(record)))
    found = found._replace(
        notes=[*found.notes, *report_bounds.notes(measured), *_stopped(measured), *table.disbelief(measured)]
    )
    load, cores = measured[0].env.get("load_average"), measured[0].env.get("cores")
    if load is not None and cores and load > cores / 2:
        busy = f"The machine was busy with other work before this run (load {load:.1f} on {cores} cores)."
        found = found._replace(notes=[*found.notes, busy])
    if (network := environment.network_note(measured[0].env)) is not None:
        found = found._replace(notes=[*found.notes, network])
    return found


def _stopped(measured: Sequence[Record]) -> list[str]:
    """Why parts of a run made fewer rounds than asked for."""
    why = {
        "max_seconds": "the time of scenario.max_seconds was over",
        "target_spread": "all intervals were narrow enough",
    }
    early = [record for record in measured if record.stopped in why]
    said = [
        f"Stopped after {len(record.ceiling['samples'])} of {record.config['scenario']['rounds']} rounds: "
        f"{why[str(record.stopped)]}."
        for record in early
    ]
    return list(dict.fromkeys(said))


def more(measured: Sequence[Record]) -> list[Content]:
    """What is shown of the same rows after their table."""
    found = report_transfer.beside(measured) if measured[0].verb == "transfer" else None
    return [found] if found is not None else []


def not_measured(records: Sequence[Record]) -> list[Record]:
    """Those that failed or were skipped; once where a run of several parts skips a loader in each for one reason."""
    return list({(record.loader, record.reason): record for record in records if record.status != "ok"}.values())


def reason(record: Record) -> str:
    """Why a row was not measured, on one line."""
    return (record.reason or "").strip().partition("\n")[0]


def _loaded(records: Sequence[Record]) -> Content:
    first, ceiling = records[0], records[0].ceiling
    notes = [
        f"ceiling: {ceiling['kind']} ({ceiling['detail']}), sampled every round. Times in seconds.",
        "GB/s counts until every byte could be used; returned is when the call came back.",
    ]
    if any(record.delivers != "owned" for record in records):
        notes.append("†: the tensors still share the file's pages at the end; the others own their memory.")
    for label, meaning in _LABELS:
        found = sum(label in labels for record in records for labels in record.sample_labels)
        if found:
            notes.append(f"{found} of {sum(len(record.samples_s) for record in records)} samples are {meaning}.")
    columns = _columns(first.verb, records)
    if (beside := peers.beside([records], 120)) is not None:
        columns[-1:-1] = beside.columns
        notes.append(beside.note)
    return Content(
        f"{first.scenario}: {table.size(first.bytes)} a sample, {first.units} {first.unit}, {first.cache} cache, "
        f"{first.device}",
        columns,
        [Section(records, {"loader": "ceiling", "GB/s": table.rate(ceiling["gb_per_s"]), "% of ceiling": "100.0"})],
        notes,
    )


def _columns(verb: str, records: Sequence[Record]) -> list[Column]:
    columns = [
        Column("loader", lambda r: r.loader + ("" if r.delivers == "owned" else " †")),
        Column("GB/s", lambda r: table.rate(_median(r))),
        table.SPREAD._replace(from_width=110),
        table.SHARE._replace(from_width=0),
        report_bounds.share(records, 80),
        table.COUNT._replace(from_width=80),
        Column("returned", lambda r: table.seconds(stats.median(r.lazy_return_s)), 110),
        Column("first", lambda r: table.seconds(r.first_s), 95),
        Column("start-up", lambda r: table.seconds(r.startup_s), 95),
        Column("CPU s/GB", lambda r: "" if r.cpu_s_per_gb is None else f"{r.cpu_s_per_gb:.3f}", 110),
        table.VERIFIED,
    ]
    if verb == "gather":
        columns.insert(1, Column("k/s", lambda r: f"{r.units_per_s['median'] / 1e3:.0f}" if r.units_per_s else ""))
        columns = [column for column in columns if column.title != "returned"]
    return columns


def _median(record: Record) -> float:
    return record.gb_per_s["median"] if record.gb_per_s else 0.0


if __name__ == "__main__":
    from bench import report_md

    report_md.main()
