"""Makespans: what the constraints allow at the earliest; host layers: as good as the best of all choices, or nearly."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstream.errors import ConfigError
from gdsstream.makespan import Simulated, choose_host_layers, simulate, steady_cycle_s
from gdsstream.schedule import Order, Planned, Schedule, steady_reads


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `simulate`, in whole seconds, so that sums are exact."""
    kind = draw(st.sampled_from(["forward", "training", "explicit"]))
    if kind == "forward":
        order = Order.forward(draw(st.integers(1, 6)), draw(st.booleans()))
    elif kind == "training":
        order = Order.training(draw(st.integers(1, 6)))
    else:
        sequence = draw(st.lists(st.integers(0, 5), min_size=1, max_size=10))
        order = Order.explicit(sequence, cyclic=draw(st.booleans()))
    seconds = st.integers(0, 6)
    num_slots = draw(st.integers(1, 4))
    return {
        "order": order,
        "num_slots": num_slots,
        "compute_s": draw(st.lists(seconds, min_size=len(order.sequence), max_size=len(order.sequence))),
        "transfer_s": draw(st.lists(seconds, min_size=order.num_layers, max_size=order.num_layers)),
        "prefetch_depth": draw(st.integers(0, 3)),
        "cycles": draw(st.integers(1, 4)) if order.cyclic else 1,
        "resident": draw(st.lists(st.integers(0, 5), max_size=num_slots, unique=True)),
        "per_step_s": draw(st.sampled_from([0, 1])),
        "tier_of": draw(st.lists(st.sampled_from(["host", "storage"]), min_size=6, max_size=6)),
        "layer_bytes": draw(st.lists(st.integers(0, 100), min_size=6, max_size=6)),
    }


def plan_of(case: dict[str, Any]) -> list[Planned]:
    schedule = Schedule(case["order"], case["num_slots"], case["prefetch_depth"], resident=case["resident"])
    return [schedule.at(step) for step in range(case["cycles"] * len(case["order"].sequence))]


def earliest(case: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Begin of each step's compute and end of its read: the least times that meet every constraint, by relaxation."""
    plan, compute_s, transfer_s = plan_of(case), case["compute_s"], case["transfer_s"]
    begins = [0.0] * len(plan)
    reads = [0.0] * len(plan)
    while True:
        before = begins.copy(), reads.copy()
        for step, planned in enumerate(plan):
            ends = [b + compute_s[s % len(compute_s)] + case["per_step_s"] for s, b in enumerate(begins)]
            if planned.fetch:
                earlier = [reads[s] for s in range(step) if plan[s].fetch]
                released = [ends[planned.after]] if planned.after >= 0 else []
                reads[step] = max([0.0, *earlier, *released]) + transfer_s[planned.layer]
            begins[step] = max([0.0, *ends[:step], *([reads[step]] if planned.fetch else [])])
        if (begins, reads) == before:
            return begins, reads


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_step_begins_as_early_as_it_can(case: dict[str, Any]) -> None:
    begins, reads = earliest(case)
    plan = plan_of(case)
    compute_s = [case["compute_s"][p.step % len(case["compute_s"])] for p in plan]
    ends = [begin + compute + case["per_step_s"] for begin, compute in zip(begins, compute_s, strict=True)]
    result = simulate(**case)
    stalls = [begin - end for begin, end in zip(begins, [0.0, *ends], strict=False)]
    assert result.stall_s == tuple(stalls)
    assert result.fill_s == stalls[0]
    assert result.total_s == ends[-1]
    assert result.compute_s == sum(compute_s)
    assert result.reads == sum(planned.fetch for planned in plan)
    tier_of, sizes = case["tier_of"], case["layer_bytes"]
    for tier in ("host", "storage"):
        assert result.read_bytes[tier] == sum(sizes[p.layer] for p in plan if p.fetch and tier_of[p.layer] == tier)
    for step, (planned, bound) in enumerate(zip(plan, result.bound, strict=True)):
        station = max([0.0, *(reads[s] for s in range(step) if plan[s].fetch)])
        if not stalls[step]:
            assert bound == "none"
        elif planned.after >= 0 and ends[planned.after] > station:
            assert bound == "slots"
        else:
            assert bound == {"host": "link", "storage": "storage"}[tier_of[planned.layer]]


@settings(deadline=None)
@given(cases(), st.data())
def test_nothing_is_later_for_a_shorter_transfer(case: dict[str, Any], data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, case["order"].num_layers - 1))
    shorter = [min(seconds, 1) if i == layer else seconds for i, seconds in enumerate(case["transfer_s"])]
    assert simulate(**{**case, "transfer_s": shorter}).total_s <= simulate(**case).total_s


# ---- by hand


