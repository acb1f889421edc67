"""The search for better settings, and the proof that they are. Pure: what a trial measures comes from outside.

Successive halving: many settings get a short read each, the best third of them one three times as long, and the last
few, joined by the neighbours of the best, the longest. So most bytes go to settings that may win, and a full grid, of
which most is slow, is never read.

The best of many noisy figures looks better than it is. So what the search found only counts as a challenger: it meets
the default in fresh pairs of reads (`duel`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, TypeAlias

from gdsstream.duel import Duel
from gdsstream.errors import ConfigError, GdsStreamError

MIB = 2**20
#: What a read has to have at least: less is over before the readers are under way.
LEAST_BYTES = 8 * MIB

_CANDIDATES = 24
_GROWTH = 3
_PAIRS = 11
_NEIGHBOURS = 6
_SEARCH_SHARE = 0.6  # of the time; the pairs have the rest

Knobs: TypeAlias = Mapping[str, Any]
#: GB/s of reading that many bytes with those knobs; raises GdsStreamError where they cannot work.
Measure: TypeAlias = Callable[[Knobs, int], float]


@dataclass(frozen=True, slots=True)
class Family:
    """Settings of one kind: the knobs that are the same for all, and the values of the others, in their order."""

    name: str
    fixed: Knobs
    ranges: Mapping[str, Sequence[Any]]

    @property
    def size(self) -> int:
        """How many settings there are."""
        return prod(len(values) for values in self.ranges.values())

    def at(self, place: Sequence[int]) -> dict[str, Any]:
        """The knobs at that place of each range."""
        chosen = {knob: values[i] for (knob, values), i in zip(self.ranges.items(), place, strict=True)}
        return {**self.fixed, **chosen}

    def places(self) -> Iterator[tuple[int, ...]]:
        """Every place there is."""
        return product(*(range(len(values)) for values in self.ranges.values()))

    def beside(self, place: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The places that differ in one knob, by one step."""
        for knob, values in enumerate(self.ranges.values()):
            for step in (-1, 1):
                if 0 <= place[knob] + step < len(values):
                    yield (*place[:knob], place[knob] + step, *place[knob + 1 :])


@dataclass(frozen=True, slots=True)
class Round:
    """So many settings (the default beside them), each with a read of `nbytes`."""

    settings: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is to be read: rounds of the search, each shorter and longer than the last, then pairs."""

    rounds: tuple[Round, ...]
    pairs: int
    pair_bytes: int

    @property
    def reads(self) -> int:
        """How many reads there are at most: the default is read in each round, and once before it counts."""
        return 1 + sum(one.settings + 1 for one in self.rounds) + 2 * self.pairs

    @property
    def nbytes(self) -> int:
        """How many bytes are read at most."""
        search = self.rounds[0].nbytes + sum((one.settings + 1) * one.nbytes for one in self.rounds)
        return search + 2 * self.pairs * self.pair_bytes

    def shrunk(self, factor: int) -> Schedule:
        """The same with reads of a fraction of the bytes."""
        rounds = tuple(replace(one, nbytes=_whole(one.nbytes // factor)) for one in self.rounds)
        return replace(self, rounds=rounds, pair_bytes=_whole(self.pair_bytes // factor))


@dataclass(frozen=True, slots=True)
class Trial:
    """One read of the search: GB/s, or why there is none."""

    round: int
    family: str
    knobs: Knobs
    nbytes: int
    gb_per_s: float | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        challenger: the best that the search found beside the default; None where nothing else worked.
        family: what it belongs to.
        duel: how it did against the default.
        trials: every read of the search.
        nbytes: bytes that were read in all.
        in_time: whether the schedule was gone through to its end.
        failure: why the pairs were broken off, if they were.
    """

    challenger: Knobs | None
    family: str
    duel: Duel
    trials: tuple[Trial, ...]
    nbytes: int
    in_time: bool
    failure: str = ""

    @property
    def better(self) -> bool:
        """Whether the challenger is really better than the default."""
        return self.duel.won and not self.failure


