"""`gdsstream tune`: arguments and output of `gdsstream.tune_path`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from gdsstream.cli.output import (
    Block,
    Cell,
    Column,
    Lines,
    Marked,
    Report,
    Status,
    Table,
    device_option,
    emit,
    json_option,
)

if TYPE_CHECKING:
    from gdsstream.tune_path import Task, Tuned
    from gdsstream.tuning import Knobs

_MOST_ROWS = 5
_MIB = 2**20


@click.command("tune")
@click.argument("path", type=click.Path(exists=True))
@device_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=100,
    show_default=True,
    help="When to end; a pair of reads that is under way by then is finished.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be tried and read, and read nothing.")
@json_option
def command(path: str, device: str | None, seconds: float, dry_run: bool, as_json: bool) -> None:
    """Find the fastest settings for reading PATH on this machine, and keep them as a profile.

    PATH is a file of at least 8 MiB, or a folder with such files; the more there is, the better the figures. Looks for
    backend, threads or queue depth, chunk size and pinned bytes by successive halving: many settings get a short read,
    the best of them longer ones. The best one then meets the default in pairs of reads, in turns. Only if it is really
    faster (at 95% confidence, and by 3% or more) are its settings kept; else the profile says that the default stays.

    Files are only read; what the page cache holds of them is dropped before each read, so that the storage itself is
    measured. The profile holds for this machine, the mount of PATH and the device: load_file, safe_open, LayerStreamer,
    offload and the benchmark go by it. An argument goes before the environment, that before the profile, that before
    what is built in. GDSSTREAM_PROFILE=0 leaves profiles out; profiles are in ~/.config/gdsstream/profiles.
    """
    from gdsstream.cli.progress import byte_progress
    from gdsstream.devices import default_device
    from gdsstream.tune_path import Tuner

    with Tuner(path, device or default_device(), seconds=seconds) as tuner:
        if dry_run:
            emit(planned(tuner.task, tuner.notes()), as_json=as_json)
        click.echo(announcement(tuner.task), err=True)
        with byte_progress("tuning") as progress:
            tuned = tuner.run(progress=progress)
    emit(report(tuned), as_json=as_json)


def announcement(task: Task) -> str:
    """What is about to be read."""
    from gdsstream.cli.cells import size

    return (
        f"reads at most {size(task.schedule.nbytes)} of {task.path} in {task.schedule.reads} reads, "
        f"for at most about {task.seconds:g} s; nothing is written but the profile"
    )


def planned(task: Task, notes: Sequence[str]) -> Report:
    """What --dry-run says."""
    from gdsstream.cli.cells import size

    settings = Table(
        [Column("settings"), Column("number", "right"), Column("values", wrap=True)],
        [[one.name, str(one.size), _values(one.fixed, one.ranges)] for one in task.families],
        title="To choose from",
    )
    rounds: list[Sequence[Cell]] = [
        [f"round {number}", str(one.settings + 1), size(one.nbytes)]
        for number, one in enumerate(task.schedule.rounds, 1)
    ]
    rounds.append(["pairs with the default", str(2 * task.schedule.pairs), size(task.schedule.pair_bytes)])
    reads = Table(
        [Column("step"), Column("reads", "right"), Column("each", "right")], rows=rounds, title="To be read, at most"
    )
    said: list[Cell] = [f"{announcement(task)}.", "Nothing was read now: --dry-run."]
    return Report("tune", _data(task, notes, None), [settings, reads, Lines(said), *_notes(notes)])


def report(tuned: Tuned) -> Report:
    """What `tune` says."""
    task, outcome = tuned.task, tuned.outcome
    duel = outcome.duel
    rows: list[list[Cell]] = [["default", *_knobs({}, task), *_figures(duel.default)]]
    if outcome.challenger is not None:
        name: Cell = Marked("tuned", Status.OK) if outcome.better else "best found"
        rows.append([name, *_knobs(outcome.challenger, task), *_figures(duel.tuned)])
    compared = Table(
        [Column(""), *_KNOB_COLUMNS, Column("GB/s", "right"), Column("± MAD", "right"), Column("range", "right")],
        rows,
        title=f"Reading {task.path} to {task.device}, in turns, {len(duel.default)} pairs",
        note="auto: the engine decides; ± MAD: the median distance from the median",
    )
    said: list[Cell] = [_verdict(tuned), f"- {_kept(tuned)}"]
    names = ("default", "tuned" if outcome.better else "best found")
    said += [f"- {who}: {route}" for who, route in zip(names, tuned.routes, strict=True) if route]
    said.append(f"- {_cost(tuned)}")
    blocks: list[Block] = [compared, Lines(said), _best(tuned), *_notes(tuned.notes)]
    return Report("tune", _data(task, tuned.notes, tuned), blocks)


def sentence(tuned: Tuned) -> str:
    """Whether the settings that were found are better, in words."""
    outcome, duel = tuned.outcome, tuned.outcome.duel
    if outcome.challenger is None and not outcome.in_time:
        return "The default stays: there was no time to try anything else; give more --seconds."
    if outcome.challenger is None:
        return "The default stays: no other setting worked."
    if outcome.failure:
        return f"The default stays: the pairs were broken off ({outcome.failure})."
    if duel.gain is None or duel.at_least is None:
        return f"The default stays: {len(duel.default)} pairs are too few to tell; give more --seconds."
    what = f"the median of {len(duel.default)} pairs is {duel.gain:.2f} x the default"
    what += f", at 95% confidence {duel.at_least:.2f} x or more"
    if outcome.better:
        return f"The tuned settings are faster: {what}."
    return f"The default stays: {what}, which is no gain to rely on."


def _verdict(tuned: Tuned) -> Cell:
    return Marked(sentence(tuned), Status.OK)


def _kept(tuned: Tuned) -> str:
    what = "tuned" if tuned.profile.knobs else "the default"
    return f"profile ({what}) for {tuned.task.here.mount_point} and {tuned.task.device}: {tuned.file}"


def _cost(tuned: Tuned) -> str:
    from gdsstream.cli.cells import size

    tried = {(one.family, tuple(one.knobs.items())) for one in tuned.outcome.trials}
    text = f"{size(tuned.outcome.nbytes)} read in {tuned.seconds:.1f} s, {len(tried) - 1} settings tried"
    if not tuned.outcome.in_time:
        text += f"; cut short by --seconds {tuned.task.seconds:g}"
    return f"{text}; page cache {'emptied before each read' if tuned.task.cold else 'not emptied (files in memory)'}"


def _best(tuned: Tuned) -> Table:
    """The last round's, the fastest first."""
    trials = tuned.outcome.trials
    last = max(one.round for one in trials)
    worked = [one for one in trials if one.round == last and one.gb_per_s is not None]
    worked.sort(key=lambda one: -(one.gb_per_s or 0.0))
    rows: list[list[Cell]] = [
        [one.family, *_knobs(one.knobs, tuned.task), f"{one.gb_per_s:.2f}"] for one in worked[:_MOST_ROWS]
    ]
    failed = [one for one in trials if one.failure]
    note = f"{len(failed)} could not work, the first because: {failed[0].failure}" if failed else ""
    columns = [Column("settings"), *_KNOB_COLUMNS, Column("GB/s", "right")]
    return Table(columns, rows, title="The best of the search's last round, one read each", note=note)


