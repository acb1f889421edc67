"""`python -m bench.compare A.jsonl B.jsonl`: is B faster, slower or the same as A, row by row?

    --threshold 0.03     what makes a difference, as a fraction (default 3 %)
    --by rate|ceiling    compare GB/s, or shares of the ceiling sampled in the same rounds (default rate)
    --fail-on slower     exit 1 where a row is slower, or was measured in A and failed in B; may be given several times,
                         also `ambiguous`, and `missing`: measured in A and not measured in B
    --json               one JSON document instead of the table

The rule. The ratio is median(B) / median(A) of the samples that count, above 1 where B is faster; its 95 % interval is
a percentile bootstrap that resamples A and B on their own (stats.ratio_of_medians_ci95). With threshold t:

    faster       the whole interval is above 1 + t
    slower       the whole interval is below 1 / (1 + t)
    same         the whole interval is between the two
    ambiguous    it reaches across one of them, or a side has fewer than six samples: measure more; of shares of a
                 ceiling also where a row is faster than its ceiling can be

So a difference is named only where the samples bear it and it is worth naming, and `same` is a finding, too, never the
lack of one. For samples of one distribution the interval misses 1 by lying below it in about one of 50 comparisons, and
above it likewise; the threshold makes that rarer still. Of fewer than six samples a side there is no interval: that all
of three lie above all of three others happens by chance to one row in 20, and a comparison has many rows.

What the interval does not hold is what differs between two machines, or the same one on two days: samples of one run
know nothing of it. `--by ceiling` takes out what moved the ceiling as well.

Rows are the same where scenario, loader, cache, device and all settings are (results.settings: not how many rounds, nor
where the files were). A setting that one of them was made without, as it did not exist, has its default. Rows of one
file with the same settings are pooled. Where only settings differ, they are named, and nothing is compared. Exit
status: 0; 1 by --fail-on; 2 where the files cannot be read, or nothing could be compared although --fail-on asked for a
verdict.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import config, loaders, results, stats, sweeps
from bench.config import BenchConfigError, BenchError
from bench.record import Record, ceiling_believed

THRESHOLD = 0.03
BY = ("rate", "ceiling")
FAIL_ON = ("slower", "ambiguous", "missing")
#: Of the environment: where these differ, the comparison is not of the code alone.
_ENVIRONMENT = (*results.MACHINE, "filesystem", "python", "variables")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of both files. The medians `a` and `b` are GB/s, or fractions of the ceiling; `n` samples of each."""

    scenario: str
    part: str
    loader: str
    cache: str
    verdict: str
    a: float
    b: float
    ratio: float
    ratio_ci95: tuple[float, float] | None
    n: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A row that cannot be compared, and why. `kind`: only_a, only_b, settings; failed, unmeasured: in B; neither."""

    scenario: str
    part: str
    loader: str
    cache: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of both files, and in what their environments differ: name -> (A, B)."""

    threshold: float
    by: str
    rows: list[Verdict]
    unmatched: list[Unmatched]
    environment: dict[str, tuple[str, str]]

    def failed(self, fail_on: Sequence[str]) -> bool:
        """Whether something is as `fail_on` says (module docstring)."""
        verdicts = {row.verdict for row in self.rows} & set(fail_on)
        kinds = {row.kind for row in self.unmatched}
        broken = "slower" in fail_on and "failed" in kinds
        missing = "missing" in fail_on and bool(kinds & {"failed", "unmeasured", "only_a", "settings"})
        return bool(verdicts) or broken or missing


def verdict(interval: tuple[float, float] | None, threshold: float) -> str:
    """By the rule above. Raises ValueError for a negative threshold."""
    if threshold < 0:
        raise ValueError(f"a threshold of {threshold} is negative")
    if interval is None:
        return "ambiguous"
    low, high = interval
    above, below = 1 + threshold, 1 / (1 + threshold)
    if low > above:
        return "faster"
    if high < below:
        return "slower"
    return "same" if below <= low and high <= above else "ambiguous"


def compare(
    first: Sequence[Record], second: Sequence[Record], *, threshold: float = THRESHOLD, by: str = "rate"
) -> Comparison:
    """The rows of `second` beside those of `first`. Raises ValueError for another `by` or a negative threshold."""
    if by not in BY:
        raise ValueError(f"{by!r} is not one of {', '.join(BY)}")
    mine, theirs = _by_settings(first), _by_settings(second)
    labels = _labels({**theirs, **mine})
    rows, unmatched = [], []
    left = {key: found for key, found in theirs.items() if key not in mine}
    for key, found in mine.items():
        a = found[0]
        if key in theirs:
            b = theirs[key][0]
            if a.status != "ok" or b.status != "ok":
                unmatched.append(Unmatched(*labels[key], *_not_measured(a, b)))
            elif _device(a) != _device(b):
                unmatched.append(Unmatched(*labels[key], "settings", f"device is {_device(a)} and {_device(b)}"))
            else:
                rows.append(_row(labels[key], found, theirs[key], threshold, by))
            continue
        near = {other: _differing(a, b[0]) for other, b in left.items() if _name(b[0]) == _name(a)}
        if near:
            other = min(near, key=lambda key: len(near[key]))
            del left[other]
            unmatched.append(Unmatched(*labels[key], "settings", f"settings differ: {'; '.join(near[other])}"))
        else:
            unmatched.append(Unmatched(*labels[key], "only_a", "only in A"))
    unmatched += [Unmatched(*labels[key], "only_b", "only in B") for key in left]
    return Comparison(threshold, by, rows, unmatched, _environment(first, second))


