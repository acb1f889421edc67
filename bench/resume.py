"""What an interrupted run has already measured.

`resume=PATH` names the results.jsonl of the run, or the directory that holds it, or that of a multirun, whose jobs have
a folder each. The new records are added to the same file. A run is resumed part by part, since the loaders of a part
are interleaved and share its ceilings: a part counts as measured when every loader of the run has a row of it, whatever
that says, and one of which only some rows were written is measured again. Such rows, and half a line at the end of a
file whose process was killed, are taken out of the file.

The file has to be of the same settings, machine and commit, since its rows go into one table with the new ones. A
commit with changes of its own ("-dirty") is only known by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bench import config, results
from bench.config import BenchConfig, BenchError
from bench.record import Record

#: Settings that say how a run is made, and may differ.
_FREE = (
    "output",
    "resume",
    "isolate",
    "hang_seconds",
    "allow_busy_gpu",
    "reference",
    "storage.dir",
    "storage.keep_files",
    "scenario.max_seconds",
)
_MACHINE = (*results.MACHINE, "filesystem")


class Found(NamedTuple):
    """The numbers of the parts that are measured, their rows, and how many rows were taken out of the file."""

    parts: frozenset[int]
    rows: list[Record]
    dropped: int


def path(resume: str, job: int | None) -> Path:
    """The file that `resume` means; `job` is the number within a multirun, None outside. Raises BenchError.

    A job of a multirun that had not begun has no file yet.
    """
    given = Path(resume)
    if given.is_dir():
        given = given / results.NAME if job is None else given / str(job) / results.NAME
        if job is not None and given.parent.parent.is_dir():
            return given
    if not given.is_file():
        raise BenchError(
            f"resume: there is no {given}; give the {results.NAME} of the run, its directory, or a multirun's "
            "directory with -m"
        )
    return given


def find(file: Path, settings: BenchConfig, env: Mapping[str, Any]) -> Found:
    """The parts of `settings` that `file` holds; the file is left with these alone. Raises BenchError where it is of
    another run, with what differs."""
    if not file.exists():
        return Found(frozenset(), [], 0)
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if not whole.strip():
        _replace(file, [])
        return Found(frozenset(), [], int(bool(text.strip())))
    rows = results.parse(whole, file)
    for number, row in enumerate(rows, 1):
        differing = _differing(row, settings, env)
        if differing:
            raise _of_another(file, number, differing)
    parts = _parts(settings)
    found: dict[int, dict[str, Record]] = {}
    for row in rows:
        found.setdefault(parts.index(_timeless(row.config["scenario"])), {})[row.loader] = row
    done = frozenset(number for number, held in found.items() if held.keys() == settings.loaders.keys())
    kept = [row for number in sorted(done) for row in found[number].values()]
    dropped = len(rows) - len(kept) + (len(whole) < len(text))
    if dropped:
        _replace(file, kept)
    return Found(done, kept, dropped)


def find_jobs(file: Path, jobs: Mapping[str, BenchConfig], now: Mapping[str, Mapping[str, Any]]) -> list[Record] | None:
    """The rows of jobs that were measured at once, by their names, in the jobs' order; None where `file` has not all of
    them, and then none stays in it. `now` is what is known of the environment of each. Raises BenchError."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found: dict[str, Record] = {}
    for number, row in enumerate(results.parse(text[: text.rfind("\n") + 1], file), 1):
        differing = [f"job {row.loader!r} is not in the job file"]
        if row.loader in jobs:
            differing = _differing(row, jobs[row.loader], {**row.env, **now[row.loader]})
        if differing:
            raise _of_another(file, number, differing)
        found[row.loader] = row
    if found.keys() == jobs.keys():
        return [found[name] for name in jobs]
    if file.exists():
        _replace(file, [])
    return None


def _of_another(file: Path, number: int, differing: Sequence[str]) -> BenchError:
    return BenchError(
        f"resume: {file}:{number} is of another run: {'; '.join(differing)}; resume with what it was made with, or "
        "start anew without resume="
    )


def _differing(row: Record, settings: BenchConfig, env: Mapping[str, Any]) -> list[str]:
    """In what a row is not of this run, for people; of another scenario everything else would differ as well."""
    now_is = settings.scenario
    if (row.scenario, row.verb) != (now_is.name, now_is.verb):
        return [
            f"it is of scenario {row.scenario!r} (verb {row.verb}), and this run is of {now_is.name!r} ({now_is.verb})"
        ]
    known = [name for name in ("commit", *_MACHINE) if row.env.get(name) != env.get(name)]
    said = [f"{name} was {row.env.get(name)!r} and is {env.get(name)!r}" for name in known]
    parts, scenario = _parts(settings), _timeless(row.config.get("scenario", {}))
    if scenario not in parts:
        said += _unequal(scenario, min(parts, key=lambda part: len(_unequal(scenario, part))), "scenario.")
    if row.loader not in settings.loaders:
        return [*said, f"loader {row.loader!r} is not in this run"]
    now = _plain(asdict(settings)) | {"loaders": {row.loader: _plain(settings.loaders[row.loader])}}
    return said + _unequal(
        {key: value for key, value in row.config.items() if key != "scenario"},
        {key: value for key, value in now.items() if key != "scenario"},
    )


def _parts(settings: BenchConfig) -> list[dict[str, Any]]:
    return [_timeless(_plain(asdict(part))) for part in config.parts(settings.scenario)]


def _timeless(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """Without the time that it may take, of which a resumed run may be given another."""
    return {key: value for key, value in scenario.items() if key != "max_seconds"}


def _unequal(then: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    said: list[str] = []
    for key in {**then, **now}:
        name, old, new = f"{where}{key}", then.get(key), now.get(key)
        if name in _FREE or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            said += _unequal(old, new, f"{name}.")
        else:
            said.append(f"{name} was {old!r} and is {new!r}")
    return said


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As a record's line gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _replace(file: Path, rows: Sequence[Record]) -> None:
    """At once, so that a kill in between loses nothing."""
    new = file.with_name(f".{file.name}.new")
    new.write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")
    os.replace(new, file)
