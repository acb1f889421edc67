"""Offloaded layers on a real GPU: gradients with every bit, on side streams too, in the memory of a few slots."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_support import assert_free
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_moe import assert_equal, gradients

from gdsstream.accumulate import LayerwiseAccumulation
from gdsstream.offloading import offload

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is used first
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
HIDDEN, INNER, COUNT = 1024, 4096, 7
LAYER_BYTES = 3 * HIDDEN * INNER * 2


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer(nn.Module):
    """25 MB of frozen weights in bfloat16, and an adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Parameter((torch.randn(2 * INNER, HIDDEN) / 32).to(dtype), requires_grad=False)
        self.down = nn.Parameter((torch.randn(HIDDEN, INNER) / 64).to(dtype), requires_grad=False)
        self.a = nn.Parameter(torch.randn(8, HIDDEN) / 32)
        self.b = nn.Parameter(torch.randn(HIDDEN, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        gate, up = F.linear(h.to(self.gate_up.dtype), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down).float() + h @ self.a.t() @ self.b.t()


def twins(folder: Path, dtype: torch.dtype = torch.bfloat16, count: int = COUNT) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Layers whose weights are stored in `folder`, and their twins on the GPU."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(dtype) for _ in range(count))
    stored = {f"layers.{name}": t.detach().clone() for name, t in layers.named_parameters() if not t.requires_grad}
    save_file(stored, folder / "model.safetensors")
    return layers, copy.deepcopy(layers).cuda()


def step(
    layers: nn.ModuleList, call: Any = None, autocast: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    layers.zero_grad()
    x = torch.randn(512, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        h = x
        for layer in layers:
            h = layer(h) if call is None else call(layer, h)
    loss = h.square().mean()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), {**gradients(layers), "x": x.grad}


def assert_same(found: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: Any) -> None:
    assert torch.equal(found[0], expected[0])
    assert_equal(found[1], expected[1])


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("where", ["layer", "forward"])
def test_training(tmp_path: Path, slots: int, reentrant: bool | None, where: str) -> None:
    layers, twin = twins(tmp_path)
    call = None if reentrant is None or where == "forward" else partial(checkpoint, use_reentrant=reentrant)
    if reentrant is not None and where == "forward":
        for layer in (*layers, *twin):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
    expected = step(twin, call)
    assert_same(step(twin, call), expected)
    with offload(layers, tmp_path, device="cuda", num_slots=slots, debug=True) as handle:
        for _ in range(3):
            assert_same(step(layers, call), expected)
        assert handle.stats().order_misses == 0
        assert_free(handle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(tmp_path: Path, dtype: torch.dtype) -> None:
    layers, twin = twins(tmp_path, dtype)
    expected = step(twin, autocast=True)
    with offload(layers, tmp_path, device="cuda", debug=True):
        for _ in range(2):
            assert_same(step(layers, autocast=True), expected)


@pytest.mark.parametrize("slots", [1, 2])
def test_side_streams(tmp_path: Path, slots: int) -> None:
    layers, twin = twins(tmp_path)
    expected = step(twin)
    busy = torch.randn(4096, 4096, device="cuda")
    with offload(layers, tmp_path, device="cuda", num_slots=slots, debug=True) as handle:
        for _ in range(2):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(20):
                    busy @ busy  # the GPU is late
                found = step(layers)
            torch.cuda.current_stream().wait_stream(side)
            assert_same(found, expected)
        with handle.hold(0):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(20):
                    busy @ busy
                held = layers[0](torch.ones(4, HIDDEN, device="cuda"))
        with handle.hold(COUNT - 1):
            pass
        torch.cuda.synchronize()
        assert torch.equal(held, twin[0](torch.ones(4, HIDDEN, device="cuda")))


@pytest.mark.parametrize("side", [False, True])
def test_dequantised_weights(tmp_path: Path, side: bool) -> None:
    layers, twin = twins(tmp_path)
    stored = {}
    for index, layer in enumerate(twin):
        for name in ("gate_up", "down"):
            weight = getattr(layer, name)
            scale = weight.data.float().abs().amax(1, keepdim=True) / 127
            packed = (weight.data.float() / scale).round().to(torch.int8)
            weight.data = (packed.float() * scale).to(torch.bfloat16)
            stored[f"layers.{index}.{name}"], stored[f"layers.{index}.{name}.scale"] = packed.cpu(), scale.cpu()
    save_file(stored, tmp_path / "model.safetensors")

    def dequantise(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        return (tensors[""].float() * tensors["scale"]).to(parameter.dtype)

    expected = step(twin)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with offload(layers, tmp_path, device="cuda", num_slots=1, dequantize=dequantise, debug=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = [step(layers) for _ in range(2)]
        torch.cuda.synchronize()
    for each in found:
        assert_same(each, expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_accumulation(tmp_path: Path, recompute: bool) -> None:
    layers, twin = twins(tmp_path)
    batches = [torch.randn(64, HIDDEN, device="cuda") for _ in range(3)]
    for batch in batches:
        h = batch
        for layer in twin:
            h = layer(h)
        h.square().mean().backward()
    with offload(layers, tmp_path, device="cuda", debug=True) as handle:
        accumulation = LayerwiseAccumulation(
            layers, lambda batch: batch, lambda h, _: h.square().mean(), handle=handle, recompute=recompute
        )
        accumulation.step(batches)
        assert handle.stats().order_misses == 0
    assert_equal(gradients(layers), gradients(twin))


def test_memory_is_that_of_the_slots(tmp_path: Path) -> None:
    count = 12
    layers, twin = twins(tmp_path, count=count)

    def peak(layers: nn.ModuleList) -> int:
        step(layers)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(layers)
        return torch.cuda.max_memory_allocated()

    resident = peak(twin)
    del twin
    torch.cuda.empty_cache()
    with offload(layers, tmp_path, device="cuda", num_slots=2):
        before = peak(layers)
        for _ in range(20):
            step(layers)
        assert peak(layers) == before
        assert before <= resident - (count - 2) * LAYER_BYTES + (4 << 20)
