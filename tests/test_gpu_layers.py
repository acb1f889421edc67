"""Layers through slots on a real GPU: bytes, fences under load, memory that stays flat."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from layer_files import layer_of, write_layers

from gdsstream import MemoryBudgetError
from gdsstream.layers import LayerStreamer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
COUNT = 7
# 33 MB a layer: copies take long enough to be overtaken where a fence is missing.
SHAPES = {"input_layernorm.weight": (2048,), "w": (4096, 2048), "odd": (3, 7), "v": (2048, 4096)}
KNOBS = [
    {"direct_io": False},
    {"direct_io": True},
    {"backend": "mapped"},
    {"host_cache_bytes": 100_000_000},
    {"backend": "traditional"},
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("layers")
    return folder, write_layers(folder, COUNT, shapes=SHAPES, files=2)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_what_compute_sees(stored: tuple[Path, dict[str, torch.Tensor]], knobs: dict[str, object], slots: int) -> None:
    """Products with a layer's weights, queued far behind the host, are those of the resident weights."""
    folder, tensors = stored
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    resident = [{name: tensor.cuda() for name, tensor in layer_of(tensors, i).items()} for i in range(COUNT)]
    busy = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with LayerStreamer(folder, device="cuda", num_slots=slots, order="training", **knobs) as streamer:  # type: ignore[arg-type]
        results = []
        for step in range(3):
            with torch.cuda.stream(side if step == 1 else torch.cuda.current_stream()):
                for lease in streamer:
                    # The consumer is late: its slot must wait for it, not the other way round.
                    for _ in range(4):
                        busy @ busy
                    results.append((lease.layer, (x @ lease["w"].t()).float().sum(), lease["v"].float().sum()))
                    results[-1] += (lease["odd"].clone(), lease["input_layernorm.weight"].clone())
        torch.cuda.synchronize()
    for layer, product, total, odd, norm in results:
        wanted = resident[layer]
        assert torch.equal(product, (x @ wanted["w"].t()).float().sum())
        assert torch.equal(total, wanted["v"].float().sum())
        assert torch.equal(odd, wanted["odd"])
        assert torch.equal(norm, wanted["input_layernorm.weight"])
    print(streamer.stats().summary())


def test_gpu_memory_is_the_slots_and_stays(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with LayerStreamer(stored[0], device="cuda", num_slots=2) as streamer:
        for _ in range(50):
            for lease in streamer:
                lease.wait()
        # A little of what tests before left may have gone meanwhile.
        rounded = -(-streamer.slot_bytes // 512) * 512  # as the allocator does
        assert 2 * rounded - (1 << 20) <= torch.cuda.memory_allocated() - before <= 2 * rounded
        stats = streamer.stats()
        assert stats.leases == 50 * COUNT
        assert stats.stall_s > 0
        assert stats.host_s / stats.leases < 1e-3
    assert torch.cuda.memory_allocated() <= before


def test_slots_that_do_not_fit(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(MemoryBudgetError, match=r"of 100000 slots of \d+ bytes fit on cuda:0; use num_slots=\d+"):
        LayerStreamer(stored[0], device="cuda", num_slots=100_000)
    torch.cuda.empty_cache()


def test_groups_and_poison(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = stored
    with LayerStreamer(folder, device="cuda", num_slots=1, groups=["w"], debug=True) as streamer:
        for lease in streamer:
            kept = lease["w"]
            assert torch.equal(kept.cpu(), layer_of(tensors, lease.layer)["w"])
            assert torch.equal(lease["v"].cpu(), layer_of(tensors, lease.layer)["v"])
