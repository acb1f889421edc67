"""Which layer is read into which slot, and when its bytes may begin to arrive. Pure: no torch, no I/O.

The order of use is declared, so eviction can be exact. A step whose layer is in no slot reads it into the slot whose
layer is used again last (Belady's MIN). The exchange argument: where a plan drops y although x is used again no
earlier, let it drop x instead and go on as before with y in x's place. When y is used the changed plan has it and saves
that read, which pays for reading x later; so dropping the farthest never costs a read, and no plan reads less.

MIN alone leaves nothing to read ahead in a loop: the layer used again last is the one just used, and a read into its
slot waits until that use ends. So the layers of steps s-d to s-1 are *pinned* against step s. What remains was used in
step s-d-1 or earlier, and its slot can be filled while d layers are computed with. Every plan that keeps this rule has
the pinned layers in its slots and is free in the others, so the exchange holds among those: no plan that can read d
steps ahead reads less. d is at most num_slots - 1, since one slot has to be left to choose.

With n layers and k slots, 1 <= k <= n, a cycle in the steady state reads

    training (0..n-1, n-1..0)   2(n-k) layers, at any depth (naive double buffering: 2n). The last k layers of a pass
                                begin the next one, and their slots come free in the order in which they are needed
    forward (0..n-1)            n(n-k)/(n-1-d) layers on average, d < n-1. Depth 1 makes 2 slots a double buffer (n
                                reads); with more some layers stay, as a rule other ones in every cycle
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gdsstream.errors import ConfigError

_NEVER = 1 << 62  # the step of a next use that does not come; an int, so that steps compare as ints
_LONG_AGO = -_NEVER  # the step of a last use before the schedule began


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which layers are used. A step is a position in it, counted on through the cycles of a cyclic one.

    Attributes:
        sequence: layer numbers, from 0; at least one. Not all numbers have to occur, and any may occur often.
        cyclic: begin again at the end.
        num_layers: the largest layer number, and one.

    Raises ConfigError.
    """

    sequence: tuple[int, ...]
    cyclic: bool
    num_layers: int = field(init=False, repr=False, compare=False)
    _uses: dict[int, list[int]] = field(init=False, repr=False, compare=False)  # of each layer, as indices of sequence
    _gaps: tuple[int, ...] = field(init=False, repr=False, compare=False)  # from each index to the layer's next use

    def __post_init__(self) -> None:
        sequence = tuple(self.sequence)
        if not sequence:
            raise ConfigError("the order has no steps; it has to name at least one layer")
        uses: dict[int, list[int]] = {}
        for index, layer in enumerate(sequence):
            if not _is_count(layer):
                raise ConfigError(f"step {index} of the order is layer {layer!r}; layers are whole numbers from 0")
            uses.setdefault(layer, []).append(index)
        gaps = [0] * len(sequence)
        for indices in uses.values():
            around = indices[0] + len(sequence) if self.cyclic else _NEVER
            for index, following in zip(indices, [*indices[1:], around], strict=True):
                gaps[index] = following - index
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "num_layers", max(uses) + 1)
        object.__setattr__(self, "_uses", uses)
        object.__setattr__(self, "_gaps", tuple(gaps))

    @classmethod
    def forward(cls, num_layers: int, cyclic: bool = True) -> Order:
        """Layers 0 to num_layers - 1, again and again or once."""
        return cls(tuple(range(_check("num_layers", num_layers, 1))), cyclic)

    @classmethod
    def training(cls, num_layers: int) -> Order:
        """Forward and backward: 0 to num_layers - 1, then num_layers - 1 to 0, again and again."""
        forward = tuple(range(_check("num_layers", num_layers, 1)))
        return cls(forward + forward[::-1], True)

    @classmethod
    def explicit(cls, sequence: Sequence[int], cyclic: bool = False) -> Order:
        """Any sequence of layers."""
        return cls(tuple(sequence), cyclic)

    def layer_at(self, step: int) -> int:
        """The layer used at a step. Raises IndexError before the beginning, and past the end of a finite order."""
        if step < 0 or (step >= len(self.sequence) and not self.cyclic):
            raise IndexError(f"step {step} is not in the order, which has {len(self.sequence)} steps")
        return self.sequence[step % len(self.sequence)]

    def next_use(self, layer: int, step: int) -> int | None:
        """The first step at or after `step` that uses a layer; None where there is none."""
        uses = self._uses.get(layer)
        if uses is None:
            return None
        cycle, index = divmod(max(step, 0), len(self.sequence))
        if cycle and not self.cyclic:
            return None
        found = bisect_left(uses, index)
        if found < len(uses):
            return cycle * len(self.sequence) + uses[found]
        return (cycle + 1) * len(self.sequence) + uses[0] if self.cyclic else None

    def _next_after(self, step: int) -> int:
        # What next_use(layer_at(step), step + 1) is, without a search.
        return step + self._gaps[step % len(self.sequence)]


