from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from runs import running

from bench import record, run_parts
from bench.config import BenchError

COMMAND = [sys.executable, "-m", "bench.run", "device=cpu", "loader=[pread,safetensors]"]


def command(tmp_path: Path, *overrides: str) -> list[str]:
    where = [f"hydra.run.dir={tmp_path}/hydra", f"storage.dir={tmp_path}", f"output={tmp_path}/rows.jsonl"]
    return [*COMMAND, *where, *overrides]


def test_the_smoke_experiment_writes_valid_rows(tmp_path: Path) -> None:
    run = subprocess.run(
        command(tmp_path, "experiment=smoke", "storage.file_bytes=4000000", "scenario.rounds=3"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["loader"], row["status"]) for row in rows] == [("pread", "ok"), ("safetensors", "ok")]
    assert all(record.problems(row) == [] for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hydra", "rows.jsonl"]


def test_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    run = subprocess.run(
        command(tmp_path, "scenario.round=3"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2
    assert "did you mean 'rounds'?" in run.stdout


def test_an_output_that_cannot_be_written_is_said_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output, says in ((f"{tmp_path}/file/x.jsonl", "file is no directory"), (str(tmp_path), "Is a directory")):
        with pytest.raises(BenchError, match=f"'output': {output} cannot be written: .*{says}"):
            run_parts.check_output(Path(output))
    run_parts.check_output(tmp_path / "new" / "rows.jsonl")
    assert list((tmp_path / "new").iterdir()) == []
    run = subprocess.run(
        command(tmp_path, f"output={tmp_path}/file/x.jsonl"),
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stdout
    assert "error: 'output':" in run.stdout
    assert "files of" not in run.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    long = command(tmp_path, "scenario.rounds=100000", "scenario.max_seconds=200", "storage.file_bytes=2000000")
    with running(
        long, lambda: list(tmp_path.glob("gdsstream-bench-*/*.index.json")), "no files were written"
    ) as process:
        time.sleep(0.5)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    # Python ends itself by SIGINT where the interrupt passed through an exec of a string, as in an import.
    assert process.returncode in (130, -signal.SIGINT), output
    assert list(tmp_path.glob("gdsstream-bench-*")) == []
    assert "interrupted" in output


def test_an_interrupted_run_keeps_what_was_complete(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    overrides = ["experiment=pipeline_smoke", "loader=[stream_staged]", "scenario.tokens=[16,32,64,128,256]"]
    long = command(tmp_path, *overrides, "scenario.rounds=60", "scenario.max_seconds=3")
    with running(long, lambda: rows.exists() and rows.stat().st_size, "no part was complete", limit_s=120) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert "interrupted" in output
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert 1 <= len(found) < 5
    assert all(record.problems(row) == [] for row in found)
