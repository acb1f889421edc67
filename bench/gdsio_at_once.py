"""The jobs of a job file, all at once as gdsio makes them: each in a process of its own, with its GPU, the cores of its
NUMA node, its directory and its files.

All of them are planned and checked before the first is started. They begin every sample at the same moment, and measure
their ceilings in turn meanwhile nothing else runs (gate.py); all make all rounds, so that round for round the time from
the common start to the last end is that of the slowest. A job whose library crashes or hangs is a failed row, and the
others go on without it; then there is no sum. Two processes take turns on one GPU where gdsio has threads, and that is
said.

The rows of all jobs are written when the last is complete, since a part of them cannot be resumed: what was measured
beside another job has to be measured beside it again.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from bench import environment, files, gate, guard, nvml, record, results, resume, run_parts, scenarios
from bench.config import BenchConfig, BenchConfigError, BenchError
from bench.record import Record

#: Of free memory, what samples may hold.
_MEMORY_SHARE = 0.8
_LOOK_S = 2.0


class JobRun(NamedTuple):
    """One job: its run, which has one row of the job's name, its GPU, and the cores that it may use (None: all)."""

    settings: BenchConfig
    gpu: int
    cpus: list[int] | None
    #: Whether its bytes end, or begin, on the GPU.
    to_gpu: bool

    @property
    def name(self) -> str:
        return next(iter(self.settings.loaders))

    @property
    def held_bytes(self) -> int:
        """Of a sample."""
        return int(max(self.settings.scenario.total_bytes))  # type: ignore[attr-defined]


def run(jobs: Sequence[JobRun], output: Path, out: Console, check_cold: Callable[[Path, bool], None]) -> list[Record]:
    """Check and measure them, append their rows to `output` and return them; with `resume` set, rows that `output`
    holds of all of them are kept. Raises BenchError, and KeyboardInterrupt once all test files are removed."""
    plans = [_plan(job, check_cold) for job in jobs]
    check_room(jobs, plans)
    check_gpus(jobs)
    for gpu, count in Counter(job.gpu for job in jobs if job.to_gpu).items():
        if count > 1:
            out.print(f"{count} jobs share GPU {gpu}: as processes, they take turns on it.", style="yellow")
    if jobs[0].settings.resume is not None:
        kept = resume.find_jobs(output, {job.name: job.settings for job in jobs}, _now(jobs, plans))
        out.print(f"resumed: {'all' if kept else 'no'} jobs are kept.", highlight=False)
        if kept:
            return kept
    with tempfile.TemporaryDirectory(prefix=guard.PREFIX) as folder:
        rows = _measure(jobs, Path(folder), out)
    for row in rows:
        if row.derived is not None:
            row.derived["jobs_at_once"] = [job.name for job in jobs]
    run_parts.append(output, rows)
    return rows


def check_room(jobs: Sequence[JobRun], plans: Sequence[files.Plan]) -> None:
    """Raise BenchError where the jobs together need more than a disk or the memory has."""
    disks: dict[int, list[tuple[str, files.Plan, int]]] = {}
    for job, plan in zip(jobs, plans, strict=True):
        writes = 2 if job.settings.scenario.writes else 1  # type: ignore[attr-defined]
        needed = int(writes * plan.total_bytes * files.MARGIN) + files.RESERVE_BYTES
        disks.setdefault(os.stat(plan.directory).st_dev, []).append((job.name, plan, needed))
    for found in disks.values():
        needed, room = sum(each for _, _, each in found), files.room(found[0][1].directory)
        if needed > room:
            raise BenchError(
                f"{', '.join(name for name, _, _ in found)} together need {needed / 1e9:.2f} GB, and "
                f"{found[0][1].directory} has room for {room / 1e9:.2f} GB; lower size= or num_threads= of the jobs"
            )
    on_gpus: Counter[int] = Counter()
    held = 0
    for job in jobs:
        if job.to_gpu:
            on_gpus[job.gpu] += job.held_bytes
        else:
            held += job.held_bytes
    if held > _MEMORY_SHARE * files.memory_available():
        raise BenchError(
            f"samples of all jobs hold {held / 1e9:.2f} GB of host memory, and {files.memory_available() / 1e9:.2f} GB "
            "are free; lower scenario.total_bytes"
        )
    if jobs[0].settings.device == "cpu":
        return
    for gpu, nbytes in on_gpus.items():
        try:
            free = nvml.open_device(gpu).free_bytes()
        except nvml.NvmlError:
            continue  # without a GPU that can be asked, the row says what is missing
        if nbytes > _MEMORY_SHARE * free:
            raise BenchError(
                f"samples of the jobs on GPU {gpu} hold {nbytes / 1e9:.2f} GB of it, and {free / 1e9:.2f} GB are free; "
                "lower scenario.total_bytes"
            )


