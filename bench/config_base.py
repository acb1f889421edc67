"""What every configuration rests on: the errors, the parameters that all scenarios have, and checks of values.

Scenarios with many parameters have modules of their own (config_*.py), which build on this one; config.py knows them
all.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import stats

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
VERBS = ("read", "gather", "pipeline", "train", "epoch", "mlperf", "transfer", "write")


class BenchError(Exception):
    """The run cannot be made as asked; the message says why and what to do."""


class BenchConfigError(BenchError):
    """A key or value of the configuration is not valid."""


@dataclass(frozen=True, slots=True)
class ScenarioConfig:
    """Parameters of one verb. Sizes are bytes, times seconds."""

    name: str
    verb: str
    rounds: int = 7
    #: From the first start-up on; no new round starts after it, but at least three are made.
    max_seconds: float = 60.0
    #: No new round starts once the 95 % interval of every row's median rate is this narrow: half its width over the
    #: median, such as 0.02. It is asked from six rounds on, as fewer have no interval; None: make all `rounds`.
    target_spread: float | None = None
    #: Give torch's cached device memory back before each sample, so that every sample pays for its allocation, as a
    #: process's first load does.
    fresh_memory: bool = False
    records: int = 65536
    record_bytes: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("scenario.verb", self.verb, VERBS)
        at_least("scenario.rounds", self.rounds, 1)
        if self.target_spread is not None:
            if self.target_spread <= 0:
                raise BenchConfigError(f"'scenario.target_spread' is {self.target_spread}; it has to be positive")
            if self.rounds < stats.LEAST_FOR_INTERVAL:
                raise BenchConfigError(
                    f"'scenario.target_spread' needs at least {stats.LEAST_FOR_INTERVAL} rounds, and 'scenario.rounds' "
                    f"is {self.rounds}; raise it, or set scenario.target_spread=null"
                )
        at_least("scenario.records", self.records, 1)
        at_least("scenario.record_bytes", self.record_bytes, 512)

    def parts(self) -> Iterable[ScenarioConfig]:
        """What a run measures one after the other."""
        return [self]

    def check_storage(self, storage: StorageConfig) -> None:
        """Raise BenchConfigError where the scenario decides what `storage` says."""
        del storage


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Where the test files go and how large they are; None lets the machine decide (files.choose)."""

    dir: str | None = None
    files: int | None = None
    file_bytes: int | None = None
    #: Equal tensors in each file; None: the tensors of a mixture-of-experts layer.
    tensors: int | None = None
    keep_files: bool = False

    def __post_init__(self) -> None:
        if self.files is not None:
            at_least("storage.files", self.files, 1)
        if self.file_bytes is not None:
            at_least("storage.file_bytes", self.file_bytes, 1 << 20)
        if self.tensors is not None:
            at_least("storage.tensors", self.tensors, 1)


def nearest(word: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where something is near, else the list of what is valid."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names) or 'nothing'}"


def one_of(where: str, value: str, valid: Sequence[str]) -> None:
    """Raise BenchConfigError, naming the nearest, unless `value` is valid; `where` is the dotted key."""
    if value not in valid:
        raise BenchConfigError(f"'{where}' is {value!r}; {nearest(value, valid)}")


def at_least(where: str, value: float, least: float) -> None:
    """Raise BenchConfigError for a value below `least`."""
    if value < least:
        raise BenchConfigError(f"'{where}' is {value}; it has to be at least {least}")


def byte_size(text: str) -> int:
    """Bytes of 4096, 4k, 1M or 2GiB; units are binary. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError("it has to be a size, such as 4k, 1M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def whole_numbers(where: str, values: Sequence[object], least: int) -> None:
    """Raise BenchConfigError unless there are values, and all are whole numbers of at least `least`."""
    if not values:
        raise BenchConfigError(f"'{where}' is empty; name a number, such as {where}=[8192]")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise BenchConfigError(f"'{where}' holds {value!r}; it has to be a list of whole numbers")
        at_least(where, value, least)
