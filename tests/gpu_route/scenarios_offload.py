"""Offloaded layers on late streams: what a product reads, forward and backward, is its own layer's weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_route.harness import scenario
from gpu_route.stand_in import StandIn
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from gdsstream.devices import current_stream, on_stream
from gdsstream.offloading import OffloadHandle, offload

COUNT = 6
DEVICE = torch.device("cuda", 0)
# Operations that a stream does before the one that matters: its delays add up.
MANY = 12
SOURCE, TARGET = torch.ones(64), torch.zeros(64)


class LateProduct(torch.autograd.Function):
    """Reads its weight late, as a kernel does: by a copy that is queued behind others on the current stream."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, read: Callable[[torch.Tensor], None]) -> torch.Tensor:
        read(weight)
        ctx.save_for_backward(weight)
        ctx.read = read
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.read(ctx.saved_tensors[0])
        return gradient * 2, None, None


class LateLayer(nn.Module):
    def __init__(self, fake: StandIn) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(4))  # what a checkpoint has to compute again for
        self.seen: list[torch.Tensor] = []
        self._fake = fake

    def read(self, weight: torch.Tensor) -> None:
        stream = current_stream(DEVICE)
        for _ in range(MANY):
            self._fake.copy(TARGET, SOURCE, stream)
        self.seen.append(torch.zeros_like(weight))
        self._fake.copy(self.seen[-1], weight, stream)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = LateProduct.apply(x, self.weight, self.read) * self.gain
        return result


def late_layers(
    fake: StandIn, folder: Path, **options: Any
) -> tuple[list[LateLayer], list[torch.Tensor], OffloadHandle]:
    layers = [LateLayer(fake) for _ in range(COUNT)]
    weights = [layer.weight.detach().clone() for layer in layers]
    save_file({f"layers.{i}.weight": weight for i, weight in enumerate(weights)}, folder / "model.safetensors")
    handle = offload(layers, folder, prefix="layers.{i}.", device=DEVICE, staging_bytes=4 << 20, **options)
    return layers, weights, handle


def check(layers: list[LateLayer], weights: list[torch.Tensor], reads: int) -> None:
    for number, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        assert len(layer.seen) == reads
        for seen in layer.seen:
            assert torch.equal(seen, weight), f"layer {number} was computed with other bytes"


@scenario(delays_us=(100, 500), limit_s=60)
def offloaded_layers_are_computed_with_their_own_weights(fake: StandIn, folder: Path) -> None:
    for slots in (1, 2, 3):
        for reentrant in (None, False, True):
            layers, weights, handle = late_layers(fake, folder, num_slots=slots)
            with handle, fake.stream() as stream:
                run = partial(checkpoint, use_reentrant=reentrant) if reentrant is not None else lambda f, x: f(x)
                with on_stream(DEVICE, stream):
                    for _ in range(2):
                        x = torch.ones(4, requires_grad=True)
                        for layer in layers:
                            x = run(layer, x)
                        x.sum().backward()
                fake.synchronize(stream)
            check(layers, weights, 4 if reentrant is None else 6)


@scenario(delays_us=(500,))
def a_held_layer_is_used_on_another_stream(fake: StandIn, folder: Path) -> None:
    layers, weights, handle = late_layers(fake, folder, num_slots=1)
    with handle, fake.stream() as one, fake.stream() as other:
        for number, layer in enumerate(layers):
            with on_stream(DEVICE, one):
                hold = handle.hold(number)
                hold.__enter__()
            with on_stream(DEVICE, other):
                layer(torch.ones(4, requires_grad=True)).sum().backward()
            with on_stream(DEVICE, one):
                hold.__exit__(None, None, None)
        fake.synchronize(one)
        fake.synchronize(other)
    check(layers, weights, 2)