Label = tuple[str, str, str, str]


def _row(label: Label, first: Sequence[Record], second: Sequence[Record], threshold: float, by: str) -> Verdict:
    a, b = ([value for record in rows for value in values(record, by)] for rows in (first, second))
    interval = stats.ratio_of_medians_ci95(a, b)
    believed = by == "rate" or all(ceiling_believed(record) for record in (*first, *second))
    middle = stats.median(a), stats.median(b)
    return Verdict(
        *label,
        verdict(interval if believed else None, threshold),
        *middle,
        middle[1] / middle[0],
        interval,
        (len(a), len(b)),
    )


def values(record: Record, by: str) -> list[float]:
    """What is compared of a row: GB/s of the samples that count, or their shares of the ceiling of their round."""
    return results.rates(record) if by == "rate" else results.shares(record)


def _by_settings(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Rows of the same settings, those that were measured where there are any."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(json.dumps([_name(record), _settings(record)], sort_keys=True, default=str), []).append(record)
    return {key: [row for row in rows if row.status == "ok"] or rows[-1:] for key, rows in found.items()}


def _settings(record: Record) -> dict[str, Any]:
    """With the defaults of what did not exist when the row was made."""
    return _defaults(record) | results.settings(record)


def _defaults(record: Record) -> dict[str, Any]:
    """As they are now; empty for a kind of loader or a verb that is not known here."""
    options = record.config.get("loaders", {}).get(record.loader, {})
    known = {"scenario": {"name": record.scenario, "verb": record.verb}}
    try:
        kind = {"kind": options.get("kind")}
        loader = loaders.build(record.loader, kind)
        scenario = config.from_mapping(config.BenchConfig, known, "").scenario
    except BenchConfigError:
        return {}
    names = loaders.option_names(str(options.get("kind")))
    found = {"scenario": asdict(scenario), "loaders": {record.loader: {name: getattr(loader, name) for name in names}}}
    return results.settings(replace(record, config=found))


def _name(record: Record) -> Label:
    return record.scenario, results.part(record), record.loader, record.cache


def _labels(rows: dict[str, list[Record]]) -> dict[str, Label]:
    """What rows are called: those of a sweep, which share their names, by the settings in which they differ, too."""
    shared: dict[Label, list[str]] = {}
    for key, found in rows.items():
        shared.setdefault(_name(found[0]), []).append(key)
    labels = {}
    for (scenario, part, loader, cache), keys in shared.items():
        settings = {key: _settings(rows[key][0]) for key in keys}
        names = dict.fromkeys(name for each in settings.values() for name in each)
        told = [name for name in names if len({str(each.get(name)) for each in settings.values()}) > 1]
        for key in keys:
            said = [f"{sweeps.short(name)} {sweeps.value(name, settings[key].get(name))}" for name in told]
            labels[key] = (scenario, ", ".join(filter(None, [part, *said])), loader, cache)
    return labels


def _device(record: Record) -> str:
    return record.device.partition(":")[0]


def _not_measured(a: Record, b: Record) -> tuple[str, str]:
    if a.status != "ok" and b.status != "ok":
        return "neither", f"{a.status} in A, {b.status} in B"
    if b.status == "ok":
        return "only_b", f"{a.status} in A: {_reason(a)}"
    return "failed" if b.status == "failed" else "unmeasured", f"{b.status} in B: {_reason(b)}"


def _reason(record: Record) -> str:
    return (record.reason or "").strip().partition("\n")[0]


def _differing(a: Record, b: Record) -> list[str]:
    one, other = _settings(a), _settings(b)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [f"{name} is {one.get(name)!r} and {other.get(name)!r}" for name in names]


def _environment(first: Sequence[Record], second: Sequence[Record]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in _ENVIRONMENT:
        said = [
            ", ".join(dict.fromkeys(str(record.env.get(name)) for record in records)) for records in (first, second)
        ]
        if said[0] != said[1]:
            found[name] = (said[0], said[1])
    versions = [[record.env.get("versions") or {} for record in records][-1] for records in (first, second)]
    for package in sorted({*versions[0], *versions[1]}):
        if versions[0].get(package) != versions[1].get(package):
            found[package] = (str(versions[0].get(package)), str(versions[1].get(package)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point."""
    from bench import compare_output, report

    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Say of every row of two files of records whether B is faster."
    )
    parser.add_argument(
        "a", type=results.given, metavar="A", help="records to compare with: results.jsonl, or the directory of a run"
    )
    parser.add_argument("b", type=results.given, metavar="B", help="records that are judged")
    parser.add_argument("--threshold", type=_fraction, default=THRESHOLD, help="what makes a difference (default 0.03)")
    parser.add_argument("--by", choices=BY, default="rate", help="GB/s, or the share of the ceiling (default rate)")
    parser.add_argument("--fail-on", choices=FAIL_ON, action="append", default=[], help="exit 1 where a row is that")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args(arguments)
    out = report.console()
    try:
        found = compare(results.read(options.a), results.read(options.b), threshold=options.threshold, by=options.by)
        if options.json:
            print(json.dumps(asdict(found), indent=2, allow_nan=False))
        else:
            compare_output.show(found, out)
        if options.fail_on and not found.rows and not found.failed(options.fail_on):
            raise BenchError(f"no row of {options.a} could be compared with one of {options.b}")
    except BenchError as error:
        compare_output.fail(error)
        raise SystemExit(2) from None
    if found.failed(options.fail_on):
        raise SystemExit(1)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no fraction from 0 to below 1; 0.03 is 3 %")
    return value


if __name__ == "__main__":
    main()
