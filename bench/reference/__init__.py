"""The reference documents' tables, measured here: `python -m bench.run experiment=reference`.

Several documents say what storage-to-GPU paths reach, each on hardware of its own. This makes the experiments that
their tables come from, one after the other and scaled to the machine, and lays the figures beside each other. What is
made and what is claimed is data (configs/reference/):

    plan.py     what a part and a claim are, checked
    forward.py  what of the command line is for the parts
    fit.py      how long a part's samples take, and how much they move
    parts.py    the experiments: each a run of bench.run in a fresh process, with a share of the time; resumable
    claims.py   our figure for a claim, with its interval, and whether the claim holds (pure)
    show.py     the table in the terminal, and report.md

Rates of different hardware say nothing about each other: they are shown side by side, ours with its share of what this
machine's ceiling is, and get no verdict. What a document says of one figure in proportion to another gets one: it holds
where the whole 95 % interval of our proportion agrees with it, does not hold here where none of it does, and is
undecided between. A claim of what cannot be measured here is a row with the reason, and so is each of a part that
failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.config import BenchConfig
from bench.record import Record


def run(settings: BenchConfig, directory: Path, out: Console, given: Sequence[str] = ()) -> list[Record]:
    """Make the parts, in `directory` or where an earlier call began, print the table and write report.md; returns all
    records, which are in results.jsonl there. `given` are the overrides of the command line. Raises BenchError."""
    from bench.reference import claims, forward, parts, plan, show

    planned = plan.build(settings.reference)
    place = Path(settings.reference.resume or directory)
    try:
        made = parts.run(planned, settings, place, out, forward.check(given))
    except KeyboardInterrupt:
        out.print(f"go on with reference.resume={place}", highlight=False)
        raise
    judged = [claims.judge(claim, made) for claim in planned.claims_of(made)]
    show.show(judged, made, out)
    target = show.write(judged, made, place)
    out.print(f"report: {target}; go on with reference.resume={place}", style="dim", highlight=False)
    return [row for part in made.values() for row in part.rows]