_KNOB_COLUMNS = (
    Column("backend"),
    Column("O_DIRECT"),
    Column("threads", "right"),
    Column("depth", "right"),
    Column("chunk", "right"),
    Column("pinned", "right"),
)


def _knobs(knobs: Knobs, task: Task) -> list[str]:
    from gdsstream.tune_path import shown

    values = shown(knobs, task.default_backend)
    return [
        str(values["backend"]),
        {None: "auto", True: "yes", False: "no"}[values["direct_io"]],
        _or_auto(values["direct_threads"] or values["num_threads"]),
        "-" if values["reader"] == "pread" else _or_auto(values["io_depth"]),
        _binary(values["chunk_size"]),
        _binary(values["staging_bytes"]),
    ]


def _or_auto(value: object) -> str:
    return "auto" if value is None else str(value)


def _binary(nbytes: int | None) -> str:
    if nbytes is None:
        return "auto"
    return f"{nbytes // _MIB} MiB" if nbytes % _MIB == 0 else f"{nbytes // 1024} KiB"


def _figures(rates: Sequence[float]) -> list[str]:
    from gdsstream.duel import spread

    if not rates:
        return ["-", "-", "-"]
    return [f"{median(rates):.2f}", f"{spread(rates):.2f}", f"{min(rates):.2f} - {max(rates):.2f}"]


