"""Records of what is no loader: they are valid, say what was set, and a subject that cannot be measured says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from bench import floor, shuffle_quality, stats_cost, subject


def line(**changes: Any) -> dict[str, Any]:
    good = subject.Line("floor", "staged", {"rounds": 2}, {"a": [1.0, 2.0], "b": [3, 4.5]}, {"ratio": 1.0}, {})
    return {**json.loads(good.to_json()), **changes}


def test_a_line_that_is_none_is_found(tmp_path: Path) -> None:
    assert subject.problems(line()) == []
    for changes, message in (
        ({"row": 3}, "row: missing or no str"),
        ({"more": 3}, "more: unknown"),
        ({"schema_version": 2}, "schema_version: 2 is not 1"),
        ({"figures": {"a": []}}, "figures.a: has to be a list"),
        ({"figures": {"a": [1.0, True]}}, "figures.a: has to be a list"),
        ({"figures": {"a": [1.0], "b": [1.0, 2.0]}}, "figures: have no value for each round"),
    ):
        assert message in "; ".join(subject.problems(line(**changes)))
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line()) + "\n" + json.dumps(line(row=3)) + "\n", encoding="utf-8")
    with pytest.raises(subject.BenchError, match=r"lines\.jsonl:2 is no line of a subject: row"):
        subject.read(path)


def test_published_lines_are_valid() -> None:
    paths = sorted((ROOT / "docs" / "results").glob("*/subjects/*.jsonl"))
    assert paths
    for path in paths:
        assert {line.subject for line in subject.read(path)} == {path.stem}


def test_fewer_than_six_samples_are_said_to_have_a_range() -> None:
    few, enough = subject.median("ratio", [3.0, 1.0, 2.0]), subject.median("ratio", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert few == {"ratio": 2.0, "ratio_ci95": None, "ratio_range": [1.0, 3.0]}
    assert subject.bounds(few, "ratio", ".1f") == "range 1.0 - 3.0"
    assert subject.bounds(enough, "ratio", ".1f") == "95 % CI 1.0 - 6.0"


def test_what_reading_costs(tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path), "--output", str(tmp_path / "out" / "floor.jsonl")]
    options = floor.parser().parse_args([*where, "--files", "2", "--file-bytes", "8000000", "--rounds", "2"])
    subject.run(options, floor.measure, floor.said)
    (row,) = subject.read(tmp_path / "out" / "floor.jsonl")
    assert row.settings == {"dir": str(tmp_path), "files": 2, "file_bytes": 8_000_000, "rounds": 2}
    assert {name: len(values) for name, values in row.figures.items()} == dict.fromkeys(row.figures, 2)
    ratios = sorted(
        a / b for a, b in zip(row.figures["staged_cpu_s_per_gb"], row.figures["bare_cpu_s_per_gb"], strict=True)
    )
    assert row.derived["ratio"] == pytest.approx(sum(ratios) / 2)
    assert row.env["cores"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_counting_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_cost, "KINDS", {"small": stats_cost.What(64, 4096, False)})
    where = ["--dir", str(tmp_path), "--what", "small", "--file-bytes", "4194304"]
    rows = stats_cost.measure(stats_cost.parser().parse_args([*where, "--rounds", "3"]))
    assert [row.row for row in rows] == ["small, 0", "small, 1", "small, 2", "small, 3", "small, 0 again"]
    assert all(subject.problems(json.loads(row.to_json())) == [] for row in rows)
    assert rows[0].derived["overhead"] == 0
    ratios = sorted(a / b for a, b in zip(rows[2].figures["seconds"], rows[0].figures["seconds"], strict=True))
    assert rows[2].derived["overhead"] == pytest.approx(ratios[1] - 1)


def test_a_subject_that_cannot_be_measured_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for module, words, message in (
        (shuffle_quality, ["--records", "9"], "at least 32768"),
        (stats_cost, ["--what", "smal"], "names 'smal'; valid: large, small, direct"),
    ):
        with pytest.raises(SystemExit) as ended:
            subject.run(module.parser().parse_args(words), module.measure, module.said)
        assert ended.value.code == 2
        assert message in capsys.readouterr().out.replace("\n", " ")
    (tmp_path / "file").touch()
    words = ["--records", "32768", "--seeds", "1", "--output", str(tmp_path / "file" / "x.jsonl")]
    with pytest.raises(SystemExit):
        subject.run(shuffle_quality.parser().parse_args(words), shuffle_quality.measure, shuffle_quality.said)
    assert "cannot be written" in capsys.readouterr().out