def check_gpus(jobs: Sequence[JobRun]) -> None:
    """Raise BenchError where a job names a GPU that this machine has not, or that is hidden."""
    if jobs[0].settings.device == "cpu":
        return
    shown, by_number = _shown()
    try:
        count = nvml.count()
    except nvml.NvmlError:
        return  # no driver: the rows that need a GPU say so
    for job in jobs:
        if job.gpu >= count:
            raise BenchConfigError(
                f"[{job.name}] gpu_dev_id={job.gpu}: this machine has {count} GPUs, from 0 to {count - 1}"
            )
        if shown and (str(job.gpu) not in shown if by_number else job.gpu != 0):
            raise BenchConfigError(
                f"[{job.name}] gpu_dev_id={job.gpu} is hidden by CUDA_VISIBLE_DEVICES={','.join(shown)}; name the GPU "
                "there by its number"
            )


def _shown() -> tuple[list[str], bool]:
    """What CUDA_VISIBLE_DEVICES names, and whether by numbers; nothing where all GPUs are shown."""
    shown = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",") if each]
    return shown, all(each.isdigit() for each in shown)


def _variables(job: JobRun) -> dict[str, str]:
    """That show a job's process its own GPU only. Where GPUs are named otherwise it gets the first, and where none is
    shown it gets none."""
    shown, by_number = _shown()
    if job.settings.device == "cpu" or not by_number or ("CUDA_VISIBLE_DEVICES" in os.environ and not shown):
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(job.gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _plan(job: JobRun, check_cold: Callable[[Path, bool], None]) -> files.Plan:
    cold = job.settings.cache.state == "cold"
    try:
        plan = scenarios.plan(
            job.settings.scenario, files.choose(job.settings.storage, cuda=False, cold=cold), cold=cold
        )
        check_cold(plan.directory, cold)
    except BenchError as error:
        raise BenchError(f"[{job.name}] {error}") from error
    return plan


def _now(jobs: Sequence[JobRun], plans: Sequence[files.Plan]) -> dict[str, dict[str, object]]:
    """What is known here of the environment that each job's row would have. Its cores are those of its NUMA node, and
    its GPU has not been asked."""
    shared = {"commit": environment.commit(), **environment.host()}
    del shared["cores"]
    return {
        job.name: {**shared, "filesystem": environment.filesystem(plan.directory)}
        for job, plan in zip(jobs, plans, strict=True)
    }


def _measure(jobs: Sequence[JobRun], folder: Path, out: Console) -> list[Record]:
    meetings = gate.Meetings(folder / "gate")
    attempts: list[guard.Attempt] = []
    outcomes: dict[int, tuple[int, str]] = {}

    def ended(number: int) -> None:
        outcomes[number] = attempts[number].outcome()
        error = attempts[number].told().error
        if error is not None:
            raise BenchError(f"[{jobs[number].name}] {error}")

    try:
        for number, job in enumerate(jobs):
            place = folder / str(number)
            place.mkdir()
            settings = dataclasses.replace(job.settings, output=None, resume=None)
            task = guard.Task(
                dataclasses.asdict(settings), str(place / results.NAME), gate=str(folder / "gate"), cpus=job.cpus
            )
            attempts.append(guard.Attempt(task, place, _variables(job), bar=False))
        fds = [attempt.ended_fd for attempt in attempts]
        meetings.serve(fds, lambda number: attempts[number].watch(), ended, _LOOK_S)
        if any(attempt.told().end == "interrupted" for attempt in attempts):
            raise KeyboardInterrupt
    finally:
        for number, attempt in enumerate(attempts):
            if number not in outcomes:
                attempt.end()
        meetings.close()
    return [_row(job, attempts[number], outcomes[number][1], folder / str(number), out) for number, job in
            enumerate(jobs)]  # fmt: skip


def _row(job: JobRun, attempt: guard.Attempt, reason: str, place: Path, out: Console) -> Record:
    """The job's row; a failed one where its process was lost."""
    written = place / results.NAME
    if attempt.told().end == "measured":
        (row,) = results.parse(written.read_text(encoding="utf-8"), written)
        return row
    out.print(f"{job.name}: {reason}; there is no sum", style="yellow", markup=False, highlight=False)
    settings = dataclasses.replace(job.settings, output=None, resume=None)
    return record.unmeasured(
        job.name,
        reason,
        settings.scenario,
        cold=settings.cache.state == "cold",
        config=run_parts.row_config(settings, job.name),
        env=environment.collect(Path(settings.storage.dir or "/"), "cpu"),
        status="failed",
    )
