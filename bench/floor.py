"""What reading alone costs the CPU: `python -m bench.floor [--dir /dev/shm] [--files 8] [--rounds 6]`.

The staged route reads with native threads into a pinned ring and copies from there. Its floor is what bare threads
cost that only `preadv` into memory of the ring's size, in reads of the same length, with as many threads, paced to the
rate that the staged route reached in the same round. Both are CPU seconds of the whole process per decimal GB.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment, files, stats, subject
from bench.config import StorageConfig

_READ_BYTES = 2 << 20


def paced_reads(paths: Sequence[str], threads: int, ring_bytes: int, gb_per_s: float) -> float:
    """Read every file once at `gb_per_s` into a ring of that size; returns CPU seconds per GB."""
    ring = np.zeros(ring_bytes // _READ_BYTES * _READ_BYTES, dtype=np.uint8).reshape(-1, _READ_BYTES)
    descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
    jobs = iter(
        [(fd, at) for fd, path in zip(descriptors, paths, strict=True) for at in range(0, _size(path), _READ_BYTES)]
    )
    lock = threading.Lock()
    done = 0
    start = time.perf_counter()

    def work() -> None:
        nonlocal done
        while True:
            with lock:
                job = next(jobs, None)
                number = done
                done += 1
            if job is None:
                return
            ahead = number * _READ_BYTES / (gb_per_s * 1e9) - (time.perf_counter() - start)
            if ahead > 0:
                time.sleep(ahead)
            os.preadv(job[0], [memoryview(ring[number % len(ring)])], job[1])

    cpu = time.process_time()
    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    cpu = time.process_time() - cpu
    for descriptor in descriptors:
        os.close(descriptor)
    return cpu / (sum(map(_size, paths)) / 1e9)


def _size(path: str) -> int:
    return os.path.getsize(path)


def parser() -> argparse.ArgumentParser:
    made = subject.parser("floor", __doc__)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    made.add_argument("--files", type=int, default=8)
    made.add_argument("--file-bytes", type=int, default=files.LAYER_BYTES)
    made.add_argument("--rounds", type=int, default=6)
    return made


def measure(options: argparse.Namespace) -> list[subject.Line]:
    """One row. Raises BenchError where the files do not fit."""
    import torch

    import gdsstream

    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = files.choose(
        StorageConfig(dir=str(options.dir), files=options.files, file_bytes=options.file_bytes),
        cuda=device == "cuda",
        cold=False,
    )
    threads = min(12, len(os.sched_getaffinity(0)))
    config = gdsstream.StreamConfig(backend="staged", direct_io=False, num_threads=threads, chunk_size=_READ_BYTES)
    figures: dict[str, list[float]] = {name: [] for name in ("gb_per_s", "staged_cpu_s_per_gb", "bare_cpu_s_per_gb")}
    with files.written(plan) as written:
        for number in range(options.rounds + 1):
            cpu, start = time.process_time(), time.perf_counter()
            tensors = gdsstream.load_file(list(written.paths), device=device, config=config)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            cpu = time.process_time() - cpu
            rate = written.data_bytes / seconds / 1e9
            del tensors
            floor = paced_reads(written.paths, threads, config.staging_bytes, rate)
            if number:  # the first round pays for threads and pinned memory
                for name, value in zip(figures, (rate, cpu / (written.data_bytes / 1e9), floor), strict=True):
                    figures[name].append(value)
    gdsstream.release_engines()
    ratios = stats.paired_ratios(figures["staged_cpu_s_per_gb"], figures["bare_cpu_s_per_gb"])
    derived: dict[str, Any] = {name: stats.median(values) for name, values in figures.items()}
    derived |= subject.median("ratio", ratios)
    derived |= {"device": device, "threads": threads, "read_bytes": _READ_BYTES, "ring_bytes": config.staging_bytes}
    env = environment.collect(plan.directory, "cuda:0" if device == "cuda" else device)
    return [subject.Line("floor", "staged", subject.settings(options), figures, derived, env)]


def said(line: subject.Line) -> str:
    """A row for people."""
    d = line.derived
    return (
        f"{d['device']}, {d['threads']} threads, reads of {d['read_bytes'] >> 20} MiB, ring of "
        f"{d['ring_bytes'] >> 20} MiB, n = {len(line.figures['gb_per_s'])}: staged {d['staged_cpu_s_per_gb']:.3f} "
        f"CPU s/GB at {d['gb_per_s']:.1f} GB/s, bare preadv at the same rate {d['bare_cpu_s_per_gb']:.3f}; "
        f"ratio {d['ratio']:.2f} ({subject.bounds(d, 'ratio', '.2f')})"
    )


if __name__ == "__main__":
    subject.run(parser().parse_args(), measure, said)