def test_compute_hides_all_reads_but_the_first() -> None:
    result = simulate(Order.forward(4), 2, [10] * 4, [7] * 4, cycles=2)
    assert result == Simulated(
        total_s=87,
        compute_s=80,
        stall_s=(7, 0, 0, 0, 0, 0, 0, 0),
        fill_s=7,
        reads=8,
        read_bytes={"host": 0, "storage": 0},
        bound=("storage", *["none"] * 7),
    )


def test_reads_one_after_the_other_bound_a_double_buffer() -> None:
    tiers = ["host", "storage", "host", "storage"]
    result = simulate(Order.forward(4), 2, [5] * 4, [7] * 4, cycles=2, tier_of=tiers, layer_bytes=[1, 10, 100, 1000])
    assert result.total_s == 8 * 7 + 5
    assert result.stall_s == (7, *[2] * 7)
    assert result.bound == ("link", "storage") * 4
    assert result.read_bytes == {"host": 202, "storage": 2020}


def test_one_slot_waits_for_itself() -> None:
    result = simulate(Order.training(3), 1, [5] * 6, lambda layer: 7, cycles=2)
    # 0 1 2 2 1 0 0 1 2 2 1 0: the turns need no read.
    assert result.reads == 9
    assert result.total_s == 9 * 7 + 12 * 5
    turned = ("slots", "slots", "none") * 3
    assert result.bound == ("storage", "slots", "slots", "none", *turned[:2], "none", *turned[:2], "none", *turned[:2])


def test_a_resident_layer_costs_nothing() -> None:
    result = simulate(Order.forward(3, cyclic=False), 2, [5, 5, 5], [7, 7, 7], resident=[None, 0])
    assert result.stall_s == (0, 2, 2)
    # Layer 2 takes the place of layer 0, free at 5, but layer 1 is on its way until 7.
    assert result.bound == ("none", "storage", "storage")
    assert (result.fill_s, result.reads, result.total_s) == (0, 2, 19)


def test_a_fixed_cost_of_each_step_is_no_stall() -> None:
    result = simulate(Order.forward(4), 2, [10] * 4, [7] * 4, per_step_s=0.5)
    assert result.total_s == 7 + 4 * 10.5
    assert result.compute_s == 40
    assert result.stall_s == (7, 0, 0, 0)


def test_turning_costs_a_wait_for_the_slots() -> None:
    # 6 layers, 2 slots, T > C. The reads of a pass are back to back; the first one after the turn waits until the
    # layer used twice there has been.
    n, k, transfer, compute = 6, 2, 9, 4
    result = simulate(Order.training(n), k, [compute] * 2 * n, [transfer] * n, cycles=4)
    cycle = [step for step, bound in enumerate(result.bound[2 * n : 4 * n]) if bound == "slots"]
    assert cycle == [k, n + k]
    steady = steady_cycle_s(Order.training(n), k, [compute] * 2 * n, [transfer] * n)
    assert steady == 2 * (n - k) * transfer + 4 * compute
    # A naive double buffer reads every layer twice.
    naive = steady_cycle_s(Order.forward(2 * n), k, [compute] * 2 * n, [transfer] * 2 * n)
    assert naive == 2 * n * transfer


# ---- the steady state


def test_a_steady_cycle_is_that_of_a_long_run() -> None:
    generator = random.Random(11)
    for _ in range(60):
        n, depth = generator.randint(1, 8), generator.randint(0, 2)
        num_slots = generator.randint(1, n)
        sequence = [generator.randrange(n) for _ in range(2 * n)]
        order = generator.choice([Order.forward(n), Order.training(n), Order.explicit(sequence, cyclic=True)])
        compute_s = [generator.uniform(0, 2) for _ in order.sequence]
        transfer_s = [generator.uniform(0, 2) for _ in range(n)]
        _, period = steady_reads(order, num_slots, depth)

        def total_s(cycles: int) -> float:
            return simulate(order, num_slots, compute_s, transfer_s, prefetch_depth=depth, cycles=cycles).total_s  # noqa: B023

        long_run = (total_s(20 + 5 * period) - total_s(20)) / (5 * period)
        assert steady_cycle_s(order, num_slots, compute_s, transfer_s, prefetch_depth=depth) == pytest.approx(long_run)


def test_residents_may_repeat_before_the_times_do() -> None:
    order = Order.explicit([0, 3, 3, 2, 4], cyclic=True)
    compute_s, transfer_s = [0, 1, 0, 1, 0], [10, 0, 0, 1, 10]
    totals = [
        simulate(order, 3, compute_s, transfer_s, prefetch_depth=2, cycles=cycles).total_s for cycles in (1, 9, 12)
    ]
    steady = steady_cycle_s(order, 3, compute_s, transfer_s, prefetch_depth=2)
    assert steady == (totals[2] - totals[1]) / 3


