"""A run from a job file of gdsio: each job is a row of verb `transfer`, measured in turn with the others.

gdsio makes all jobs at once and adds them up; here they take turns, and each has figures of its own. Jobs that differ
in what a run has once (directory, operation, range of sizes, offset, seed, size of the files, verification, duration)
become runs one after the other, with rows in the same file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bench import gdsio_jobs
from bench.config import CONFIG_DIR, BenchConfig, BenchConfigError, TransferConfig
from bench.config_transfer import MOST_DEPTH
from bench.gdsio_jobs import Job

#: gdsio's -x, in its order.
ROUTES = (
    "storage_gpu",
    "storage_cpu",
    "storage_cpu_gpu",
    "storage_cpu_gpu_async",
    "page_cache_cpu_gpu",
    "gpu_async_stream",
    "gpu_batch",
    "gpu_batch_stream",
)
_BATCHED = ("gpu_batch", "gpu_batch_stream")
_UNALIGNED_BYTES = 512


def expand(settings: BenchConfig, say: Callable[[str], None]) -> list[BenchConfig]:
    """The runs that these settings stand for: themselves, or those of their job file. Raises BenchConfigError.

    `say` is told what of the file is not as gdsio would do it.
    """
    scenario = settings.scenario
    if not isinstance(scenario, TransferConfig) or scenario.job_file is None:
        return [settings]
    try:
        text = Path(scenario.job_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchConfigError(f"'scenario.job_file': {scenario.job_file} cannot be read: {error}") from error
    jobs = gdsio_jobs.parse(text, scenario.job_file)
    for note in dict.fromkeys(note for job in jobs for note in job.not_applied.values()):
        say(note)
    if len(jobs) > 1:
        say("gdsio runs its jobs at once and adds them up; here they take turns, a row each.")
    runs: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        key = (job.directory, job.filename, job.rw, job.io_range, job.start_offset, job.random_seed, job.size)
        runs.setdefault((*key, job.do_verify, job.runtime, job.unaligned_random), []).append(job)
    return [_run(settings, scenario, members, say) for members in runs.values()]


def _run(settings: BenchConfig, scenario: TransferConfig, jobs: list[Job], say: Callable[[str], None]) -> BenchConfig:
    first = jobs[0]
    threads = max(job.num_threads for job in jobs)
    files = 1 if first.filename is not None else threads
    everything = first.size * files
    # For a duration gdsio begins at the beginning again, and so does a sample.
    total = scenario.total_bytes[0] if first.runtime else min(scenario.total_bytes[0], everything)
    total = max(total, *(job.io_bytes for job in jobs))
    if not first.runtime and total < everything:
        say(
            f"[{first.name}] is about {everything} bytes; a sample moves {total} of them, since every byte of it is "
            "held and compared: raise scenario.total_bytes for more"
        )
    changed = dataclasses.replace(
        scenario,
        ops=[first.rw],
        io_bytes=[first.io_bytes],
        io_range=list(first.io_range) if first.io_range else None,
        total_bytes=[total],
        # gdsio's duration is that of a job; here all samples of a row take as long together.
        sample_seconds=first.runtime / scenario.rounds if first.runtime else None,
        max_seconds=max(scenario.max_seconds, 2 * first.runtime * len(jobs)),
        threads=[threads],
        depth=[1],
        offset_bytes=first.start_offset,
        shift_bytes=[_UNALIGNED_BYTES if first.unaligned_random else 0],
        registered=[True],
        verify=first.do_verify,
        seed=first.random_seed,
    )
    directory = first.directory or str(Path(first.filename or "").parent)
    storage = dataclasses.replace(settings.storage, dir=directory, files=files, file_bytes=first.size, tensors=None)
    return dataclasses.replace(
        settings, scenario=changed, storage=storage, loaders={job.name: _row(job) for job in jobs}
    )


def _row(job: Job) -> dict[str, Any]:
    """The options of the route that the job names, with the job's own over them."""
    name = ROUTES[job.xfer_type]
    loaded = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "loader" / f"{name}.yaml"))
    assert isinstance(loaded, dict)
    options = {str(key): value for key, value in loaded.items()}
    # A batch of gdsio's is one thread with as many ios in flight as it has threads else.
    batched = name in _BATCHED
    own = {
        "threads": 1 if batched else job.num_threads,
        "depth": min(job.num_threads, MOST_DEPTH) if batched else 1,
        "registered": not job.skip_bufregister,
        "gpu_dev_id": job.gpu_dev_id,
    }
    return {**options, **own, "io_bytes": None if job.io_range else job.io_bytes}
