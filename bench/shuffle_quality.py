"""How good an order of ShardLoader is, beside numpy's: `python -m bench.shuffle_quality [--records 1000000]`.

A row for each order, a figure for each seed; no file is read. `spread` is a chi-square of 32 parts of the order against
32 parts of the records, in standard deviations; `correlation` that of each record's number and the next one's, in
standard deviations; `neighbours` how many pairs stay adjacent, over the two that chance gives; `distance` the mean
distance of a record and the next one, over that of two at random; `clumping` the variance of the mean record of batches
of 256, over that of random batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import environment, stats, subject
from bench.config import BenchError

Order = Callable[[int], NDArray[np.int64]]


class Quality(NamedTuple):
    """What a good shuffle leaves at about 0 (standard deviations from what chance gives), or at about 1 (ratios)."""

    spread: float
    correlation: float
    neighbours: float
    distance: float
    clumping: float


def quality(records: NDArray[np.int64], parts: int = 32, batch: int = 256) -> Quality:
    """Of the record numbers 0 to n - 1 in some order, int64 [n]; module docstring."""
    n = len(records)
    position, record = np.arange(n) * parts // n, records * parts // n
    counts = np.bincount(position * parts + record, minlength=parts * parts)
    expected = n / parts**2
    freedom = (parts - 1) ** 2
    spread = (((counts - expected) ** 2 / expected).sum() - freedom) / sqrt(2 * freedom)
    steps = np.abs(np.diff(records))
    means = (records[: n // batch * batch] / n).reshape(-1, batch).mean(1)
    at_random = (n - batch) / (n - 1) / 12 / batch
    return Quality(
        spread=float(spread),
        correlation=float(np.corrcoef(records[1:], records[:-1])[0, 1] * sqrt(n)),
        neighbours=float((steps == 1).sum() / 2),
        distance=float(steps.mean() / (n / 3)),
        clumping=float(((means - 0.5) ** 2).mean() / at_random),
    )


def orders(count: int) -> dict[str, Order]:
    """The rows: name -> what makes the order of `count` records for a seed."""
    from gdsstream.sampling import EpochOrder

    every = np.arange(count)

    def block(records: int, window: int) -> Order:
        return lambda seed: EpochOrder(
            count, shuffle="block", seed=seed, epoch=0, block_records=records, window_blocks=window
        ).records(every)

    return {
        "numpy": lambda seed: np.random.default_rng(seed).permutation(count),
        "full": lambda seed: EpochOrder(count, shuffle="full", seed=seed, epoch=0).records(every),
        "block 1024 x 64": block(1024, 64),
        "block 1024 x 256": block(1024, 256),
        "block 64 x 1024": block(64, 1024),
        "none": lambda seed: EpochOrder(count, shuffle="none", seed=seed, epoch=0).records(every),
    }


def parser() -> argparse.ArgumentParser:
    made = subject.parser("shuffle_quality", __doc__)
    made.add_argument("--records", type=int, default=1_000_000)
    made.add_argument("--seeds", type=int, default=10)
    return made


def measure(options: argparse.Namespace) -> list[subject.Line]:
    """The rows. Raises BenchError for fewer records than the measures need."""
    if options.records < 32_768 or options.seeds < 1:
        raise BenchError("--records has to be at least 32768, for 32 records in each of 32 x 32 parts, and --seeds 1")
    env = environment.collect(Path.cwd(), "cpu")
    lines = []
    for name, order in orders(options.records).items():
        seconds, found = [], []
        for seed in range(options.seeds):
            began = time.perf_counter()
            records = order(seed)
            seconds.append(time.perf_counter() - began)
            found.append(quality(records))
        figures = {key: [float(getattr(each, key)) for each in found] for key in Quality._fields}
        derived = {key: float(np.mean(values)) for key, values in figures.items()}
        derived |= {f"largest_{key}": max(map(abs, figures[key])) for key in ("spread", "correlation")}
        derived["positions_per_s"] = options.records / stats.median(seconds)
        figures["order_s"] = seconds
        lines.append(subject.Line("shuffle_quality", name, subject.settings(options), figures, derived, env))
    return lines


def said(line: subject.Line) -> str:
    """A row for people."""
    d = line.derived
    return (
        f"{line.row}: spread {d['spread']:.2f} ({d['largest_spread']:.2f}), correlation {d['correlation']:.2f} "
        f"({d['largest_correlation']:.2f}), neighbours {d['neighbours']:.2f}, clumping {d['clumping']:.3f}, "
        f"{d['positions_per_s'] / 1e6:.1f} million positions a second"
    )


if __name__ == "__main__":
    subject.run(parser().parse_args(), measure, said)
