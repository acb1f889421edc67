"""Allocations of the device: tensors that touch and yet lie in different ones, and memory that was given back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_route.device_memory import DeviceMemory
from gpu_route.harness import KIB, MIB, SLOT, scenario, write_random
from gpu_route.plans import one_buffer, small_engine
from gpu_route.stand_in import StandIn
from support import source_of

import gdsstream
from gdsstream.devices import on_stream
from gdsstream.engine.native import NativeEngine

# Small ones, one that ends where its block does, and one larger than a slot.
SIZES = (512, 4 * KIB, 60 * KIB, 3 * KIB, SLOT + 512, 512, MIB // 2)


def _touching(fake: StandIn, path: Path, knobs: dict[str, object]) -> int:
    """Read the file into tensors that touch, of which every second begins an allocation; how many copies that took."""
    data = write_random(path, sum(SIZES))
    out = torch.zeros(len(data), dtype=torch.uint8)
    starts = np.cumsum((0, *SIZES))
    blocks = [*range(0, len(SIZES), 2), len(SIZES)]
    for first, last in pairwise(blocks):
        fake.allocation(out.data_ptr() + int(starts[first]), int(starts[last] - starts[first]))
    backend = str(knobs.pop("backend", "staged"))
    with gdsstream.open_engine(backend, device="cuda:0", **knobs) as engine:
        assert isinstance(engine, NativeEngine)
        extents = [(int(start), size, 0) for start, size in zip(starts[:-1], SIZES, strict=True)]
        targets = np.uint64(out.data_ptr()) + starts[:-1].astype(np.uint64)
        before = fake.count("copies")
        engine.submit_to([source_of(path)], one_buffer(extents), targets, keep=[out]).wait()
        fake.drain()
        assert torch.equal(out, data)
        return fake.count("copies") - before


@scenario()
def touching_tensors_of_several_allocations_staged(fake: StandIn, folder: Path) -> None:
    # One slot takes them all: what could be one copy is one for each allocation.
    knobs: dict[str, object] = {"chunk_size": MIB, "staging_bytes": 2 * MIB, "num_threads": 1, "direct_io": False}
    assert _touching(fake, folder / "data", knobs) >= 4


@scenario()
def touching_tensors_of_several_allocations_past_the_page_cache(fake: StandIn, folder: Path) -> None:
    _touching(fake, folder / "data", {"chunk_size": 64 * KIB, "staging_bytes": 4 * MIB, "direct_io": True})


@scenario()
def touching_tensors_of_several_allocations_mapped(fake: StandIn, folder: Path) -> None:
    _touching(fake, folder / "data", {"backend": "mapped", "host_cache_bytes": 4 * MIB})


@scenario()
def touching_tensors_of_one_allocation_are_one_copy(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, 96 * KIB)
    out = torch.zeros(len(data), dtype=torch.uint8)
    fake.allocation(out.data_ptr(), len(data))
    with small_engine(slots=2, chunk_size=MIB, staging_bytes=2 * MIB, num_threads=1) as engine:
        plan = one_buffer([(start, 4 * KIB, 0) for start in range(0, len(data), 4 * KIB)])
        engine.submit([source_of(path)], plan, [out]).wait()
        fake.drain()
    assert torch.equal(out, data)
    # One for each slot: the first ones are filled in part only, so that copies begin early.
    assert fake.count("copies") <= 2


@scenario()
def memory_given_back_is_watched(fake: StandIn, folder: Path) -> None:
    # What every other scenario relies on: a copy that nothing orders is noticed, one that its stream waits for is not.
    memory = DeviceMemory(fake)
    source = torch.zeros(SLOT, dtype=torch.uint8)
    with fake.stream() as own, fake.stream() as other:
        for stream in (own, other):
            with on_stream(torch.device("cuda", 0), own):
                target = memory.empty((SLOT,), dtype=torch.uint8, device=torch.device("cpu"))
            with fake.paused():
                fake.copy(target, source, stream)
                del target
                memory.give_back(torch.zeros(1, dtype=torch.uint8), own)
            fake.drain()
            if stream == own:
                memory.check()
    with pytest.raises(AssertionError, match="somebody else's"):
        memory.check()
    assert memory.written_after == 1
