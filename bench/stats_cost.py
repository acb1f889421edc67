"""What counting costs: `python -m bench.stats_cost [--what large,small,direct] [--rounds 50]`.

Engines with GDSSTREAM_STATS at 1, 2 and 3 and without, and a second one without (`0 again`), read the same in turns, in
an order drawn anew each round. A row's ratios are to the engine without in the same round; what `0 again` differs by is
what the measurement itself does. `large` is one read of 1 GiB from memory, `small` 65,536 records of 4 KiB from memory,
`direct` 8,192 of them from the disk with O_DIRECT, each to the GPU where there is one.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import environment, files, stats, subject
from bench.config import BenchError, StorageConfig

#: Row -> the level of its engine.
LEVELS = {"0": 0, "1": 1, "2": 2, "3": 3, "0 again": 0}


class What(NamedTuple):
    """Reads of one kind: how many, of how many bytes, and past the page cache or from it."""

    records: int
    nbytes: int
    direct: bool


KINDS = {"large": What(1, 1 << 30, False), "small": What(65_536, 4096, False), "direct": What(8192, 4096, True)}


def parser() -> argparse.ArgumentParser:
    made = subject.parser("stats_cost", __doc__)
    made.add_argument("--what", default=",".join(KINDS))
    made.add_argument("--rounds", type=int, default=50)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="of large and small")
    made.add_argument("--disk", type=Path, default=Path("/tmp"), help="of direct")
    made.add_argument("--file-bytes", type=int, default=1 << 31)
    return made


def measure(options: argparse.Namespace) -> list[subject.Line]:
    """A row for each kind and level. Raises BenchError for an unknown kind, or where a file does not fit."""
    lines = []
    for name in options.what.split(","):
        if name not in KINDS:
            raise BenchError(f"--what names {name!r}; valid: {', '.join(KINDS)}")
        lines += _kind(name, KINDS[name], options)
    return lines


def _kind(name: str, what: What, options: argparse.Namespace) -> list[subject.Line]:
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    directory = options.disk if what.direct else options.dir
    file_bytes = max(what.records * what.nbytes, options.file_bytes // (8 if what.direct else 1))
    storage = StorageConfig(dir=str(directory), files=1, file_bytes=file_bytes + (4 << 20), tensors=1)
    plan = files.choose(storage, cuda=device != "cpu", cold=False)
    with files.written(plan) as written, ExitStack() as opened:
        (path,) = written.paths
        places = np.random.default_rng(0).permutation(os.path.getsize(path) // what.nbytes)[: what.records]
        offsets = (places * what.nbytes).astype(np.int64) if what.records > 1 else np.zeros(1, np.int64)
        out = torch.empty((what.records, what.nbytes), dtype=torch.uint8, device=device)
        engines = {row: _engine(path, level, what, device, opened) for row, level in LEVELS.items()}
        wall: dict[str, list[float]] = {row: [] for row in LEVELS}
        cpu: dict[str, list[float]] = {row: [] for row in LEVELS}
        turns = random.Random(0)
        for number in range(-2, options.rounds):  # the first two warm up
            for row in turns.sample(list(LEVELS), len(LEVELS)):
                seconds, busy = _once(engines[row], offsets, what.nbytes, out)
                if number >= 0:
                    wall[row].append(seconds)
                    cpu[row].append(busy)
        env = environment.collect(plan.directory, device)
    return [
        subject.Line(
            "stats_cost",
            f"{name}, {row}",
            subject.settings(options),
            {"seconds": wall[row], "cpu_s": cpu[row]},
            {
                "device": device,
                "seconds": stats.median(wall[row]),
                **_beyond(wall, row, ""),
                **_beyond(cpu, row, "cpu_"),
            },
            env,
        )
        for row in LEVELS
    ]


def _beyond(taken: dict[str, list[float]], row: str, prefix: str) -> dict[str, Any]:
    """By what fraction a row takes longer than the one that counts nothing."""
    beyond = [ratio - 1 for ratio in stats.paired_ratios(taken[row], taken["0"])]
    return subject.median(f"{prefix}overhead", beyond)


def _engine(path: str, level: int, what: What, device: str, opened: ExitStack) -> Callable[..., Any]:
    """What gathers records of the file through an engine of its own."""
    from types import SimpleNamespace

    from gdsstream import open_engine
    from gdsstream.checkpoint import FileStamp

    engine: Any = open_engine("staged", device=device, stats=level, direct_io=what.direct)
    opened.callback(engine.close)
    file = engine.open([SimpleNamespace(path=path, stamp=FileStamp.of(path))])
    engine.prepare()
    return lambda offsets, nbytes, out: engine.gather(
        file, np.zeros(len(offsets), np.int32), offsets, nbytes, out
    ).wait()


def _once(gather: Callable[..., Any], offsets: np.ndarray[Any, Any], nbytes: int, out: Any) -> tuple[float, float]:
    """Seconds of wall and of CPU time of one gather."""
    import torch

    def settle() -> None:
        if out.is_cuda:
            torch.cuda.synchronize()

    settle()
    cpu, start = time.process_time(), time.perf_counter()
    gather(offsets, nbytes, out)
    settle()
    return time.perf_counter() - start, time.process_time() - cpu


def said(line: subject.Line) -> str:
    """A row for people."""
    d = line.derived
    return (
        f"{line.row}: {d['seconds'] * 1e3:.3f} ms, {d['overhead']:+.2%} ({subject.bounds(d, 'overhead', '+.2%')}), "
        f"CPU {d['cpu_overhead']:+.2%}, n = {len(line.figures['seconds'])}"
    )


if __name__ == "__main__":
    subject.run(parser().parse_args(), measure, said)
