"""What is said of a document's claims: figures and intervals, and when too few samples or a beaten ceiling decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import record_rows

from bench import report, report_bounds, results, table
from bench.reference import claims, show
from bench.reference.claims import FAILS, HOLDS, INCOMPARABLE, SHOWN, UNDECIDED
from bench.reference.figures import Made
from bench.reference.plan import Claim, Selector

FAST, SLOW = [20.0, 20.2, 19.8, 20.1, 20.0, 20.0], [10.0, 10.1, 9.9, 10.0, 10.2, 10.0]


def claim(**changes: Any) -> Claim:
    given = {"name": "x", "document": "d", "hardware": "h", "says": "fast", "unit": "x", "theirs": 2.0}
    return Claim(**{**given, "ours": Selector("p", "fast"), **changes})


def made(*rows: Any, problem: str | None = None) -> dict[str, Made]:
    return {"p": Made(list(rows), problem)}


def pair(fast: list[float] = FAST, slow: list[float] = SLOW) -> dict[str, Made]:
    return made(record_rows.row("fast", fast), record_rows.row("slow", slow))


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"at_least": 1.5}, HOLDS),
        ({"at_least": 1.5, "at_most": 2.5}, HOLDS),
        ({"at_least": 2.5}, FAILS),
        ({"at_most": 1.5}, FAILS),
        ({"at_least": 1.99}, UNDECIDED),
        ({}, SHOWN),
    ],
)
def test_a_proportion_is_judged_by_its_interval(bounds: dict[str, float], verdict: str) -> None:
    found = claims.judge(claim(over=Selector("p", "slow"), **bounds), pair())
    assert found.verdict == verdict, found
    assert found.value == pytest.approx(2.0, rel=0.01)
    assert found.interval is not None
    assert found.interval[0] < 2.0 < found.interval[1]
    assert found.rows == ("fast", "slow")
    assert found.pct_ceiling == pytest.approx(40.0)


def test_rows_of_one_run_are_paired_round_by_round() -> None:
    drifting = [10.0, 20.0, 40.0, 80.0, 160.0, 320.0]
    paired = pair([2 * rate for rate in drifting], drifting)
    found = claims.judge(claim(over=Selector("p", "slow"), at_least=1.9), paired)
    assert (found.verdict, found.interval) == (HOLDS, (2.0, 2.0))
    paired["p"].rows[1].ceiling["samples"] = [49.0] * 6
    apart = claims.judge(claim(over=Selector("p", "slow"), at_least=1.9), paired)
    assert apart.verdict == UNDECIDED
    assert apart.value == pytest.approx(2.0 * 49 / 50), "of shares of ceilings that differ"


def test_rates_of_different_times_are_taken_as_shares_of_their_ceilings() -> None:
    # Storage that is half as fast when the second row is measured.
    found = pair([20.0, 20.2, 19.8, 20.1, 19.9, 20.0], [10.0, 10.1, 9.9, 10.0, 10.0, 10.0])
    found["p"].rows[0].ceiling["samples"] = [40.0] * 6
    found["p"].rows[1].ceiling["samples"] = [20.0] * 6
    asked = claim(over=Selector("p", "slow"), at_least=1.5)
    judged = claims.judge(asked, found)
    assert (judged.verdict, judged.value) == (FAILS, pytest.approx(1.0))
    assert "shares of the ceilings" in judged.reason
    found["p"].rows[1].ceiling["kind"] = "another"
    judged = claims.judge(asked, found)
    assert judged.verdict == UNDECIDED
    assert "ceilings of different kinds" in judged.reason


def test_shares_of_a_ceiling_that_is_not_believed_decide_nothing() -> None:
    found = pair()
    for each, limit in zip(found["p"].rows, (18.0, 20.0), strict=True):
        each.ceiling["samples"] = [limit] * 6
        each.pct_ceiling = 100 * each.gb_per_s["median"] / limit  # type: ignore[index]
    judged = claims.judge(claim(over=Selector("p", "slow"), at_least=1.5), found)
    assert judged.verdict == UNDECIDED
    assert "ceiling not believed: fast reaches 111 % of it" in judged.reason
    share = claims.judge(claim(unit="%", ours=Selector("p", "fast", figure="pct_ceiling"), at_least=90.0), found)
    assert (share.verdict, share.believed) == (UNDECIDED, False)
    rate = claims.judge(claim(unit="GB/s", at_least=10.0), found)
    assert rate.verdict == HOLDS, "what needs no ceiling is judged"
    rows = found["p"].rows
    assert [table.SHARE.cell(each) for each in rows] == ["111.1 ?", "50.0"]
    assert any("ceiling not believed" in note and "fast" in note for note in report.content(rows).notes)
    rows[0].delivers = "file mapping"
    assert table.SHARE.cell(rows[0]) == "111.1", "a warm mapping need not be copied"


def test_too_few_samples_decide_nothing() -> None:
    found = claims.judge(claim(over=Selector("p", "slow"), at_least=1.0), pair([20.0, 20.0], [10.0, 10.0]))
    assert found.verdict == UNDECIDED
    assert "too few samples" in found.reason
    assert "n=2" in found.reason


@pytest.mark.parametrize(
    ("count", "bounds", "verdict", "said"),
    [
        (3, {"at_least": 1.5}, HOLDS, "the ranges of 3 and 3 samples lie apart: permutation test, p = 0.05"),
        (3, {"at_most": 1.5}, FAILS, "permutation test, p = 0.05"),
        (3, {"at_least": 1.97}, UNDECIDED, "too few samples for an interval (n=3)"),
        (2, {"at_least": 1.5}, UNDECIDED, "too few samples for an interval (n=2)"),
        (5, {"at_least": 1.93}, HOLDS, "all 5 samples agree: sign test, p = 0.031"),
        (5, {"at_least": 1.5, "at_most": 2.5}, HOLDS, "sign test"),
    ],
)
def test_fewer_than_six_samples_decide_only_by_an_exact_test(
    count: int, bounds: dict[str, float], verdict: str, said: str
) -> None:
    found = claims.judge(claim(over=Selector("p", "slow"), **bounds), pair(FAST[:count], SLOW[:count]))
    assert (found.verdict, found.interval, found.n) == (verdict, None, count)
    assert said in found.reason
    assert found.range is not None
    assert f"2 x, range {show.number(found.range[0])} to {show.number(found.range[1])} (n={count})" == show.ours(found)


def test_three_samples_of_one_figure_decide_nothing_however_far_they_are() -> None:
    row = replace(record_rows.row("fast", FAST[:3]), derived={"overhead": 0.01, "overhead_range": [0.01, 0.01]})
    asked = claim(unit="%", ours=Selector("p", "fast", figure="derived.overhead"), at_most=50.0)
    found = claims.judge(asked, made(row))
    assert (found.verdict, found.n) == (UNDECIDED, 3)


def test_an_old_records_interval_of_three_samples_is_read_as_their_range(tmp_path: Path) -> None:
    old = record_rows.row("fast", FAST[:3], pct_ceiling_ci95=[39.6, 40.4])
    old = replace(old, schema_version=3, derived={"overhead": 0.01, "overhead_ci95": [0.0, 0.02]})
    six = record_rows.row("slow", SLOW, pct_ceiling_ci95=[19.8, 20.4], schema_version=3)
    path = tmp_path / "old.jsonl"
    path.write_text(f"{old.to_json()}\n{six.to_json()}\n", encoding="utf-8")
    few, many = results.read(path)
    assert (few.pct_ceiling_ci95, few.derived) == (
        None, {"overhead": 0.01, "overhead_ci95": None, "overhead_range": [0.0, 0.02]}
    )  # fmt: skip
    assert many.pct_ceiling_ci95 == [19.8, 20.4]
    assert report_bounds.share([few], 0).title == "range (n=3)"
    mixed = report_bounds.share([few, many], 0)
    assert (mixed.title, mixed.cell(few), mixed.cell(many)) == ("95 % CI / range", "39.6-40.4 (n=3)", "19.8-20.4")
    (note,) = report_bounds.notes([few, many])
    assert "75 % (n=3)" in note


def test_samples_that_do_not_count_are_left_out_of_both() -> None:
    labels = [[], ["not_cold"], [], [], [], []]
    rows = made(
        record_rows.row("fast", [20.0, 900.0, 20.0, 20.0, 20.0, 20.0], labels=labels), record_rows.row("slow", SLOW)
    )
    found = claims.judge(claim(over=Selector("p", "slow"), at_most=2.1), rows)
    assert found.verdict == HOLDS, found


def test_a_derived_figure_brings_its_own_interval() -> None:
    row = replace(
        record_rows.row("fast", FAST), derived={"overhead": 0.01, "overhead_ci95": [0.005, 0.015], "fill_s": 1.0}
    )
    asked = claim(unit="%", ours=Selector("p", "fast", figure="derived.overhead"), at_most=2.0)
    found = claims.judge(asked, made(row))
    assert (found.verdict, found.value, found.interval) == (HOLDS, pytest.approx(1.0), pytest.approx((0.5, 1.5)))
    bare = claims.judge(claim(unit="s", ours=Selector("p", "fast", figure="derived.fill_s"), at_most=2.0), made(row))
    assert (bare.verdict, bare.value) == (UNDECIDED, 1.0)
    missing = claims.judge(claim(ours=Selector("p", "fast", figure="derived.nothing")), made(row))
    assert missing.verdict == INCOMPARABLE
    assert "no figure 'derived.nothing'" in missing.reason


def test_figures_come_in_the_unit_of_the_claim() -> None:
    row = record_rows.row("fast", [20.0, 20.0, 20.0])
    for unit, figure, value in (("GB/s", "gb_per_s", 20.0), ("ms", "samples_s", 50.0), ("1/s", "units_per_s", 140.0),
                                ("%", "pct_ceiling", 40.0)):  # fmt: skip
        found = claims.judge(claim(unit=unit, ours=Selector("p", "fast", figure=figure)), made(row))
        assert found.value == pytest.approx(value), unit
    scaled = claims.judge(claim(unit="us", ours=Selector("p", "fast", figure="samples_s", scale=1e-6)), made(row))
    assert scaled.value == pytest.approx(0.05)


def test_the_time_of_a_layer_is_the_slope_of_its_runs() -> None:
    row = record_rows.Record(**record_rows.golden())
    tokens = {"scenario.tokens": 8192}
    layer = Selector("p", row.loader, tokens, "layer_s")
    found = claims.judge(claim(unit="ms", ours=layer), made(row))
    assert found.value == pytest.approx(1e3 * row.derived["slope_s"])  # type: ignore[index]
    over = claims.judge(claim(ours=layer, over=Selector("p", row.loader, tokens, "figures.compute_s")), made(row))
    assert over.value == pytest.approx(2.36, rel=0.02)


def test_the_fastest_of_several_rows_is_taken_and_where_narrows_them() -> None:
    rows = [
        record_rows.row("fast", [rate] * 3, storage={"tensors": number})
        for number, rate in enumerate([5.0, 9.0, 7.0], 1)
    ]
    best = claims.judge(claim(unit="GB/s"), made(*rows))
    assert best.value == pytest.approx(9.0)
    third = claims.judge(claim(unit="GB/s", ours=Selector("p", "fast", {"storage.tensors": 3})), made(*rows))
    assert third.value == pytest.approx(7.0)
    fourth = claims.judge(claim(unit="GB/s", ours=Selector("p", "fast", {"storage.tensors": 4})), made(*rows))
    assert fourth.reason == "part p has no row of fast with storage.tensors=4"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "part p was not made"),
        (made(problem="it ended"), "part p: it ended"),
        (made(record_rows.row("other", FAST)), "part p has no row 'fast'"),
        (made(record_rows.unmeasured("fast", "skipped", "no GPU\nat all")), "fast skipped: no GPU"),
    ],
)
def test_what_is_missing_is_a_reason(found: Mapping[str, Made], reason: str) -> None:
    judged = claims.judge(claim(at_least=1.0), found)
    assert (judged.verdict, judged.reason, judged.value) == (INCOMPARABLE, reason, None)


def test_a_claim_of_gpudirect_needs_the_proof() -> None:
    asked = claim(over=Selector("p", "slow"), at_least=1.5, needs="gpudirect")
    for route, verdict in (
        ("kvikio POSIX path: not GDS", INCOMPARABLE),
        ("kvikio -> cuFile -> GPU (unproven: cuFile counted no direct read)", INCOMPARABLE),
        ("kvikio -> cuFile -> GPU (proven by cuFile's counters of reads: 5 nvme)", HOLDS),
    ):
        rows = pair()
        rows["p"].rows[0].route = route
        assert claims.judge(asked, rows).verdict == verdict, route
