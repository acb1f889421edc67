"""The parts of a reference run: each `python -m bench.run experiment=...` in a fresh process.

The time that is left is shared out anew before each part, in proportion to the shares of those that are still to come;
a part's scenario gets its time through `scenario.max_seconds` and the length of its samples (fit.py). One that needs
far more is ended, with what it had written kept; it counts as made where every row was complete by then.

A part leaves a folder with its records, what was printed, and part.json: how it ended. That makes a later call with
`reference.resume=` go on: parts that ended well are kept, where commit, machine and overrides are the same; one that
was cut short or could not be made goes on where it was.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from rich.console import Console

from bench import config, environment, files, progress, results, run_parts
from bench.config import BenchConfig, BenchError, nearest
from bench.record import Record
from bench.reference import fit, forward
from bench.reference.figures import Made
from bench.reference.plan import Part, Plan

_ROOT = Path(__file__).resolve().parents[2]
_STATE = "part.json"
_PRINTED = "printed.txt"
#: With less, a part could not even begin.
_LEAST_S = 1.0
_GRACE_S = 30.0
_RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_ENDING_S = 90.0


def run(plan: Plan, settings: BenchConfig, directory: Path, out: Console, given: Sequence[str] = ()) -> dict[str, Made]:
    """Make the parts in `directory`, and put all their records into one results.jsonl there, and at the end of the file
    `output`. `given` are overrides that parts get. Raises BenchError where the directory is of another commit, or
    cannot be written, and where there is no directory for the files, which no part could be made in."""
    if settings.storage.dir is not None:
        files.check_directory(Path(settings.storage.dir))
    output = Path(settings.output) if settings.output is not None else None
    if output is not None:
        run_parts.check_output(output)
    directory.mkdir(parents=True, exist_ok=True)
    made = {part.name: _earlier(part, directory, given) for part in plan.parts}
    if settings.reference.resume is not None:
        kept = sum(found is not None for found in made.values())
        out.print(f"resumed: {kept} of {len(plan.parts)} parts are kept.", highlight=False)
    todo = [part for part in plan.parts if made[part.name] is None and part.name in plan.chosen]
    deadline = time.monotonic() + plan.max_seconds
    rate = cache(fit.rate)
    with progress.bar("reference", len(todo)) as step:
        for number, part in enumerate(todo):
            left = deadline - time.monotonic()
            budget = left * part.share / sum(other.share for other in todo[number:])
            step(part.name)
            out.print(f"{part.name}: {max(budget, 0):.0f} s", style="dim", highlight=False)
            found = made[part.name] = _make(part, budget, left, given, directory, rate)
            step(None)
            _combine(directory, plan, made)
            if output is not None:
                _add(output, found.rows)
    _combine(directory, plan, made)
    return {name: found for name, found in made.items() if found is not None}


def _combine(directory: Path, plan: Plan, made: dict[str, Made | None]) -> None:
    found = (made[part.name] for part in plan.parts)
    lines = [row.to_json() + "\n" for each in found if each is not None for row in each.rows]
    target = directory / results.NAME
    new = target.with_name(f".{target.name}.new")
    new.write_text("".join(lines), encoding="utf-8")
    os.replace(new, target)


def _add(output: Path, rows: Sequence[Record]) -> None:
    """What the file does not hold of a part that an earlier call had begun."""
    held = set(output.read_text(encoding="utf-8").splitlines()) if output.exists() else set()
    run_parts.append(output, [row for row in rows if row.to_json() not in held])


def _earlier(part: Part, directory: Path, given: Sequence[str]) -> Made | None:
    """What an earlier call made of a part, where it ended. Raises BenchError where that was of another commit."""
    held = _state(directory / part.name)
    if held is None:
        return None
    now = _asked(part, given)
    differing = [
        f"{name} was {held.get(name)!r} and is {value!r}" for name, value in now.items() if held.get(name) != value
    ]
    if differing:
        raise BenchError(
            f"reference.resume: {directory / part.name} is of another run: {'; '.join(differing)}; remove that folder "
            "to make the part again, or start anew without reference.resume="
        )
    if not held.get("ended"):
        return None
    return Made(_rows(directory / part.name / results.NAME), None, held.get("seconds"))


def _state(place: Path) -> dict[str, Any] | None:
    """What a part's folder says of it; None where it was not begun."""
    state = place / _STATE
    if not state.is_file():
        return None
    try:
        held: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{state} cannot be read ({error}); remove it, and its part is made again") from error
    return held