def test_what_does_not_repeat_in_time_is_averaged() -> None:
    arguments: tuple[Any, ...] = (Order.forward(9), 7, [1] * 9, [2, 3, 2, 3, 2, 3, 2, 3, 9])
    totals = [simulate(*arguments, prefetch_depth=0, cycles=cycles).total_s for cycles in (1, 3)]
    assert steady_cycle_s(*arguments, prefetch_depth=0, max_cycles=3) == (totals[1] - totals[0]) / 2


def test_a_finite_order_takes_its_pass() -> None:
    arguments: tuple[Any, ...] = (Order.explicit([0, 1, 0, 2]), 2, [3, 1, 4, 1], [5, 9, 2])
    assert steady_cycle_s(*arguments, per_step_s=1) == simulate(*arguments, per_step_s=1).total_s


# ---- host layers


def seconds_with(host: Sequence[int], case: dict[str, Any]) -> float:
    rates = [case["host"] if i in host else case["storage"] for i in range(len(case["sizes"]))]
    return steady_cycle_s(
        case["order"],
        case["slots"],
        case["compute_s"],
        [size / rate for size, rate in zip(case["sizes"], rates, strict=True)],
        prefetch_depth=case["depth"],
    )


def choose(case: dict[str, Any], **changes: Any) -> tuple[int, ...]:
    case = {**case, **changes}
    return choose_host_layers(
        case["order"],
        case["slots"],
        case["sizes"],
        case["budget"],
        compute_s=case["compute_s"],
        host_bytes_per_s=case["host"],
        storage_bytes_per_s=case["storage"],
        prefetch_depth=case["depth"],
    )


def random_case(generator: random.Random, most_layers: int, equal: bool) -> dict[str, Any]:
    n = generator.randint(2, most_layers)
    sequence = [generator.randrange(n) for _ in range(generator.randint(1, 12))] + [n - 1]
    order = generator.choice(
        [Order.forward(n), Order.training(n), Order.explicit(sequence), Order.explicit(sequence, cyclic=True)]
    )
    sizes = [10] * n if equal else [generator.randint(1, 10) for _ in range(n)]
    longest = generator.uniform(0.2, 3)
    host = sum(sizes) / n / generator.choice([0.1, 0.3, 0.7, 1, 1.5])
    return {
        "order": order,
        "slots": generator.randint(1, n),
        "depth": generator.randint(0, 2),
        "sizes": sizes,
        "budget": generator.randint(0, sum(sizes)),
        "compute_s": [generator.choice([longest, generator.uniform(0, 3)]) for _ in order.sequence],
        "host": host,
        "storage": host / generator.choice([1.5, 3, 8]),
    }


@pytest.mark.parametrize(("equal", "worst"), [(True, 1.03), (False, 1.1)])
def test_host_layers_are_nearly_the_best_of_all_choices(equal: bool, worst: float) -> None:
    generator = random.Random(20 + equal)
    ratios = []
    for _ in range(250):
        case = random_case(generator, 7, equal)
        chosen = choose(case)
        layers = range(len(case["sizes"]))
        assert sum(case["sizes"][layer] for layer in chosen) <= case["budget"]
        best = min(
            seconds_with(host, case)
            for count in range(len(layers) + 1)
            for host in combinations(layers, count)
            if sum(case["sizes"][layer] for layer in host) <= case["budget"]
        )
        ratios.append(seconds_with(chosen, case) / best)
    assert max(ratios) <= worst
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.98 * len(ratios)


def first_that_fit(case: dict[str, Any]) -> list[int]:
    first: list[int] = []
    for layer, size in enumerate(case["sizes"]):
        if sum(case["sizes"][i] for i in first) + size <= case["budget"]:
            first.append(layer)
    return first


def test_host_layers_are_never_worse_than_the_first_that_fit() -> None:
    generator = random.Random(5)
    for _ in range(60):
        case = random_case(generator, 24, generator.random() < 0.5)
        chosen = choose(case)
        assert list(chosen) == sorted(set(chosen))
        assert sum(case["sizes"][layer] for layer in chosen) <= case["budget"]
        assert seconds_with(chosen, case) <= seconds_with(first_that_fit(case), case) * (1 + 1e-8)


TWO = Order.forward(2)
EVEN: dict[str, Any] = {
    "order": Order.training(20),
    "slots": 4,
    "depth": 1,
    "sizes": [100] * 20,
    "budget": 1000,
    "compute_s": [3.0] * 40,
    "host": 100.0,
    "storage": 20.0,
}


