"""Where in a backward pass a layer's weights are needed: from the nodes of its outputs to those of its inputs.

A forward pass of a layer with gradients is a `Call`. Autograd executes nodes in the reverse order of their making, so
when it reaches a node that made one of the call's inputs, everything that belongs to the call is done. Nodes carry this
rather than tensors: the input of a layer is mostly the output of the one before, and one gate first ends the one, then
begins the other, which one slot is enough for.

The call has to begin at its outputs, and not with the first weight that is asked for, because checkpointing inside of
our wrapper computes the forward again without calling us. Where inputs have no node (the first layer; a reentrant
checkpoint's detached inputs) the call ends with the backward pass. `TaskEnd` notices that when autograd drops it,
whether the pass succeeded or raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from gdsstream.errors import OffloadError

_KEY = "gdsstream.gate"


class Lender(Protocol):
    """What a call asks of its layer."""

    def reached(self, call: Call) -> None: ...
    def finish(self, call: Call) -> None: ...


class Call:
    """One forward pass of a layer with gradients, for its backward pass."""

    __slots__ = ("layer",)

    def __init__(self, layer: Lender) -> None:
        self.layer = layer


class Gate:
    """What happens when autograd reaches a node: calls that it ends, then calls that it begins."""

    __slots__ = ("begins", "ends")

    def __init__(self) -> None:
        self.begins: list[Call] = []
        self.ends: list[Call] = []

    @classmethod
    def of(cls, node: Any) -> Gate:
        """The node's gate, put there if it has none."""
        gate = node.metadata.get(_KEY)
        if gate is None:
            gate = node.metadata[_KEY] = cls()
            node.register_prehook(gate)
        return gate  # type: ignore[no-any-return]

    def __call__(self, gradients: Any) -> None:
        for call in self.ends:
            call.layer.finish(call)
        for call in self.begins:
            call.layer.reached(call)


def put_gates(call: Call, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> bool:
    """Let the call begin at the nodes of `outputs` and end at those of `inputs`; False if it will never begin."""
    ends = [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]
    # What is only passed through was made before the call.
    begins = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None and tensor.grad_fn not in ends]
    for node in begins:
        Gate.of(node).begins.append(call)
    for node in ends:
        Gate.of(node).ends.append(call)
    return bool(begins)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in what a forward takes or gives: nested tuples, lists and dicts, and what pytree knows or is a
    dataclass."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                found += tensors_in(getattr(leaf, field.name))
    return found


class TaskEnd:
    """Calls `ended(task)` when backward pass `task` is over; registers itself with the pass that the thread is in."""

    _ended: Callable[[int], None] | None = None

    def __init__(self, task: int, ended: Callable[[int], None]) -> None:
        self._task = task
        self._ended = ended
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        if self._ended is not None:
            self._ended(self._task)

    __del__ = __call__


def backward_task() -> int:
    """Which backward pass this thread executes nodes of; -1 for none."""
    return torch._C._current_graph_task_id()


def refuse_double_backward() -> None:
    """Raise OffloadError in a backward pass that is differentiable itself."""
    if torch.is_grad_enabled():
        raise OffloadError(
            "a backward pass with create_graph=True through an offloaded layer: its graph would keep views of slots "
            "that are read into again; compute higher derivatives on a resident model"
        )


__all__ = ["Call", "Gate", "Lender", "TaskEnd", "backward_task", "put_gates", "refuse_double_backward", "tensors_in"]
