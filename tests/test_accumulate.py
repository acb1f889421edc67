"""Layer-by-layer accumulation: gradients of ordinary accumulation, each layer read twice a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_support import assert_free, deterministic, offloaded, twins
from torch import nn
from toy_moe import HIDDEN, VOCABULARY, ToyModel, assert_equal, gradients, tokens

from gdsstream import OffloadError
from gdsstream.accumulate import LayerwiseAccumulation
from gdsstream.offloading import offload

__all__ = ["deterministic"]

BATCHES = [tokens(seed, count) for seed, count in enumerate((5, 9, 3))]


def ordinary(model: ToyModel, autocast: bool = False) -> list[torch.Tensor]:
    losses = []
    for batch in BATCHES:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch) / len(BATCHES)
        loss.backward()
        losses.append(loss.detach())
    return losses


def layerwise(model: ToyModel, **options: Any) -> LayerwiseAccumulation:
    def loss(hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(hidden), batch) / len(BATCHES)

    return LayerwiseAccumulation(model.layers, model.embed, loss, **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trained_embedding", [False, True])
def test_resident_modules(tmp_path: Path, recompute: bool, trained_embedding: bool) -> None:
    model, twin = twins(tmp_path, 4, trained_embedding=trained_embedding)
    accumulation = layerwise(model, recompute=recompute)
    for _ in range(2):  # gradients add up over steps
        for found, expected in zip(accumulation.step(BATCHES), ordinary(twin), strict=True):
            assert torch.equal(found, expected)
            assert not found.requires_grad
        assert_equal(gradients(model), gradients(twin))
    assert [layer.calls for layer in model.layers] == [6 * (1 + recompute)] * 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("pair", [False, True], ids=["output", "tuple"])
def test_offloaded_modules(tmp_path: Path, recompute: bool, slots: int, pair: bool) -> None:
    model, twin = twins(tmp_path, 5, pair=pair)
    for each in twin.layers:
        each.pair = False
    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        accumulation = layerwise(model, handle=handle, recompute=recompute)
        for _ in range(3):
            model.zero_grad(), twin.zero_grad()
            for found, expected in zip(accumulation.step(BATCHES), ordinary(twin), strict=True):
                assert torch.equal(found, expected)
            assert_equal(gradients(model), gradients(twin))
        stats = handle.stats()
        assert stats.order_misses == 0
        assert handle.streamer.last_step is not None
        assert handle.streamer.last_step.leases == 2 * 5, "each layer is read once forward, once backward"
        assert handle.streamer.last_step.reads == 2 * (5 - slots)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_casts_forward_and_not_backward(tmp_path: Path, recompute: bool) -> None:
    model, twin = twins(tmp_path, 3)
    expected = ordinary(twin, autocast=True)
    with offloaded(model, tmp_path) as handle:
        accumulation = layerwise(model, handle=handle, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            found = accumulation.step(BATCHES)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert_equal(gradients(model), gradients(twin))


def test_recomputing_draws_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3))
    found = []
    for recompute in (False, True):
        layers.zero_grad()
        torch.manual_seed(7)
        accumulation = LayerwiseAccumulation(
            layers, lambda batch: batch, lambda hidden, _: hidden.square().sum(), recompute=recompute
        )
        losses = accumulation.step([torch.ones(4, 6), torch.full((4, 6), 2.0)])
        found.append(({n: p.grad.clone() for n, p in layers.named_parameters() if p.grad is not None}, losses))
        after = torch.rand(1)
        found[-1][1].append(after)
    assert_equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_keyword_arguments_get_their_gradients() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, *, bias: torch.Tensor, name: str) -> tuple[torch.Tensor, str]:
            return torch.tanh(self.linear(x) + bias), name

    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    table = nn.Embedding(VOCABULARY, HIDDEN)
    x = [torch.randn(len(batch), HIDDEN) for batch in BATCHES]

    def inputs(number: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return x[number], {"bias": table(BATCHES[number]), "name": "n"}

    modules = nn.ModuleList([*layers, table])
    for number in range(3):
        hidden, keywords = inputs(number)
        for layer in layers:
            hidden = layer(hidden, **keywords)[0]
        hidden.sum().backward()
    expected = gradients(modules)
    for recompute in (False, True):
        modules.zero_grad()
        LayerwiseAccumulation(layers, inputs, lambda hidden, _: hidden.sum(), recompute=recompute).step(range(3))
        found = gradients(modules)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, atol=1e-5), name


def test_nothing_to_train() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)).requires_grad_(False)
    for recompute in (False, True):
        accumulation = LayerwiseAccumulation(layers, lambda x: x, lambda h, _: h.sum(), recompute=recompute)
        assert len(accumulation.step([torch.ones(1, 2)])) == 1
    assert all(parameter.grad is None for parameter in layers.parameters())


def test_only_some_layers_are_trained(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 4, trained_embedding=False)
    for each in (model, twin):
        for layer in (0, 3):
            each.layers[layer].requires_grad_(False)
    for recompute in (False, True):
        model.zero_grad(), twin.zero_grad()
        layerwise(model, recompute=recompute).step(BATCHES)
        ordinary(twin)
        assert_equal(gradients(model), gradients(twin))


def test_a_failing_loss_leaves_every_slot_free(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 3)

    def loss(hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss")

    with offloaded(model, tmp_path) as handle:
        with pytest.raises(ValueError, match="no loss"):
            LayerwiseAccumulation(model.layers, model.embed, loss, handle=handle).step(BATCHES)
        assert_free(handle)


def test_a_handle_of_other_modules(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 3)
    with (
        offload(model.layers, tmp_path, device="cpu") as handle,
        pytest.raises(OffloadError, match="handle is of other modules"),
    ):
        LayerwiseAccumulation(model.layers[:2], model.embed, lambda h, b: h.sum(), handle=handle)