class Planned(NamedTuple):
    """What a step needs: `layer` in `slot`.

    Attributes:
        fetch: False where the slot holds the layer already; True where it is to be read into the slot.
        after: the last step that uses what the read overwrites: the read may begin once that step has released the
            slot. -1 where no step of this schedule does, and for a hit.
    """

    step: int
    layer: int
    slot: int
    fetch: bool
    after: int


class Schedule:
    """What each step finds or reads, and where; planned step by step, as far as it is asked for.

    Args:
        order: the order of use.
        num_slots: how many layers fit at once.
        prefetch_depth: how many steps a read may begin ahead of its use at least; 0 for the fewest reads. More than
            num_slots - 1 is as good as that.
        start: the first step.
        resident: what the slots hold before it, by slot; None, or too short, for empty ones. Nothing is pinned for
            steps before `start`: who begins while a slot is still in use has to hold back the reads into it.

    Raises ConfigError. A step costs O(num_slots), the beginning O(num_slots x log(steps of the order)).
    """

    def __init__(
        self,
        order: Order,
        num_slots: int,
        prefetch_depth: int = 1,
        *,
        start: int = 0,
        resident: Sequence[int | None] = (),
    ) -> None:
        self.order = order
        self.num_slots = _check("num_slots", num_slots, 1)
        self.depth = min(_check("prefetch_depth", prefetch_depth, 0), num_slots - 1)
        self.start = _check("start", start, 0)
        if len(resident) > num_slots:
            raise ConfigError(f"resident names {len(resident)} slots; there are {num_slots}")
        self._layers: list[int | None] = [*resident, *[None] * (num_slots - len(resident))]
        self._slot_of: dict[int, int] = {}
        for slot, layer in enumerate(self._layers):
            if layer is None:
                continue
            if not _is_count(layer):
                raise ConfigError(f"resident says layer {layer!r} is in slot {slot}; layers are whole numbers from 0")
            if layer in self._slot_of:
                raise ConfigError(f"resident says layer {layer} is in slots {self._slot_of[layer]} and {slot}")
            self._slot_of[layer] = slot
        self._last = [_LONG_AGO] * num_slots  # the last step that used what a slot holds
        # The step that will use it; farther than all where the slot is empty, so that empty slots are taken first.
        self._next = [_NEVER + 1 if layer is None else self._first_use(layer) for layer in self._layers]
        self._plan: dict[int, Planned] = {}
        self._planned = start  # steps before this one are planned
        self._kept = start  # and those before this one forgotten

    def at(self, step: int) -> Planned:
        """What a step needs. Plans all steps up to it.

        Raises IndexError past the end of a finite order, and ConfigError for a step before `start` or forgotten.
        """
        if step < self._kept:
            raise ConfigError(
                f"step {step} is not planned any more, only steps from {self._kept}; begin a Schedule with start={step}"
            )
        if step >= self._planned:
            self.order.layer_at(step)  # refuses what is past the end before anything is planned
            while self._planned <= step:
                self._extend()
        return self._plan[step]

    def forget(self, before_step: int) -> None:
        """Drop the plan of steps before `before_step`, as far as they are planned."""
        for step in range(self._kept, min(before_step, self._planned)):
            del self._plan[step]
            self._kept = step + 1

    @property
    def residents(self) -> tuple[int | None, ...]:
        """What the slots hold after the last step that was planned, by slot."""
        return tuple(self._layers)

    def _first_use(self, layer: int) -> int:
        step = self.order.next_use(layer, self.start)
        return _NEVER if step is None else step

    def _extend(self) -> None:
        step = self._planned
        layer = self.order.layer_at(step)
        slot = self._slot_of.get(layer)
        fetch = slot is None
        after = -1
        if slot is None:
            slot = self._victim(step)
            after = max(self._last[slot], -1)
            dropped = self._layers[slot]
            if dropped is not None:
                del self._slot_of[dropped]
            self._slot_of[layer] = slot
            self._layers[slot] = layer
        self._last[slot] = step
        self._next[slot] = self.order._next_after(step)
        self._plan[step] = Planned(step, layer, slot, fetch, after)
        self._planned = step + 1

    def _victim(self, step: int) -> int:
        """The slot whose layer is used again last, of those that are not pinned; the lowest of equals."""
        farthest = self._next
        # Usually what comes last is pinned, in a loop: it was used just now. Copying keeps the search in C.
        for pinned in range(max(step - self.depth, self.start), step):
            slot = self._slot_of[self.order.layer_at(pinned)]
            if farthest is self._next:
                farthest = self._next.copy()
            farthest[slot] = -1
        return farthest.index(max(farthest))


