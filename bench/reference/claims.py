"""Our figure for a claim, and whether the claim holds. Pure: records in, verdicts out.

A proportion of two rows of the same part of a run is the median over the rounds, with the interval of paired samples.
Of rows that were not measured in turn each side is resampled on its own, and rates are taken as shares of the ceilings
of their own rounds: storage that is shared with others can be half as fast a minute later. Where the ceilings are not
of one kind, such a claim stays undecided. A figure that the scenario derived comes with
the interval that was derived with it, or with none, which leaves a claim undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from bench import results, stats
from bench.measure import NOT_COLD
from bench.record import Record
from bench.reference.plan import NEEDS, UNITS, Claim, Selector

HOLDS, FAILS, UNDECIDED = "holds", "does not hold here", "undecided"
#: Of rates, which depend on the hardware, and of what cannot be measured here.
SHOWN, INCOMPARABLE = "side by side", "not comparable"
#: As gdsstream's route says it. A route that only asks for it is no proof.
_PROOF = "proven by cuFile"


@dataclass(slots=True)
class Made:
    """What became of a part: its records, and why there are none or not all of them."""

    rows: list[Record] = field(default_factory=list)
    problem: str | None = None
    seconds: float | None = None


class Judged(NamedTuple):
    """A claim beside our figure, in the claim's unit: the median, its interval, and the spread (MAD)."""

    claim: Claim
    verdict: str
    reason: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    spread: float | None = None
    pct_ceiling: float | None = None
    rows: tuple[str, ...] = ()


class _Missing(Exception):
    """There is no figure; the message says why."""


class _Figure(NamedTuple):
    """Of one row: the samples in order (None where one does not count), or a derived value with its interval."""

    row: Record
    samples: Sequence[float | None]
    value: float
    interval: tuple[float, float] | None
    #: Of a rate: each sample over the ceiling of its round.
    shares: Sequence[float | None] = ()

    @property
    def counted(self) -> list[float]:
        return [sample for sample in self.samples if sample is not None]


def judge(claim: Claim, made: Mapping[str, Made]) -> Judged:
    """Lay our figure beside the claim's."""
    if claim.ours is None:
        return Judged(claim, INCOMPARABLE, claim.never or "")
    try:
        figures = [_figure(selector, made) for selector in (claim.ours, claim.over) if selector is not None]
        value, interval, spread = _value(figures)
    except _Missing as missing:
        return Judged(claim, INCOMPARABLE, str(missing))
    scale = UNITS[claim.unit]
    bounds = None if interval is None else (scale * interval[0], scale * interval[1])
    found = Judged(
        claim,
        UNDECIDED,
        "",
        scale * value,
        bounds,
        None if spread is None else scale * spread,
        figures[0].row.pct_ceiling,
        tuple(figure.row.loader for figure in figures),
    )
    if claim.needs is not None and not _meets(figures[0].row):
        route = figures[0].row.route or "an unknown route"
        return found._replace(verdict=INCOMPARABLE, reason=f"it is of {NEEDS[claim.needs]}; here: {route}")
    if claim.at_least is None and claim.at_most is None:
        return found._replace(verdict=SHOWN, reason="of other hardware")
    verdict, reason = _verdict(claim, found.interval)
    if len(figures) == 2 and _apart(*figures):
        limits = " and ".join(f"{figure.row.ceiling.get('gb_per_s') or 0:.3g}" for figure in figures)
        if not _comparable(*figures):
            return found._replace(
                verdict=UNDECIDED, reason=f"{reason}; measured at different times, under ceilings of different kinds"
            )
        reason = f"{reason}; of shares of the ceilings, {limits} GB/s, since they were measured at different times"
    return found._replace(verdict=verdict, reason=reason)


def _meets(row: Record) -> bool:
    return _PROOF in (row.route or "")


