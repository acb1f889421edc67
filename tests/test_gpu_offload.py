"""Offloaded training on a real GPU: gradients of the resident model, bit for bit, at sizes where a race shows."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import gdsstream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
LAYERS, HIDDEN, INNER, ROWS = 6, 2048, 6144, 512


class Layer(nn.Module):
    """50 MB of frozen weights in bfloat16, a trainable adapter and a trainable norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.up = nn.Linear(HIDDEN, INNER, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False, dtype=dtype).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, HIDDEN, dtype=dtype) / HIDDEN**0.5)
        self.b = nn.Parameter(torch.randn(HIDDEN, 8, dtype=dtype) / 8**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.up(h))) + F.linear(F.linear(h, self.a), self.b)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(LAYERS))
        self.call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda layer, x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x.float().square().mean()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(folder: Path, dtype: torch.dtype) -> tuple[Model, Model]:
    """A model whose frozen weights are in `folder`, and its resident twin on the GPU."""
    torch.manual_seed(1)
    model = Model(dtype)
    twin = copy.deepcopy(model).cuda()
    frozen = {f"layers.{n}": p.detach() for n, p in model.layers.named_parameters() if not p.requires_grad}
    save_file(frozen, folder / "model.safetensors")
    return model, twin


def steps(model: Model, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Losses and gradients of some optimizer steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    results = []
    for step in range(count):
        x = torch.randn(ROWS, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        loss = model(x.to(model.layers[0].a.dtype))
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach().clone(), **grads})
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_same(got: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    for step, (some, others) in enumerate(zip(got, wanted, strict=True)):
        assert some.keys() == others.keys()
        assert len(some) == 1 + 4 * LAYERS
        for name, tensor in others.items():
            assert torch.equal(some[name], tensor), f"{name} in step {step}"


HOW = {
    "plain": lambda layer, x: layer(x),
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", ["staged", "mapped"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_gradients_are_those_of_the_resident_model(tmp_path: Path, slots: int, backend: str, how: str) -> None:
    model, twin = made(tmp_path, torch.bfloat16)
    model.call = twin.call = HOW[how]
    wanted, again = steps(copy.deepcopy(twin)), steps(copy.deepcopy(twin))
    assert_same(again, wanted)
    with gdsstream.offload(
        model.layers, tmp_path, device="cuda", num_slots=slots, backend=backend, debug=True
    ) as handle:
        assert_same(steps(model), wanted)
        print(handle.stats().summary())


@pytest.mark.parametrize("slots", [1, 2])
def test_autocast(tmp_path: Path, slots: int) -> None:
    model, twin = made(tmp_path, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        wanted = steps(twin)
    with (
        gdsstream.offload(model.layers, tmp_path, device="cuda", num_slots=slots),
        torch.autocast("cuda", torch.bfloat16),
    ):
        assert_same(steps(model), wanted)


def test_gpu_memory_is_slots_and_activations(tmp_path: Path) -> None:
    model, twin = made(tmp_path, torch.bfloat16)
    weights = sum(p.nbytes for p in twin.parameters() if not p.requires_grad)

    def peak(of: Model) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps(of, 2)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    activations = peak(twin)
    del twin
    with gdsstream.offload(model.layers, tmp_path, device="cuda", num_slots=2) as handle:
        assert 2 * handle.streamer.slot_bytes < weights / 2
        assert peak(model) <= activations + (4 << 20)


def test_side_streams_and_no_grad(tmp_path: Path) -> None:
    model, twin = made(tmp_path, torch.bfloat16)
    x = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gdsstream.offload(model.layers, tmp_path, device="cuda", num_slots=2))
        stack.enter_context(torch.no_grad())
        wanted = twin(x)
        torch.cuda.synchronize()
        for _ in range(3):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                got = model(x)
            side.synchronize()
            assert torch.equal(got, wanted)
