"""How fast a row is beside the best peer: the fastest loader of the same table that is not gdsstream's own.

A peer is whatever a user could run instead: other libraries, and the loop of `pread` that one would write by hand. What
only shows the hardware's limit (copies from memory that was pinned before) is no peer. The ratio is the median of the
ratios within the rounds, as a share of the ceiling is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench import results, stats
from bench.measure import NOT_COLD
from bench.record import Record
from bench.table import Column

#: Kinds of loaders (loaders.KINDS) that are routes of gdsstream; so are all whose name begins with it.
_OWN = ("shard_loader",)
_LIMITS = ("pinned_copies",)


class Beside(NamedTuple):
    """A column, and the note that explains it."""

    column: Column
    note: str


def is_own(record: Record) -> bool:
    """Whether a row is of a route of gdsstream."""
    return _kind(record).startswith("gdsstream") or _kind(record) in _OWN


def is_peer(record: Record) -> bool:
    """Whether a row is of another library, or of what one would write by hand."""
    return not is_own(record) and _kind(record) not in _LIMITS


def beside(sections: Sequence[Sequence[Record]], from_width: int) -> Beside | None:
    """Each row's rate over the best peer's of its section; None where no section has a peer and a row of ours."""
    ratios: dict[int, float] = {}
    names: dict[str, None] = {}
    for rows in sections:
        peers = [row for row in rows if is_peer(row) and row.gb_per_s]
        if not peers or len(peers) == len(rows):
            continue
        best = max(peers, key=lambda row: row.gb_per_s["median"] if row.gb_per_s else 0.0)
        names[best.loader] = None
        for row in rows:
            if (found := ratio(row, best)) is not None:
                ratios[id(row)] = found
    if not ratios:
        return None
    return Beside(
        Column("x peer", lambda r: f"{ratios[id(r)]:.2f}" if id(r) in ratios else "", from_width),
        f"x peer: the rate over that of the fastest that is not gdsstream's: {', '.join(names)}.",
    )


def ratio(row: Record, other: Record) -> float | None:
    """The median over the rounds of the one's rate over the other's; None where no round counts for both."""
    pairs = [
        (mine, theirs)
        for mine, theirs, labels, others in zip(
            results.all_rates(row), results.all_rates(other), row.sample_labels, other.sample_labels, strict=False
        )
        if NOT_COLD not in labels + others
    ]
    return stats.median([mine / theirs for mine, theirs in pairs]) if pairs else None


def _kind(record: Record) -> str:
    return str(record.config.get("loaders", {}).get(record.loader, {}).get("kind", record.loader))
