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
    python -m bench.run experiment=reference         the tables of the reference documents, beside what they say
    python -m bench.run loader=[gdsstream_staged,kvikio_tuned] storage.dir=/raid scenario.rounds=15

Sizes of `scenario` and `storage` may have a binary unit: scenario.io_bytes=[4K,1M], storage.file_bytes=1GiB.
Every row is a JSON line in results.jsonl in Hydra's output directory, or where `output=` says; `resume=` goes on with
those of an interrupted run (resume.py). What is measured is measured in a process of its own (guard.py), and not beside
other work on the GPU (busy.py). Exit status: 0 when the run was made, whatever its rows say; 2 when it could not be
made as asked.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape

from bench import (
    busy,
    config,
    config_chosen,
    environment,
    files,
    gdsio_at_once,
    gdsio_line,
    gdsio_run,
    guard,
    loaders,
    record,
    reference,
    report,
    results,
    resume,
    scenarios,
)
from bench.config import BenchConfig, BenchError, TransferConfig
from bench.gate import ALONE, Gate
from bench.run_parts import Parts, append, check_output, row_config


def measure(
    settings: BenchConfig,
    output: Path,
    out: Console,
    *,
    say: Callable[..., None] = lambda **_: None,
    finished: Collection[int] = (),
    crashed: Mapping[int, Mapping[str, str]] | None = None,
    others: Gate = ALONE,
) -> list[record.Record]:
    """One run: write the files, measure, append the records to `output`, and return them. Raises BenchError.

    Records are appended as soon as they are complete, part by part (`config.parts`): an interrupt loses one part only.
    `say` is told what is under way (guard.Told); the parts in `finished` are left out, and loaders in `crashed`, by the
    part, are failed rows with that reason; `others` are processes that measure at once. With `resume` set, what
    `output` holds of this run is kept and returned too.
    """
    built = {name: loaders.build(name, options) for name, options in settings.loaders.items()}
    device, cuda_reason, gpu_use = _device(settings, others)
    cold = settings.cache.state == "cold"
    if cuda_reason is not None and settings.resume is not None:
        raise BenchError(f"resume: {cuda_reason}, and so nothing can be added to {output}")
    if cuda_reason is not None:
        env = environment.collect(Path(settings.storage.dir or "/"), device)
        rows = [
            record.unmeasured(
                name, cuda_reason, settings.scenario, cold=cold, config=row_config(settings, name), env=env
            )
            for name in built
        ]
        append(output, rows)
        return rows
    plan = files.choose(settings.storage, cuda=device.startswith("cuda"), cold=cold)
    plan = scenarios.plan(settings.scenario, plan, cold=cold)
    _check_cold(plan.directory, cold)
    env = environment.collect(plan.directory, device) | ({"gpu_use": gpu_use} if gpu_use else {})
    if (note := environment.network_note(env)) is not None:
        out.print(note, style="yellow", highlight=False)
    parts = dict(enumerate(config.parts(settings.scenario)))
    rows = []
    if settings.resume is not None:
        found = resume.find(output, settings, env)
        rows, finished = found.rows, found.parts | set(finished)
        out.print(
            f"resumed: {len(found.rows)} rows of {len(found.parts)} of {len(parts)} parts are kept"
            f"{f', {found.dropped} of incomplete parts are measured again' if found.dropped else ''}.",
            highlight=False,
        )
    todo = {number: part for number, part in parts.items() if number not in finished}
    if todo:
        rows += Parts(settings, built, device, env, say, crashed or {}, others).all(plan, todo, output, out)
    return rows


def _device(settings: BenchConfig, others: Gate) -> tuple[str, str | None, str | None]:
    """The device, why no row can run when CUDA was asked for and is missing, and who else uses it. Raises BenchError
    where another process does."""
    if settings.device == "cpu":
        return "cpu", None, None
    import torch

    if torch.cuda.is_available():
        use = busy.check(allow=settings.allow_busy_gpu)
        others.meet()  # before they are on a GPU themselves
        torch.zeros(1, device="cuda:0")  # the context is the process's, and no loader's start-up
        return "cuda:0", None, use
    missing = "device=cuda was asked for, and there is no CUDA device"
    return "cpu", missing if settings.device == "cuda" else None, None


def _check_cold(directory: Path, cold: bool) -> None:
    found = environment.filesystem(directory)
    if cold and found is not None and found["type"] in ("tmpfs", "ramfs"):
        raise BenchError(
            f"{directory} is a {found['type']}: it is memory and cannot be cold; choose a disk with storage.dir="
        )


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM and SIGHUP."""
    del number, frame
    raise KeyboardInterrupt  # so that the files go when the run is terminated, as they do on Ctrl-C


@hydra.main(version_base="1.3", config_path=str(config.CONFIG_DIR), config_name="bench")
def _app(composed: DictConfig) -> None:
    out = report.console()
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(plain, dict)
        settings = config.build({str(key): value for key, value in plain.items()})
        directory = Path(HydraConfig.get().runtime.output_dir)
        if settings.reference.parts:
            reference.run(settings, directory, out, HydraConfig.get().overrides.task)
            return
        output = Path(settings.output or directory / results.NAME)
        if settings.resume is not None:
            output = resume.path(settings.resume, _job())
        check_output(output)
        jobs = gdsio_run.jobs(settings, lambda note: out.print(note, style="yellow", highlight=False))
        if jobs:
            rows = gdsio_at_once.run(jobs, output, out, _check_cold)
        else:
            rows = (guard.run if settings.isolate else measure)(settings, output, out)
    except BenchError as error:
        _fail(error, out)
        raise SystemExit(2) from None
    report.show(rows, out)
    if isinstance(settings.scenario, TransferConfig) and settings.scenario.gdsio_lines:
        for row in rows:
            if row.status == "ok":
                out.print(f"{row.loader}: {gdsio_line.text(gdsio_line.of(row))}", soft_wrap=True, highlight=False)
    if len(jobs) > 1 and all(row.status == "ok" for row in rows):
        total = gdsio_line.text(gdsio_line.total(rows))
        out.print(f"all jobs at once: {total}", soft_wrap=True, highlight=False)
    out.print(f"records: {output}", style="dim", highlight=False)


def _job() -> int | None:
    """The number within a multirun; None outside of one."""
    found = HydraConfig.get()
    return None if OmegaConf.is_missing(found.job, "num") else int(found.job.num)


def _fail(error: BenchError, out: Console) -> None:
    out.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)


def main() -> None:
    """The entry point."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, interrupt)
    try:
        config.check_overrides(sys.argv[1:])
        config_chosen.check(sys.argv[1:])
        config_chosen.check_directory(sys.argv[1:])
        _app()
    except BenchError as error:
        _fail(error, report.console())
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        report.console().print("interrupted; the test files are removed, records of what was complete are kept")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
