"""A program that ends while its engines are open; see test_gpu_route.py."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from gpu_route.harness import MIB, write_random
from gpu_route.plans import read_whole

import gdsstream
from gdsstream.engine import Transfer

kept: list[object] = []


def leave(when: str, path: str) -> None:
    """Return to an interpreter that has nothing more to do, with an engine of its own and a shared one open."""
    write_random(Path(path), 4 * MIB)
    faults = "delay_us=100000" if when == "reads" else ""
    engine = gdsstream.open_engine(
        device="cuda:0", faults=faults, chunk_size=64 * 1024, staging_bytes=2 * MIB, num_threads=2
    )
    out = torch.empty(4 * MIB, dtype=torch.uint8)
    transfer: Transfer = read_whole(engine, Path(path), out)
    record = gdsstream.read_many(path, [0], [0], 100, device="cuda:0")
    if when == "idle":
        transfer.wait()
    kept.extend([engine, out, transfer, record])
    print(time.time())
