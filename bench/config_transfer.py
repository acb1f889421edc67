"""Parameters of verb `transfer`: blocks of storage moved by a named route.

Everything that is a list is a part of the run each: a run measures every combination, one after the other, with rows of
its own. A row may also set `io_bytes`, `threads`, `depth` and `registered` for itself (loaders/transfer_route.py), and
is then the same in all parts: so two settings are two rows of one part, measured in turn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.config_base import BenchConfigError, ScenarioConfig, at_least, one_of, whole_numbers

OPS = ("read", "write", "randread", "randwrite")
MOST_DEPTH = 128
#: What a run measures one after the other, in this order.
PARTS = ("ops", "io_bytes", "total_bytes", "threads", "depth", "shift_bytes", "registered")

#: What a row may set for itself.
ROW_SETTINGS = ("io_bytes", "threads", "depth", "registered")


@dataclass(frozen=True, slots=True)
class TransferConfig(ScenarioConfig):
    """See above. Sizes are bytes, times seconds."""

    #: In the order of the file, or of a permutation drawn from `seed`; writes go into files of their own.
    ops: list[str] = field(default_factory=lambda: ["read"])
    #: Of one input or output; ios are what is counted.
    io_bytes: list[int] = field(default_factory=lambda: [1 << 20])
    #: Least, most and step of sizes that the ios have in turn, as `gdsio -i`; instead of `io_bytes`.
    io_range: list[int] | None = None
    #: Parts by name instead of every operation with every size: operation:bytes, such as read:4194304.
    pairs: list[str] | None = None
    #: What a sample moves, at most; more than the files hold begins at their beginning again.
    total_bytes: list[int] = field(default_factory=lambda: [256 << 20])
    #: A row that would take longer for `total_bytes` moves less, by its first load; None: all of them.
    sample_seconds: float | None = None
    threads: list[int] = field(default_factory=lambda: [8])
    #: Ios in flight in each thread.
    depth: list[int] = field(default_factory=lambda: [1])
    #: Where in each file the first io may begin.
    offset_bytes: int = 0
    #: Added to every offset, which else is a multiple of the io: 512 is aligned to sectors, 1 is not aligned.
    shift_bytes: list[int] = field(default_factory=lambda: [0])
    #: Buffers page-locked or registered beforehand, where the route has any.
    registered: list[bool] = field(default_factory=lambda: [True])
    #: Writes end with fdatasync; without, as gdsio, they are durable only where O_DIRECT and the disk make them so.
    fsync: bool = False
    #: Compare the bytes of every sample; false: of the first load only.
    verify: bool = True
    #: A job file of gdsio, whose jobs become the rows and are measured at once.
    job_file: str | None = None
    #: Print each row as gdsio does, besides the table.
    gdsio_lines: bool = False

    def __post_init__(self) -> None:
        ScenarioConfig.__post_init__(self)
        if not self.ops:
            raise BenchConfigError("'scenario.ops' is empty; name one, such as scenario.ops=[read]")
        for op in self.ops:
            one_of("scenario.ops", str(op), OPS)
        for name in ("io_bytes", "total_bytes", "threads", "depth"):
            whole_numbers(f"scenario.{name}", getattr(self, name), 1)
        whole_numbers("scenario.shift_bytes", self.shift_bytes, 0)
        at_least("scenario.offset_bytes", self.offset_bytes, 0)
        if max(self.depth) > MOST_DEPTH:
            raise BenchConfigError(f"'scenario.depth' holds {max(self.depth)}; it has to be at most {MOST_DEPTH}")
        if self.sample_seconds is not None and self.sample_seconds <= 0:
            raise BenchConfigError(f"'scenario.sample_seconds' is {self.sample_seconds}; it has to be positive")
        if not self.registered or any(not isinstance(value, bool) for value in self.registered):
            raise BenchConfigError(f"'scenario.registered' is {self.registered}; it has to be a list of true and false")
        self._check_range()
        largest = max(size for _, size in self._kinds())
        if largest > min(self.total_bytes):
            raise BenchConfigError(
                f"'scenario.total_bytes' holds {min(self.total_bytes)}, which is less than an io of {largest} bytes; "
                "raise it, or lower scenario.io_bytes"
            )

    def parts(self) -> Iterator[TransferConfig]:
        """Every combination, each a scenario with lists of one."""
        names = [name for name in PARTS if name not in ("ops", "io_bytes")]
        values = itertools.product(*(getattr(self, name) for name in names))
        for (op, io_bytes), chosen in itertools.product(self._kinds(), list(values)):
            single: dict[str, Any] = {name: [value] for name, value in zip(names, chosen, strict=True)}
            yield dataclasses.replace(self, pairs=None, ops=[op], io_bytes=[io_bytes], **single)

    @property
    def writes(self) -> bool:
        """Whether any part writes."""
        return any(op.endswith("write") for op, _ in self._kinds())

    def _kinds(self) -> list[tuple[str, int]]:
        """Operation and size of an io, or the largest, of each part."""
        if self.pairs is not None:
            return [_pair(str(pair)) for pair in self.pairs]
        return list(itertools.product(self.ops, [self.io_range[1]] if self.io_range else self.io_bytes))

    def _check_range(self) -> None:
        if self.pairs is not None and (self.io_range or not self.pairs):
            raise BenchConfigError("'scenario.pairs' is empty or beside an io_range; name pairs, or set it to null")
        if self.io_range is None:
            return
        whole_numbers("scenario.io_range", self.io_range, 1)
        if len(self.io_range) != 3 or self.io_range[0] > self.io_range[1]:
            raise BenchConfigError(
                f"'scenario.io_range' is {self.io_range}; it has to be [least, most, step], such as "
                "[1048576, 4194304, 1048576]"
            )


def _pair(text: str) -> tuple[str, int]:
    op, _, size = text.partition(":")
    one_of("scenario.pairs", op, OPS)
    if not size.isdecimal() or int(size) < 1:
        raise BenchConfigError(f"'scenario.pairs' holds {text!r}; it has to be operation:bytes, such as read:4194304")
    return op, int(size)
