"""Offloaded models beside their resident twins."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_moe import ToyModel, assert_equal, gradients, save, tokens, toy_model

from gdsstream.offloading import OffloadHandle, offload


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these tensors are too small to share
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def twins(folder: Path, count: int, **options: Any) -> tuple[ToyModel, ToyModel]:
    """A model, its checkpoint in `folder`, and the same model again, to stay resident."""
    model = toy_model(count, **options)
    save(model.layers, folder)
    return model, copy.deepcopy(model)


@contextlib.contextmanager
def offloaded(model: ToyModel, folder: Path, **options: Any) -> Iterator[OffloadHandle]:
    """Within, the model's layers are offloaded; afterwards every slot has to be free."""
    with offload(model.layers, folder, device="cpu", **options) as handle:
        yield handle
        assert_free(handle)


def assert_free(handle: OffloadHandle) -> None:
    """No slot is leased, and parameters are empty."""
    for layer, weights in zip(handle.modules, handle._layers, strict=True):
        streamed = {id(each.parameter) for each in weights.served}
        for name, parameter in layer.named_parameters():
            assert (id(parameter) in streamed) == (parameter.shape == (0,)), name
    with contextlib.ExitStack() as stack:
        for layer in range(min(handle.streamer.num_slots, handle.streamer.num_layers)):
            stack.enter_context(handle.streamer.layer(layer))


def step(model: ToyModel, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One forward and backward pass; the loss, and all gradients, which are cleared before."""
    model.zero_grad()
    loss = model(tokens(seed))
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_step(model: ToyModel, twin: ToyModel, seed: int = 0) -> None:
    """Losses and gradients of both have the same bits."""
    (loss, found), (expected_loss, expected) = step(model, seed), step(twin, seed)
    assert torch.equal(loss, expected_loss)
    assert_equal(found, expected)
