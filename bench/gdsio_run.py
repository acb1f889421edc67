"""A run from a job file of gdsio: each job is a row of verb `transfer` with a run of its own, and all are made at once
(gdsio_at_once.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bench import gdsio_jobs
from bench.config import CONFIG_DIR, BenchConfig, BenchConfigError, TransferConfig
from bench.config_transfer import MOST_DEPTH
from bench.gdsio_at_once import JobRun
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
_NO_LIMIT_S = 1e6


def jobs(settings: BenchConfig, say: Callable[[str], None]) -> list[JobRun]:
    """What the job file of these settings asks for, a run each; none where there is no job file. Raises
    BenchConfigError.

    `say` is told what of the file is not as gdsio would do it.
    """
    scenario = settings.scenario
    if not isinstance(scenario, TransferConfig) or scenario.job_file is None:
        return []
    if not settings.isolate:
        raise BenchConfigError("'isolate' is False, and jobs of a job file are processes of their own; leave it true")
    try:
        text = Path(scenario.job_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchConfigError(f"'scenario.job_file': {scenario.job_file} cannot be read: {error}") from error
    found = gdsio_jobs.parse(text, scenario.job_file)
    for note in dict.fromkeys(note for job in found for note in job.not_applied.values()):
        say(note)
    return [
        JobRun(
            _run(settings, scenario, job, say),
            job.gpu_dev_id,
            None if job.numa_node is None else _cpus(job.name, job.numa_node),
            ROUTES[job.xfer_type] != "storage_cpu",
        )
        for job in found
    ]


def _cpus(name: str, node: int) -> list[int]:
    """The cores of a NUMA node that this process may use. Raises BenchConfigError."""
    from gdsstream import machine
    from gdsstream.topology import parse_cpu_list

    nodes = {each.index: each.cpus for each in machine.probe().nodes}
    if node not in nodes:
        raise BenchConfigError(
            f"[{name}] numa_node={node}: this machine has node {', '.join(map(str, nodes)) or 'none'}; change it, or "
            "leave it out"
        )
    cpus = sorted(set(parse_cpu_list(nodes[node])) & os.sched_getaffinity(0))
    if not cpus:
        raise BenchConfigError(f"[{name}] numa_node={node}: no core of it ({nodes[node]}) is this process's to use")
    return cpus


def _run(settings: BenchConfig, scenario: TransferConfig, job: Job, say: Callable[[str], None]) -> BenchConfig:
    files = 1 if job.filename is not None else job.num_threads
    everything = job.size * files
    # For a duration gdsio begins at the beginning again, and so does a sample.
    total = scenario.total_bytes[0] if job.runtime else min(scenario.total_bytes[0], everything)
    total = max(total, job.io_bytes)
    if not job.runtime and total < everything:
        say(
            f"[{job.name}] is about {everything} bytes; a sample moves {total} of them, since every byte of it is "
            "held and compared: raise scenario.total_bytes for more"
        )
    changed = dataclasses.replace(
        scenario,
        ops=[job.rw],
        io_bytes=[job.io_bytes],
        io_range=list(job.io_range) if job.io_range else None,
        pairs=None,
        total_bytes=[total],
        # gdsio's duration is that of a job; here all samples of a row take as long together.
        sample_seconds=job.runtime / scenario.rounds if job.runtime else None,
        # Jobs at once make their rounds together, and so none may stop before the others.
        max_seconds=_NO_LIMIT_S,
        threads=[job.num_threads],
        depth=[1],
        offset_bytes=job.start_offset,
        shift_bytes=[_UNALIGNED_BYTES if job.unaligned_random else 0],
        registered=[True],
        verify=job.do_verify,
        seed=job.random_seed,
    )
    directory = job.directory or str(Path(job.filename or "").parent)
    storage = dataclasses.replace(settings.storage, dir=directory, files=files, file_bytes=job.size, tensors=None)
    return dataclasses.replace(settings, scenario=changed, storage=storage, loaders={job.name: _row(job)})


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
