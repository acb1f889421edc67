"""Offloaded layers on a real GPU: losses and gradients bit by bit, on side streams too, in the memory of a few slots.

The layers are large enough for a race to show.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
HIDDEN, INNER, ROWS, COUNT = 2048, 4096, 512, 7
LAYER_BYTES = 3 * HIDDEN * INNER * 2  # of the large weights in bfloat16
TRAINED = 4  # parameters of a layer

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer(nn.Module):
    """50 MB of frozen weights in bfloat16, bare and in a module; a trainable norm, and an adapter in the same dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Parameter((torch.randn(2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype), requires_grad=False)
        self.down = nn.Linear(INNER, HIDDEN, dtype=dtype).requires_grad_(False)
        self.a = nn.Parameter((torch.randn(8, HIDDEN) / HIDDEN**0.5).to(dtype))
        self.b = nn.Parameter((torch.randn(HIDDEN, 8) / 8**0.5).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).to(self.a.dtype)
        gate, up = F.linear(h, self.gate_up).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up).float() + F.linear(F.linear(h, self.a), self.b).float()


class Stored(NamedTuple):
    folder: Path
    layers: nn.ModuleList

    def twins(self) -> tuple[nn.ModuleList, nn.ModuleList]:
        """Layers to offload, and their twins on the GPU."""
        return copy.deepcopy(self.layers), copy.deepcopy(self.layers).cuda()


def store(folder: Path, dtype: torch.dtype = torch.bfloat16, count: int = COUNT) -> Stored:
    """Layers whose frozen weights are in `folder`."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(dtype) for _ in range(count))
    frozen = {f"layers.{name}": p.detach() for name, p in layers.named_parameters() if not p.requires_grad}
    save_file(frozen, folder / "model.safetensors")
    return Stored(folder, layers)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Stored]:
    """COUNT layers in a dtype, written once."""
    made: dict[torch.dtype, Stored] = {}

    def get(dtype: torch.dtype) -> Stored:
        if dtype not in made:
            made[dtype] = store(tmp_path_factory.mktemp("layers"), dtype)
        return made[dtype]

    return get


@pytest.fixture
def bfloat16(stored: Callable[[torch.dtype], Stored]) -> Stored:
    return stored(torch.bfloat16)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def train(
    layers: nn.ModuleList,
    steps: int = 3,
    *,
    call: Call | None = None,
    into_inputs: bool = False,
    autocast: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Losses and gradients of some optimizer steps; every other one gives gradients to the inputs too, or each does."""
    optimizer = torch.optim.SGD([p for p in layers.parameters() if p.requires_grad], lr=1e-2)
    results = []
    for step in range(steps):
        x = inputs(step).requires_grad_(into_inputs or step % 2 == 0)
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            h = x
            for layer in layers:
                h = layer(h) if call is None else call(layer, h)
        loss = h.square().mean()
        loss.backward()
        found = {"loss": loss.detach().clone(), **gradients(layers)}
        assert len(found) == 1 + TRAINED * len(layers)
        if x.requires_grad:
            assert x.grad is not None
            found["x"] = x.grad
        results.append(found)
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["staged", "mapped"])
@pytest.mark.parametrize(
    ("reentrant", "where"),
    [(None, "layer"), (False, "layer"), (False, "forward"), (True, "layer"), (True, "forward")],
    ids=["plain", "checkpoint", "checkpointed", "reentrant checkpoint", "reentrant checkpointed"],
)
def test_training(bfloat16: Stored, slots: int, backend: str, reentrant: bool | None, where: str) -> None:
    layers, twin = bfloat16.twins()
    call: Call | None = None
    if reentrant is not None and where == "layer":
        call = partial(checkpoint, use_reentrant=reentrant)
    elif reentrant is not None:
        for layer in (*layers, *twin):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
    # A reentrant checkpoint has gradients only where its inputs do.
    run = partial(train, call=call, into_inputs=bool(reentrant))
    start = copy.deepcopy(twin.state_dict())
    expected = run(twin)
    twin.load_state_dict(start)
    assert_same(run(twin), expected)
    with offload(layers, bfloat16.folder, device="cuda", num_slots=slots, backend=backend, debug=True) as handle:
        assert_same(run(layers), expected)
        assert handle.stats().order_misses == 0
        assert_free(handle)
        print(handle.stats().summary())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("of", ["forward", "step"])
