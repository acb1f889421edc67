"""The search on landscapes that are known, with noise, drift and failures; on a clock that only reads move."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log2
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from gdsstream import tuning
from gdsstream.duel import Duel, lower_bound, spread
from gdsstream.errors import BackendUnavailableError, ConfigError, MemoryBudgetError, ReadError
from gdsstream.tuning import Family, Knobs, Outcome
from gdsstream.tuning_space import Place, space

MIB = 2**20
SPACE = space(Place(cores=16, gpu=True, direct=True, prefers_direct=True, io_uring=True, cufile=True))


def hill(knobs: Knobs) -> float:
    """4 GB/s for the default; O_DIRECT has its peak, 10 GB/s, at 4 threads, depth 128 and a ring of 192 MiB."""
    if not knobs:
        return 4.0
    if knobs["backend"] == "cufile":
        return 3.0
    if "direct_io" in knobs:
        return 2.0
    off = abs(log2(knobs["direct_threads"] / 4)) + abs(log2(knobs["io_depth"] / 128))
    return 10.0 / (1 + 0.2 * (off + abs(log2(knobs["staging_bytes"] / (192 * MIB)))))


def flat(knobs: Knobs) -> float:
    return 4.0


class Machine:
    """Reads at the rate of a landscape, with noise; each takes its time on a clock of its own."""

    def __init__(self, landscape: Callable[[Knobs], float], noise: float = 0.0, seed: int = 0, overhead: float = 0.02):
        self.now = 100.0
        self.reads: list[tuple[dict[str, Any], int]] = []
        self.drift = 0.0
        self._landscape, self._noise, self._overhead = landscape, noise, overhead
        self._random = random.Random(seed)

    def measure(self, knobs: Knobs, nbytes: int) -> float:
        self.reads.append((dict(knobs), nbytes))
        rate = (
            self._landscape(knobs) * self._random.lognormvariate(0, self._noise) * (1 - self.drift) ** len(self.reads)
        )
        self.now += self._overhead + nbytes / rate / 1e9
        return rate

    def tune(self, seconds: float = 1000.0, most_bytes: int = 1 << 30, seed: int = 0, **options: Any) -> Outcome:
        schedule = tuning.plan(SPACE, most_bytes)
        return tuning.tune(SPACE, self.measure, schedule, seconds=seconds, clock=lambda: self.now, seed=seed, **options)


@pytest.mark.parametrize("seed", range(5))
def test_finds_the_top_of_a_hill(seed: int):
    outcome = Machine(hill).tune(seed=seed)
    assert outcome.challenger is not None
    assert hill(outcome.challenger) > 0.7 * 10, "24 of 490 settings, and the neighbours of the best"
    assert outcome.family == "O_DIRECT"
    assert outcome.better
    assert outcome.in_time
    assert outcome.duel.gain == pytest.approx(hill(outcome.challenger) / 4)


def test_finds_it_in_noise():
    wins = [Machine(hill, noise=0.15, seed=seed).tune(seed=seed).better for seed in range(20)]
    assert sum(wins) >= 19


def test_noise_alone_wins_nothing():
    outcomes = [Machine(flat, noise=0.15, seed=seed).tune(seed=seed) for seed in range(60)]
    assert all(outcome.challenger is not None for outcome in outcomes)
    best = [max(t.gb_per_s or 0 for t in o.trials if t.family != "default" and t.round == 2) for o in outcomes]
    assert sum(rate > 4.0 for rate in best) > 50, "the search's own figures nearly always look better than the default"
    assert sum(outcome.better for outcome in outcomes) <= 4  # 1 in 30 each, less those below the margin


def test_a_machine_that_slows_down_favours_nobody():
    machine = Machine(flat)
    machine.drift = 0.02
    duel = machine.tune().duel
    assert duel.default[-1] < 0.7 * duel.default[0]
    assert not duel.won


def test_a_small_gain_is_not_worth_a_profile():
    outcome = Machine(lambda knobs: 4.0 if not knobs else 4.05).tune()
    assert outcome.duel.at_least is not None
    assert outcome.duel.at_least > 1
    assert not outcome.better


def test_later_rounds_are_fewer_and_longer_and_meet_the_neighbours():
    machine = Machine(hill)
    trials = machine.tune().trials
    rounds = [[trial for trial in trials if trial.round == number] for number in range(3)]
    assert [len(one) - 1 for one in rounds[:2]] == [24, 8]
    assert [one[0].family for one in rounds] == ["default"] * 3
    assert rounds[0][0].nbytes * 8 < rounds[1][0].nbytes * 3 < rounds[2][0].nbytes + 10 * MIB
    best = max(rounds[1][1:], key=lambda trial: trial.gb_per_s or 0)
    before = [t.knobs for t in rounds[1]]
    new = [trial for trial in rounds[2] if trial.knobs not in before]
    family = next(one for one in SPACE if one.name == best.family)
    place = next(one for one in family.places() if family.at(one) == best.knobs)
    beside = [family.at(one) for one in family.beside(place) if family.at(one) not in before]
    assert len(new) == min(6, len(beside)) > 2
    assert all(trial.knobs in beside for trial in new)
    assert all(sum(trial.knobs[knob] != best.knobs[knob] for knob in best.knobs) == 1 for trial in new)


def test_every_family_has_its_chance():
    first = [trial.family for trial in Machine(hill).tune().trials if trial.round == 0]
    assert {name: first.count(name) for name in set(first)} == {
        "default": 1,
        "O_DIRECT": 8,
        "page cache": 8,
        "cuFile": 8,
    }


def test_what_cannot_work_is_a_trial_with_a_reason():
    def landscape(knobs: Knobs) -> float:
        if knobs.get("backend") == "cufile":
            raise BackendUnavailableError("no kvikio here")
        if knobs.get("staging_bytes") == 192 * MIB:
            raise MemoryBudgetError("no room")
        return hill(knobs)

    outcome = Machine(landscape).tune()
    assert {trial.failure for trial in outcome.trials} == {"", "no kvikio here", "no room"}
    assert all((trial.gb_per_s is None) == bool(trial.failure) for trial in outcome.trials)
    assert outcome.better


def test_where_nothing_but_the_default_works():
    def landscape(knobs: Knobs) -> float:
        if knobs:
            raise MemoryBudgetError("no room")
        return 4.0

    outcome = Machine(landscape).tune()
    assert (outcome.challenger, outcome.better, outcome.duel.gain) == (None, False, None)


def test_where_the_default_does_not_work():
    def landscape(knobs: Knobs) -> float:
        raise ReadError("the disk is gone")

    with pytest.raises(ReadError, match="the disk is gone"):
        Machine(landscape).tune()


def test_a_challenger_that_fails_in_the_pairs_has_not_won():
    machine, before = Machine(hill), Machine(hill)
    tuning.tune(SPACE, before.measure, tuning.plan(SPACE, 1 << 30), seconds=1000, clock=lambda: before.now)
    last = len(before.reads) - 3

    def measure(knobs: Knobs, nbytes: int) -> float:
        if len(machine.reads) > last and knobs:
            raise ReadError("eio")
        return machine.measure(knobs, nbytes)

    outcome = tuning.tune(SPACE, measure, tuning.plan(SPACE, 1 << 30), seconds=1000, clock=lambda: machine.now)
    assert outcome.duel.won
    assert (outcome.failure, outcome.better) == ("eio", False)


@settings(max_examples=40, deadline=None)
@given(seconds=st.floats(0.5, 200), rate=st.floats(0.05, 50), most=st.integers(tuning.LEAST_BYTES, 2 << 30))
@example(seconds=5.5, rate=4.0, most=53477376)  # the time would do, but not for reads that all cost as the first
@example(seconds=60.0, rate=4.0, most=53477376)
def test_keeps_to_what_it_announced(seconds: float, rate: float, most: int):
    machine = Machine(lambda knobs: rate)
    schedule = tuning.plan(SPACE, most)
    seen: list[tuple[int, int]] = []
    outcome = machine.tune(seconds, most, progress=lambda *both: seen.append(both))
    total = sum(nbytes for _, nbytes in machine.reads)
    assert total == outcome.nbytes == seen[-1][0] <= schedule.nbytes
    assert len(machine.reads) <= schedule.reads
    assert max(nbytes for _, nbytes in machine.reads) <= max(most, tuning.LEAST_BYTES)
    # What is under way when the time is over is finished: the default's first reads, or a pair.
    longest = max(nbytes for _, nbytes in machine.reads) / rate / 1e9 + 0.02
    assert machine.now - 100 <= seconds + 2 * longest + 1e-6
    base = schedule.rounds[0].nbytes
    counts = [(one.settings + 1, one.nbytes) for one in schedule.rounds] + [(2 * schedule.pairs, schedule.pair_bytes)]
    # What the first read costs beside its bytes is expected of the others in proportion to theirs.
    expected = (base / rate / 1e9 + 0.02) * (2 + sum(count * max(0.3, nbytes / base) for count, nbytes in counts))
    event("time for all of it" if expected < seconds else "too little time")
    if expected < seconds and schedule.nbytes / rate / 1e9 + 60 * 0.02 < seconds / 3:
        # A best one at the edge of the space has fewer neighbours.
        last = schedule.rounds[2]
        fewer = last.settings + 1 - sum(trial.round == 2 for trial in outcome.trials)
        assert (outcome.in_time, total) == (True, schedule.nbytes - fewer * last.nbytes)


def test_a_slow_machine_gets_shorter_reads_then_fewer():
    fast = Machine(flat).tune(seconds=1000)
    slow = Machine(flat).tune(seconds=5)
    slower = Machine(lambda knobs: 0.05).tune(seconds=10)
    assert fast.trials[-1].nbytes > slow.trials[-1].nbytes >= slower.trials[-1].nbytes >= tuning.LEAST_BYTES
    assert (fast.in_time, slow.in_time, slower.in_time) == (True, True, False)
    assert len(slow.duel.default) == 11
    assert len(slower.trials) < len(slow.trials)


def test_a_space_of_one_setting():
    one = [Family("only", {"backend": "staged"}, {"num_threads": (4,)})]
    machine = Machine(lambda knobs: 8.0 if knobs else 4.0)
    outcome = tuning.tune(one, machine.measure, tuning.plan(one, 64 * MIB), seconds=100, clock=lambda: machine.now)
    assert outcome.challenger == {"backend": "staged", "num_threads": 4}
    assert outcome.duel.gain == 2


def test_too_little_to_read():
    with pytest.raises(ConfigError, match="too few to tell settings apart"):
        tuning.plan(SPACE, tuning.LEAST_BYTES - 1)


# --- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "place"), [(0, None), (4, None), (5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (13, 3)])
def test_the_bound_is_an_order_statistic(n: int, place: int | None):
    values = [1.0 + i / 10 for i in range(n)]
    assert lower_bound(values[::-1]) == (None if place is None else values[place])


def test_the_bound_holds_as_often_as_it_says():
    # The median of the distribution is 1; how far its tails reach must not matter.
    rng = random.Random(1)
    for draw in (lambda: rng.gauss(1, 0.2), lambda: rng.lognormvariate(0, 1.5), lambda: 1 + rng.gauss(0, 1) ** 3):
        above = sum((lower_bound([draw() for _ in range(11)]) or 0) > 1 for _ in range(2000))
        assert above / 2000 <= 0.05


def test_a_duel_needs_enough_pairs_a_bound_and_a_margin():
    assert not Duel((1.0,) * 4, (2.0,) * 4).won
    assert Duel((1.0,) * 5, (2.0,) * 5).won
    assert not Duel((1.0,) * 5, (2.0, 2.0, 2.0, 2.0, 0.9)).won
    assert not Duel((1.0,) * 5, (1.02,) * 5).won
    assert Duel((), ()).gain is None
    assert spread([1.0, 2.0, 4.0]) == 1.0


# --- the choice -----------------------------------------------------------------------------------------------------


def test_the_choice_fits_the_place():
    def names(**facts: Any) -> list[str]:
        base = {"cores": 4, "gpu": False, "direct": True, "prefers_direct": True, "io_uring": True, "cufile": False}
        return [family.name for family in space(Place(**{**base, **facts}))]

    assert names() == ["O_DIRECT", "page cache"]
    assert names(direct=False, prefers_direct=False) == ["page cache"]
    assert names(gpu=True, cufile=True) == ["O_DIRECT", "page cache", "cuFile"]


def test_files_on_a_network_are_only_read_with_o_direct_where_that_is_asked_for():
    local = {one.name: one.fixed for one in space(Place(4, False, True, True, True, False))}
    network = {one.name: one.fixed for one in space(Place(4, False, True, False, True, False))}
    assert local == {"O_DIRECT": {"backend": "staged"}, "page cache": {"backend": "staged", "direct_io": False}}
    assert network == {"O_DIRECT": {"backend": "staged", "direct_io": True}, "page cache": {"backend": "staged"}}


def test_every_setting_is_one_that_an_engine_takes():
    from gdsstream.config import StreamConfig

    for io_uring in (True, False):
        for family in space(Place(2, True, True, True, io_uring, True)):
            for place in family.places():
                StreamConfig(**family.at(place))
