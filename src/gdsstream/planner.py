"""What streaming a model's layers will cost, before anything is streamed, and what would hide it. Pure.

A training step is forward and backward through frozen layers: backward takes the gradient back through each matrix, as
many FLOPs as forward, and with activation checkpointing (`recompute`) it repeats the forward pass first.

"Free" means that the steady state takes at most 0.1 % longer than its compute alone. More compute never makes a stall
longer: a step's time is a maximum over paths of reads and steps, and no path has more compute in it than the cycle. So
the smallest number of tokens is found by bisection, and slots and host tier are, as each of them saves reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from gdsstream.errors import ConfigError
from gdsstream.layer_work import LayerWork
from gdsstream.plan import ALIGNMENT_BYTES
from gdsstream.rates import Rates
from gdsstream.stream_model import FREE, KINDS, Kind, LayerTimes, Steady, StreamModel

MOST_TOKENS = 1 << 40
# Beyond this, reads that nothing hides only get small beside the compute.
_MOST_FREE_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Setup:
    """How the model is to be streamed.

    Attributes:
        tokens: how many pass through a layer at once.
        num_slots: layers that fit into device memory at once.
        host_cache_bytes: bytes of layers kept in registered host memory.
        recompute: whether backward repeats the forward pass (activation checkpointing).

    Raises ConfigError.
    """

    tokens: int
    num_slots: int = 2
    host_cache_bytes: int = 0
    recompute: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (("tokens", 1, MOST_TOKENS), ("num_slots", 1, 4096), ("host_cache_bytes", 0, 2**50)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; it has to be a whole number from {least} to {most}")

    @property
    def backward_factor(self) -> float:
        """Compute of a layer's backward pass, as a multiple of its forward pass."""
        return 2.0 if self.recompute else 1.0


class Needs(NamedTuple):
    """The least that makes a kind of pass free, each with everything else as it is; None where no number does.

    Attributes:
        tokens: at once.
        num_slots: at most as many as there are layers; nothing is read any more then.
        host_bytes: the host tier, as many bytes as it really takes.
    """

    tokens: int | None
    num_slots: int
    host_bytes: int | None


class Cell(NamedTuple):
    """One entry of a table over tokens and host tiers: seconds of a cycle, and what it adds to its compute."""

    tokens: int
    host_bytes: int
    total_s: float
    overhead: float


@dataclass(frozen=True, slots=True)
class StreamingPlan:
    """What `plan_streaming` found. Dicts are by kind: a training step, and forward passes again and again.

    Attributes:
        layers, times: of each layer.
        steady: a cycle of the steady state.
        host_layers: those kept in host memory.
        needs: what would make it free.
        tiers: the host tiers of the table in bytes: none, what was asked for, half of the layers, all of them.
        table: over numbers of tokens and those tiers, in rows of tokens.
    """

    setup: Setup
    rates: Rates
    layers: tuple[LayerWork, ...]
    times: tuple[LayerTimes, ...]
    steady: dict[Kind, Steady]
    host_layers: dict[Kind, tuple[int, ...]]
    needs: dict[Kind, Needs]
    tiers: tuple[int, ...]
    table: dict[Kind, tuple[Cell, ...]]

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Device memory of one slot."""
        largest = max(layer.slot_nbytes for layer in self.layers)
        return max(ceil(largest / ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES


def plan_streaming(layers: Sequence[LayerWork], rates: Rates, setup: Setup) -> StreamingPlan:
    """Work out the plan: about a second for a hundred layers. Raises ConfigError where nothing can be computed with."""
    if not any(layer.flops_per_token for layer in layers):
        raise ConfigError("there is no layer with compute; a plan weighs reads against the compute that hides them")
    models = {kind: StreamModel(kind, layers, rates, setup.backward_factor) for kind in KINDS}
    slots, given = setup.num_slots, setup.host_cache_bytes
    total = sum(layer.nbytes for layer in layers)
    tiers = tuple(sorted({0, min(given, total), total // 2, total}))
    return StreamingPlan(
        setup=setup,
        rates=rates,
        layers=tuple(layers),
        times=models["training"].times(setup.tokens),
        steady={kind: model.steady(setup.tokens, slots, given) for kind, model in models.items()},
        host_layers={kind: model.host_layers(slots, given) for kind, model in models.items()},
        needs={kind: _needs(model, setup) for kind, model in models.items()},
        tiers=tiers,
        table={
            kind: tuple(_cell(model, tokens, slots, host) for tokens in around(setup.tokens) for host in tiers)
            for kind, model in models.items()
        },
    )


def around(tokens: int) -> tuple[int, ...]:
    """The numbers of tokens that a table has: from a quarter to four times as many."""
    return tuple(sorted({max(tokens // 4, 1), max(tokens // 2, 1), tokens, 2 * tokens, 4 * tokens}))


def _cell(model: StreamModel, tokens: int, num_slots: int, host_bytes: int) -> Cell:
    total_s = model.total_s(tokens, num_slots, host_bytes)
    # Sums of the same times in another order differ by rounding.
    return Cell(tokens, host_bytes, total_s, max(total_s / model.compute_s(tokens) - 1, 0.0))


def _needs(model: StreamModel, setup: Setup) -> Needs:
    tokens, slots, given = setup.tokens, setup.num_slots, setup.host_cache_bytes

    def budget_frees(nbytes: int) -> bool:
        return model.overhead(tokens, slots, nbytes) <= FREE

    host_bytes = None
    if budget_frees(model.total_bytes):
        # Less than the smallest layer changes nothing.
        grain = max(min((layer.nbytes for layer in model.layers if layer.nbytes), default=1), 1)
        grains = ceil(model.total_bytes / grain)
        found = _least(lambda count: budget_frees(count * grain), 0, grains)
        host_bytes = sum(model.layers[i].nbytes for i in model.host_layers(slots, found * grain))
    return Needs(
        _free_tokens(model, slots, given),
        _least(lambda count: model.overhead(tokens, count, given) <= FREE, 1, len(model.layers)),
        host_bytes,
    )


def _free_tokens(model: StreamModel, num_slots: int, host_bytes: int) -> int | None:
    def frees(tokens: int) -> bool:
        return model.overhead(tokens, num_slots, host_bytes) <= FREE

    if frees(1):
        return 1
    # Fewer cannot do: their compute is shorter than the reads by more than what counts as free.
    least = max(int(model.reads_s(num_slots, host_bytes) / (model.compute_s(1) * (1 + FREE))), 1)
    most = least + 1
    while not frees(most):
        if most >= _MOST_FREE_TOKENS:
            return None
        least, most = most, 2 * most
    return _least(frees, least, most)


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number from `low` on for which `holds`; it holds for `high`, and for all above one that it does."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


__all__ = ["Cell", "Needs", "Setup", "StreamingPlan", "around", "plan_streaming"]
