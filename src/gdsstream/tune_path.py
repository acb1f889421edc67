"""`gdsstream tune` without its command line: search, meet the default, keep what is really better.

Puts `tuning` (the search), `tuning_space` (the choice), `trials` (the reads) and `profile` (what is kept) together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gdsstream import tuning
from gdsstream.config import StreamConfig
from gdsstream.devices import parse_device
from gdsstream.errors import ConfigError
from gdsstream.profile import TUNED, Here, Profile, here, store_profile
from gdsstream.sample_files import SampleFiles
from gdsstream.storage import StorageInfo
from gdsstream.trials import Trials
from gdsstream.tuning import Family, Outcome, Schedule
from gdsstream.tuning_space import space


@dataclass(frozen=True, slots=True)
class Task:
    """What is going to be done, before anything is read.

    Attributes:
        path, device: as asked for.
        here: what the profile will hold for.
        info: what the path sits on.
        families: the choice.
        schedule: what will be read, at most.
        seconds: when it ends.
        cold: whether the files are dropped from the page cache before each read.
        default_backend: what "auto" is here.
    """

    path: str
    device: str
    here: Here
    info: StorageInfo
    families: tuple[Family, ...]
    schedule: Schedule
    seconds: float
    cold: bool
    default_backend: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of it.

    Attributes:
        task: what was to be done.
        outcome: the search and the pairs.
        routes: what moved the bytes for the default and for the challenger.
        profile: what was kept, and where.
        seconds: how long it took.
        notes: what a reader of the figures should know.
    """

    task: Task
    outcome: Outcome
    routes: tuple[str, str]
    profile: Profile
    file: Path
    seconds: float
    notes: tuple[str, ...]


class Tuner:
    """One path and device, looked at and ready; a context manager.

    Raises ReadError where the path cannot be reached, ConfigError for too little to read and for devices that cannot
    be, BackendUnavailableError where there is no CUDA.
    """

    def __init__(self, path: str | os.PathLike[str], device: torch.device | str | int, *, seconds: float) -> None:
        target = parse_device(device)
        sample = SampleFiles(path, tuning.LEAST_BYTES)
        place = here(sample.files[0][0], target)
        if place is None:
            raise ConfigError(f"{os.fspath(path)}: its mount was not found, and a profile holds for a mount")
        self._trials = Trials(sample, target)
        families = space(self._trials.place)
        self.task = Task(
            path=os.fspath(path),
            device=str(target),
            here=place,
            info=self._trials.info,
            families=tuple(families),
            schedule=tuning.plan(families, self._trials.most_bytes),
            seconds=seconds,
            cold=self._trials.cold,
            default_backend=self._trials.default_backend,
        )

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self._trials.close()

    def notes(self) -> tuple[str, ...]:
        """What is known to stand in the way of good figures, and of the profile's use."""
        return (*self._trials.notes(), *_overridden())

    def run(self, *, progress: Callable[[int, int], None] | None = None) -> Tuned:
        """Search, compare, and store a profile: what was found where it is really better, else that nothing was.

        `progress` is called with the bytes read so far, and the bytes in all. Raises what reading with the default
        raises, and WriteError where the profile cannot be stored.
        """
        task, began = self.task, time.monotonic()
        outcome = tuning.tune(
            task.families, self._trials.measure, task.schedule, seconds=task.seconds, progress=progress
        )
        knobs: dict[str, Any] = dict(outcome.challenger or {}) if outcome.better else {}
        duel = outcome.duel
        profile = Profile(
            here=task.here,
            knobs=knobs,
            default_gb_per_s=median(duel.default) if duel.default else None,
            tuned_gb_per_s=median(duel.tuned) if duel.tuned else None,
            gain=duel.gain,
        )
        routes = (self._trials.route({}), self._trials.route(outcome.challenger or {}))
        return Tuned(task, outcome, routes, profile, store_profile(profile), time.monotonic() - began, self.notes())


def shown(knobs: tuning.Knobs, default_backend: str) -> dict[str, Any]:
    """The value of every knob that a profile may set; None where the engine decides."""
    values = StreamConfig(**knobs).as_dict()
    found = {name: values[name] for name in TUNED}
    if found["backend"] == "auto":
        found["backend"] = default_backend
    if found["reader"] == "auto":
        found["reader"] = None
    return found


def _overridden() -> list[str]:
    names = [name for name in sorted(os.environ) if name.removeprefix("GDSSTREAM_").lower() in TUNED]
    names = [name for name in names if name.startswith("GDSSTREAM_")]
    found = [f"{', '.join(names)}: set in the environment, which goes before a profile"] if names else []
    if "GDSSTREAM_PROFILE" in os.environ:
        found.append(f"GDSSTREAM_PROFILE={os.environ['GDSSTREAM_PROFILE']}: 0 leaves all profiles out")
    return found


__all__ = ["Task", "Tuned", "Tuner", "shown"]
