"""An interrupted run goes on where it was; a file of another run is refused with what differs."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rich.console import Console

from bench import config, environment, record, resume, run, run_parts
from bench.config import BenchConfig, BenchError

SIZES = [4096, 8192, 16384]


def settings(tmp_path: Path, sizes: list[int], **changes: Any) -> BenchConfig:
    (tmp_path / "files").mkdir(exist_ok=True)
    rows = {name: {"kind": "torch_dataloader", "num_workers": 0, "dataset": name} for name in ("shards", "memmap")}
    scenario = config.EpochConfig("loader_epoch", "epoch", rounds=3, max_seconds=5, sizes=sizes, sample_seconds=0.01,
                                  sample_bytes=1 << 20)  # fmt: skip
    storage = config.StorageConfig(str(tmp_path / "files"), 1, 1 << 20)
    return BenchConfig(
        scenario=scenario, storage=storage, loaders=changes.pop("loaders", rows), device="cpu", **changes
    )


def measured(given: BenchConfig, output: Path) -> tuple[list[record.Record], str]:
    out = Console(file=io.StringIO(), width=200)
    rows = run.measure(given, output, out)
    return rows, out.file.getvalue()  # type: ignore[attr-defined]


def names(rows: list[record.Record]) -> list[tuple[int, str]]:
    return [(row.config["scenario"]["sizes"][0], row.loader) for row in rows]


def test_finished_parts_are_kept_and_the_rest_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    whole = settings(tmp_path, SIZES, loaders={"shards": settings(tmp_path, SIZES).loaders["shards"]})
    first, _ = measured(replace(whole, scenario=replace(whole.scenario, sizes=SIZES[:1])), output)  # type: ignore[call-arg]
    before = output.read_text(encoding="utf-8")
    # As a run is left that was killed in the middle of a line.
    output.write_text(before + before[: len(before) // 2], encoding="utf-8")
    rows, said = measured(replace(whole, resume=str(output), scenario=replace(whole.scenario, max_seconds=4.0)), output)
    assert names(rows) == [(size, "shards") for size in SIZES]
    assert rows[0].to_json() == first[0].to_json()
    assert "resumed: 1 rows of 1 of 3 parts are kept, 1 of incomplete parts are measured again" in said
    lines = output.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[0] == before
    assert [record.problems(json.loads(line)) for line in lines] == [[]] * 3
    again, said = measured(replace(whole, resume=str(output)), output)
    assert [row.to_json() for row in again] == [row.to_json() for row in rows]
    assert "resumed: 3 rows of 3 of 3 parts are kept." in said


@pytest.fixture
def finished(tmp_path: Path) -> tuple[BenchConfig, Path, dict[str, Any]]:
    """Settings of two loaders and parts, a file of their rows that were never measured, and its environment."""
    given = settings(tmp_path, SIZES[:2])
    env = json.loads(json.dumps(environment.collect(tmp_path / "files", "cpu")))
    output = tmp_path / "results.jsonl"
    made = [
        record.unmeasured(
            name, "why", part, cold=False, config=run_parts.row_config(replace(given, scenario=part), name), env=env
        )
        for part in config.parts(given.scenario)
        for name in given.loaders
    ]
    output.write_text("".join(row.to_json() + "\n" for row in made), encoding="utf-8")
    return given, output, env


def test_a_part_counts_when_every_loader_has_a_row_of_it(
    finished: tuple[BenchConfig, Path, dict[str, Any]],
) -> None:
    given, output, env = finished
    assert resume.find(output, given, env).parts == {0, 1}
    lines = output.read_text(encoding="utf-8").splitlines(keepends=True)
    output.write_text("".join(lines[:3]), encoding="utf-8")
    found = resume.find(output, given, env)
    assert (found.parts, len(found.rows), found.dropped) == ({0}, 2, 1)
    assert output.read_text(encoding="utf-8") == "".join(lines[:2])
    output.write_text(lines[0][:50], encoding="utf-8")
    assert resume.find(output, given, env) == (frozenset(), [], 1)
    assert output.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(
    ("changes", "elsewhere", "message"),
    [
        ({"cache": config.CacheConfig("cold")}, {}, "cache.state was 'warm' and is 'cold'"),
        ({"storage": config.StorageConfig("/tmp", 2, 1 << 20)}, {}, "storage.files was 1 and is 2"),
        ({"loaders": {"shards": {"kind": "pread"}}}, {}, "loaders.shards.kind was 'torch_dataloader' and is 'pread'"),
        ({"loaders": {"new": {"kind": "pread"}}}, {}, "loader 'shards' is not in this run"),
        ({}, {"commit": "abc"}, "and is 'abc'"),
        ({}, {"cores": 999, "gpu": "GPU 9"}, "gpu was None and is 'GPU 9'; cores was "),
    ],
)  # fmt: skip
def test_another_run_is_refused_with_what_differs(
    finished: tuple[BenchConfig, Path, dict[str, Any]],
    changes: dict[str, Any],
    elsewhere: dict[str, Any],
    message: str,
) -> None:
    given, output, env = finished
    before = output.read_text(encoding="utf-8")
    with pytest.raises(BenchError) as caught:
        resume.find(output, replace(given, **changes), {**env, **elsewhere})
    assert message in str(caught.value)
    assert f"{output}:1 is of another run" in str(caught.value)
    assert output.read_text(encoding="utf-8") == before


def test_other_parameters_are_refused(finished: tuple[BenchConfig, Path, dict[str, Any]]) -> None:
    given, output, env = finished
    with pytest.raises(BenchError, match=r"scenario\.rounds was 3 and is 4"):
        resume.find(output, replace(given, scenario=replace(given.scenario, rounds=4)), env)
    with pytest.raises(BenchError, match=r"results.jsonl:3 .*scenario.sizes was \[8192\] and is \[4096\]"):
        resume.find(output, replace(given, scenario=replace(given.scenario, sizes=[4096])), env)  # type: ignore[call-arg]


def test_another_scenario_is_said_and_nothing_else(finished: tuple[BenchConfig, Path, dict[str, Any]]) -> None:
    given, output, env = finished
    other = config.PipelineConfig("pipeline", "pipeline")
    with pytest.raises(BenchError) as caught:
        resume.find(output, replace(given, scenario=other, loaders={"x": {}}), {**env, "commit": "other"})
    assert "is of another run: it is of scenario 'loader_epoch' (verb epoch), and this run is of 'pipeline'" in str(
        caught.value
    )
    assert "commit" not in str(caught.value)


def test_what_only_says_how_a_run_is_made_may_differ(finished: tuple[BenchConfig, Path, dict[str, Any]]) -> None:
    given, output, env = finished
    other = replace(given, isolate=False, resume="y", scenario=replace(given.scenario, max_seconds=9.0))
    assert resume.find(output, other, env).parts == {0, 1}


def test_the_file_is_found_by_its_run_or_multirun(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with pytest.raises(BenchError, match="resume: there is no"):
        resume.path(str(file), None)
    with pytest.raises(BenchError, match="resume: there is no"):
        resume.path(str(tmp_path), None)
    file.touch()
    assert resume.path(str(file), None) == resume.path(str(tmp_path), None) == file
    # A job that had not begun has no file yet.
    assert resume.path(str(tmp_path), 3) == tmp_path / "3" / "results.jsonl"


def test_a_run_that_was_ended_half_way_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    rows = tmp_path / "run" / "results.jsonl"
    command = [
        sys.executable, "-m", "bench.run", "experiment=loader_epoch_smoke", "device=cpu",
        "loader=[dataloader_shards_0]", f"storage.dir={tmp_path}/files", "storage.files=1",
        "storage.file_bytes=1048576", f"hydra.run.dir={tmp_path}/run",
        "scenario.sizes=[4096,8192,16384]", "scenario.sample_seconds=0.2", "scenario.rounds=5",
    ]  # fmt: skip
    held = ""
    for number in (signal.SIGKILL, signal.SIGINT):
        resumed = [f"resume={tmp_path}/run"] if held else []
        process = subprocess.Popen([*command, *resumed], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _until(lambda before=held: rows.exists() and len(rows.read_text()) > len(before), "no part was complete")
            process.send_signal(number)
            process.wait(60)
        finally:
            process.kill()
        _until(lambda: not list((tmp_path / "files").iterdir()), "the files are still there")
        assert rows.read_text(encoding="utf-8").startswith(held)
        held = rows.read_text(encoding="utf-8")
        held = held[: held.rfind("\n") + 1]
    done = subprocess.run(
        [*command, f"resume={tmp_path}/run"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows.read_text(encoding="utf-8").startswith(held)
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [row["config"]["scenario"]["sizes"] for row in found] == [[4096], [8192], [16384]]
    complete = held.count("\n")
    assert complete >= 2
    assert f"resumed: {complete} rows of {complete} of 3 parts are kept" in done.stdout


def _until(true: Any, otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