def test_autocast(stored: Callable[[torch.dtype], Stored], dtype: torch.dtype, slots: int, of: str) -> None:
    layers, twin = stored(dtype).twins()

    def run(layers: nn.ModuleList) -> list[dict[str, torch.Tensor]]:
        if of == "forward":
            return train(layers, autocast=True)
        with torch.autocast("cuda", torch.bfloat16):
            return train(layers)

    expected = run(twin)
    with offload(layers, stored(dtype).folder, device="cuda", num_slots=slots, debug=True):
        assert_same(run(layers), expected)


@pytest.mark.parametrize("slots", [1, 2])
def test_side_streams(bfloat16: Stored, slots: int) -> None:
    layers, twin = bfloat16.twins()
    expected = train(twin)
    busy = torch.randn(4096, 4096, device="cuda")
    ones = torch.ones(4, HIDDEN, device="cuda")
    with offload(layers, bfloat16.folder, device="cuda", num_slots=slots, debug=True) as handle:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                busy @ busy  # the GPU is late
            found = train(layers)
        torch.cuda.current_stream().wait_stream(side)
        assert_same(found, expected)
        with handle.hold(0):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(20):
                    busy @ busy
                held = layers[0](ones)
        with handle.hold(COUNT - 1):
            pass
        torch.cuda.synchronize()
        assert torch.equal(held, twin[0](ones))


def test_side_streams_without_gradients(bfloat16: Stored) -> None:
    layers, twin = bfloat16.twins()
    x = inputs(0)
    with offload(layers, bfloat16.folder, device="cuda", num_slots=2), torch.no_grad():
        wanted = nn.Sequential(*twin)(x)
        torch.cuda.synchronize()
        for _ in range(3):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                got = nn.Sequential(*layers)(x)
            side.synchronize()
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("side", [False, True])
def test_dequantised_weights(tmp_path: Path, bfloat16: Stored, side: bool) -> None:
    layers, twin = bfloat16.twins()
    frozen = {}
    for name, weight in twin.named_parameters():
        if weight.requires_grad:
            continue
        frozen[f"layers.{name}"] = weight.data.cpu()
        if weight.ndim == 2:
            scale = weight.data.float().abs().amax(1, keepdim=True) / 127
            packed = (weight.data.float() / scale).round().to(torch.int8)
            weight.data = (packed.float() * scale).to(torch.bfloat16)
            frozen[f"layers.{name}"], frozen[f"layers.{name}.scale"] = packed.cpu(), scale.cpu()
    save_file(frozen, tmp_path / "model.safetensors")

    def dequantise(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        return (tensors[""].float() * tensors["scale"]).to(parameter.dtype)

    expected = train(twin)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with offload(layers, tmp_path, device="cuda", num_slots=1, dequantize=dequantise, debug=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = train(layers)
        torch.cuda.synchronize()
    assert_same(found, expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_accumulation(bfloat16: Stored, recompute: bool) -> None:
    layers, twin = bfloat16.twins()
    batches = [inputs(seed)[:64] for seed in range(3)]
    for batch in batches:
        nn.Sequential(*twin)(batch).square().mean().backward()
    with offload(layers, bfloat16.folder, device="cuda", debug=True) as handle:
        accumulation = LayerwiseAccumulation(
            layers, lambda batch: batch, lambda h, _: h.square().mean(), handle=handle, recompute=recompute
        )
        accumulation.step(batches)
        assert handle.stats().order_misses == 0
    assert_equal(gradients(layers), gradients(twin))


def test_memory_is_slots_and_activations(tmp_path: Path) -> None:
    count = 12
    layers, twin = store(tmp_path, count=count).twins()

    def peak(layers: nn.ModuleList) -> tuple[int, int]:
        """Of the device's memory in a training step: all that is allocated, and what the step adds to it."""
        train(layers, 2)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(layers, 2)
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        return most, most - before

    resident, activations = peak(twin)
    del twin
    torch.cuda.empty_cache()
    with offload(layers, tmp_path, device="cuda", num_slots=2) as handle:
        assert 2 * handle.streamer.slot_bytes < count * LAYER_BYTES / 2
        most, added = peak(layers)
        assert most <= resident - (count - 2) * LAYER_BYTES + (4 << 20)
        assert added <= activations + (4 << 20)
        train(layers, 20)
        assert peak(layers) == (most, added)
