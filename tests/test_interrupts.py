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
from layer_files import write_layers
from offload_support import assert_free, assert_same_step, deterministic, offloaded, step, twins
from support import InterruptAt, random_bytes, source_of

import gdsstream
from gdsstream import binding, gates, layers, lease, lending, mending, offloading, residency, saved, slots, sources
from gdsstream.checkpoint import TensorSpec
from gdsstream.engine import native
from gdsstream.engine.base import Engine, Transfer
from gdsstream.plan import plan_separate

__all__ = ["deterministic"]

NBYTES = 1 << 20


def submit(engine: Engine, path: Path, out: torch.Tensor) -> Transfer:
    plan = plan_separate([TensorSpec("x", "U8", (NBYTES,), 0, 0, NBYTES)])
    return engine.submit([source_of(path)], plan, [out])


def gather(engine: Engine, path: Path, out: torch.Tensor) -> Transfer:
    rows, record = out.shape
    files, offsets = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64) * record
    return engine.gather([source_of(path)], files, offsets, record, out)  # type: ignore[attr-defined]


def test_an_interrupt_stays_one_while_a_native_error_is_told(monkeypatch: pytest.MonkeyPatch):
    """Making the exception runs Python, in which a signal may be handled."""

    class Interrupted(Exception):
        def __init__(self, _: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(gdsstream.errors, "ConfigError", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gdsstream._native.Lane("nonsense", direct=False, threads=1, depth=1, read_bytes=1)


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
            if not InterruptAt(n, native).run(lambda: start(engine, path, out)):  # noqa: B023
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


def use(streamer: gdsstream.LayerStreamer, layer: int) -> dict[str, torch.Tensor]:
    with streamer.layer(layer) as lease:
        return {name: lease[name].clone() for name in lease}


@pytest.mark.parametrize("act", ["lease", "release", "prefetch", "mend"])
def test_a_streamer_that_was_interrupted_anywhere_goes_on(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    write_layers(tmp_path / "model", 4)
    modules = (layers, mending, residency, slots, sources, native)
    n = changed = 0
    with gdsstream.LayerStreamer(
        tmp_path / "model", device="cpu", num_slots=2, backend="staged", num_threads=2, faults="delay_us=300"
    ) as streamer:
        expected = [use(streamer, layer) for layer in range(4)]
        while True:
            n += 1
            use(streamer, 3)
            lease = streamer.layer(0) if act == "release" else None
            interrupt = InterruptAt(n, *modules)
            got: list[gdsstream.Lease] = []
            if act == "mend":
                streamer._mending.note(None)
            if act in ("lease", "mend"):
                more = interrupt.run(lambda: got.append(streamer.layer(2)))  # noqa: B023
            elif lease is not None:
                more = interrupt.run(lease.release)
                lease.release()
            else:
                more = interrupt.run(lambda: streamer.prefetch(1))
            for one in got:
                one.release()
            changed += streamer._mending.needed
            # Both slots can be leased at once, and every layer has its bytes.
            with streamer.layer(1), streamer.layer(2):
                pass
            for layer in (0, 1, 2, 3):
                for name, tensor in use(streamer, layer).items():
                    assert torch.equal(tensor, expected[layer][name]), f"layer {layer}, {name}, event {n} of {act}"
            assert all(slot.leases == 0 for slot in streamer._ring.slots), f"event {n} of {act}"
            if not more:
                break
    assert changed > 10, f"{n} events, hardly any of which interrupted a change"


# A step has some 7,000 such events.
def test_an_offloaded_model_that_was_interrupted_anywhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    modules = (binding, gates, layers, lease, lending, mending, native, offloading, residency, saved, slots, sources)
    model, twin = twins(tmp_path, 4)
    n = 1
    with offloaded(model, tmp_path, num_slots=2) as handle:
        assert_same_step(model, twin)
        while InterruptAt(n, *modules).run(lambda: step(model)):
            assert_same_step(model, twin)
            assert_free(handle)
            n += 97
    assert n > 5000, "the events of a step were not seen"
