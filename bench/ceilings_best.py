"""Which arrangement of ios a disk is fastest with: found before the rounds, and asked again in every round.

A single short pass of each says little where storage is shared with others, and a ceiling that was picked from one is
beaten by the rows under it. So all are screened with little data, the fastest of them tried for _TRIAL_S each, and the
best few of these are measured in every round, beginning with another one each time. The ceiling is one of them, the
one whose median is the highest when all rounds are over: the best of each round is the luckiest of several, which no
way of reading keeps up. Of three equal ones on a disk that varies by 10 % it is 8 % above them all, so that a row as
fast as they are would stand at 92 % (a test has it). All of it is bounded: a screening by about _SCREEN_S for each,
finding them by _BUDGET_S, and a measurement of a round by `sample_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from bench import stats

Choice = TypeVar("Choice")

_MIB = 1 << 20
_PILOT_BYTES = 4 * _MIB
_SCREEN_BYTES, _SCREEN_S = 64 * _MIB, 0.05
_TRIED, _TRIAL_S, _TRIAL_PASSES = 6, 0.25, 4
_BUDGET_S = 12.0


class Best(Generic[Choice]):
    """The best of `choices`. `rate(choice, nbytes)` moves as many bytes and returns GB/s; `least(choice)` is what it
    needs to be busy. A measurement moves `nbytes` at most, which have to be there, and takes
    about `sample_s` seconds at most. Raises ValueError for no choices."""

    def __init__(
        self,
        rate: Callable[[Choice, int], float],
        choices: Sequence[Choice],
        nbytes: int,
        least: Callable[[Choice], int] = lambda choice: 0,
        *,
        kept: int = 3,
        sample_s: float = 1.0,
    ) -> None:
        if not choices:
            raise ValueError("there is no arrangement to choose from")
        self._rate, self._nbytes, self._least = rate, nbytes, least
        deadline = time.monotonic() + _BUDGET_S
        screened = self._screen(choices, deadline)
        tried = {choice: screened[choice] for choice in sorted(screened, key=screened.__getitem__)[-_TRIED:]}
        for choice in reversed(tried):
            if time.monotonic() > deadline:
                break
            tried[choice] = self._trial(choice, tried[choice])
        chosen = sorted(tried, key=tried.__getitem__)[-kept:]
        self._sizes = {choice: self._bytes(choice, tried[choice], sample_s) for choice in reversed(chosen)}
        #: GB/s in each round, by arrangement; the best by the trials first.
        self.rates: dict[Choice, list[float]] = {choice: [] for choice in self._sizes}

    def sample(self) -> float:
        """GB/s in one more round, of the one that is the best so far."""
        order = list(self._sizes)
        turn = len(self.rates[order[0]]) % len(order)
        measured = {choice: self._rate(choice, self._sizes[choice]) for choice in order[turn:] + order[:turn]}
        for choice, rate in measured.items():
            self.rates[choice].append(rate)
        return measured[self.winner]

    @property
    def winner(self) -> Choice:
        """The one whose median over the rounds is the highest, or the best by the trials before any."""
        return max(self.rates, key=lambda choice: stats.median(self.rates[choice]) if self.rates[choice] else 0.0)

    def in_hindsight(self, rounds: int) -> list[float]:
        """GB/s of the winner in each of the last `rounds`."""
        return self.rates[self.winner][-rounds:] if rounds else []

    def describe(self, says: Callable[[Choice], str]) -> str:
        """The winner, and how the others that were measured in every round compare with it."""
        best, others = self.winner, [choice for choice in self.rates if choice != self.winner]
        if not others or not self.rates[best]:
            return says(best)
        most = stats.median(self.rates[best])
        each = (f"{says(choice)} had {stats.median(self.rates[choice]) / most:.0%}" for choice in others)
        return f"{says(best)}; in the same rounds {', '.join(each)}"

    def _bytes(self, choice: Choice, rate: float, seconds: float) -> int:
        """What takes about as long at this rate, in GB/s."""
        return min(self._nbytes, max(int(min(rate * 1e9 * seconds, self._nbytes)), self._least(choice), _PILOT_BYTES))

    def _screen(self, choices: Sequence[Choice], deadline: float) -> dict[Choice, float]:
        best = self._rate(choices[0], self._bytes(choices[0], 0.0, 0.0))
        found: dict[Choice, float] = {}
        for choice in choices:
            if found and time.monotonic() > deadline:
                break
            size = min(self._bytes(choice, best, _SCREEN_S), max(_SCREEN_BYTES, self._least(choice)))
            found[choice] = self._rate(choice, size)
            best = max(best, found[choice])
        return found

    def _trial(self, choice: Choice, rate: float) -> float:
        """GB/s over about _TRIAL_S, in several passes where the files are short."""
        size = self._bytes(choice, rate, _TRIAL_S)
        seconds, moved = 0.0, 0
        for _ in range(_TRIAL_PASSES):
            moved += size
            seconds += size / self._rate(choice, size) / 1e9
            if seconds >= 0.8 * _TRIAL_S:
                break
        return moved / seconds / 1e9
