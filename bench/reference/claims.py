"""Our figure for a claim, and whether the claim holds. Pure: records in, verdicts out.

A proportion of two rows of the same part of a run is the median over the rounds, with the interval of paired samples.
Of rows that were not measured in turn each side is resampled on its own, and rates are taken as shares of the ceilings
of their own rounds: storage that is shared with others can be half as fast a minute later. Where the ceilings are not
of one kind, or a row is faster than its ceiling can be, such a claim stays undecided. A figure that the scenario
derived comes with the interval that was derived with it, or with none, which leaves a claim undecided.

Fewer than stats.LEAST_FOR_INTERVAL samples have no interval. Their range decides only where it lies so far from what is
asked for that an exact test says so at 5 %, one-sided: the sign test for one figure (five samples), and for one row
over another the permutation test, which takes all samples of both as independent (three and three, where every one of
the first is on one side of what is asked for with every one of the second). The reason then names the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench import stats
from bench.record import Record, ceiling_believed
from bench.reference.figures import Figure, Made, Missing, scaled, select
from bench.reference.plan import NEEDS, UNITS, Claim

HOLDS, FAILS, UNDECIDED = "holds", "does not hold here", "undecided"
#: Of rates, which depend on the hardware, and of what cannot be measured here.
SHOWN, INCOMPARABLE = "side by side", "not comparable"
#: As gdsstream's route says it. A route that only asks for it is no proof.
_PROOF = "proven by cuFile"


class Judged(NamedTuple):
    """A claim beside our figure, in the claim's unit: the median, its interval, the spread (MAD), and the range of `n`
    samples where they are too few for an interval."""

    claim: Claim
    verdict: str
    reason: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    spread: float | None = None
    pct_ceiling: float | None = None
    rows: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    n: int = 0
    #: Whether the ceiling of `pct_ceiling` can be the hardware's.
    believed: bool = True


class _Value(NamedTuple):
    """A figure, or one over another. Where `n` samples are too few for an interval, `range` is theirs, and `decides`
    says which test finds at 5 % that it is above (or below) a bound, if one does."""

    value: float
    interval: tuple[float, float] | None = None
    spread: float | None = None
    range: tuple[float, float] | None = None
    n: int = 0
    decides: Callable[[float, bool], str | None] = lambda bound, above: None


def judge(claim: Claim, made: Mapping[str, Made]) -> Judged:
    """Lay our figure beside the claim's."""
    if claim.ours is None:
        return Judged(claim, INCOMPARABLE, claim.never or "")
    try:
        figures = [select(selector, made) for selector in (claim.ours, claim.over) if selector is not None]
        ours = _value(figures)
    except Missing as missing:
        return Judged(claim, INCOMPARABLE, str(missing))
    scale = UNITS[claim.unit]
    found = Judged(
        claim,
        UNDECIDED,
        "",
        scale * ours.value,
        scaled(ours.interval, scale),
        None if ours.spread is None else scale * ours.spread,
        figures[0].row.pct_ceiling,
        tuple(figure.row.loader for figure in figures),
        scaled(ours.range, scale),
        ours.n,
        ceiling_believed(figures[0].row),
    )
    if claim.needs is not None and not _meets(figures[0].row):
        route = figures[0].row.route or "an unknown route"
        return found._replace(verdict=INCOMPARABLE, reason=f"it is of {NEEDS[claim.needs]}; here: {route}")
    if claim.at_least is None and claim.at_most is None:
        return found._replace(verdict=SHOWN, reason="of other hardware")
    verdict, reason = _verdict(claim, ours, scale)
    if len(figures) == 2 and _apart(*figures):
        limits = " and ".join(f"{figure.row.ceiling.get('gb_per_s') or 0:.3g}" for figure in figures)
        if not _comparable(*figures):
            return found._replace(
                verdict=UNDECIDED, reason=f"{reason}; measured at different times, under ceilings of different kinds"
            )
        reason = f"{reason}; of shares of the ceilings, {limits} GB/s, since they were measured at different times"
    if (beaten := _beaten(claim, figures)) is not None:
        return found._replace(verdict=UNDECIDED, reason=f"{reason}; ceiling not believed: {beaten}")
    return found._replace(verdict=verdict, reason=reason)


def _beaten(claim: Claim, figures: Sequence[Figure]) -> str | None:
    """Which row is faster than its ceiling allows, where the figure is of shares of ceilings; None where none is."""
    asked = any(selector is not None and selector.figure == "pct_ceiling" for selector in (claim.ours, claim.over))
    if not asked and not (len(figures) == 2 and _apart(*figures)):
        return None
    rows = [figure.row for figure in figures if not ceiling_believed(figure.row)]
    return ", ".join(f"{row.loader} reaches {row.pct_ceiling:.0f} % of it" for row in rows) or None