def _asked(part: Part, given: Sequence[str]) -> dict[str, Any]:
    """What has to be the same for a part to be the same."""
    return {
        "experiment": part.experiment,
        "overrides": [*part.overrides, *forward.for_part(part.overrides, given)],
        "commit": environment.commit(),
        "machine": environment.host(),
    }


def _make(
    part: Part,
    budget_s: float,
    left_s: float,
    given: Sequence[str],
    directory: Path,
    rate: Callable[[Path], float],
) -> Made:
    place = directory / part.name
    output = place / results.NAME
    if part.experiment not in config.options("experiment"):
        near = nearest(part.experiment, config.options("experiment"))
        return Made(problem=f"there is no experiment {part.experiment!r}; {near}")
    if budget_s < _LEAST_S:
        return Made(_rows(output), "no time was left for it; give more with reference.max_seconds=")
    held = _state(place)
    begun = time.monotonic()
    own = forward.for_part(part.overrides, given)
    try:
        settings = fit.composed(part, own)
        # Rows of one part have to be alike, and so a resumed one keeps what it began with.
        fitted = held["fitted"] if held and "fitted" in held else fit.samples(part, own, settings, budget_s, rate)
        limits = fit.seconds(part, own, settings, budget_s)
    except (BenchError, HydraException) as error:
        return Made(_rows(output), str(error).partition("\n")[0])
    place.mkdir(exist_ok=True)
    asked = {**_asked(part, given), "fitted": fitted}
    _write(place, {**asked, "ended": False})
    where = [f"hydra.run.dir={place}/hydra", f"{'resume' if output.exists() else 'output'}={output}"]
    overrides = [f"experiment={part.experiment}", *asked["overrides"], *fitted, *limits]
    limit = min(1.5 * budget_s, left_s) + _GRACE_S
    status, printed = _run([sys.executable, "-m", "bench.run", *overrides, *where], place, limit)
    seconds = time.monotonic() - begun
    rows = _rows(output)
    complete = status == 0 or (status is None and len(rows) == _expected(settings))
    problem: str | None = None
    if status is None and not complete:
        problem = f"it was ended after {seconds:.0f} s; give more time with reference.max_seconds="
    elif not complete:
        problem = _last_line(printed) or f"it ended with exit status {status}"
    if complete:
        _write(place, {**asked, "ended": True, "seconds": seconds})
    return Made(rows, problem, seconds)


def _expected(settings: BenchConfig) -> int:
    """The rows of a run that has made all of its own parts."""
    return len(config.parts(settings.scenario)) * len(settings.loaders)


def _run(command: Sequence[str], place: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit status, None where it took too long, and what was printed, which goes into a file as it comes."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))}
    path = place / _PRINTED
    with path.open("ab") as printed:
        process = subprocess.Popen(command, env=environ, stdout=printed, stderr=subprocess.STDOUT, process_group=0)
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_ENDING_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    return status, path.read_text(encoding="utf-8", errors="replace")


def _rows(output: Path) -> list[Record]:
    """What is in the file as whole lines; a process that was killed may have left half a one."""
    text = output.read_text(encoding="utf-8") if output.exists() else ""
    return results.parse(text[: text.rfind("\n") + 1], output)


def _write(place: Path, state: dict[str, Any]) -> None:
    new = place / f".{_STATE}.new"
    new.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    os.replace(new, place / _STATE)


def _last_line(printed: str) -> str:
    """Why a run could not be made: what it prints from `error:` on, or the last line of a traceback."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("error:"):
            return " ".join(lines[number:]).removeprefix("error: ")
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or lines or [""])[-1]
