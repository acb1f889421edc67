"""A ceiling that never moves."""

from __future__ import annotations

from bench.ceilings import Ceiling


class Steady(Ceiling):
    kind = "steady"

    def __init__(self, gb_per_s: float = 10.0) -> None:
        self._rate = gb_per_s

    def sample(self) -> float:
        return self._rate

    def describe(self) -> str:
        return f"always {self._rate:g} GB/s"