def _verdict(claim: Claim, interval: tuple[float, float] | None) -> tuple[str, str]:
    low = claim.at_least if claim.at_least is not None else float("-inf")
    high = claim.at_most if claim.at_most is not None else float("inf")
    asked = " and ".join(
        f"{word} {bound:g} {claim.unit}"
        for word, bound in (("at least", claim.at_least), ("at most", claim.at_most))
        if bound is not None
    )
    if interval is None:
        return UNDECIDED, f"{asked}; there are too few samples for an interval"
    if low <= interval[0] and interval[1] <= high:
        return HOLDS, asked
    if interval[1] < low or interval[0] > high:
        return FAILS, asked
    return UNDECIDED, f"{asked}; the interval agrees only in part"


def _value(figures: Sequence[_Figure]) -> tuple[float, tuple[float, float] | None, float | None]:
    """Value, interval and spread of a figure, or of one over another."""
    first = figures[0]
    if len(figures) == 1:
        if not first.samples:
            return first.value, first.interval, None
        return first.value, stats.bootstrap_ci95(first.counted), stats.mad(first.counted)
    second = figures[1]
    if not first.samples or not second.samples:
        if second.value == 0:
            raise _Missing(f"{second.row.loader} is 0, and nothing can be divided by it")
        return first.value / second.value, None, None
    if min(second.counted) <= 0:
        raise _Missing(f"a sample of {second.row.loader} is not positive, and nothing can be divided by it")
    if _together(first.row, second.row):
        pairs = zip(first.samples, second.samples, strict=True)
        ratios = [one / other for one, other in pairs if one is not None and other is not None]
        if not ratios:
            raise _Missing("no round counts for both rows")
        return stats.median(ratios), stats.bootstrap_ci95(ratios), stats.mad(ratios)
    if _apart(first, second) and _comparable(first, second):
        one, other = ([share for share in figure.shares if share is not None] for figure in (first, second))
        return stats.median(one) / stats.median(other), stats.ratio_of_medians_ci95(other, one), None
    ratio = stats.median(first.counted) / stats.median(second.counted)
    return ratio, stats.ratio_of_medians_ci95(second.counted, first.counted), None


def _together(one: Record, other: Record) -> bool:
    """Whether two rows were measured in turn: of one part of one run, round by round."""
    return (
        one.ceiling.get("samples") == other.ceiling.get("samples")
        and one.config.get("scenario") == other.config.get("scenario")
        and len(one.samples_s) == len(other.samples_s)
    )


def _apart(one: _Figure, other: _Figure) -> bool:
    """Whether two rates were measured at different times."""
    return bool(one.shares and other.shares) and not _together(one.row, other.row)


def _comparable(one: _Figure, other: _Figure) -> bool:
    return one.row.ceiling.get("kind") == other.row.ceiling.get("kind")


def _figure(selector: Selector, made: Mapping[str, Made]) -> _Figure:
    part = made.get(selector.part)
    if part is None:
        raise _Missing(f"part {selector.part} was not made")
    if not part.rows:
        raise _Missing(f"part {selector.part}: {part.problem or 'it has no records'}")
    wanted = [selector.loader] if isinstance(selector.loader, str) else selector.loader
    named = [row for row in part.rows if wanted is None or row.loader in wanted]
    found = [row for row in named if _matches(row, selector)]
    measured = [row for row in found if row.status == "ok" and row.gb_per_s]
    if not measured:
        raise _Missing(_why(selector, part, named, found))
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


def _of(row: Record, selector: Selector) -> _Figure:
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
    value, bounds = held.get(name or figure), held.get(f"{name or figure}_ci95")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Missing(f"{row.loader} has no figure {figure!r}")
    return _Figure(row, [], scale * value, (scale * bounds[0], scale * bounds[1]) if bounds else None)


def _sampled(row: Record, values: Sequence[float]) -> _Figure:
    counted = [None if NOT_COLD in labels else value for value, labels in zip(values, row.sample_labels, strict=True)]
    return _Figure(row, counted, stats.median([value for value in counted if value is not None]), None)


def _with_shares(figure: _Figure) -> _Figure:
    limits = figure.row.ceiling.get("samples") or []
    if len(limits) != len(figure.samples) or not all(limits):
        return figure
    pairs = zip(figure.samples, limits, strict=True)
    return figure._replace(shares=[None if sample is None else sample / limit for sample, limit in pairs])


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
