"""`python -m bench.run`: measure loaders and print what share of the hardware's ceiling each reaches.

    python -m bench.run                              the default: as large as the machine allows, under two minutes
    python -m bench.run experiment=smoke             a few seconds
    python -m bench.run experiment=peers             eight 1.24 GB files in /dev/shm, to the GPU, against every peer
    python -m bench.run experiment=disk_cold         from a disk with a page cache verified to be empty
    python -m bench.run experiment=random            4 KiB records
    python -m bench.run experiment=pipeline          layers of 1237 MB through two slots, behind compute
    python -m bench.run experiment=training_step     forward and backward steps of an offloaded model
    python -m bench.run experiment=loader_epoch      shuffled batches of records, against other data loaders
    python -m bench.run experiment=checkpoint        checkpoints onto a disk, fsync included, and back
    python -m bench.run experiment=mlperf workload=unet3d     a workload of MLPerf Storage, or all of them
    python -m bench.run experiment=raw_read          one large read, threads and task sizes against the disk
    python -m bench.run experiment=random_io         small random reads and writes, ios a second and latencies
    python -m bench.run experiment=gdsio             gdsio's transfer types, or its job file: scenario.job_file=PATH
    python -m bench.run loader=[gdsstream_staged,kvikio_tuned] storage.dir=/raid scenario.rounds=15

Every row is a JSON line in results.jsonl in Hydra's output directory, or where `output=` says. Exit status: 0 when
the run was made, whatever its rows say; 2 when it could not be made as asked.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench import (
    ceilings,
    config,
    environment,
    files,
    gdsio_line,
    gdsio_run,
    loaders,
    record,
    report,
    scenarios,
)
from bench.config import BenchConfig, BenchError, TransferConfig
from bench.loaders.base import Loader
from bench.measure import Runner


def measure(settings: BenchConfig, output: Path, out: Console) -> list[record.Record]:
    """One run: write the files, measure, append the records to `output`, and return them. Raises BenchError.

    Records are appended as soon as they are complete, part by part (`config.parts`): an interrupt loses one part only.
    """
    built = {name: loaders.build(name, options) for name, options in settings.loaders.items()}
    device, cuda_reason = _device(settings.device)
    cold = settings.cache.state == "cold"
    if cuda_reason is not None:
        env = environment.collect(Path(settings.storage.dir or "/"), device)
        rows = [
            record.skipped(name, cuda_reason, settings.scenario, cold=cold, config=_row_config(settings, name), env=env)
            for name in built
        ]
    else:
        return _measure(settings, built, device, output, out)
    _append(output, rows)
    return rows


def _append(output: Path, rows: list[record.Record]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as lines:
        lines.writelines(row.to_json() + "\n" for row in rows)


def _measure(
    settings: BenchConfig, built: dict[str, Loader], device: str, output: Path, out: Console
) -> list[record.Record]:
    cold = settings.cache.state == "cold"
    plan = files.choose(settings.storage, cuda=device.startswith("cuda"), cold=cold)
    plan = scenarios.plan(settings.scenario, plan, cold=cold)
    _check_cold(plan.directory, cold)
    for path in files.left_over(plan.directory):
        out.print(f"{path} was left by a run that was killed; remove it", style="yellow", highlight=False)
    out.print(
        f"{plan.files} files of {plan.file_bytes / 1e9:.3f} GB ({plan.total_bytes / 1e9:.2f} GB"
        f"{_again(settings, plan)}) in {plan.directory} "
        f"({plan.why}), {'kept' if settings.storage.keep_files else 'removed at the end'}.",
        highlight=False,
    )
    env = environment.collect(plan.directory, device)
    if (note := environment.network_note(env)) is not None:
        out.print(note, style="yellow", highlight=False)
    parts = config.parts(settings.scenario)
    rows: list[record.Record] = []
    with _bar(out) as bar:
        steps = len(built) + settings.scenario.rounds * (1 + len(built))
        task = bar.add_task("writing the files", total=len(parts) * steps)

        def step(text: str | None) -> None:
            bar.update(task, description=text) if text is not None else bar.advance(task)
            bar.refresh()

        with files.written(plan, keep=settings.storage.keep_files) as written:
            for number, part in enumerate(parts):
                done = _measure_part(dataclasses.replace(settings, scenario=part), built, device, written, env, step)
                _append(output, done)
                rows += done
                bar.update(task, completed=(number + 1) * steps)
    return rows


def _measure_part(
    settings: BenchConfig,
    built: dict[str, Loader],
    device: str,
    written: files.BenchFiles,
    env: dict[str, Any],
    step: Callable[[str | None], None],
) -> list[record.Record]:
    scenario, cold = settings.scenario, settings.cache.state == "cold"
    step("preparing the scenario")
    try:
        workload = scenarios.build(scenario, written, device)
    except OSError as error:
        raise BenchError(
            f"the scenario's files cannot be written in {written.directory.parent}: {error.strerror or error}; choose "
            "another with storage.dir="
        ) from error
    try:
        step("finding the ceiling")
        ceiling = ceilings.choose(workload, cold=cold)
        try:
            runner = Runner(workload, built, ceiling, cold=cold, fresh_memory=scenario.fresh_memory, progress=step)
            measured = runner.run(scenario.rounds, scenario.max_seconds)
        finally:
            ceiling.close()
    finally:
        if not settings.storage.keep_files:
            workload.close()
    limit = {"kind": ceiling.kind, "detail": ceiling.describe(), "samples": measured.ceilings}
    return [
        record.make(
            name,
            outcome,
            workload,
            scenario=scenario.name,
            cold=cold,
            ceiling=limit,
            config=_row_config(settings, name),
            env=env,
        )
        for name, outcome in measured.outcomes.items()
    ]


def _again(settings: BenchConfig, plan: files.Plan) -> str:
    if isinstance(settings.scenario, TransferConfig):
        return ", and as much to write" if settings.scenario.writes else ""
    return ", anew for each part" if plan.by_part else ""


def _row_config(settings: BenchConfig, name: str) -> dict[str, Any]:
    return {**dataclasses.asdict(settings), "loaders": {name: settings.loaders[name]}}


def _device(wanted: str) -> tuple[str, str | None]:
    """The device, and why no row can run when CUDA was asked for and is missing."""
    if wanted == "cpu":
        return "cpu", None
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda:0")  # the context is the process's, and no loader's start-up
        return "cuda:0", None
    return "cpu", "device=cuda was asked for, and there is no CUDA device" if wanted == "cuda" else None


def _check_cold(directory: Path, cold: bool) -> None:
    found = environment.filesystem(directory)
    if cold and found is not None and found["type"] in ("tmpfs", "ramfs"):
        raise BenchError(
            f"{directory} is a {found['type']}: it is memory and cannot be cold; choose a disk with storage.dir="
        )


def _bar(out: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(),
        # Drawn between samples only: a thread that draws meanwhile takes the interpreter from the one that is timed.
        auto_refresh=False,
        console=out,
        transient=True,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt  # so that the files go when the run is terminated, as they do on Ctrl-C


@hydra.main(version_base="1.3", config_path=str(config.CONFIG_DIR), config_name="bench")
def _app(composed: DictConfig) -> None:
    out = report.console()
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(plain, dict)
        settings = config.build({str(key): value for key, value in plain.items()})
        output = Path(settings.output or Path(HydraConfig.get().runtime.output_dir) / "results.jsonl")
        rows = []
        for each in gdsio_run.expand(settings, lambda note: out.print(note, style="yellow", highlight=False)):
            rows += measure(each, output, out)
    except BenchError as error:
        _fail(error, out)
        raise SystemExit(2) from None
    report.show(rows, out)
    if isinstance(settings.scenario, TransferConfig) and settings.scenario.gdsio_lines:
        for row in rows:
            if row.status == "ok":
                out.print(f"{row.loader}: {gdsio_line.text(gdsio_line.of(row))}", soft_wrap=True, highlight=False)
    out.print(f"records: {output}", style="dim", highlight=False)


def _fail(error: BenchError, out: Console) -> None:
    out.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)


def main() -> None:
    """The entry point."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, _interrupt)
    try:
        config.check_overrides(sys.argv[1:])
        _app()
    except BenchError as error:
        _fail(error, report.console())
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        report.console().print("interrupted; the test files are removed, records of what was complete are kept")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
