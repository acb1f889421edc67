"""Our figure for a claim, found in the records of a part by its selector. Pure: records in, figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from bench import results, stats
from bench.measure import NOT_COLD
from bench.record import Record
from bench.reference.plan import Selector


@dataclass(slots=True)
class Made:
    """What became of a part: its records, and why there are none or not all of them."""

    rows: list[Record] = field(default_factory=list)
    problem: str | None = None
    seconds: float | None = None


class Missing(Exception):
    """There is no figure; the message says why."""


class Figure(NamedTuple):
    """Of one row: the samples in order (None where one does not count), or a derived value with its interval."""

    row: Record
    samples: Sequence[float | None]
    value: float
    interval: tuple[float, float] | None
    #: Of a rate: each sample over the ceiling of its round.
    shares: Sequence[float | None] = ()
    #: Of a derived value, the least and most of the samples behind it.
    range: tuple[float, float] | None = None

    @property
    def counted(self) -> list[float]:
        return [sample for sample in self.samples if sample is not None]

    @property
    def n(self) -> int:
        return int(self.row.gb_per_s["n"]) if self.row.gb_per_s else 0


def select(selector: Selector, made: Mapping[str, Made]) -> Figure:
    """The figure that the selector names: of several rows, the one whose median rate is highest. Raises Missing."""
    part = made.get(selector.part)
    if part is None:
        raise Missing(f"part {selector.part} was not made")
    if not part.rows:
        raise Missing(f"part {selector.part}: {part.problem or 'it has no records'}")
    wanted = [selector.loader] if isinstance(selector.loader, str) else selector.loader
    named = [row for row in part.rows if wanted is None or row.loader in wanted]
    found = [row for row in named if _matches(row, selector)]
    measured = [row for row in found if row.status == "ok" and row.gb_per_s]
    if not measured:
        raise Missing(_why(selector, part, named, found))
    best = max(measured, key=lambda row: row.gb_per_s["median"] if row.gb_per_s else 0.0)
    return _of(best, selector)


def _why(selector: Selector, part: Made, named: Sequence[Record], found: Sequence[Record]) -> str:
    """Why no row of those that were asked for has a figure."""
    if found:
        return "; ".join(dict.fromkeys(f"{row.loader} {row.status}: {_first_line(row.reason)}" for row in found))
    if part.problem:
        return f"part {selector.part}: {part.problem}"
    if not named:
        return f"part {selector.part} has no row {selector.loader!r}"
    where = ", ".join(f"{name}={value}" for name, value in selector.where.items())
    return f"part {selector.part} has no row of {selector.loader or 'any loader'} with {where}"


def _matches(row: Record, selector: Selector) -> bool:
    # A part that could not begin has the whole list of what it would have gone through.
    flat = results.settings(row) | {f"derived.{name}": value for name, value in (row.derived or {}).items()}
    return all(
        (value in flat[name] if isinstance(flat.get(name), list) else flat.get(name) == value)
        for name, value in selector.where.items()
    )


def _of(row: Record, selector: Selector) -> Figure:
    figure, scale = selector.figure, selector.scale
    kind, _, name = figure.partition(".")
    if figure == "samples_s":
        return _sampled(row, [scale * seconds for seconds in row.samples_s])
    if figure in ("gb_per_s", "units_per_s"):
        amount = row.bytes / 1e9 if figure == "gb_per_s" else float(row.units)
        return _with_shares(_sampled(row, [scale * amount / seconds for seconds in row.samples_s]))
    if figure == "layer_s" and "short_s" in row.figures:
        columns = (row.samples_s, *(row.figures[name] for name in ("short_s", "short_layers", "long_layers")))
        rounds = zip(*columns, strict=True)
        return _sampled(row, [scale * (whole - short) / (long - few) for whole, short, few, long in rounds])
    if kind == "figures" and name in row.figures:
        return _sampled(row, [scale * value for value in row.figures[name]])
    if figure == "pct_ceiling":
        scale /= 100
    held = (row.derived or {}) if kind == "derived" else asdict(row)
    value, bounds, ends = (held.get(f"{name or figure}{kind}") for kind in ("", "_ci95", "_range"))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Missing(f"{row.loader} has no figure {figure!r}")
    return Figure(row, [], scale * value, scaled(bounds, scale), range=scaled(ends, scale))


def _sampled(row: Record, values: Sequence[float]) -> Figure:
    counted = [None if NOT_COLD in labels else value for value, labels in zip(values, row.sample_labels, strict=True)]
    return Figure(row, counted, stats.median([value for value in counted if value is not None]), None)


def _with_shares(figure: Figure) -> Figure:
    limits = figure.row.ceiling.get("samples") or []
    if len(limits) != len(figure.samples) or not all(limits):
        return figure
    pairs = zip(figure.samples, limits, strict=True)
    return figure._replace(shares=[None if sample is None else sample / limit for sample, limit in pairs])


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def scaled(ends: tuple[float, float] | None, scale: float) -> tuple[float, float] | None:
    """Both ends, multiplied."""
    return None if ends is None else (scale * ends[0], scale * ends[1])
