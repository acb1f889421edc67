"""A library that ends the process is a row; whatever ends the run leaves no files behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from bench import guard, guarded, record

# A loader whose library really aborts, in its load number `when` (the first is 1).
CRASHING = """
import os, sys
from dataclasses import dataclass, field
from bench.loaders.pread import Pread


@dataclass
class Crashing(Pread):
    when: int = 1
    loads: int = field(default=0, init=False)

    def load(self):
        self.loads += 1
        if self.loads == self.when:
            print("check failed: the ring is empty", file=sys.stderr, flush=True)
            os.abort()
        return super().load()
"""
HANGING = """
import time
from bench.loaders.pread import Pread


class Crashing(Pread):
    def load(self):
        time.sleep(1000)
"""
CRASHING_IN_ONE_PART = """
import os
from bench.loaders.pread import Pread


class Crashing(Pread):
    verbs = frozenset({"epoch"})

    def check(self, job):
        if job.epoch.shards.record_bytes == 16384:
            os._exit(0)
        raise ValueError("not this time")
"""
PLUGIN = 'import bench.loaders\nbench.loaders.KINDS["crashing"] = ("crashing", "Crashing")\n'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which every process of the bench knows the kind `crashing`."""
    place = tmp_path / "plugin"
    place.mkdir()
    (place / "crashing.py").write_text(CRASHING, encoding="utf-8")
    (place / "sitecustomize.py").write_text(PLUGIN, encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(place), str(ROOT), before]))}


def command(tmp_path: Path, *overrides: str) -> list[str]:
    (tmp_path / "files").mkdir(exist_ok=True)
    where = [f"hydra.run.dir={tmp_path}/hydra", f"storage.dir={tmp_path}/files", f"output={tmp_path}/rows.jsonl"]
    return [sys.executable, "-m", "bench.run", "experiment=smoke", "device=cpu", "loader=[pread]",
            "storage.files=1", "storage.file_bytes=1048576", "scenario.rounds=3", *where, *overrides]  # fmt: skip


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(record.problems(row) == [] for row in found)
    return found


def test_a_loader_that_aborts_is_a_failed_row(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run(command(tmp_path, "+loaders.bad.kind=crashing", "+loaders.bad.when=3"), environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["loader"]: row for row in rows(tmp_path / "rows.jsonl")}
    assert {name: row["status"] for name, row in found.items()} == {"pread": "ok", "bad": "failed"}
    assert "SIGABRT (round 2: bad): check failed: the ring is empty; File " in found["bad"]["reason"]
    assert "crashing.py" in found["bad"]["reason"]
    assert len(found["pread"]["samples_s"]) == 3
    assert list((tmp_path / "files").iterdir()) == []
    assert "Not measured" in done.stdout
    assert "check failed: the ring is empty" in done.stderr


def test_a_loader_that_hangs_is_a_failed_row(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "plugin" / "crashing.py").write_text(HANGING, encoding="utf-8")
    done = run(command(tmp_path, "+loaders.bad.kind=crashing", "hang_seconds=1"), environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["loader"]: row for row in rows(tmp_path / "rows.jsonl")}
    assert {name: row["status"] for name, row in found.items()} == {"pread": "ok", "bad": "failed"}
    assert "more than hang_seconds=1 and was ended (bad: first load)" in found["bad"]["reason"]
    assert "crashing.py" in found["bad"]["reason"], "where it hung"
    assert list((tmp_path / "files").iterdir()) == []


def test_parts_that_were_complete_are_not_measured_again(tmp_path: Path, environment: dict[str, str]) -> None:
    arguments = command(tmp_path, "scenario=loader_epoch", "loader=[dataloader_shards_0]", "scenario.rounds=3")
    sizes = ["scenario.sizes=[4096,16384,65536]", "scenario.sample_seconds=0.01", "scenario.max_seconds=2"]
    (tmp_path / "plugin" / "crashing.py").write_text(CRASHING_IN_ONE_PART, encoding="utf-8")
    done = run([*arguments, *sizes, "storage.file_bytes=4194304", "+loaders.bad.kind=crashing"], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        (row["config"]["scenario"]["sizes"], row["loader"], row["status"]) for row in rows(tmp_path / "rows.jsonl")
    ]
    assert found == [
        (size, name, status)
        for size in ([4096], [16384], [65536])
        for name, status in (("dataloader_shards_0", "ok"), ("bad", "failed"))
    ]
    reasons = [row["reason"] for row in rows(tmp_path / "rows.jsonl") if row["loader"] == "bad"]
    assert ["exit status 0 (bad: start-up)" in reason for reason in reasons] == [False, True, False]


def test_a_killed_guard_takes_the_measuring_process_and_its_files_with_it(tmp_path: Path) -> None:
    arguments = command(tmp_path, "scenario.rounds=100000", "scenario.max_seconds=200")
    (tmp_path / "tmp").mkdir()
    where = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(arguments, cwd=ROOT, env=where, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    place = tmp_path / "files"
    try:
        _until(lambda: bool(list(place.glob("*/*.index.json"))), "no files were written")
    finally:
        process.kill()
        process.wait()
    _until(lambda: not list(place.iterdir()), "the files are still there")
    _until(lambda: not list((tmp_path / "tmp").iterdir()), "the guard's own are still there")


def test_an_interrupt_that_was_dropped_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7) if heard else heard.append(1))
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    left = tmp_path / f"gdsstream-bench-{process.pid}-x"
    left.mkdir()
    guard.Log(tmp_path / "said")(directory=str(tmp_path))
    monkeypatch.setattr(guard, "_ENDING_S", 0.3)
    guard._end(process, tmp_path, keep=False)
    process.stdout.close()
    assert process.returncode == 7
    assert not left.exists()


def test_signals_at_once_are_one_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.1, 102.0, 104.5])
    monkeypatch.setattr(guarded.time, "monotonic", lambda: next(now))
    handler = guarded._Interrupt()
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)
    handler(signal.SIGTERM, None)
    handler(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)
    assert guarded._SAME_S < guard._ENDING_S


def test_what_was_said_is_read_back_without_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "said"
    assert guard.Log.read(path) == guard.Told()
    say = guard.Log(path)
    say(part=1, step="a")
    say(loader="x")
    say(finished=0)
    with path.open("a", encoding="utf-8") as lines:
        lines.write('{"loader": "y')
    assert guard.Log.read(path) == guard.Told(loader="x", step="a", part=1, finished=[0])


def test_the_last_words_are_those_before_the_fault() -> None:
    lines = ["a", "b", "", "c", "d", "Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):",
             '  File "/x/w.py", line 1 in wait', "", "Current thread 0x2 (most recent call first):",
             '  File "/x/y.py", line 3 in load', '  File "/x/z.py", line 4 in run']  # fmt: skip
    assert guard._last_words(lines) == 'b; c; d; File "/x/y.py", line 3 in load'
    assert guard._last_words([]) == ""


def test_an_end_is_called_what_it_was() -> None:
    assert guard._how(-signal.SIGSEGV) == "SIGSEGV"
    assert "memory runs out" in guard._how(-signal.SIGKILL)
    assert guard._how(3) == "exit status 3"


def _until(true: Any, otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
