"""The compute of the layer scenarios: a mixture-of-experts layer in bf16, and how a file of it is laid out.

A layer is a shared expert and the experts that a token uses, each gate, up and down projections around a SiLU; every
token goes through all of them, which is what one token's share of a large model costs. Nothing is allocated while it
runs, so that what a streamer allocates shows.

The result of a layer is the input of the next, brought back to unit size. A layer that computes with wrong bytes, in
part or too early, changes the result of the whole run.

Backward: the weights are frozen, so there is no product for their gradients. A layer's backward pass then is the
forward pass once more (activations are recomputed, not kept) and one product for each of the forward's, with the
weight not transposed, that takes the gradient back: twice the matrix products of forward.

Bytes of a layer that are no weights of this compute (experts that no token chose) are consumed by summing their
64-bit words; `SUM_BYTES` says why they are a multiple of eight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from bench.config import MoeConfig
from bench.files import Shaped

if TYPE_CHECKING:
    import torch

PATTERN = "model.layers.{i}."
#: What a layer holds beside the weights that are computed with.
REST = "mlp.rest"
#: The standard deviation of what the files hold, and of what stands in for it.
WEIGHT_SIZE = 0.014
#: A sum takes whole 64-bit words.
SUM_BYTES = 8


def matrices(moe: MoeConfig) -> dict[str, tuple[int, int]]:
    """The weights [out, in] of one layer by their names in it, in the order of their use."""
    found: dict[str, tuple[int, int]] = {}
    for base, width in _feed_forwards(moe):
        found[f"{base}.gate_proj.weight"] = found[f"{base}.up_proj.weight"] = (width, moe.hidden)
        found[f"{base}.down_proj.weight"] = (moe.hidden, width)
    return found


def layer_tensors(moe: MoeConfig, nbytes: int) -> dict[str, tuple[int, ...]]:
    """What a layer of `nbytes` bytes holds: each matrix, in the order of use, that still fits, and the rest."""
    found: dict[str, tuple[int, ...]] = {}
    left = nbytes // SUM_BYTES * SUM_BYTES
    for name, shape in matrices(moe).items():
        if 2 * prod(shape) <= left:
            found[name] = shape
            left -= 2 * prod(shape)
    if left:
        found[REST] = (left // 2,)
    return found


def shapes(moe: MoeConfig, layer: int, nbytes: int) -> list[Shaped]:
    """The same, as files.Plan wants it."""
    prefix = PATTERN.replace("{i}", str(layer))
    return [(prefix + name, "BF16", shape) for name, shape in layer_tensors(moe, nbytes).items()]


def flops(moe: MoeConfig, tokens: int, *, backward: bool) -> int:
    """Floating-point operations of the matrix products of one layer."""
    return (2 if backward else 1) * 2 * tokens * sum(map(prod, matrices(moe).values()))


def _feed_forwards(moe: MoeConfig) -> list[tuple[str, int]]:
    """Name and width of the shared expert and of each that is used."""
    return [("mlp.shared_experts", moe.shared), *((f"mlp.experts.{i}", moe.expert) for i in range(moe.active))]


class Moe:
    """The compute on `device` for `tokens` tokens. Its state is an activation [tokens, hidden], or its gradient.

    `layer` is one layer of compute on the current stream, with the weights that it is given.
    """

    def __init__(self, moe: MoeConfig, tokens: int, device: str, *, backward: bool, seed: int = 0) -> None:
        import torch

        self._moe, self._backward = moe, backward
        self._first = random([tokens, moe.hidden], device, seed)
        self.state = self._first.clone()
        self._change = torch.empty_like(self._first)
        self._norm = torch.empty(tokens, 1, device=device, dtype=torch.float32)
        # An activation to be recomputed from: each layer's own would be as large, and no different in time.
        self._input = self._first.flip(0).contiguous() if backward else self.state
        self._output = torch.empty_like(self._first) if backward else self._change
        most = max(width for _, width in _feed_forwards(moe))
        work = [torch.empty(tokens * most, device=device, dtype=torch.bfloat16) for _ in range(4 if backward else 2)]
        self._work = {
            width: [buffer[: tokens * width].view(tokens, width) for buffer in work]
            for width in {width for _, width in _feed_forwards(moe)}
        }

    def start(self) -> None:
        """Put the state back to what it was first."""
        self.state.copy_(self._first)

    def layer(self, weights: Mapping[str, torch.Tensor]) -> None:
        """One layer, with the weights of `matrices` by name."""
        step = self._feed_backward if self._backward else self._feed_forward
        for number, (base, width) in enumerate(_feed_forwards(self._moe)):
            gate, up, down = (weights[f"{base}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            step(gate, up, down, self._work[width], first=number == 0)
        self._keep_size()

    def _feed_forward(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, work: list[torch.Tensor], *, first: bool
    ) -> None:
        import torch

        gated, raised = work
        torch.mm(self._input, gate.t(), out=gated)
        torch.mm(self._input, up.t(), out=raised)
        torch.nn.functional.silu(gated, inplace=True).mul_(raised)
        _add_product(self._output, gated, down.t(), first)

    def _feed_backward(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, work: list[torch.Tensor], *, first: bool
    ) -> None:
        import torch

        gated, raised, active, spare = work
        # Forward once more.
        torch.mm(self._input, gate.t(), out=gated)
        torch.mm(self._input, up.t(), out=raised)
        torch.ops.aten.silu.out(gated, out=active)
        torch.mul(active, raised, out=spare)
        _add_product(self._output, spare, down.t(), first)
        # The gradient's way back: of the product, of its two factors, and through the SiLU.
        torch.mm(self.state, down, out=spare)
        active.mul_(spare)
        spare.mul_(raised)
        torch.ops.aten.silu_backward.grad_input(spare, gated, grad_input=raised)
        _add_product(self._change, raised, gate, first)
        _add_product(self._change, active, up, False)

    def _keep_size(self) -> None:
        import torch

        self.state.add_(self._change)
        torch.linalg.vector_norm(self.state, dim=-1, keepdim=True, dtype=torch.float32, out=self._norm)
        self.state.div_(self._norm.mul_(self._moe.hidden**-0.5).add_(1e-6))


def _add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    import torch

    if first:
        torch.mm(left, right, out=target)
    else:
        target.addmm_(left, right)


def random(shape: Sequence[int], device: str, seed: int, size: float = 1.0) -> torch.Tensor:
    """Normally distributed bf16 numbers of that standard deviation."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).mul_(size).to(torch.bfloat16)


def add_up(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """The wrap-around sum of the 64-bit words of `tensor`, into `out` (int64, no dimensions), on the current stream."""
    import torch

    torch.sum(tensor.view(torch.int64), dim=0, out=out)