def _values(fixed: Knobs, ranges: Any) -> str:
    texts = [f"{knob} {value}" for knob, value in fixed.items()]
    for knob, values in ranges.items():
        names = [_binary(value) if knob.endswith(("_bytes", "_size")) else str(value) for value in values]
        texts.append(f"{knob} {', '.join(names)}")
    return "; ".join(texts)


def _notes(notes: Sequence[str]) -> list[Block]:
    return [Lines([Marked(f"- {note}", Status.WARNING) for note in notes], title="Notes")] if notes else []


def _data(task: Task, notes: Sequence[str], tuned: Tuned | None) -> dict[str, Any]:
    from gdsstream.tune_path import shown

    def arm(knobs: Knobs, rates: Sequence[float], route: str) -> dict[str, Any]:
        from gdsstream.duel import spread

        return {
            "knobs": dict(knobs),
            "effective": shown(knobs, task.default_backend),
            "route": route,
            "gb_per_s": list(rates),
            "median_gb_per_s": median(rates) if rates else None,
            "mad_gb_per_s": spread(rates) if rates else None,
        }

    result: dict[str, Any] | None = None
    if tuned is not None:
        outcome, duel = tuned.outcome, tuned.outcome.duel
        challenger = outcome.challenger
        result = {
            "default": arm({}, duel.default, tuned.routes[0]),
            "tuned": None if challenger is None else arm(challenger, duel.tuned, tuned.routes[1]),
            "gain": duel.gain,
            "gain_at_least": duel.at_least,
            "better": outcome.better,
            "sentence": sentence(tuned),
            "profile": {"file": str(tuned.file), "knobs": tuned.profile.knobs},
            "read_bytes": outcome.nbytes,
            "seconds": tuned.seconds,
            "in_time": outcome.in_time,
            "trials": [
                {
                    "round": one.round + 1,
                    "family": one.family,
                    "knobs": dict(one.knobs),
                    "nbytes": one.nbytes,
                    "gb_per_s": one.gb_per_s,
                    "failure": one.failure,
                }
                for one in outcome.trials
            ],
        }
    return {
        "path": task.path,
        "device": task.device,
        "mount_point": task.here.mount_point,
        "filesystem": task.info.filesystem,
        "cold": task.cold,
        "dry_run": tuned is None,
        "plan": {
            "most_bytes": task.schedule.nbytes,
            "most_reads": task.schedule.reads,
            "seconds": task.seconds,
            "families": [
                {
                    "name": one.name,
                    "settings": one.size,
                    "fixed": dict(one.fixed),
                    "ranges": {knob: list(values) for knob, values in one.ranges.items()},
                }
                for one in task.families
            ],
            "rounds": [{"settings": one.settings, "nbytes": one.nbytes} for one in task.schedule.rounds],
            "pairs": task.schedule.pairs,
            "pair_bytes": task.schedule.pair_bytes,
        },
        "result": result,
        "notes": list(notes),
    }


__all__ = ["announcement", "command", "planned", "report", "sentence"]