def plan(space: Sequence[Family], most_bytes: int) -> Schedule:
    """What a search of that space reads, with single reads of at most `most_bytes`.

    Raises ConfigError where that is too little to measure anything.
    """
    if most_bytes < LEAST_BYTES:
        raise ConfigError(f"{most_bytes} bytes are too few to tell settings apart; give at least {LEAST_BYTES}")
    first = min(_CANDIDATES, sum(family.size for family in space))
    second = min(first, -(-first // _GROWTH))
    third = min(first, -(-second // _GROWTH) + _NEIGHBOURS)
    longest = _whole(most_bytes)
    sizes = (longest // _GROWTH**2, longest // _GROWTH, longest)
    rounds = (Round(count, _whole(nbytes)) for count, nbytes in zip((first, second, third), sizes, strict=True))
    return Schedule(tuple(rounds), _PAIRS, longest)


def tune(
    space: Sequence[Family],
    measure: Measure,
    schedule: Schedule,
    *,
    seconds: float,
    default: Knobs | None = None,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Search, and let the best meet the default.

    Args:
        space: what to choose from.
        measure: one read.
        schedule: the most that is read (`plan`); where time would not suffice, reads become shorter, then fewer.
        seconds: when to end; a pair of reads that is under way by then is finished.
        default: the knobs to beat.
        clock: seconds, for tests.
        seed: which settings the search begins with.
        progress: called with the bytes read so far, and the bytes in all.

    Raises what `measure` raises for the default. Settings that cannot work are trials with a reason.
    """
    return _Search(space, measure, schedule, seconds, default or {}, clock, seed, progress).run()


@dataclass(order=True, slots=True)
class _Candidate:
    """A setting; `score` is that of its last read, which had the most bytes."""

    score: float
    family: int = field(compare=False)
    place: tuple[int, ...] = field(compare=False)


class _Search:
    def __init__(
        self,
        space: Sequence[Family],
        measure: Measure,
        schedule: Schedule,
        seconds: float,
        default: Knobs,
        clock: Callable[[], float],
        seed: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._space, self._measure, self._schedule, self._default = space, measure, schedule, default
        self._clock, self._progress = clock, progress
        self._random = random.Random(seed)
        self._began = clock()
        self._seconds = seconds
        self._trials: list[Trial] = []
        self._nbytes = 0
        self._in_time = True

    def run(self) -> Outcome:
        first = self._schedule.rounds[0]
        self._read(self._default, first.nbytes)  # pays for whatever only the first read pays for
        began = self._clock()
        self._trial(0, "default", self._default, first.nbytes)
        self._fit(self._clock() - began)
        best = self._search()
        if best is None:
            return Outcome(None, "", Duel((), ()), tuple(self._trials), self._nbytes, self._in_time)
        family = self._space[best.family]
        knobs = family.at(best.place)
        duel, failure = self._fight(knobs)
        return Outcome(knobs, family.name, duel, tuple(self._trials), self._nbytes, self._in_time, failure)

    # --- time -------------------------------------------------------------------------------------------------------

    def _fit(self, cost: float) -> None:
        """Shorten reads, then drop settings, until the schedule fits: one read of the first round took `cost`."""
        base = self._schedule.rounds[0].nbytes

        def predicted(schedule: Schedule) -> float:
            # What a read costs beside its bytes (threads, pinned memory) is in `cost`; no read will take less.
            reads = [(one.settings + 1, one.nbytes) for one in schedule.rounds]
            reads.append((2 * schedule.pairs, schedule.pair_bytes))
            return sum(count * cost * max(0.3, nbytes / base) for count, nbytes in reads)

        left = self._seconds - (self._clock() - self._began)
        for factor in (1, 2, 4, 8, 16, 32, 64):
            fitting = self._schedule.shrunk(factor)
            if predicted(fitting) <= left:
                break
        while predicted(fitting) > left and fitting.rounds[0].settings > _GROWTH:
            rounds = tuple(replace(one, settings=-(-one.settings // 2)) for one in fitting.rounds)
            fitting = replace(fitting, rounds=rounds)
        self._in_time = fitting.rounds[0].settings == self._schedule.rounds[0].settings
        self._schedule = fitting

    def _spent(self, share: float) -> bool:
        return self._clock() - self._began >= self._seconds * share

    # --- the search -------------------------------------------------------------------------------------------------

    def _search(self) -> _Candidate | None:
        """The best of the last round that had any; None where no setting worked."""
        chosen, best = self._first(self._schedule.rounds[0].settings), None
        for number, one in enumerate(self._schedule.rounds):
            if number:
                self._trial(number, "default", self._default, one.nbytes)
            measured: list[_Candidate] = []
            for candidate in chosen[: one.settings]:
                if self._spent(_SEARCH_SHARE):
                    self._in_time = False
                    break
                family = self._space[candidate.family]
                score = self._trial(number, family.name, family.at(candidate.place), one.nbytes)
                if score is not None:
                    measured.append(_Candidate(score, candidate.family, candidate.place))
            # Rounds differ in bytes, and so in rates: only those of one round are compared.
            measured.sort(reverse=True)
            best = measured[0] if measured else best
            if not self._in_time or not measured:
                break
            chosen = measured[: -(-len(measured) // _GROWTH)]
            if number + 2 == len(self._schedule.rounds):
                chosen = [*chosen, *self._beside(chosen)]
        return best

    def _first(self, count: int) -> list[_Candidate]:
        """Settings to begin with: as many of each family, where it has them, in random order."""
        shuffled = []
        for index, family in enumerate(self._space):
            places = list(family.places())
            self._random.shuffle(places)
            shuffled.append([_Candidate(0.0, index, place) for place in places])
        longest = max(map(len, shuffled), default=0)
        mixed = [ones[i] for i in range(longest) for ones in shuffled if i < len(ones)]
        return mixed[:count]

    def _beside(self, chosen: Sequence[_Candidate]) -> list[_Candidate]:
        """Neighbours of the best that were never tried."""
        tried = [trial.knobs for trial in self._trials]
        best = chosen[0]
        family = self._space[best.family]
        found = [place for place in family.beside(best.place) if family.at(place) not in tried]
        self._random.shuffle(found)
        return [_Candidate(0.0, best.family, place) for place in found[:_NEIGHBOURS]]

    def _trial(self, number: int, family: str, knobs: Knobs, nbytes: int) -> float | None:
        try:
            rate = self._read(knobs, nbytes)
        except GdsStreamError as error:
            if family == "default":
                raise
            self._trials.append(Trial(number, family, knobs, nbytes, None, str(error)))
            return None
        self._trials.append(Trial(number, family, knobs, nbytes, rate))
        return rate

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _fight(self, knobs: Knobs) -> tuple[Duel, str]:
        default: list[float] = []
        tuned: list[float] = []
        nbytes = self._schedule.pair_bytes
        for number in range(self._schedule.pairs):
            if self._spent(1.0):
                self._in_time = False
                break
            try:
                # Who goes first changes, so that a drift has no side.
                if number % 2:
                    second = self._read(knobs, nbytes)
                    first = self._read(self._default, nbytes)
                else:
                    first = self._read(self._default, nbytes)
                    second = self._read(knobs, nbytes)
            except GdsStreamError as error:
                return Duel(tuple(default), tuple(tuned)), str(error)
            default.append(first)
            tuned.append(second)
        return Duel(tuple(default), tuple(tuned)), ""

    def _read(self, knobs: Knobs, nbytes: int) -> float:
        rate = self._measure(knobs, nbytes)
        self._nbytes += nbytes
        if self._progress is not None:
            self._progress(self._nbytes, max(self._nbytes, self._schedule.nbytes))
        return rate


def _whole(nbytes: int) -> int:
    """Whole MiB, and not less than what a read has to have."""
    return max(LEAST_BYTES, nbytes // MIB * MIB)


__all__ = [
    "LEAST_BYTES",
    "Family",
    "Knobs",
    "Measure",
    "Outcome",
    "Round",
    "Schedule",
    "Trial",
    "plan",
    "tune",
]
