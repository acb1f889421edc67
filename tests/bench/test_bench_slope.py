"""Slope, overhead and fill of pipelines whose true values are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import slope

TIMES = st.floats(1e-4, 1.0)


def run(count: int, compute_s: float, transfer_s: float, overhead: float = 0.0) -> float:
    """A double buffer: the first layer comes in, then each step takes the slower of the two, and the last computes."""
    return transfer_s + (count - 1) * max(compute_s, transfer_s) * (1 + overhead) + compute_s


def measured(compute_s: float, transfer_s: float, overhead: float = 0.0, drift: float = 1.0) -> slope.Round:
    times = (compute_s, transfer_s, run(20, compute_s, transfer_s, overhead), run(60, compute_s, transfer_s, overhead))
    return slope.Round(*(time * drift for time in times))


@given(TIMES, TIMES, st.floats(0.0, 1.0))
def test_the_overhead_is_what_was_put_in_and_the_fill_is_apart(compute: float, transfer: float, extra: float) -> None:
    each = measured(compute, transfer, extra)
    assert each.slope_s(20, 60) == pytest.approx(max(compute, transfer) * (1 + extra), rel=1e-6)
    assert slope.summarise([each], 20, 60)["overhead"] == pytest.approx(extra, abs=1e-6)
    if extra == 0:
        # What is not hidden, once: the first transfer where compute is slower, else the last compute.
        assert each.fill_s(20, 60) == pytest.approx(min(compute, transfer), rel=1e-3, abs=1e-9)


def test_twenty_layers_alone_would_show_the_fill_as_overhead() -> None:
    each = measured(0.0108, 0.0225)
    assert each.short_s / 20 / each.bound_s - 1 > 0.02
    assert slope.summarise([each], 20, 60)["overhead"] == pytest.approx(0.0, abs=1e-9)


def test_drift_between_rounds_cancels() -> None:
    rounds = [measured(0.02, 0.01, 0.03, drift) for drift in (1.0, 1.7, 0.9, 2.5, 1.2, 1.2)]
    found = slope.summarise(rounds, 20, 60)
    assert found["overhead"] == pytest.approx(0.03, abs=1e-9)
    assert found["overhead_ci95"] == pytest.approx([0.03, 0.03], abs=1e-9)
    assert found["slope_s"] == pytest.approx(0.02 * 1.03 * 1.2)
    assert found["compute_s"] == pytest.approx(0.024)
    assert found["transfer_s"] == pytest.approx(0.012)
    assert found["fill_mad_s"] > 0


def test_an_overhead_below_nothing_is_reported_as_it_is() -> None:
    assert slope.summarise([slope.Round(0.01, 0.02, 0.4, 1.16)], 20, 60)["overhead"] == pytest.approx(-0.05)


def test_five_rounds_carry_no_interval_but_a_range() -> None:
    rounds = [measured(0.01, 0.02, overhead) for overhead in (0.01, 0.02, 0.05, 0.03, 0.04)]
    found = slope.summarise(rounds, 20, 60)
    assert found["overhead_ci95"] is None
    assert found["overhead_range"] == pytest.approx([0.01, 0.05])


def test_no_rounds_and_equal_lengths_are_errors() -> None:
    with pytest.raises(ValueError, match="no samples"):
        slope.summarise([], 20, 60)
    with pytest.raises(ValueError, match="has to be longer"):
        slope.summarise([measured(0.01, 0.02)], 20, 20)


def test_a_difference_is_paired_by_rounds() -> None:
    found = slope.difference([1.05, 2.1, 0.525], [1.0, 2.0, 0.5])
    assert found["difference"] == pytest.approx(0.05)
    assert (found["difference_ci95"], found["difference_range"]) == (None, pytest.approx([0.05, 0.05]))
    assert (found["measured_s"], found["predicted_s"]) == (1.05, 1.0)


@pytest.mark.parametrize(
    ("layer_s", "expected"),
    [(0.023, (20, 60)), (0.05, (20, 60)), (0.1, (8, 28)), (0.277, (4, 8)), (50.0, (4, 8))],
)
def test_a_slow_route_gets_shorter_runs(layer_s: float, expected: tuple[int, int]) -> None:
    assert slope.lengths(20, 60, 4, layer_s, 4.0) == expected


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.floats(1e-5, 100.0), st.floats(0.01, 100.0))
def test_lengths_are_whole_cycles_and_within_the_limit(
    cycle: int, short: int, more: int, layer_s: float, limit_s: float
) -> None:
    fewer, many = slope.lengths(short * cycle, (short + more) * cycle, cycle, layer_s, limit_s)
    assert fewer % cycle == many % cycle == 0
    assert 0 < fewer < many
    assert fewer <= short * cycle
    assert many <= (short + more) * cycle
    assert (fewer + many) * layer_s <= limit_s or fewer == cycle


@pytest.mark.parametrize("wanted", [(20, 61), (18, 60), (60, 20), (0, 20)])
def test_lengths_that_are_no_whole_cycles_are_refused(wanted: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="whole cycles"):
        slope.lengths(*wanted, 4, 0.01, 4.0)