def test_host_layers_hide_storage_that_the_first_that_fit_do_not() -> None:
    assert seconds_with(first_that_fit(EVEN), EVEN) > 1.16 * sum(EVEN["compute_s"])
    assert seconds_with(choose(EVEN), EVEN) == sum(EVEN["compute_s"])


@pytest.mark.parametrize("compute_s", [None, [1.0] * 40, [0.1] * 40])
def test_layers_that_are_read_twice_come_first_and_are_spread(compute_s: list[float] | None) -> None:
    twice = range(4, 16)  # the others are in their slots at one of the turns
    chosen = choose(EVEN, compute_s=compute_s, budget=600)
    assert len(chosen) == 6
    assert set(chosen) <= set(twice)
    assert "sss" not in "".join("H" if layer in chosen else "s" for layer in twice)


def test_unknown_compute_is_taken_to_be_in_balance() -> None:
    # 12 layers read twice, 10 of them from host memory in 1 s, and 8 read once in 5 s: 2 s for each of 40 steps.
    assert choose(EVEN, compute_s=None) == choose(EVEN, compute_s=[2.0] * 40)


def test_what_compute_hides_anyway_is_spread_all_the_same() -> None:
    assert choose(EVEN, compute_s=[100.0] * 40, budget=1600) == (0, 2, *range(4, 16), 16, 18)


def test_layers_that_are_read_once_follow_those_read_twice() -> None:
    assert set(choose(EVEN, compute_s=[0.1] * 40, budget=1400)) > set(range(4, 16))


def test_host_memory_is_used_up() -> None:
    # Layer 2, which the order does not use, fits into what layer 1 leaves.
    assert choose_host_layers(TWO, 1, [7, 8, 3], 11, host_bytes_per_s=10, storage_bytes_per_s=1) == (1, 2)


@pytest.mark.parametrize("compute_s", [None, [3.0] * 40])
def test_all_or_nothing(compute_s: list[float] | None) -> None:
    assert choose(EVEN, compute_s=compute_s, budget=0) == ()
    assert choose(EVEN, compute_s=compute_s, budget=99) == ()
    assert choose(EVEN, compute_s=compute_s, budget=2000) == tuple(range(20))
    assert len(choose(EVEN, compute_s=compute_s, budget=1999)) == 19
    assert choose(EVEN, compute_s=compute_s, budget=0, sizes=[0] * 20) == ()


# ---- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulate(TWO, 1, [1], [1, 1]), "compute_s has 1 entries; the order has 2 steps"),
        (lambda: simulate(TWO, 1, [1, 1], [1]), "transfer_s has 1 entries; the order uses layer 1"),
        (lambda: simulate(TWO, 1, [1, -1], [1, 1]), "compute_s has -1 at 1"),
        (lambda: simulate(TWO, 1, [1, 1], lambda layer: float("nan")), "transfer_s has nan at 0"),
        (lambda: simulate(TWO, 1, [1, 1], [1, float("inf")]), "transfer_s has inf at 1"),
        (lambda: simulate(TWO, 1, [1, 1], [1, 1], per_step_s=-1), "per_step_s has -1 at 0"),
        (lambda: simulate(TWO, 0, [1, 1], [1, 1]), "num_slots is 0"),
        (lambda: simulate(TWO, 1, [1, 1], [1, 1], cycles=0), "cycles is 0"),
        (lambda: simulate(Order.explicit([0]), 1, [1], [1], cycles=2), "1 for an order that is not cyclic"),
        (lambda: simulate(TWO, 1, [1, 1], [1, 1], tier_of=["host"]), "tier_of has 1 entries"),
        (lambda: simulate(TWO, 1, [1, 1], [1, 1], tier_of=["host", "disk"]), "tier_of names ['disk']"),
        (lambda: simulate(TWO, 1, [1, 1], [1, 1], layer_bytes=[1]), "layer_bytes has 1 entries"),
        (lambda: steady_cycle_s(TWO, 1, [1, 1], [1, 1], max_cycles=1), "max_cycles is 1"),
        (lambda: choose(EVEN, sizes=[100] * 19), "layer_bytes has 19 entries; the order uses layer 19"),
        (lambda: choose(EVEN, sizes=[100] * 19 + [-1]), "the least of layer_bytes is -1"),
        (lambda: choose(EVEN, budget=-1), "budget_bytes is -1"),
        (lambda: choose(EVEN, host=0), "host_bytes_per_s is 0"),
        (lambda: choose(EVEN, storage=float("inf")), "storage_bytes_per_s is inf"),
        (lambda: choose(EVEN, compute_s=[1]), "compute_s has 1 entries; the order has 40 steps"),
        (lambda: choose(EVEN, slots=0), "num_slots is 0"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()
