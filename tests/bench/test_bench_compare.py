"""bench.compare: the rule, which rows are the same, and what it exits with."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import record_rows
from conftest import ROOT
from record_rows import H200, row, unmeasured, write
from rich.console import Console

from bench import compare, compare_output, record, results, stats

TIGHT = [40.0, 40.2, 39.8, 40.1, 39.9, 40.05, 39.95]


def scaled(factor: float) -> list[float]:
    return [factor * rate for rate in TIGHT]


def only(found: compare.Comparison) -> compare.Verdict:
    (verdict,) = found.rows
    return verdict


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((1.031, 1.2), "faster"),
        ((1.029, 1.2), "ambiguous"),
        ((0.8, 0.970), "slower"),
        ((0.8, 0.972), "ambiguous"),
        ((0.98, 1.02), "same"),
        ((0.971, 1.029), "same"),
        ((0.96, 1.02), "ambiguous"),
        ((0.5, 2.0), "ambiguous"),
        (None, "ambiguous"),
    ],
)
def test_the_rule(interval: tuple[float, float] | None, expected: str) -> None:
    assert compare.verdict(interval, 0.03) == expected


def test_the_rule_is_the_same_from_both_sides() -> None:
    random = np.random.default_rng(3)
    mirrored = {"faster": "slower", "slower": "faster", "same": "same", "ambiguous": "ambiguous"}
    seen = set()
    for low, high in random.uniform(0.9, 1.1, (300, 2)):
        low, high = min(low, high), max(low, high)
        said = compare.verdict((low, high), 0.02)
        assert compare.verdict((1 / high, 1 / low), 0.02) == mirrored[said]
        seen.add(said)
    assert seen == set(mirrored)


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        compare.verdict((1.0, 1.0), -0.1)


def test_the_interval_holds_the_ratio_and_is_reproducible() -> None:
    interval = stats.ratio_of_medians_ci95(TIGHT, scaled(1.1))
    assert interval is not None
    assert 1.08 < interval[0] < 1.1 < interval[1] < 1.12
    assert stats.ratio_of_medians_ci95(TIGHT, scaled(1.1)) == interval
    assert stats.ratio_of_medians_ci95(TIGHT[:5], TIGHT) is None
    assert stats.ratio_of_medians_ci95(TIGHT, TIGHT[:5]) is None
    with pytest.raises(ValueError, match="not positive"):
        stats.ratio_of_medians_ci95(TIGHT, [1.0, 0.0, *TIGHT])


@pytest.mark.parametrize("count", [6, 9])
def test_noise_is_rarely_called_slower(count: int) -> None:
    random = np.random.default_rng(count)
    said = 0
    for seed in range(300):
        samples = [list(random.lognormal(0.0, 0.05, count)) for _ in range(2)]
        interval = stats.ratio_of_medians_ci95(*samples, resamples=400, seed=seed)
        said += compare.verdict(interval, 0.0) == "slower"
    assert said / 300 <= 0.05  # about 0.02


def test_a_real_difference_is_found() -> None:
    random = np.random.default_rng(0)
    found = [
        compare.verdict(
            stats.ratio_of_medians_ci95(
                list(random.normal(40, 0.4, 9)), list(random.normal(36, 0.4, 9)), resamples=400, seed=seed
            ),
            0.03,
        )
        for seed in range(50)
    ]
    assert found.count("slower") == 50


@pytest.mark.parametrize(("factor", "expected"), [(1.1, "faster"), (0.9, "slower"), (1.001, "same")])
def test_a_row_in_both_files(factor: float, expected: str) -> None:
    found = only(compare.compare([row("x", TIGHT)], [row("x", scaled(factor))]))
    assert found.verdict == expected
    assert found.ratio == pytest.approx(factor)
    assert (found.a, found.b) == (pytest.approx(40.0), pytest.approx(40.0 * factor))
    assert found.n == (7, 7)


def test_scattered_samples_are_ambiguous_and_a_wider_threshold_makes_them_the_same() -> None:
    wide = [30.0, 50.0, 35.0, 45.0, 40.0, 42.0, 38.0]
    assert only(compare.compare([row("x", wide)], [row("x", wide)])).verdict == "ambiguous"
    assert only(compare.compare([row("x", wide)], [row("x", wide)], threshold=0.9)).verdict == "same"


@pytest.mark.parametrize("count", [2, 5])
def test_samples_are_too_few_below_six(count: int) -> None:
    found = only(compare.compare([row("x", TIGHT)], [row("x", [10.0] * count)]))
    assert (found.verdict, found.ratio_ci95) == ("ambiguous", None)


def test_samples_that_were_not_cold_do_not_count() -> None:
    labels = [[], [], [], [record_rows.NOT_COLD], [], [], []]
    other = row("x", [40.0, 40.1, 39.9, 900.0, 40.0, 40.0, 40.0], labels=labels)
    found = only(compare.compare([row("x", TIGHT)], [other]))
    assert (found.verdict, found.n) == ("same", (7, 6))


def test_shares_of_the_ceiling_cancel_what_moved_both() -> None:
    slow_day = row("x", scaled(0.8), ceiling=[40.0] * 7)
    assert only(compare.compare([row("x", TIGHT)], [slow_day])).verdict == "slower"
    found = only(compare.compare([row("x", TIGHT)], [slow_day], by="ceiling"))
    assert (found.verdict, found.a) == ("same", pytest.approx(0.8))
    with pytest.raises(ValueError, match="'size' is not one of rate, ceiling"):
        compare.compare([], [], by="size")


def test_shares_of_a_ceiling_that_is_not_believed_are_ambiguous() -> None:
    beaten = row("x", TIGHT, ceiling=[35.0] * 7)
    assert only(compare.compare([row("x", TIGHT)], [beaten], by="ceiling")).verdict == "ambiguous"
    assert only(compare.compare([row("x", TIGHT)], [beaten])).verdict == "same"


def test_a_sweep_is_compared_point_by_point() -> None:
    sizes = (1 << 20, 1 << 24)
    a = [row("x", TIGHT, options={"chunk_size": size}) for size in sizes]
    b = [row("x", scaled(1 + n / 2), options={"chunk_size": size}) for n, size in enumerate(sizes)]
    found = compare.compare(a, list(reversed(b)))
    assert [(each.part, each.verdict) for each in found.rows] == [
        ("chunk size 1 MiB", "same"),
        ("chunk size 16 MiB", "faster"),
    ]


def test_how_a_run_was_made_is_no_setting() -> None:
    other = row("x", TIGHT[:6], storage={"dir": "/elsewhere"})
    assert only(compare.compare([row("x", TIGHT)], [other])).verdict == "same"


def test_rows_of_the_same_settings_are_pooled() -> None:
    found = only(compare.compare([row("x", TIGHT), row("x", TIGHT)], [row("x", TIGHT)]))
    assert found.n == (14, 7)


def test_other_settings_are_named_and_not_compared() -> None:
    first = [row("x", TIGHT, options={"chunk_size": 1 << 20, "io_depth": 4})]
    second = [
        row("x", TIGHT, options={"chunk_size": 1 << 22, "io_depth": 9}),
        row("x", TIGHT, options={"chunk_size": 1 << 20, "io_depth": 8}),
    ]
    found = compare.compare(first, second)
    assert found.rows == []
    settings, rest = found.unmatched
    assert (settings.kind, settings.why) == ("settings", "settings differ: loader.io_depth is 4 and 8")
    assert (rest.kind, rest.part) == ("only_b", "chunk size 4 MiB, io depth 9")


def test_an_option_that_did_not_exist_has_its_default() -> None:
    old, new = (
        row("x", TIGHT, options={"backend": "staged"}),
        row("x", TIGHT, options={"backend": "staged", "copy": True}),
    )
    assert only(compare.compare([old], [new])).verdict == "same"
    other = row("x", TIGHT, options={"backend": "staged", "copy": False})
    (left,) = compare.compare([old], [other]).unmatched
    assert left.why == "settings differ: loader.copy is True and False"


def test_another_device_is_another_setting() -> None:
    (left,) = compare.compare([row("x", TIGHT)], [row("x", TIGHT, device="cpu")]).unmatched
    assert (left.kind, left.why) == ("settings", "device is cuda and cpu")
    assert only(compare.compare([row("x", TIGHT)], [row("x", TIGHT, device="cuda:1")])).verdict == "same"


def test_rows_that_are_only_in_one_file() -> None:
    found = compare.compare([row("x", TIGHT), row("y", TIGHT)], [row("y", TIGHT), row("z", TIGHT)])
    assert [(each.loader, each.kind) for each in found.unmatched] == [("x", "only_a"), ("z", "only_b")]
    assert [each.loader for each in found.rows] == ["y"]


def test_rows_that_were_not_measured_say_why() -> None:
    a = [row("x", TIGHT), row("y", TIGHT), unmeasured("z", "skipped", "no GPU"), unmeasured("w", "skipped", "no GPU")]
    b = [
        unmeasured("x", "failed", "RuntimeError: out\nof memory"),
        unmeasured("y", "skipped", "not installed"),
        row("z", TIGHT),
        unmeasured("w", "failed", "no"),
    ]
    found = compare.compare(a, b)
    assert [(each.loader, each.kind, each.why) for each in found.unmatched] == [
        ("x", "failed", "failed in B: RuntimeError: out"),
        ("y", "unmeasured", "skipped in B: not installed"),
        ("z", "only_b", "skipped in A: no GPU"),
        ("w", "neither", "skipped in A, failed in B"),
    ]
    assert found.failed(["slower"])  # what crashes is slower than anything
    assert not compare.compare(a[1:], b[1:]).failed(["slower"])
    assert compare.compare(a[1:], b[1:]).failed(["missing"])
    assert not compare.compare(a[2:], b[2:]).failed(["slower", "missing"])


def test_differing_environments_are_named() -> None:
    env = {**record_rows.golden()["env"], "gpu": "NVIDIA H100", "versions": {"torch": "2.12.0"}}
    found = compare.compare([row("x", TIGHT)], [row("x", TIGHT, env=env)])
    assert found.environment["gpu"] == ("NVIDIA H200", "NVIDIA H100")
    assert found.environment["torch"] == ("2.11.0", "2.12.0")
    text = io.StringIO()
    compare_output.show(found, Console(file=text, width=100))
    assert "gpu: NVIDIA H200 and NVIDIA H100" in text.getvalue()
    assert compare.compare([row("x", TIGHT)], [row("x", TIGHT)]).environment == {}


def test_real_runs_with_themselves_are_never_faster_or_slower() -> None:
    for path in sorted(H200.glob("*.jsonl")):
        rows = [row for row in results.read(path) if row.status == "ok"]
        found = compare.compare(rows, rows)
        assert len(found.rows) == len(rows), path
        assert {each.verdict for each in found.rows} <= {"same", "ambiguous"}, path
        assert {each.ratio for each in found.rows} == {1.0}


def test_two_real_runs() -> None:
    found = compare.compare(results.read(H200 / "peers-160MiB-first.jsonl"), results.read(H200 / "peers.jsonl"))
    verdicts = {each.loader: each.verdict for each in found.rows}
    assert (verdicts["pread"], verdicts["gdsstream_mapped"]) == ("slower", "same")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.compare", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def exit_status(*arguments: object) -> object:
    """Of a call within this process."""
    try:
        compare.main([str(each) for each in arguments])
    except SystemExit as end:
        return end.code
    return 0


def test_the_command(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", [row("x", TIGHT)]), write(tmp_path / "b.jsonl", [row("x", scaled(0.9))])
    run = command(a, b, "--fail-on", "slower")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "slower" in run.stdout
    assert "0.900" in run.stdout


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.jsonl", [row("x", TIGHT)]), write(tmp_path / "b.jsonl", [row("x", scaled(0.9))])
    other = write(tmp_path / "other.jsonl", [row("y", TIGHT)])
    assert exit_status(a, b) == 0
    assert exit_status(b, a, "--fail-on", "slower") == 0
    assert exit_status(a, b, "--fail-on", "slower", "--threshold", "0.2") == 0
    assert exit_status(a, b, "--fail-on", "ambiguous", "--fail-on", "slower") == 1
    assert exit_status(a, other, "--fail-on", "missing") == 1
    assert exit_status(a, other) == 0
    (tmp_path / "run").mkdir()
    b.rename(tmp_path / "run" / "results.jsonl")
    assert exit_status(a, tmp_path / "run", "--fail-on", "slower") == 1, "a run is named by its directory, too"
    b = tmp_path / "run" / "results.jsonl"
    capsys.readouterr()
    assert exit_status(a, other, "--fail-on", "slower") == 2
    assert "could be compared" in " ".join(capsys.readouterr().err.split())
    assert exit_status(a, tmp_path / "none.jsonl") == 2
    assert "cannot be read" in capsys.readouterr().err
    for threshold in ("-1", "nan", "3 %", "1"):
        assert exit_status(a, b, f"--threshold={threshold}") == 2


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", [row("x", TIGHT), row("y", TIGHT)])
    b = write(tmp_path / "b.jsonl", [row("x", scaled(1.2))])
    assert exit_status(a, b, "--json", "--threshold", "0.05") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["threshold"], found["by"]) == (0.05, "rate")
    assert [(each["loader"], each["verdict"], each["n"]) for each in found["rows"]] == [("x", "faster", [7, 7])]
    assert found["rows"][0]["ratio_ci95"][0] < 1.2 < found["rows"][0]["ratio_ci95"][1]
    assert [(each["loader"], each["kind"]) for each in found["unmatched"]] == [("y", "only_a")]


def test_the_factory_of_these_rows_makes_valid_ones() -> None:
    made = [row("x", TIGHT), unmeasured("y", "failed", "why")]
    assert [record.problems(json.loads(each.to_json())) for each in made] == [[], []]
