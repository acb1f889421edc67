"""Schedules: as few reads as any plan (exhaustive search), never into a slot that is pinned, exact about when."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstream.errors import ConfigError
from gdsstream.schedule import Order, Planned, Schedule, reads_per_cycle, steady_reads

# A schedule, what its slots hold when it begins, and the steps to look at.
Situation: TypeAlias = tuple[Schedule, tuple[int | None, ...], range]


@st.composite
def orders(draw: st.DrawFn, max_layers: int = 5, max_steps: int = 9) -> Order:
    kind = draw(st.sampled_from(["forward", "training", "explicit"]))
    if kind == "forward":
        return Order.forward(draw(st.integers(1, max_layers)), draw(st.booleans()))
    if kind == "training":
        return Order.training(draw(st.integers(1, max_layers)))
    sequence = draw(st.lists(st.integers(0, max_layers - 1), min_size=1, max_size=max_steps))
    return Order.explicit(sequence, cyclic=draw(st.booleans()))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """From the beginning with empty slots, or from the middle with anything in them."""
    order = draw(orders())
    num_slots = draw(st.integers(1, 4))
    start = 0
    resident: list[int | None] = []
    if draw(st.booleans()):
        start = draw(st.integers(0, 20 if order.cyclic else len(order.sequence) - 1))
        held = draw(st.lists(st.integers(0, 6), max_size=num_slots, unique=True))
        resident = [layer if draw(st.booleans()) else None for layer in held]
    end = start + draw(st.integers(1, 14))
    if not order.cyclic:
        end = min(end, len(order.sequence))
    schedule = Schedule(order, num_slots, draw(st.integers(0, 4)), start=start, resident=resident)
    return schedule, (*resident, *[None] * (num_slots - len(resident))), range(start, end)


def fewest_reads(layers: Sequence[int], num_slots: int, depth: int, resident: frozenset[int] = frozenset()) -> int:
    """Of all plans: between two steps any layers may be read, as long as those of the last `depth` steps stay."""
    universe = set(layers) | resident
    contents = [frozenset(c) for size in range(num_slots + 1) for c in combinations(sorted(universe), size)]
    costs = {resident: 0}
    for step, layer in enumerate(layers):
        needed = {layer, *layers[max(step - depth, 0) : step]}
        costs = {
            after: min(cost + len(after - before) for before, cost in costs.items())
            for after in contents
            if needed <= after
        }
    return min(costs.values())


# ---- orders


@settings(deadline=None)
@given(orders(), st.integers(-2, 25), st.integers(0, 7))
def test_next_use_is_the_first_step_that_uses_the_layer(order: Order, step: int, layer: int) -> None:
    end = 60 if order.cyclic else len(order.sequence)
    uses = [s for s in range(max(step, 0), end) if order.layer_at(s) == layer]
    assert order.next_use(layer, step) == (uses[0] if uses else None)


def test_orders() -> None:
    assert Order.forward(3) == Order((0, 1, 2), True)
    assert Order.forward(3, cyclic=False) == Order((0, 1, 2), False)
    assert Order.training(3) == Order((0, 1, 2, 2, 1, 0), True)
    assert Order.explicit([4, 0, 4]) == Order((4, 0, 4), False)
    assert Order.explicit([4, 0, 4], cyclic=True).num_layers == 5
    assert Order.training(2) != Order.explicit([0, 1, 1, 0])
    assert len({Order.forward(3), Order.explicit((0, 1, 2), cyclic=True)}) == 1
    assert repr(Order.forward(2)) == "Order(sequence=(0, 1), cyclic=True)"


def test_layer_at_knows_the_end() -> None:
    assert [Order.training(2).layer_at(step) for step in range(9)] == [0, 1, 1, 0, 0, 1, 1, 0, 0]
    finite = Order.explicit([1, 0])
    assert finite.layer_at(1) == 0
    for step in (2, -1):
        with pytest.raises(IndexError, match=f"step {step} is not in the order, which has 2 steps"):
            finite.layer_at(step)
    with pytest.raises(IndexError):
        Order.forward(2).layer_at(-1)


# ---- reads


@settings(max_examples=600, deadline=None)
@given(situations())
def test_no_plan_that_can_read_as_far_ahead_reads_less(situation: Situation) -> None:
    # Up to any step: what comes after it may only decide between plans that are equal so far.
    schedule, resident, steps = situation
    layers = [schedule.order.layer_at(step) for step in steps]
    held = frozenset(layer for layer in resident if layer is not None)
    fetched = sum(schedule.at(step).fetch for step in steps)
    assert fetched == fewest_reads(layers, schedule.num_slots, schedule.depth, held)


@settings(deadline=None)
@given(orders(), st.integers(1, 4))
def test_without_prefetch_it_reads_no_more_than_with(order: Order, num_slots: int) -> None:
    steps = range(3 * len(order.sequence) if order.cyclic else len(order.sequence))
    reads = []
    for depth in range(num_slots):
        schedule = Schedule(order, num_slots, depth)
        reads.append(sum(schedule.at(step).fetch for step in steps))
    assert reads == sorted(reads)
    assert reads[0] == fewest_reads([order.layer_at(step) for step in steps], num_slots, 0)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 12])
def test_training_reads_only_what_does_not_fit(num_layers: int) -> None:
    for num_slots in range(1, num_layers + 1):
        for depth in range(num_slots + 1):
            reads = reads_per_cycle(Order.training(num_layers), num_slots, depth)
            assert sum(reads.values()) == 2 * (num_layers - num_slots), (num_slots, depth)
            # The first layers are there when the pass begins, the last ones when it turns.
            kept = [(layer < num_slots) + (layer >= num_layers - num_slots) for layer in range(num_layers)]
            assert reads == {layer: 2 - times for layer, times in enumerate(kept)}


@pytest.mark.parametrize("num_layers", [2, 3, 5, 8, 13])
def test_forward_reads_on_average(num_layers: int) -> None:
    for num_slots in range(1, num_layers + 1):
        for depth in range(min(num_slots, num_layers - 1)):
            reads, cycles = steady_reads(Order.forward(num_layers), num_slots, depth)
            # n (n - k) / (n - 1 - d) a cycle
            assert sum(reads.values()) * (num_layers - 1 - depth) == cycles * num_layers * (num_layers - num_slots)


def test_training_reads_one_layer_ahead_and_turns_without_reads() -> None:
    n, k = 8, 3
    schedule = Schedule(Order.training(n), k)
    cycle = [schedule.at(step) for step in range(2 * n, 4 * n)]
    step = [planned._replace(step=planned.step - 2 * n, after=planned.after - 2 * n) for planned in cycle]
    assert [planned.fetch for planned in step] == 2 * ([False] * k + [True] * (n - k))
    # Forward, layer j takes the place of layer j - k, as soon as that was used; backward likewise.
    assert [planned.after for planned in step if planned.fetch] == [0, 1, 2, 3, 4, n, n + 1, n + 2, n + 3, n + 4]
    assert all(step[j].slot == step[j - k].slot for j in range(k, n))
    # What turning needs are the layers that were used last, where they are.
    assert [planned.slot for planned in step[n : n + k]] == [planned.slot for planned in step[n - k : n]][::-1]


def test_two_slots_in_a_forward_order_are_a_double_buffer() -> None:
    schedule = Schedule(Order.forward(5), 2)
    for step in range(25):
        assert schedule.at(step) == Planned(step, step % 5, step % 2, True, max(step - 2, -1))


def test_without_prefetch_a_forward_order_reads_less_but_cannot_overlap() -> None:
    schedule = Schedule(Order.forward(5), 2, prefetch_depth=0)
    plan = [schedule.at(step) for step in range(2, 42)]
    assert sum(planned.fetch for planned in plan) == 30  # 15 in 4 cycles, not 20
    assert all(planned.after == planned.step - 1 for planned in plan if planned.fetch)


def test_steady_reads_are_the_average_of_a_long_run() -> None:
    generator = random.Random(4)
    for _ in range(40):
        sequence = [generator.randrange(6) for _ in range(generator.randint(1, 12))]
        order, num_slots, depth = (
            Order.explicit(sequence, cyclic=True),
            generator.randint(1, 5),
            generator.randint(0, 3),
        )
        reads, cycles = steady_reads(order, num_slots, depth)
        schedule = Schedule(order, num_slots, depth)
        begin, length = 200 * len(sequence), cycles * len(sequence)
        plan = [schedule.at(step) for step in range(begin, begin + length)]
        assert reads == {layer: sum(p.fetch for p in plan if p.layer == layer) for layer in set(sequence)}


def test_reads_per_cycle() -> None:
    assert reads_per_cycle(Order.training(4), 2, 1) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert reads_per_cycle(Order.forward(3), 3, 1) == {0: 0, 1: 0, 2: 0}
    # A finite order: the pass, with empty slots to begin with. Layers without a step have no entry.
    finite = Order.explicit([0, 2, 0, 5, 0])
    assert reads_per_cycle(finite, 2, 0) == {0: 1, 2: 1, 5: 1}
    assert steady_reads(finite, 1, 0) == ({0: 3, 2: 1, 5: 1}, 1)
    # 3 layers in 2 slots without prefetch: 3 reads in 2 cycles.
    assert steady_reads(Order.forward(3), 2, 0) == ({0: 1, 1: 1, 2: 1}, 2)
    assert sum(reads_per_cycle(Order.forward(3), 2, 0).values()) in (1, 2)


# ---- where and when


@settings(max_examples=300, deadline=None)
@given(situations())
def test_slots_hold_what_the_plan_says(situation: Situation) -> None:
    schedule, resident, steps = situation
    order, depth = schedule.order, schedule.depth
    slots = list(resident)
    used: list[int] = [-1] * len(slots)  # the last step that used what the slot holds
    for step in steps:
        planned = schedule.at(step)
        layer, slot = order.layer_at(step), planned.slot
        assert (planned.step, planned.layer) == (step, layer)
        assert planned.fetch == (layer not in slots)
        if not planned.fetch:
            assert slots[slot] == layer
            assert planned.after == -1
        else:
            assert planned.after == (-1 if slots[slot] is None else used[slot])
            pinned = {order.layer_at(earlier) for earlier in range(max(step - depth, steps[0]), step)}
            assert slots[slot] not in pinned
            assert planned.after < 0 or planned.after < step - depth
            assert slot == expected_slot(order, slots, pinned, step)
            slots[slot] = layer
        used[slot] = step
    assert schedule.residents == tuple(slots)


def expected_slot(order: Order, slots: Sequence[int | None], pinned: set[int], step: int) -> int:
    """The first empty slot; else that of the layer used again last, the first of those never used again."""
    if None in slots:
        return slots.index(None)
    uses: dict[int, float] = {}
    for slot, layer in enumerate(slots):
        if layer not in pinned:
            assert layer is not None
            use = order.next_use(layer, step)
            uses[slot] = float("inf") if use is None else use
    return max(uses, key=uses.__getitem__)  # the first of equals


@settings(deadline=None)
@given(orders(), st.integers(1, 4), st.integers(0, 20))
def test_beginning_in_the_middle_goes_on_alike(order: Order, num_slots: int, start: int) -> None:
    start = start if order.cyclic else min(start, len(order.sequence) - 1)
    whole = Schedule(order, num_slots, prefetch_depth=0)
    for step in range(start):
        whole.at(step)
    middle = Schedule(order, num_slots, prefetch_depth=0, start=start, resident=whole.residents)
    for step in range(start, start + 15 if order.cyclic else len(order.sequence)):
        one, other = whole.at(step), middle.at(step)
        assert one[:4] == other[:4]
        # What a slot was used for before the start is not the new schedule's to know.
        assert other.after == (one.after if one.after >= start else -1)


def test_a_schedule_may_begin_at_the_end_of_a_finite_order() -> None:
    schedule = Schedule(Order.forward(3, cyclic=False), 2, start=3, resident=[2])
    with pytest.raises(IndexError, match="step 3 is not in the order"):
        schedule.at(3)


# ---- at and forget


def test_steps_are_planned_when_asked_for_and_forgotten_when_told() -> None:
    schedule = Schedule(Order.forward(4), 2, start=5)
    assert schedule.residents == (None, None)
    ahead = schedule.at(9)
    assert schedule.at(5).layer == 1
    assert schedule.at(9) is ahead
    schedule.forget(8)
    assert schedule.at(8).layer == 0
    for step in (4, 7):
        with pytest.raises(
            ConfigError, match=f"step {step} is not planned.*from 8; begin a Schedule with start={step}"
        ):
            schedule.at(step)
    schedule.forget(8)
    schedule.forget(1000)  # only what is planned; the steps after that stay open
    assert schedule.at(10).layer == 2
    with pytest.raises(ConfigError):
        schedule.at(9)


def test_a_step_past_the_end_plans_nothing() -> None:
    schedule = Schedule(Order.forward(3, cyclic=False), 3)
    with pytest.raises(IndexError):
        schedule.at(3)
    assert schedule.residents == (None, None, None)
    assert schedule.at(2).slot == 2


def test_it_keeps_no_more_than_was_not_forgotten() -> None:
    schedule = Schedule(Order.forward(8), 3)
    for step in range(10_000):
        schedule.at(step + 2)
        schedule.forget(step)
    assert len(schedule._plan) == 3


def test_a_hundred_thousand_steps_take_a_moment() -> None:
    # 0.3 to 0.5 s; a search through the order for each next use would take minutes.
    for order, num_slots in ((Order.training(128), 16), (Order.forward(128), 2)):
        begin = time.process_time()
        schedule = Schedule(order, num_slots)
        for step in range(100_000):
            schedule.at(step)
            schedule.forget(step)
        assert time.process_time() - begin < 4


# ---- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Order.forward(0), "num_layers is 0; it has to be a whole number, at least 1"),
        (lambda: Order.training(-2), "num_layers is -2"),
        (lambda: Order.training(2.0), "num_layers is 2.0"),  # type: ignore[arg-type]
        (lambda: Order.explicit([]), "the order has no steps"),
        (lambda: Order.explicit([0, -1]), "step 1 of the order is layer -1"),
        (lambda: Order.explicit([True]), "step 0 of the order is layer True"),
        (lambda: Order.explicit(["a"]), "step 0 of the order is layer 'a'"),  # type: ignore[list-item]
        (lambda: Schedule(Order.forward(2), 0), "num_slots is 0; it has to be a whole number, at least 1"),
        (lambda: Schedule(Order.forward(2), True), "num_slots is True"),
        (lambda: Schedule(Order.forward(2), 1, -1), "prefetch_depth is -1"),
        (lambda: Schedule(Order.forward(2), 1, start=-1), "start is -1"),
        (lambda: Schedule(Order.forward(2), 2, resident=[0, 1, None]), "resident names 3 slots; there are 2"),
        (lambda: Schedule(Order.forward(2), 3, resident=[1, None, 1]), "layer 1 is in slots 0 and 2"),
        (lambda: Schedule(Order.forward(2), 3, resident=[-1]), "layer -1 is in slot 0"),
        (lambda: reads_per_cycle(Order.forward(2), 0), "num_slots is 0"),
        (lambda: steady_reads(Order.forward(2), 1, -1), "prefetch_depth is -1"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()
