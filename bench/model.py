"""The model of the training scenario: mixture-of-experts layers with frozen weights, and an adapter that is trained.

The names inside a layer are those of `bench/moe.py`, so that its files are the model's checkpoint. Weights that a layer
has beside those that it computes with are parameters too, since which experts a step uses is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench import moe
from bench.config import MoeConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


def layer(config: MoeConfig, rest: Sequence[int] | None, rank: int, device: str, seed: int) -> nn.Module:
    """One layer, its frozen weights on the meta device and its adapter on `device`; the same seed, the same adapter.

    `rest` is the shape of the weights that are not computed with, None where there are none.
    """
    import torch
    from torch import nn

    class FeedForward(nn.Module):
        """Gate, up and down projections around a SiLU."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(config.hidden, width, bias=False)
            self.up_proj = nn.Linear(config.hidden, width, bias=False)
            self.down_proj = nn.Linear(width, config.hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            down: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
            return down

    class Experts(nn.Module):
        """The shared expert and those that are used."""

        def __init__(self) -> None:
            super().__init__()
            self.shared_experts = FeedForward(config.shared)
            self.experts = nn.ModuleList(FeedForward(config.expert) for _ in range(config.active))
            if rest is not None:
                self.rest = nn.Parameter(torch.empty(rest))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.shared_experts(x)
            for expert in self.experts:
                total = total + expert(x)
            return total

    class Layer(nn.Module):
        """x + experts + adapter, both of the normalised x."""

        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.mlp = Experts()
            self.to(torch.bfloat16).requires_grad_(False)
            generator = torch.Generator().manual_seed(seed)

            def adapter(*shape: int) -> nn.Parameter:
                value = torch.randn(shape, generator=generator) * moe.WEIGHT_SIZE
                return nn.Parameter(value.to(device, torch.bfloat16))

            self.adapter_in, self.adapter_out = adapter(rank, config.hidden), adapter(config.hidden, rank)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            unit = nn.functional.rms_norm(x, (config.hidden,))
            adapted = nn.functional.linear(nn.functional.linear(unit, self.adapter_in), self.adapter_out)
            changed: torch.Tensor = x + self.mlp(unit) + adapted
            return changed

    return Layer()


def set_weights(target: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Let the frozen parameters be `values`, by name; several layers may share them."""
    from torch import nn

    for name, value in values.items():
        path, _, key = name.rpartition(".")
        setattr(target.get_submodule(path), key, nn.Parameter(value, requires_grad=False))


def run_step(
    modules: Any,
    first: torch.Tensor,
    gradient: torch.Tensor,
    *,
    recompute: bool,
    mark: Callable[[], Any] | None = None,
) -> list[Any]:
    """Forward and backward through `modules`, which leaves the gradients of what is trained.

    `mark` is called at the boundaries of every use of a layer: before the first, and after each, of 2 x layers.
    """
    from torch.utils.checkpoint import checkpoint

    marks: list[Any] = []

    def say(gradient: torch.Tensor | None = None) -> None:
        del gradient
        if mark is not None:
            marks.append(mark())

    for parameter in modules.parameters():
        parameter.grad = None
    x = first.detach().requires_grad_()  # as if an embedding were trained, so that no layer's backward pass is shorter
    say()
    for number, module in enumerate(modules):
        # Nothing is random in it.
        x = checkpoint(module, x, use_reentrant=False, preserve_rng_state=False) if recompute else module(x)
        say()
        if mark is not None and number < len(modules) - 1:
            # Called when the gradient has come back through the next layer.
            x.register_hook(say)
    x.backward(gradient)  # type: ignore[no-untyped-call]
    say()
    return marks


def adapter_gradients(modules: Any) -> dict[str, torch.Tensor]:
    """What a step left, by name."""
    return {name: p.grad.clone() for name, p in modules.named_parameters() if p.grad is not None}
