"""The parts of a reference run: each `python -m bench.run experiment=...` in a fresh process.

The time that is left is shared out anew before each part, in proportion to the shares of those that are still to come;
a part's scenario gets its time through `scenario.max_seconds`, and one that needs far more is ended, with what it had
written kept. A part leaves a folder with its records, what was printed, and part.json: how it ended. That makes a later
call with `reference.resume=` go on: parts that ended well are kept, where commit, machine and overrides are the same;
one that was cut short or could not be made goes on where it was.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from rich.console import Console

from bench import config, environment, progress, results, resume
from bench.config import BenchConfig, BenchConfigError, BenchError, nearest
from bench.record import Record
from bench.reference.figures import Made
from bench.reference.plan import Part, Plan

_ROOT = Path(__file__).resolve().parents[2]
_STATE = "part.json"
_PRINTED = "printed.txt"
#: Of a part's time, what its rounds may take; the rest is for files, start-ups and first loads.
_ROUNDS_SHARE = 0.6
_GRACE_S = 30.0
_RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_ENDING_S = 90.0


def run(plan: Plan, settings: BenchConfig, directory: Path, out: Console) -> dict[str, Made]:
    """Make the parts in `directory`, and put all their records into one results.jsonl there. Raises BenchError where
    the directory is of another commit, or cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    made = {part.name: _earlier(part, directory, settings) for part in plan.parts}
    if settings.reference.resume is not None:
        kept = sum(found is not None for found in made.values())
        out.print(f"resumed: {kept} of {len(plan.parts)} parts are kept.", highlight=False)
    todo = [part for part in plan.parts if made[part.name] is None and part.name in plan.chosen]
    deadline = time.monotonic() + plan.max_seconds
    with progress.bar("reference", len(todo)) as step:
        for number, part in enumerate(todo):
            left = deadline - time.monotonic()
            budget = left * part.share / sum(other.share for other in todo[number:])
            step(part.name)
            out.print(f"{part.name}: {max(budget, 0):.0f} s", style="dim", highlight=False)
            made[part.name] = _make(part, budget, left, settings, directory)
            step(None)
            _combine(directory, plan, made)
    _combine(directory, plan, made)
    return {name: found for name, found in made.items() if found is not None}


def _combine(directory: Path, plan: Plan, made: dict[str, Made | None]) -> None:
    found = (made[part.name] for part in plan.parts)
    lines = [row.to_json() + "\n" for each in found if each is not None for row in each.rows]
    target = directory / resume.NAME
    new = target.with_name(f".{target.name}.new")
    new.write_text("".join(lines), encoding="utf-8")
    os.replace(new, target)


def _earlier(part: Part, directory: Path, settings: BenchConfig) -> Made | None:
    """What an earlier call made of a part, where it ended. Raises BenchError where that was of another commit."""
    state = directory / part.name / _STATE
    if not state.is_file():
        return None
    try:
        held: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{state} cannot be read ({error}); remove it, and its part is made again") from error
    now = _asked(part, settings)
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
    return Made(_rows(directory / part.name / resume.NAME), None, held.get("seconds"))


def _asked(part: Part, settings: BenchConfig) -> dict[str, Any]:
    """What has to be the same for a part to be the same."""
    return {
        "experiment": part.experiment,
        "overrides": [*part.overrides, *_common(part, settings)],
        "commit": environment.commit(),
        "machine": environment.host(),
    }


def _common(part: Part, settings: BenchConfig) -> list[str]:
    """Overrides that the call itself was given, and that are for every part that does not say otherwise."""
    given = [f"device={settings.device}"] if settings.device != "auto" else []
    if settings.storage.dir and not any(each.startswith("storage.dir=") for each in part.overrides):
        given.append(f"storage.dir={settings.storage.dir}")
    given += ["allow_busy_gpu=true"] if settings.allow_busy_gpu else []
    return given + ([] if settings.isolate else ["isolate=false"])


def _make(part: Part, budget_s: float, left_s: float, settings: BenchConfig, directory: Path) -> Made:
    place = directory / part.name
    output = place / resume.NAME
    if part.experiment not in config.options("experiment"):
        near = nearest(part.experiment, config.options("experiment"))
        return Made(problem=f"there is no experiment {part.experiment!r}; {near}")
    if budget_s <= 0:
        return Made(_rows(output), "no time was left for it; give more with reference.max_seconds=")
    place.mkdir(exist_ok=True)
    asked = _asked(part, settings)
    _write(place, {**asked, "ended": False})
    try:
        overrides = [f"experiment={part.experiment}", *asked["overrides"], *_limits(part, budget_s)]
    except (BenchConfigError, HydraException) as error:
        return Made(problem=str(error).partition("\n")[0])
    where = [f"hydra.run.dir={place}/hydra", f"{'resume' if output.exists() else 'output'}={output}"]
    limit = min(1.5 * budget_s, left_s) + _GRACE_S
    begun = time.monotonic()
    status, printed = _run([sys.executable, "-m", "bench.run", *overrides, *where], place, limit)
    seconds = time.monotonic() - begun
    rows = _rows(output)
    problem: str | None = None
    if status is None:
        problem = f"it was ended after {seconds:.0f} s; give more time with reference.max_seconds="
    elif status != 0:
        problem = _last_line(printed) or f"it ended with exit status {status}"
    if status == 0:
        _write(place, {**asked, "ended": True, "seconds": seconds})
    return Made(rows, problem, seconds)


def _limits(part: Part, budget_s: float) -> list[str]:
    """The time of one of the parts that the experiment itself has, unless the part says it. Raises BenchConfigError."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    if any(override.startswith("scenario.max_seconds=") for override in part.overrides):
        return []
    config.check_overrides(part.overrides)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config.CONFIG_DIR), version_base="1.3"):
        plain = OmegaConf.to_container(
            compose("bench", [f"experiment={part.experiment}", *part.overrides]), resolve=True
        )
    assert isinstance(plain, dict)
    count = len(config.parts(config.build({str(key): value for key, value in plain.items()}).scenario))
    return [f"scenario.max_seconds={max(1.0, _ROUNDS_SHARE * budget_s / count):.0f}"]


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
