"""Ctrl-C between any two steps of a submit: what readers may still write to stays allocated until they are done.

The interpreter handles signals between two bytecodes, so also between a native call that has begun to read and the
assignment of what it returned. Raising at the n-th traced line, for every n, tries all of those places but the first
(a `return` or line event follows each call).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import InterruptAt, random_bytes, source_of

import gdsstream
from gdsstream.checkpoint import TensorSpec
from gdsstream.engine import native
from gdsstream.engine.base import Engine, Transfer
from gdsstream.plan import plan_separate

NBYTES = 1 << 20


def submit(engine: Engine, path: Path, out: torch.Tensor) -> Transfer:
    plan = plan_separate([TensorSpec("x", "U8", (NBYTES,), 0, 0, NBYTES)])
    return engine.submit([source_of(path)], plan, [out])


def gather(engine: Engine, path: Path, out: torch.Tensor) -> Transfer:
    rows, record = out.shape
    files, offsets = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64) * record
    return engine.gather([source_of(path)], files, offsets, record, out)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("start", "shape"), [(submit, (NBYTES,)), (gather, (NBYTES // 4096, 4096))])
def test_an_interrupted_submit_keeps_its_destination_until_nothing_writes_to_it(
    start: Callable[[Engine, Path, torch.Tensor], Transfer],
    shape: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    # An interrupt in a destructor is only printed, and its traceback would keep what this test wants to see go.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    path = tmp_path / "x.bin"
    path.write_bytes(random_bytes(NBYTES))
    began_to_read = n = 0
    # One thread, whose every read takes 10 ms: what is submitted behind another transfer is still under way when the
    # interrupt comes.
    with gdsstream.open_engine(
        "staged", device="cpu", chunk_size=1 << 18, num_threads=1, faults="delay_us=10000"
    ) as engine:
        while True:
            n += 1
            ahead = start(engine, path, torch.zeros(shape, dtype=torch.uint8))
            transfers = engine.stats()["transfers"]
            out = torch.zeros(shape, dtype=torch.uint8)
            alive = weakref.ref(out)
            if not InterruptAt(native, n).run(lambda: start(engine, path, out)):  # noqa: B023
                break
            del out
            began = engine.stats()["transfers"] - transfers
            assert engine.stats()["quarantined"] == began, f"at event {n}"
            assert (alive() is not None) == bool(began), f"at event {n}"
            began_to_read += began
            ahead.wait()
            until = time.monotonic() + 10
            while engine.stats()["quarantined"] and time.monotonic() < until:
                time.sleep(0.001)
            assert alive() is None, f"never let go of, at event {n}"
    assert began_to_read >= 3, f"{n} events, none of them while reads were under way"
