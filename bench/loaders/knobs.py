"""The knobs of gdsstream that a row may set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.loaders.base import Loader


@dataclass
class Knobs(Loader):
    """`backend` is asked for by name, so it never falls back to another. Knobs left at None keep their defaults."""

    backend: str | None = None
    reader: str | None = None
    direct_io: bool | str | None = None
    chunk_size: int | None = None
    io_depth: int | None = None
    num_threads: int | None = None
    staging_bytes: int | None = None

    def knobs(self, *others: str) -> dict[str, Any]:
        """Those that are set, as keyword arguments for gdsstream; `others` are fields of the row's own."""
        names = ("backend", "reader", "direct_io", "chunk_size", "io_depth", "num_threads", "staging_bytes", *others)
        return {name: value for name in names if (value := getattr(self, name)) is not None}
