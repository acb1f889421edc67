"""When a run makes no more rounds, and that its records say why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import record_rows
from steady import Steady

from bench import config, files, measure, record, report, results, scenarios
from bench.config import BenchConfigError
from bench.loaders.pread import Pread

READ = config.ScenarioConfig("load_model", "read")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[files.BenchFiles]:
    with files.written(files.Plan(tmp_path_factory.mktemp("bench"), 1, 1 << 20, "")) as found:
        yield found


def run(
    written: files.BenchFiles,
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[str, Iterator[float]],
    target: float | None,
    labels: tuple[str, ...] = (),
) -> measure.Measurement:
    """Twenty rounds of rows whose samples take what is given."""
    runner = measure.Runner(
        scenarios.build(READ, written, "cpu"), {name: Pread() for name in seconds}, Steady(), cold=False,
        fresh_memory=False,
    )  # fmt: skip

    def sample(name: str, number: int) -> measure.Sample:
        return measure.Sample(number, 1000, 1, next(seconds[name]), 0.0, 0.0, None, list(labels))

    monkeypatch.setattr(runner, "_sample", sample)
    return runner.run(20, 60.0, target)


def narrow() -> Iterator[float]:
    return itertools.cycle([1.0, 1.001])


def test_narrow_rows_stop_after_six_rounds_and_not_before(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(written, monkeypatch, {"a": narrow(), "b": narrow()}, 0.01)
    assert (len(found.ceilings), found.stopped) == (6, "target_spread")


def test_the_widest_row_decides(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wide in its first rounds only: from nine samples on its interval leaves the least and the most out.
    settling = itertools.chain([1.0, 9.0], itertools.repeat(2.0))
    found = run(written, monkeypatch, {"a": narrow(), "b": settling}, 0.01)
    assert (len(found.ceilings), found.stopped) == (9, "target_spread")
    found = run(written, monkeypatch, {"a": narrow(), "b": itertools.cycle([1.0, 2.0])}, 0.01)
    assert (len(found.ceilings), found.stopped) == (20, "rounds")


def test_without_a_target_or_with_samples_that_do_not_count_all_rounds_are_made(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(written, monkeypatch, {"a": narrow()}, None).stopped == "rounds"
    assert run(written, monkeypatch, {"a": narrow()}, 0.5, (measure.NOT_COLD,)).stopped == "rounds"


def test_the_time_is_a_reason(written: files.BenchFiles) -> None:
    runner = measure.Runner(
        scenarios.build(READ, written, "cpu"), {"p": Pread()}, Steady(), cold=False, fresh_memory=False
    )
    found = runner.run(20, 0.0, 1e-9)
    assert (len(found.ceilings), found.stopped) == (3, "max_seconds")


@pytest.mark.parametrize(
    ("given", "message"),
    [({"target_spread": 0.0}, "has to be positive"), ({"target_spread": 0.02, "rounds": 5}, "needs at least 6 rounds")],
)
def test_a_target_that_cannot_be_asked_for(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchConfigError, match=message):
        config.ScenarioConfig("load_model", "read", **given)


def test_a_record_says_why_and_a_report_repeats_it(tmp_path: Path) -> None:
    row = record_rows.row("x", [40.0] * 6, stopped="target_spread")
    row.config["scenario"]["rounds"] = 15
    (read,) = results.read(record_rows.write(tmp_path / "rows.jsonl", [row]))
    assert read.stopped == "target_spread"
    assert "Stopped after 6 of 15 rounds: all intervals were narrow enough." in report.content([read]).notes
    plain = {**record_rows.golden(), "stopped": "tired"}
    assert any(problem.startswith("stopped: 'tired'") for problem in record.problems(plain))
