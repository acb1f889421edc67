"""Gradient accumulation layer by layer: each layer is read once forward and once backward for all micro-batches.

Ordinary accumulation runs micro-batch by micro-batch, and streams every layer twice for each. Here a layer runs for all
micro-batches while it is on the device, forward and later backward, with *boundaries* between layers: each layer's
output is detached, and its gradient carried over by hand.

Gradients are those of ordinary accumulation, bit for bit, where kernels are deterministic: each parameter's gradient is
the sum over micro-batches, in their order, of the same terms. Two things differ. A trainable parameter with several
uses in the model (a tied embedding and head) has its terms added in another order. And random numbers are drawn layer
by layer, so dropout has other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from gdsstream.errors import OffloadError
from gdsstream.offloading import OffloadHandle

# What a layer is called with: its first argument, and keyword arguments, such as masks and position embeddings.
Inputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]"


class LayerwiseAccumulation:
    """Runs forward and backward of several micro-batches, layer by layer.

        accumulation = LayerwiseAccumulation(model.model.layers, embed, head_loss, handle=handle)
        losses = accumulation.step(micro_batches)
        optimizer.step()

    Args:
        modules: the layers. Each is called with the output of the one before (the first of its outputs, where it gives
            a tuple) and the keyword arguments from `embed`.
        embed: gives, for a micro-batch, the first layer's input, or that and keyword arguments for every layer.
        head_loss: gives, for the last layer's output and the micro-batch, the loss: a scalar. Scale it here (by the
            number of micro-batches, or a gradient scaler).
        handle: what `offload` gave for these modules; None where they are resident.
        recompute: keep only the boundaries, and compute each layer's forward again for its backward pass, as activation
            checkpointing does (with the same random numbers).

    Modules that `embed` and `head_loss` use train as usual. Under torch.autocast, forward passes are cast and backward
    passes are not, as torch recommends.
    """

    def __init__(
        self,
        modules: nn.ModuleList | Sequence[nn.Module],
        embed: Callable[[Any], Inputs],
        head_loss: Callable[[torch.Tensor, Any], torch.Tensor],
        *,
        handle: OffloadHandle | None = None,
        recompute: bool = False,
    ) -> None:
        self._modules = list(modules)
        self._embed = embed
        self._head_loss = head_loss
        self._handle = handle
        self._recompute = recompute
        if handle is not None and [id(m) for m in handle.modules] != [id(m) for m in self._modules]:
            raise OffloadError("the handle is of other modules; pass what offload() was given")

    def step(self, micro_batches: Sequence[Any]) -> list[torch.Tensor]:
        """Add the gradients of all micro-batches to the parameters' `grad`.

        Returns each micro-batch's loss, detached. Raises what the modules raise; gradients are then incomplete.
        """
        runs = [self._start(batch) for batch in micro_batches]
        for index in range(len(self._modules)):
            with self._hold(index):
                for run in runs:
                    self._forward(index, run)
        losses = [self._head(run) for run in runs]
        for index in reversed(range(len(self._modules))):
            with self._hold(index, backward=True):
                for run in runs:
                    self._backward(index, run)
        for run in runs:
            run.backward_embed()
        return losses

    def _hold(self, index: int, *, backward: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self._handle is None else self._handle.hold(index, backward=backward)

    def _start(self, batch: Any) -> _Run:
        inputs = self._embed(batch)
        hidden, keywords = inputs if isinstance(inputs, tuple) else (inputs, {})
        return _Run(batch, hidden, keywords)

    def _forward(self, index: int, run: _Run) -> None:
        layer, boundary = self._modules[index], run.boundaries[-1]
        if self._recompute:
            run.random.append(_RandomState(boundary))
            with torch.no_grad():
                output = _first(layer(boundary, **run.keywords))
            trained = torch.is_grad_enabled() and (
                run.needs_gradient or any(parameter.requires_grad for parameter in layer.parameters())
            )
            run.add(output, trained)
        else:
            output = _first(layer(boundary, **run.keywords))
            run.outputs.append(output)
            run.add(output, output.requires_grad)

    def _head(self, run: _Run) -> torch.Tensor:
        loss = self._head_loss(run.boundaries[-1], run.batch)
        if loss.requires_grad:
            _backward(loss, None)
        return loss.detach()

    def _backward(self, index: int, run: _Run) -> None:
        gradient = run.boundaries.pop().grad
        if self._recompute:
            state = run.random.pop()
            if gradient is None:
                return
            with state.again():
                output = _first(self._modules[index](run.boundaries[-1], **run.keywords))
        else:
            output = run.outputs.pop()
        if gradient is not None and output.requires_grad:
            _backward(output, gradient)


class _Run:
    """One micro-batch on its way: the boundaries between layers, detached, each to collect its gradient."""

    def __init__(self, batch: Any, hidden: torch.Tensor, keywords: Mapping[str, Any]) -> None:
        self.batch = batch
        self._embedded = hidden
        self._given = keywords
        # A tensor that all layers use collects their gradients in one place.
        self.keywords = {
            name: _cut(value, value.requires_grad) if isinstance(value, torch.Tensor) else value
            for name, value in keywords.items()
        }
        self.boundaries = [_cut(hidden, hidden.requires_grad)]
        self.outputs: list[torch.Tensor] = []
        self.random: list[_RandomState] = []

    @property
    def needs_gradient(self) -> bool:
        """Whether the next layer's inputs do."""
        keywords = (value for value in self.keywords.values() if isinstance(value, torch.Tensor))
        return self.boundaries[-1].requires_grad or any(value.requires_grad for value in keywords)

    def add(self, output: torch.Tensor, trained: bool) -> None:
        self.boundaries.append(_cut(output, trained))

    def backward_embed(self) -> None:
        """The part of the graph in front of the layers."""
        pairs = [(self._embedded, self.boundaries[0].grad)]
        pairs += [(self._given[name], value.grad) for name, value in self.keywords.items() if _is_trained(value)]
        pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad and gradient is not None]
        if pairs:
            _backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


class _RandomState:
    """The random number generators as they were when this was made."""

    def __init__(self, like: torch.Tensor) -> None:
        self._kind = like.device.type
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(like) if self._kind != "cpu" else ([], [])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, they are like that; afterwards as before."""
        with torch.random.fork_rng(self._devices, device_type=self._kind if self._devices else "cuda"):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states, device_type=self._kind)
            yield


def _backward(outputs: Any, gradients: Any) -> None:
    kinds = {tensor.device.type for tensor in (outputs if isinstance(outputs, list) else [outputs])}
    with torch.autocast(kinds.pop(), enabled=False):
        torch.autograd.backward(outputs, gradients)


def _cut(tensor: torch.Tensor, trained: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(trained)


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple | list) else output  # type: ignore[no-any-return]


__all__ = ["Inputs", "LayerwiseAccumulation"]
