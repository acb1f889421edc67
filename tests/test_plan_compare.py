"""Predicted against measured, on the records of a real H200; and what is no such record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdsstream.errors import CheckpointNotFoundError, ConfigError
from gdsstream.plan_compare import AIM, compare
from gdsstream.rates import Rates, rates_for

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "h200-2026-11-21"
# Close to what these very records measured alone: they test the arithmetic, not the prediction.
RATES = rates_for(link_gbps=55.4, storage_gbps=54.6, tflops=610)


@pytest.fixture
def record() -> dict[str, Any]:
    """A pipeline through the staging ring, at 8,192 tokens."""
    lines = (RESULTS / "pipeline.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[1])
    assert found["loader"] == "stream_staged"
    return found


@pytest.fixture(scope="module")
def held_out() -> Rates:
    """Rates of other runs: of loading whole checkpoints, and of the compute of a training step's forward pass."""
    lines = (RESULTS / "peers.jsonl").read_text().splitlines()
    loads = {one["loader"]: one for one in map(json.loads, lines) if one["status"] == "ok"}
    staged, mapped = loads["gdsstream_staged"], loads["gdsstream_mapped"]
    step = json.loads((RESULTS / "training_step.jsonl").read_text().splitlines()[0])["derived"]
    products = 2 * step["tokens"] * 3 * 5120 * (12288 + 8 * 1536) * step["layers"]
    return rates_for(
        link_gbps=staged["ceiling"]["gb_per_s"],
        storage_gbps=staged["gb_per_s"]["median"],
        host_gbps=mapped["gb_per_s"]["median"],
        tflops=products / step["forward_s"] / 1e12,
    )


@pytest.mark.parametrize(
    ("name", "rows"), [("pipeline", 15), ("pipeline_backward", 9), ("pipeline_200mb", 8), ("training_step", 3)]
)
def test_an_h200_is_predicted_within_the_aim_by_rates_of_other_runs(held_out: Rates, name: str, rows: int):
    found = compare(RESULTS / f"{name}.jsonl", held_out)
    assert (len(found.rows), found.skipped) == (rows, ())
    judged = [row for row in found.rows if row.judged]
    assert {row.loader for row in judged} >= {"stream_staged", "stream_mapped"}
    assert max(abs(row.planned_difference) for row in judged) <= AIM
    assert found.within


def test_the_times_measured_alone_predict_what_the_bench_says(record: dict[str, Any]):
    row = compare(RESULTS / "pipeline.jsonl", RATES).rows[1]
    assert row.measured_s == pytest.approx(record["derived"]["slope_s"])
    assert row.alone_difference == pytest.approx(record["derived"]["overhead"], abs=1e-6)
    (step, *_) = compare(RESULTS / "training_step.jsonl", RATES).rows
    derived = json.loads((RESULTS / "training_step.jsonl").read_text().splitlines()[0])["derived"]
    assert step.measured_s == pytest.approx(derived["measured_s"])
    assert step.alone_s == pytest.approx(derived["predicted_s"], rel=5e-3)


def test_rates_move_what_is_planned():
    slow = compare(RESULTS / "pipeline.jsonl", rates_for(link_gbps=55.4, storage_gbps=20, tflops=610))
    by_loader = {row.loader: row for row in slow.rows if row.tokens == 8192}
    assert not slow.within
    assert by_loader["stream_staged"].planned_s == pytest.approx(1.237 / 20)
    assert by_loader["stream_mapped"].planned_s == pytest.approx(1.237 / 55.4)
    assert by_loader["pinned_copies"].within


def test_an_assumed_rate_of_compute_gives_way_to_the_runs_own():
    found = compare(RESULTS / "pipeline.jsonl", rates_for(link_gbps=55.4, storage_gbps=54.6))
    long = next(row for row in found.rows if row.tokens == 22528 and row.loader == "stream_staged")
    assert long.compute_measured
    assert long.planned_s == pytest.approx(long.alone_s, rel=0.01)


def test_other_routes_are_judged_where_they_are_asked_for():
    cufile = compare(RESULTS / "pipeline.jsonl", RATES, ["stream_cufile"])
    assert [row.loader for row in cufile.rows] == ["stream_cufile"] * 3
    assert all(row.judged for row in cufile.rows)
    assert len(cufile.skipped) == 12
    assert not cufile.within
    assert compare(RESULTS / "pipeline.jsonl", rates_for(link_gbps=55.4, storage_gbps=49.4, tflops=610)).rows[3].within


def test_a_backward_pass_has_twice_the_products():
    rows = [row for row in compare(RESULTS / "pipeline_backward.jsonl", RATES).rows if row.tokens == 16384]
    assert {row.what for row in rows} == {"backward"}
    work = 2 * 2 * 16384 * 3 * 5120 * (12288 + 8 * 1536)
    assert rows[0].planned_s == pytest.approx(work / 610e12)


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for key in parents:
            record = record[key]
        record[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_set("scenario", "load_model"), "streams no layers"),
        (_set("schema_version", 3), "schema_version is 3"),
        (_set("status", "skipped"), "has no times"),
        (_set("derived", None), "lacks derived"),
        (_set("derived.tokens", 0), "tokens is 0"),
        (_set("derived.tokens", True), "tokens is True"),
        (_set("figures.compute_s", ["x"]), "compute_s are"),
        (_set("figures.transfer_s", [float("nan")]), "transfer_s are"),
        (_set("derived.long_layers", 20), "have no slope"),
        (_set("derived.long_layers", 10**9), "have no slope"),
        (_set("samples_s", []), "no samples"),
        (_set("samples_s", [0.1]), "not positive"),
        (_set("config.scenario.moe", 1), "lacks config.scenario.moe"),
    ],
)
def test_a_record_that_cannot_be_compared_is_named(
    tmp_path: Path, record: dict[str, Any], change: Callable[[dict[str, Any]], None], why: str
):
    good = json.dumps(record)
    change(record)
    (tmp_path / "run.jsonl").write_text(f"{good}\n\n{json.dumps(record)}\n")
    found = compare(tmp_path / "run.jsonl", RATES)
    assert [row.line for row in found.rows] == [1]
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("line 3: ")
    assert why in found.skipped[0]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "it is empty"), (b"{", "line 1: not JSON"), (b"[]", "not a record"), (b"\xff", "no text")],
)
def test_a_file_without_records_is_refused(tmp_path: Path, content: bytes, why: str):
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        compare(tmp_path / "run.jsonl", RATES)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointNotFoundError, match="cannot be read"):
        compare(tmp_path / "run.jsonl", RATES)