def steady_reads(order: Order, num_slots: int, prefetch_depth: int = 1) -> tuple[dict[int, int], int]:
    """How often each layer is read in the steady state, and in how many cycles: the period after which it repeats.

    Training orders repeat every cycle; a forward order with spare slots keeps other layers in each. A finite order has
    one cycle, the whole pass from empty slots. Layers of the order that are never read count 0. Raises ConfigError.
    """
    cycles = _steady_cycles(order, num_slots, prefetch_depth)
    total = sum(cycles, Counter())
    return {layer: total[layer] for layer in sorted(order._uses)}, len(cycles)


def reads_per_cycle(order: Order, num_slots: int, prefetch_depth: int = 1) -> dict[int, int]:
    """How often each layer is read in one cycle of the steady state; of a finite order, in the pass from empty slots.

    Where it takes the steady state several cycles to repeat (see `steady_reads`), this is the first of them. Layers of
    the order that are not read count 0. Raises ConfigError.
    """
    cycle = _steady_cycles(order, num_slots, prefetch_depth)[0]
    return {layer: cycle[layer] for layer in sorted(order._uses)}


def _steady_cycles(order: Order, num_slots: int, prefetch_depth: int) -> list[Counter[int]]:
    """The reads of each cycle of one period."""
    schedule = Schedule(order, num_slots, prefetch_depth)
    length = len(order.sequence)
    seen: dict[frozenset[int | None], int] = {}
    cycles: list[Counter[int]] = []
    # What the slots hold decides what follows; what is pinned is the end of a cycle, the same every time.
    while (held := frozenset(schedule.residents)) not in seen:
        seen[held] = len(cycles)
        begin = len(cycles) * length
        planned = [schedule.at(step) for step in range(begin, begin + length)]
        schedule.forget(begin + length)
        cycles.append(Counter(step.layer for step in planned if step.fetch))
        if not order.cyclic:
            return cycles
    return cycles[seen[held] :]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(name: str, value: int, least: int) -> int:
    if not _is_count(value) or value < least:
        raise ConfigError(f"{name} is {value!r}; it has to be a whole number, at least {least}")
    return value


__all__ = ["Order", "Planned", "Schedule", "reads_per_cycle", "steady_reads"]
