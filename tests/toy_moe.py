"""Small layers of every kind that offload() has to get right, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

HIDDEN, INNER, EXPERTS, VOCABULARY = 16, 24, 3, 11


class LoRALinear(nn.Module):
    """A frozen matrix with a trainable product of two narrow ones beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)


class Experts(nn.Module):
    """Fused experts, every token through the one that the router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5, requires_grad=False)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = out + weights[:, expert, None] * F.linear(F.silu(gate) * up, self.down_proj[expert])
        return out


class ToyLayer(nn.Module):
    """Attention-like and expert parts; returns its output and the router's logits if `pair`."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = LoRALinear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False).requires_grad_(False)
        self.experts = Experts()
        self.register_buffer("scale", torch.tensor(0.5))
        self.pair = pair
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        h = x + self.scale * torch.tanh(self.mix(self.norm(x)))
        logits = self.router(h)
        out = h + self.experts(h, torch.softmax(logits, dim=-1))
        return (out, logits) if self.pair else out


class ToyModel(nn.Module):
    """An embedding, layers, a head. `call` runs a layer (to put a checkpoint there)."""

    def __init__(self, layers: Sequence[nn.Module], trained_embedding: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(trained_embedding)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.call: Callable[[nn.Module, torch.Tensor], object] = lambda layer, x: layer(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        extra = []
        for layer in self.layers:
            out = self.call(layer, x)
            x, *others = out if isinstance(out, tuple) else (out,)
            extra += [logits.square().mean() for logits in others]
        loss = F.cross_entropy(self.head(x), tokens)
        return loss + sum(extra) if extra else loss


def toy_model(count: int, *, seed: int = 0, pair: bool = False, trained_embedding: bool = True) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel([ToyLayer(pair) for _ in range(count)], trained_embedding)


def tokens(seed: int = 0, count: int = 9) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def save(layers: nn.Module, folder: Path, prefix: str = "model.layers.") -> Path:
    """What is frozen (and buffers) of `layers`, as a checkpoint."""
    trained = {name for name, parameter in layers.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    tensors = {prefix + n: t.detach().clone() for n, t in layers.state_dict().items() if n not in trained}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Same names, same bits; and there is something to compare."""
    assert expected
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
