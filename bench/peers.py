"""How fast a row is beside the best peer: the fastest loader of the same table that is not gdsstream's own.

A peer is whatever a user could run instead: other libraries, and plain ios that one would write by hand. What only
shows the hardware's limit (copies from memory that was pinned before) is no peer, and nothing is compared with a row
whose bytes end elsewhere: in host memory, where the others bring theirs to the GPU. The ratio is the median of the
ratios within the rounds, as a share of the ceiling is, and not the ratio of the medians: where few rounds drift, the
two can lie on different sides of 1, which the range beside it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench import report_bounds, results, stats
from bench.measure import NOT_COLD
from bench.record import Record
from bench.report_bounds import Bounds
from bench.table import REPORT_ONLY, Column

#: Kinds of loaders (loaders.KINDS) that are routes of gdsstream; so are all whose name begins with it.
_OWN = ("shard_loader", "transfer_engine")
#: Ios by system calls and copies by the driver's calls, put together in the bench: no library, and not gdsstream.
_PLAIN = ("pread", "transfer_posix", "transfer_aio", "transfer_bounce")
_LIMITS = ("pinned_copies",)


class Beside(NamedTuple):
    """The ratio and how sure it is, as columns, and the note that explains them."""

    columns: list[Column]
    note: str


def is_own(record: Record) -> bool:
    """Whether a row is of a route of gdsstream."""
    return _kind(record).startswith("gdsstream") or _kind(record) in _OWN


def is_plain(record: Record) -> bool:
    """Whether a row is of ios that one would write by hand, and of no library."""
    return _kind(record) in _PLAIN


def is_peer(record: Record) -> bool:
    """Whether a row is of another library, or of what one would write by hand."""
    return not is_own(record) and _kind(record) not in _LIMITS


def beside(sections: Sequence[Sequence[Record]], from_width: int, bounds_width: int = REPORT_ONLY) -> Beside | None:
    """Each row's rate over the best peer's of its section; None where no section has a peer and a row of ours."""
    found: dict[int, list[float]] = {}
    names: dict[str, None] = {}
    for rows in (group for section in sections for group in _ending_together(section)):
        peers = [row for row in rows if is_peer(row) and row.gb_per_s]
        if not any(map(is_own, rows)) or not peers:
            continue
        best = max(peers, key=lambda row: row.gb_per_s["median"] if row.gb_per_s else 0.0)
        names[f"{best.loader} (plain ios)" if is_plain(best) else best.loader] = None
        found |= {id(row): ratios(row, best) for row in rows}
    if not any(found.values()):
        return None

    def bounds(record: Record) -> Bounds | None:
        pairs = found.get(id(record), [])
        if len(pairs) < 2:
            return None
        return Bounds(*(stats.median_ci95(pairs) or (min(pairs), max(pairs))), len(pairs))

    def cell(record: Record) -> str:
        pairs = found.get(id(record))
        return f"{stats.median(pairs):.2f}" if pairs else ""

    rows = [row for section in sections for row in section]
    sure = report_bounds.column(rows, bounds, lambda each: f"{each.low:.2f}-{each.high:.2f}", bounds_width)
    return Beside(
        [Column("x peer", cell, from_width), sure._replace(title=f"x {sure.title}")],
        "x peer: the rate over that of the fastest that is not gdsstream's, the median of the ratios within the "
        f"rounds: {', '.join(names)}. x {sure.title}: of these ratios.",
    )


def ratios(row: Record, other: Record) -> list[float]:
    """The one's rate over the other's in each round that counts for both."""
    pairs = zip(results.all_rates(row), results.all_rates(other), row.sample_labels, other.sample_labels, strict=False)
    return [mine / theirs for mine, theirs, labels, others in pairs if NOT_COLD not in labels + others]


def _ending_together(section: Sequence[Record]) -> list[list[Record]]:
    """Those that end in host memory, and the others."""
    return [[row for row in section if (row.delivers == "host memory") == host] for host in (False, True)]


def _kind(record: Record) -> str:
    return str(record.config.get("loaders", {}).get(record.loader, {}).get("kind", record.loader))
