"""What scenarios are made of: how they are named, what they must leave behind, and engines without Python's layers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gpu_route.stand_in import MISUSE, NOW, StandIn
from support import random_bytes

import gdsstream
from gdsstream import _native
from gdsstream.checkpoint import FileStamp

KIB = 1024
MIB = 1024 * KIB
SLOT = 64 * KIB
# The exit status of a scenario that cannot run here.
SKIPPED = 77


class Scenario(NamedTuple):
    run: Callable[[StandIn, Path], None]
    env: dict[str, str]
    limit_s: float
    leaves: frozenset[str]


SCENARIOS: dict[str, Scenario] = {}
MODULES = (
    "scenarios_load",
    "scenarios_fences",
    "scenarios_layers",
    "scenarios_offload",
    "scenarios_giving_up",
    "scenarios_made_ahead",
    "scenarios_faults",
    "scenarios_lifetime",
    "scenarios_windows",
    "scenarios_loader",
    "scenarios_placement",
    "scenarios_stats",
    "scenarios_allocations",
    "scenarios_timed_ios",
)


def scenario(
    *, delays_us: Sequence[int] = (200,), devices: int = 2, limit_s: float = 30, leaves: Sequence[str] = ()
) -> Callable[[Callable[[StandIn, Path], None]], Callable[[StandIn, Path], None]]:
    """Register a function as a scenario, once for each delay of the streams, with another seed each.

    `leaves` names counters that need not come back to zero.
    """

    def register(run: Callable[[StandIn, Path], None]) -> Callable[[StandIn, Path], None]:
        for seed, delay in enumerate(delays_us, 1):
            name = run.__name__ if len(delays_us) == 1 else f"{run.__name__}-{delay}us"
            env = {"FAKE_CUDA_DELAY_US": str(delay), "FAKE_CUDA_SEED": str(seed), "FAKE_CUDA_DEVICES": str(devices)}
            SCENARIOS[name] = Scenario(run, env, limit_s, frozenset(leaves))
        return run

    return register


def load_scenarios() -> dict[str, Scenario]:
    for module in MODULES:
        importlib.import_module(f"gpu_route.{module}")
    return SCENARIOS


def check_nothing_left(fake: StandIn, leaves: frozenset[str]) -> None:
    """Everything taken from the driver was given back, and nothing was used in a way that only happens to work."""
    fake.clear_faults()
    fake.resume()
    gdsstream.release_engines()
    fake.drain()
    gc.collect()
    counts = {name: fake.count(name) for name in (*NOW, *MISUSE)}
    assert {name: count for name, count in counts.items() if count and name not in leaves} == {}
    assert reader_threads() == 0


def reader_threads() -> int:
    return len(reader_tasks())


def reader_tasks() -> list[int]:
    """The thread ids of all engines' readers."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/self/task/{task}/comm").read_text().strip() == "gdsstream":
                found.append(int(task))
    return found


def until(condition: Callable[[], bool], what: str, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.001)


def write_random(path: Path, nbytes: int, seed: int = 1) -> torch.Tensor:
    """A file of random bytes; they are returned."""
    data = random_bytes(nbytes, seed)
    path.write_bytes(data)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Extent(NamedTuple):
    offset: int
    nbytes: int
    target: int
    group: int = 0


class Bare:
    """The native engine on one lane and one file, with streams and addresses of the test's own."""

    def __init__(
        self,
        path: Path,
        *,
        device: int = 0,
        reader: str = "pread",
        slots: int = 4,
        threads: int = 2,
        depth: int = 1,
        faults: str = "",
    ) -> None:
        self.engine = _native.Engine(
            device=device,
            slot_bytes=SLOT,
            staging_bytes=slots * SLOT,
            numa_node=-1,
            cpus=[],
            lanes=[_native.Lane(reader, direct=False, threads=threads, depth=depth, read_bytes=SLOT, faults=faults)],
        )
        self.file = _native.File(str(path), tuple(FileStamp.of(path)))
        if reader == "mapped":
            self.engine.map(self.file)

    def submit(self, extents: Sequence[Extent], *, stream: int = 0) -> _native.Transfer:
        table = np.array(extents, dtype=np.int64).reshape(-1, 4)
        request = _native.Request(
            [self.file],
            [0],
            np.zeros(len(table), dtype=np.int32),
            np.ascontiguousarray(table[:, 0]),
            np.ascontiguousarray(table[:, 1]),
            np.ascontiguousarray(table[:, 2]).astype(np.uint64),
            np.ascontiguousarray(table[:, 3]).astype(np.int32),
            max((extent.group for extent in extents), default=0) + 1,
        )
        return self.engine.submit(request, stream, None)

    def read(self, out: torch.Tensor, offset: int = 0, *, stream: int = 0) -> _native.Transfer:
        """Start to fill `out` with the file's bytes from `offset` on."""
        return self.submit([Extent(offset, out.nbytes, out.data_ptr())], stream=stream)

    def close(self) -> None:
        self.engine.close()
