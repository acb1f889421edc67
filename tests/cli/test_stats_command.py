"""`gdsstream stats`: of a process that runs, of a report, and where there is neither."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from stats_support import COUNTING, example, until
from support import random_raw, start_python, write_checkpoint

from gdsstream.cli import stats as command
from gdsstream.cli.output import to_text
from gdsstream.stats import ProcessStats, load_report
from gdsstream.stats_files import own_file, published, write_file

Run = Callable[..., Result]


@pytest.fixture
def report_file(tmp_path: Path) -> Path:
    example().save(tmp_path / "report.json")
    return tmp_path / "report.json"


@pytest.fixture
def process(counting: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = write_checkpoint(tmp_path / "c.safetensors", {"a": random_raw("U8", (3_000_001,))})
    started = start_python(COUNTING, path, GDSSTREAM_STATS="3")
    assert started.stdout is not None
    assert started.stdout.readline() == "reading\n"
    until(lambda: any(one.read().reads.bytes for one in published(started.pid)), "it shows what it read")  # type: ignore[union-attr]
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate(timeout=20)


def test_a_report_as_people_see_it(run: Run, report_file: Path, snapshot: Callable[[str, str], None]):
    result = run("stats", report_file)
    assert result.exit_code == 0
    snapshot("stats", result.stdout)


@pytest.mark.parametrize(("level", "tables"), [(1, ["All"]), (2, ["All", "Sizes"]), (3, ["All", "Sizes", "Engines"])])
def test_levels_show_more_and_more(run: Run, run_json: Callable[..., Any], report_file: Path, level: int, tables: Any):
    said = run("stats", report_file, "--level", level).stdout
    for title in ("All", "Sizes", "Engines"):
        assert (f"\n{title}\n" in said) == (title in tables)
    found = run_json("stats", report_file, "--level", level)
    assert found["level"] == level
    assert bool(found["engines"]) == (level == 3)
    assert bool(found["reads"]["latencies"]) == (level > 1)


def test_json_can_be_read_as_a_report(run: Run, run_json: Callable[..., Any], report_file: Path, tmp_path: Path):
    found = run_json("stats", report_file)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found))
    assert load_report(again) == example()
    assert (found["command"], found["command_line"]) == ("stats", example().command_line)
    assert found["reads"]["p50_us"] == pytest.approx(5000, rel=0.12)
    assert found["read_bytes_per_s"] == example().reads.bytes / 0.5


def test_a_running_process(run: Run, run_json: Callable[..., Any], process: subprocess.Popen[str]):
    found = run_json("stats", process.pid)
    assert (found["pid"], found["level"]) == (process.pid, 3)
    assert found["reads"]["bytes"] == 3_000_001
    assert [one["engine"] for one in found["engines"]] == ["staged"]
    # The only one needs no number.
    assert run_json("stats")["pid"] == process.pid
    assert f"process {process.pid} on " in run("stats").stdout


def test_several_processes_are_listed(run: Run, run_json: Callable[..., Any], process: subprocess.Popen[str]):
    write_file(own_file(), json.dumps(example(os.getpid()).as_dict()))
    listed = run_json("stats")["processes"]
    assert {one["pid"] for one in listed} == {process.pid, os.getpid()}
    assert "python train.py" in run("stats").stdout
    for option in ("--watch", "--prometheus"):
        result = run("stats", option)
        assert (result.exit_code, "name one by its PID" in result.stderr) == (2, True)


def test_where_nothing_counts_it_says_how_to_begin(run: Run, counting: Path):
    for arguments in ([], [str(os.getpid())]):
        result = run("stats", *arguments)
        assert result.exit_code == 3
        assert "start it with GDSSTREAM_STATS=3" in result.stderr


def test_a_process_that_does_not_run_is_wrong_usage(run: Run, counting: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    result = run("stats", gone.pid)
    assert (result.exit_code, f"no process {gone.pid} runs here" in result.stderr) == (2, True)


def test_bad_reports_and_options(run: Run, tmp_path: Path, report_file: Path):
    assert run("stats", tmp_path / "missing.json").exit_code == 2
    assert run("stats", tmp_path).exit_code == 2
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    result = run("stats", bad)
    assert (result.exit_code, "is no report of statistics" in result.stderr) == (3, True)
    assert run("stats", report_file, "--level", "4").exit_code == 2
    assert run("stats", report_file, "--json", "--prometheus").exit_code == 2
    assert run("stats", report_file, "--watch", "--json").exit_code == 2


def test_prometheus(run: Run, report_file: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (gdsstream[metrics])")
    said = run("stats", report_file, "--prometheus").stdout
    assert 'gdsstream_stats_level{pid="4242"} 3.0\n' in said
    assert said.endswith("\n")
    assert 'device="cuda:0"' not in run("stats", report_file, "--prometheus", "--level", 2).stdout
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = run("stats", report_file, "--prometheus")
    assert (result.exit_code, "pip install gdsstream[metrics]" in result.stderr) == (3, True)


def test_watching_ends_with_the_process(process: subprocess.Popen[str]):
    watching = start_python("from gdsstream.cli import main; main(['stats', '--watch', '--interval', '0.1'])")
    assert watching.stdout is not None
    first = watching.stdout.readline()
    assert first.startswith(f"process {process.pid} on ")
    process.communicate("\n", timeout=20)
    out = watching.stdout.read()
    _, err = watching.communicate(timeout=20)
    assert (watching.returncode, err) == (0, "")
    assert out.endswith("the process has ended\n")
    assert "Devices and routes" in out


def test_watching_is_interrupted(process: subprocess.Popen[str]):
    watching = start_python("from gdsstream.cli import main; main(['stats', '--watch'])")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    assert watching.wait(20) == 130
    watching.communicate()
    assert process.poll() is None


def test_watching_shows_the_present_bandwidth():
    before, now = example(), replace(example(), taken_at=example().taken_at + 2)
    now = replace(now, reads=replace(now.reads, bytes=before.reads.bytes + 3_000_000))
    assert "bandwidth now" not in to_text(command.report(now))
    line = next(one for one in to_text(command.report(now, None, before)).splitlines() if "bandwidth now" in one)
    assert line.split() == ["bandwidth", "now", "1.5", "MB/s", "0", "B/s"]


def test_a_process_that_is_stopped_is_called_silent(run: Run, counting: Path):
    old = replace(example(os.getpid()), host=os.uname().nodename, taken_at=time.time() - 60)
    write_file(own_file(), json.dumps(old.as_dict()))
    assert "silent for 60 s" in run("stats", os.getpid()).stdout
    assert "silent" not in to_text(command.report(replace(old, taken_at=time.time())))


def test_a_report_without_anything(run: Run, run_json: Callable[..., Any], tmp_path: Path):
    nothing = ProcessStats(1, "", "here", 0, 5.0, 5.0)
    nothing.save(tmp_path / "report.json")
    said = run("stats", tmp_path / "report.json").stdout
    assert "(unknown command)" in said
    assert "nothing was counted" in said
    found = run_json("stats", tmp_path / "report.json")
    assert (found["read_bytes_per_s"], found["reads"]["average_us"]) == (None, None)
