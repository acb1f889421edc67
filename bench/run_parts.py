"""The parts of one run, measured one after the other on one set of files.

The records of a part are written as soon as it is complete, so that whatever ends the run costs one part only. What is
under way is said at every step, for the process that guards this one (guard.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import ceilings, device_bytes, files, progress, record, scenarios
from bench.config import BenchConfig, BenchError, ScenarioConfig, TransferConfig
from bench.gate import ALONE, Gate
from bench.loaders.base import Loader
from bench.measure import Runner


@dataclass(slots=True)
class Parts:
    """The parts of one run, on one set of files."""

    settings: BenchConfig
    built: dict[str, Loader]
    device: str
    env: dict[str, Any]
    say: Callable[..., None]
    crashed: Mapping[int, Mapping[str, str]]
    others: Gate = ALONE

    @property
    def cold(self) -> bool:
        return self.settings.cache.state == "cold"

    def all(
        self, plan: files.Plan, parts: Mapping[int, ScenarioConfig], output: Path, out: Console
    ) -> list[record.Record]:
        """Write the files, measure these parts, and append their records."""
        keep = self.settings.storage.keep_files
        for path in files.left_over(plan.directory):
            out.print(f"{path} was left by a run that was killed; remove it", style="yellow", highlight=False)
        out.print(
            f"{plan.files} files of {plan.file_bytes / 1e9:.3f} GB ({plan.total_bytes / 1e9:.2f} GB"
            f"{_again(self.settings.scenario, plan)}) in {plan.directory} "
            f"({plan.why}), {'kept' if keep else 'removed at the end'}.",
            highlight=False,
        )
        rows: list[record.Record] = []
        steps = len(self.built) + self.settings.scenario.rounds * (1 + len(self.built))
        with progress.bar("writing the files", len(parts) * steps) as step:
            self.say(step="writing the files", directory=str(plan.directory))
            with files.written(plan, keep=keep) as written:
                for done, (number, part) in enumerate(parts.items(), 1):
                    self.say(part=number)
                    made = self.part(number, part, written, step)
                    append(output, made)
                    self.say(finished=number)
                    rows += made
                    step.reach(done * steps)
        return rows

    def part(
        self, number: int, scenario: ScenarioConfig, written: files.BenchFiles, step: progress.Steps
    ) -> list[record.Record]:
        """The rows of one part, in the order of the loaders."""
        settings = dataclasses.replace(self.settings, scenario=scenario)
        crashed = self.crashed.get(number, {})
        running = {name: loader for name, loader in self.built.items() if name not in crashed}
        rows = {
            name: record.unmeasured(
                name,
                reason,
                scenario,
                cold=self.cold,
                config=row_config(settings, name),
                env=self.env,
                status="failed",
            )
            for name, reason in crashed.items()
        }
        if running:
            rows |= self.measured(settings, running, written, step)
        return [rows[name] for name in self.built]

    def measured(
        self, settings: BenchConfig, running: dict[str, Loader], written: files.BenchFiles, step: progress.Steps
    ) -> dict[str, record.Record]:
        """The rows of these loaders."""

        def announce(text: str | None) -> None:
            if text is not None:
                self.say(step=text)
            step(text)

        scenario = settings.scenario
        announce("preparing the scenario")
        try:
            workload = scenarios.build(scenario, written, self.device)
        except OSError as error:
            raise BenchError(
                f"the scenario's files cannot be written in {written.directory.parent}: {error.strerror or error}; "
                "choose another with storage.dir="
            ) from error
        try:
            announce("finding the ceiling")
            with self.others.turn():
                ceiling: ceilings.Ceiling = ceilings.choose(workload, cold=self.cold)
            counters = device_bytes.Counters(written.directory, self.device)
            try:
                runner = Runner(
                    workload,
                    running,
                    InTurn(ceiling, self.others),
                    cold=self.cold,
                    fresh_memory=scenario.fresh_memory,
                    progress=announce,
                    watch=lambda name: self.say(loader=name),
                    counters=counters,
                    others=self.others,
                )
                measured = runner.run(scenario.rounds, scenario.max_seconds, scenario.target_spread)
            finally:
                ceiling.close()
        finally:
            if not settings.storage.keep_files:
                workload.close()
        limit = {"kind": ceiling.kind, "detail": ceiling.describe(), "samples": measured.ceilings}
        return {
            name: record.make(
                name,
                outcome,
                workload,
                scenario=scenario.name,
                cold=self.cold,
                ceiling=limit,
                config=row_config(settings, name),
                env=self.env,
                devices=counters.source,
                stopped=measured.stopped,
            )
            for name, outcome in measured.outcomes.items()
        }


class InTurn(ceilings.Ceiling):
    """A ceiling that is sampled while no other process does anything."""

    def __init__(self, ceiling: ceilings.Ceiling, others: Gate) -> None:
        self._ceiling, self._others = ceiling, others

    def sample(self) -> float:
        with self._others.turn():
            return self._ceiling.sample()

    def in_hindsight(self, samples: Sequence[float]) -> list[float]:
        return self._ceiling.in_hindsight(samples)

    def describe(self) -> str:
        return self._ceiling.describe()


def _again(scenario: ScenarioConfig, plan: files.Plan) -> str:
    if isinstance(scenario, TransferConfig):
        return ", and as much to write" if scenario.writes else ""
    return ", anew for each part" if plan.by_part else ""


def check_output(output: Path) -> None:
    """Raise BenchError where records cannot be added to `output`. Nothing of it stays where there was none."""
    existed = output.exists()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        why = f"{output.parent} is no directory" if isinstance(error, FileExistsError) else error.strerror
        raise BenchError(
            f"'output': {output} cannot be written: {why}; name a .jsonl file in a directory that can be written in"
        ) from error
    if not existed:
        output.unlink()


def append(output: Path, rows: Sequence[record.Record]) -> None:
    """Add lines to a file of records, which is made where it is missing."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # Made before the file is: Ctrl-C shall not come between half of a part's rows and the rest.
    text = "".join(row.to_json() + "\n" for row in rows)
    with output.open("a", encoding="utf-8") as lines:
        lines.write(text)


def row_config(settings: BenchConfig, name: str) -> dict[str, Any]:
    """What the record of a loader says of the run's settings."""
    found = {**dataclasses.asdict(settings), "loaders": {name: settings.loaders[name]}}
    return {key: value for key, value in found.items() if key != "reference"}
