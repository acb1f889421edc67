"""How long layers take when they are streamed, for any number of tokens, slots and host layers. Pure.

A layer's compute time is its FLOPs by the rate of compute, and its transfer time its bytes by the rate of its tier.
`makespan` plays the library's own schedule with them: slots, read-ahead, residents and the choice of host layers are
those of a LayerStreamer with the same settings. All figures are of the steady state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gdsstream.layer_work import LayerWork
from gdsstream.makespan import Tier, choose_host_layers, simulate, steady_cycle_s
from gdsstream.rates import Rates
from gdsstream.schedule import Order, Schedule, steady_reads

Kind: TypeAlias = Literal["training", "forward"]
Cause: TypeAlias = Literal["storage", "link", "slots"]
Bound: TypeAlias = Literal["storage", "link", "slots", "none"]

KINDS: tuple[Kind, ...] = ("training", "forward")
# What takes at most this much longer than its compute alone is free.
FREE = 1e-3
# What a LayerStreamer chooses its host layers by: it knows nothing of a machine's rates.
STREAMER_HOST_BYTES_PER_S = 50e9
STREAMER_STORAGE_BYTES_PER_S = 5e9
_CAUSES: tuple[Cause, ...] = ("storage", "link", "slots")
# Cycles after which the timing has settled, and the most of them that are looked at then.
_SETTLED = 4
_MOST_CYCLES = 32


class LayerTimes(NamedTuple):
    """Seconds of one layer: compute of each pass, and the transfer from each tier."""

    forward_s: float
    backward_s: float
    from_storage_s: float
    from_host_s: float


@dataclass(frozen=True, slots=True)
class PassTimes:
    """A pass through the layers in the steady state.

    Attributes:
        compute_s: with all layers in device memory.
        transfer_s: all of its reads, one after the other.
        total_s: streamed.
        stall_s: what it waits, by cause.
        reads: layers read; an average, for with spare slots passes differ.
        storage_bytes, host_bytes: read from each tier, averages as well.
    """

    compute_s: float
    transfer_s: float
    total_s: float
    stall_s: dict[Cause, float]
    reads: float
    storage_bytes: float
    host_bytes: float

    @property
    def overhead(self) -> float:
        """What streaming adds to the compute: 0.1 is 10 % longer."""
        return max(self.total_s / self.compute_s - 1, 0.0)

    @property
    def bound(self) -> Bound:
        """What it waits for most; "none" where it is free."""
        if self.overhead <= FREE:
            return "none"
        return max(_CAUSES, key=lambda cause: self.stall_s[cause])


class Steady(NamedTuple):
    """A cycle of the steady state: the whole; of a training step forward and backward; and the very first stall."""

    whole: PassTimes
    forward: PassTimes
    backward: PassTimes | None
    fill_s: float


class StreamModel:
    """Layers that are used in one order: "training" is forward and backward, "forward" forward again and again.

    Args:
        layers: in the order of the model, at least one, with compute in at least one.
        rates: of the machine.
        backward_factor: compute of a layer's backward pass, as a multiple of its forward pass.
    """

    def __init__(self, kind: Kind, layers: Sequence[LayerWork], rates: Rates, backward_factor: float) -> None:
        self.kind = kind
        self.layers = tuple(layers)
        self.total_bytes = sum(layer.nbytes for layer in layers)
        self._rates, self._backward_factor = rates, backward_factor
        self._order = Order.training(len(layers)) if kind == "training" else Order.forward(len(layers))
        self._hosts: dict[tuple[int, int], tuple[int, ...]] = {}

    def times(self, tokens: int) -> tuple[LayerTimes, ...]:
        """Of each layer."""
        rates, found = self._rates, []
        for layer in self.layers:
            seconds = layer.flops_per_token * tokens / rates.compute.value
            from_storage_s, from_host_s = layer.nbytes / rates.from_storage, layer.nbytes / rates.from_host
            found.append(LayerTimes(seconds, seconds * self._backward_factor, from_storage_s, from_host_s))
        return tuple(found)

    def host_layers(self, num_slots: int, host_bytes: int) -> tuple[int, ...]:
        """What a LayerStreamer keeps in host memory."""
        key = (num_slots, min(host_bytes, self.total_bytes))
        if key not in self._hosts:
            self._hosts[key] = choose_host_layers(
                self._order,
                num_slots,
                [layer.nbytes for layer in self.layers],
                host_bytes,
                host_bytes_per_s=STREAMER_HOST_BYTES_PER_S,
                storage_bytes_per_s=STREAMER_STORAGE_BYTES_PER_S,
                prefetch_depth=num_slots // 2,
            )
        return self._hosts[key]

    def total_s(self, tokens: int, num_slots: int, host_bytes: int) -> float:
        """Seconds of a cycle."""
        compute_s, transfer_s = self._seconds(tokens, self.host_layers(num_slots, host_bytes))
        return steady_cycle_s(self._order, num_slots, compute_s, transfer_s, prefetch_depth=num_slots // 2)

    def overhead(self, tokens: int, num_slots: int, host_bytes: int) -> float:
        """What streaming adds to the compute of a cycle: 0.1 is 10 % longer."""
        return max(self.total_s(tokens, num_slots, host_bytes) / self.compute_s(tokens) - 1, 0.0)

    def compute_s(self, tokens: int) -> float:
        """Seconds of a cycle's compute."""
        return sum(self._seconds(tokens, ())[0])

    def reads_s(self, num_slots: int, host_bytes: int) -> float:
        """Seconds of a cycle's reads, one after the other: no cycle is shorter."""
        _, transfer_s = self._seconds(1, self.host_layers(num_slots, host_bytes))
        counts, cycles = steady_reads(self._order, num_slots, num_slots // 2)
        return sum(count * transfer_s[layer] for layer, count in counts.items()) / cycles

    def steady(self, tokens: int, num_slots: int, host_bytes: int) -> Steady:
        """A cycle in detail."""
        host = self.host_layers(num_slots, host_bytes)
        compute_s, transfer_s = self._seconds(tokens, host)
        depth = num_slots // 2
        cycles = min(steady_reads(self._order, num_slots, depth)[1], _MOST_CYCLES)
        # A layer that storage delivers as fast as the link takes it waits for the link.
        link_bound = self._rates.storage.value >= self._rates.link.value
        tiers: list[Tier] = ["host" if link_bound or i in host else "storage" for i in range(len(self.layers))]
        played = simulate(
            self._order,
            num_slots,
            compute_s,
            transfer_s,
            prefetch_depth=depth,
            cycles=_SETTLED + cycles,
            tier_of=tiers,
        )
        schedule = Schedule(self._order, num_slots, depth)
        length, count = len(compute_s), len(self.layers)
        steps = range(_SETTLED * length, (_SETTLED + cycles) * length)
        # The cycle's length is that of the exact steady state; what was played tells how its stalls are shared out.
        exact_s = steady_cycle_s(self._order, num_slots, compute_s, transfer_s, prefetch_depth=depth)
        seen_s = sum(played.stall_s[step] for step in steps) / cycles
        scale = max(exact_s - sum(compute_s), 0.0) / seen_s if seen_s else 0.0

        def part(first: int, last: int) -> PassTimes:
            stall_s: dict[Cause, float] = dict.fromkeys(_CAUSES, 0.0)
            reads, moved_s, moved = 0, 0.0, {True: 0, False: 0}
            for step in steps:
                if not first <= step % length < last:
                    continue
                cause = played.bound[step]
                if cause != "none":
                    stall_s[cause] += played.stall_s[step] * scale / cycles
                planned = schedule.at(step)
                if planned.fetch:
                    reads += 1
                    moved_s += transfer_s[planned.layer]
                    moved[planned.layer in host] += self.layers[planned.layer].nbytes
            alone_s = sum(compute_s[first:last])
            return PassTimes(
                alone_s,
                moved_s / cycles,
                alone_s + sum(stall_s.values()),
                stall_s,
                reads / cycles,
                moved[False] / cycles,
                moved[True] / cycles,
            )

        backward = part(count, length) if length > count else None
        return Steady(part(0, length), part(0, count), backward, played.fill_s)

    def _seconds(self, tokens: int, host: Collection[int]) -> tuple[list[float], list[float]]:
        """Compute of each step of a cycle, and the transfer of each layer."""
        times = self.times(tokens)
        compute_s = [each.forward_s for each in times]
        if self.kind == "training":
            compute_s += [each.backward_s for each in reversed(times)]
        kept = frozenset(host)
        transfer_s = [each.from_host_s if i in kept else each.from_storage_s for i, each in enumerate(times)]
        return compute_s, transfer_s


__all__ = ["FREE", "KINDS", "Bound", "Cause", "Kind", "LayerTimes", "PassTimes", "Steady", "StreamModel"]