def _meets(row: Record) -> bool:
    return _PROOF in (row.route or "")


def _verdict(claim: Claim, ours: _Value, scale: float) -> tuple[str, str]:
    bounds = [(claim.at_least, True), (claim.at_most, False)]
    given = [(bound / scale, above) for bound, above in bounds if bound is not None]
    asked = " and ".join(
        f"{word} {bound:g} {claim.unit}"
        for word, bound in (("at least", claim.at_least), ("at most", claim.at_most))
        if bound is not None
    )
    if ours.interval is not None:
        low, high = ours.interval
        if all(low >= bound if above else high <= bound for bound, above in given):
            return HOLDS, asked
        if any(high < bound if above else low > bound for bound, above in given):
            return FAILS, asked
        return UNDECIDED, f"{asked}; the interval agrees only in part"
    agreeing = [ours.decides(bound, above) for bound, above in given]
    if all(agreeing):
        return HOLDS, f"{asked}; {agreeing[0]}"
    for bound, above in given:
        if (said := ours.decides(bound, not above)) is not None:
            return FAILS, f"{asked}; {said}"
    return UNDECIDED, f"{asked}; {f'too few samples for an interval (n={ours.n})' if ours.n else 'it has no interval'}"


def _value(figures: Sequence[Figure]) -> _Value:
    """Of a figure, or of one over another."""
    first = figures[0]
    if len(figures) == 1:
        if first.samples:
            return _sample_value(first.counted)
        few = first.range if first.interval is None else None
        return _Value(first.value, first.interval, None, few, first.n if few else 0, _by_signs(few or (), first.n))
    second = figures[1]
    if not first.samples or not second.samples:
        if second.value == 0:
            raise Missing(f"{second.row.loader} is 0, and nothing can be divided by it")
        return _Value(first.value / second.value)
    if min(second.counted) <= 0:
        raise Missing(f"a sample of {second.row.loader} is not positive, and nothing can be divided by it")
    if _together(first.row, second.row):
        pairs = zip(first.samples, second.samples, strict=True)
        ratios = [one / other for one, other in pairs if one is not None and other is not None]
        if not ratios:
            raise Missing("no round counts for both rows")
        found, groups = _sample_value(ratios), _by_groups(first.counted, second.counted)
        signs = found.decides
        return found._replace(decides=lambda bound, above: signs(bound, above) or groups(bound, above))
    one, other = first.counted, second.counted
    if _apart(first, second) and _comparable(first, second):
        one, other = ([share for share in figure.shares if share is not None] for figure in (first, second))
    ratio = stats.median(one) / stats.median(other)
    interval = stats.ratio_of_medians_ci95(other, one)
    if interval is not None:
        return _Value(ratio, interval)
    extremes = min(one) / max(other), max(one) / min(other)
    return _Value(ratio, None, None, extremes, min(len(one), len(other)), _by_groups(one, other))


def _sample_value(values: Sequence[float]) -> _Value:
    interval = stats.median_ci95(values)
    found = _Value(stats.median(values), interval, stats.mad(values))
    if interval is not None:
        return found
    return found._replace(range=(min(values), max(values)), n=len(values), decides=_by_signs(values, len(values)))


def _by_signs(values: Sequence[float], n: int) -> Callable[[float, bool], str | None]:
    """By the least and the most of `n` samples, or all of them."""

    def decides(bound: float, above: bool) -> str | None:
        beyond = bool(values) and (min(values) > bound if above else max(values) < bound)
        chance = stats.sign_test(n) if beyond else 1.0
        return f"all {n} samples agree: sign test, p = {chance:.2g}" if chance <= stats.LEVEL else None

    return decides


def _by_groups(one: Sequence[float], other: Sequence[float]) -> Callable[[float, bool], str | None]:
    def decides(bound: float, above: bool) -> str | None:
        times = [bound * value for value in other]
        chance = stats.permutation_test(*((one, times) if above else (times, one)))
        n = f"{len(one)} and {len(other)}"
        said = f"the ranges of {n} samples lie apart: permutation test, p = {chance:.2g}"
        return said if chance <= stats.LEVEL else None

    return decides


def _together(one: Record, other: Record) -> bool:
    """Whether two rows were measured in turn: of one part of one run, round by round."""
    return (
        one.ceiling.get("samples") == other.ceiling.get("samples")
        and one.config.get("scenario") == other.config.get("scenario")
        and len(one.samples_s) == len(other.samples_s)
    )


def _apart(one: Figure, other: Figure) -> bool:
    """Whether two rates were measured at different times."""
    return bool(one.shares and other.shares) and not _together(one.row, other.row)


def _comparable(one: Figure, other: Figure) -> bool:
    return one.row.ceiling.get("kind") == other.row.ceiling.get("kind")
