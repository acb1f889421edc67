"""Jobs of a job file, at once: they begin together, are checked before any is measured, and are added up."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import record_rows
from conftest import ROOT
from rich.console import Console

from bench import config, files, gate, gdsio_at_once, gdsio_line, gdsio_run, nvml, resume
from bench.config import BenchConfig, BenchConfigError, BenchError, StorageConfig, TransferConfig
from bench.gdsio_at_once import JobRun

MIB = 1 << 20
JOBS = """\
[global]
rw=randread
xfer_type=1
bs=64k
size=2M
do_verify=1
numa_node=0
[job1]
num_threads=2
directory={one}
[job2]
num_threads=1
rw=write
directory={two}
"""
CRASHING = """
import os
from bench.loaders.transfer_bounce import Bounce


class Crashing(Bounce):
    on_host = True

    def check(self, job):
        pass

    def start(self):
        os.abort()
"""
PLUGIN = 'import bench.loaders\nbench.loaders.KINDS["transfer_bounce"] = ("crashing", "Crashing")\n'


def command(tmp_path: Path, text: str, *overrides: str) -> Any:
    for name in ("one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "a.gdsio").write_text(text.format(one=tmp_path / "one", two=tmp_path / "two"))
    return subprocess.run(
        [
            sys.executable, "-m", "bench.run", "experiment=gdsio", f"scenario.job_file={tmp_path}/a.gdsio",
            "scenario.gdsio_lines=true", "scenario.rounds=3", "cache=warm", "device=cpu",
            f"hydra.run.dir={tmp_path}/hydra", *overrides,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "hydra" / "results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


needs_nodes = pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="no NUMA nodes in /sys")


@needs_nodes
def test_jobs_run_at_once_are_added_up_and_resumed(tmp_path: Path) -> None:
    made = command(tmp_path, JOBS)
    assert made.returncode == 0, made.stdout + made.stderr
    found = re.findall(r"job(\d): IoType: (\w+) XferType: CPUONLY Threads: (\d) DataSetSize: (\d+)/(\d+)", made.stdout)
    # Three samples of as much as the files hold: a file of 2 MiB for each thread.
    assert found == [("1", "RANDREAD", "2", "12288", "4096"), ("2", "WRITE", "1", "6144", "2048")]
    total = "all jobs at once: IoType: RANDREAD+WRITE XferType: CPUONLY Threads: 3 DataSetSize: 18432/6144(KiB)"
    assert total in made.stdout
    before = rows(tmp_path)
    assert [(row["loader"], row["status"]) for row in before] == [("job1", "ok"), ("job2", "ok")]
    assert all(row["derived"]["jobs_at_once"] == ["job1", "job2"] for row in before)
    assert [list((tmp_path / name).iterdir()) for name in ("one", "two")] == [[], []]

    again = command(tmp_path, JOBS, f"resume={tmp_path}/hydra")
    assert "resumed: all jobs are kept." in again.stdout, again.stdout + again.stderr
    assert rows(tmp_path) == before
    file = tmp_path / "hydra" / "results.jsonl"
    now: dict[str, dict[str, Any]] = {"job1": {}, "job2": {}}
    other = config.build({**before[0]["config"], "loaders": {"job1": {}}, "device": "cuda"})
    with pytest.raises(BenchError, match="device was 'cpu' and is 'cuda'"):
        resume.find_jobs(file, {"job1": other, "job2": other}, now)
    with pytest.raises(BenchError, match="job 'job1' is not in the job file"):
        resume.find_jobs(file, {"job2": other}, now)


def test_nothing_is_measured_before_all_jobs_are_checked(tmp_path: Path) -> None:
    text = JOBS.replace("numa_node=0\n", "")
    made = command(tmp_path, text.replace("{two}", "/nowhere/at/all"))
    assert made.returncode == 2
    assert "[job2] storage.dir: /nowhere/at/all is not a directory" in " ".join(made.stdout.split())
    assert "files of" not in made.stdout
    assert rows(tmp_path) == []


def test_a_job_that_crashes_is_a_failed_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    (tmp_path / "sitecustomize.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    (tmp_path / "files").mkdir()
    text = JOBS.replace("numa_node=0\n", "").replace("[job2]", "[job2]\nxfer_type=2")
    path = tmp_path / "a.gdsio"
    path.write_text(text.format(one=tmp_path / "files", two=tmp_path / "files"))
    scenario = TransferConfig("gdsio", "transfer", rounds=3, job_file=str(path))
    settings = BenchConfig(scenario, loaders={"x": {"kind": "transfer_posix"}}, device="cpu")
    core = [min(os.sched_getaffinity(0))]
    jobs = [each._replace(cpus=core) for each in gdsio_run.jobs(settings, pytest.fail)]
    out = io.StringIO()
    found = gdsio_at_once.run(jobs, tmp_path / "rows.jsonl", Console(file=out, width=300), lambda *_: None)
    assert [(row.loader, row.status, len(row.samples_s)) for row in found] == [("job1", "ok", 3), ("job2", "failed", 0)]
    assert found[0].env["cores"] == 1
    assert "SIGABRT (job2: start-up)" in str(found[1].reason)
    assert "there is no sum" in out.getvalue()
    assert [json.loads(row.to_json()) for row in found] == [
        json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    ]
    assert list((tmp_path / "files").iterdir()) == []


# ---- what is checked


def job(tmp_path: Path, name: str, gpu: int = 0, **storage: Any) -> JobRun:
    scenario = TransferConfig("gdsio", "transfer", total_bytes=[64 * MIB])
    settings = BenchConfig(
        scenario, StorageConfig(str(tmp_path), **{"files": 1, "file_bytes": 64 * MIB, **storage}), loaders={name: {}}
    )
    return JobRun(settings, gpu, None, to_gpu=True)


def test_room_is_needed_by_all_jobs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "room", lambda _: 200 * MIB)
    one, two = job(tmp_path, "a"), job(tmp_path, "b")
    plan = files.choose(one.settings.storage, cuda=False, cold=False)
    gdsio_at_once.check_room([one], [plan])
    with pytest.raises(BenchError, match=r"a, b together need 0\.27 GB.*has room for 0\.21 GB"):
        gdsio_at_once.check_room([one, two], [plan, plan])


def test_gpus_have_to_be_there_and_to_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gdsio_at_once.check_gpus([job(tmp_path, "a", 1)])
    with pytest.raises(BenchConfigError, match=r"\[b\] gpu_dev_id=2: this machine has 2 GPUs"):
        gdsio_at_once.check_gpus([job(tmp_path, "a", 1), job(tmp_path, "b", 2)])
    with pytest.raises(BenchConfigError, match=r"gpu_dev_id=0 is hidden by CUDA_VISIBLE_DEVICES=1"):
        gdsio_at_once.check_gpus([job(tmp_path, "a", 0)])

    assert gdsio_at_once._variables(job(tmp_path, "a", 1))["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    gdsio_at_once.check_gpus([job(tmp_path, "a", 0)])
    assert gdsio_at_once._variables(job(tmp_path, "a", 0)) == {}
    with pytest.raises(BenchConfigError, match=r"gpu_dev_id=1 is hidden by CUDA_VISIBLE_DEVICES=GPU-aa,GPU-bb"):
        gdsio_at_once.check_gpus([job(tmp_path, "a", 1)])

    class Small:
        def free_bytes(self) -> int:
            return 100 * MIB

    monkeypatch.setattr(nvml, "open_device", lambda _: Small())
    one, two = job(tmp_path, "a"), job(tmp_path, "b")
    plan = files.choose(one.settings.storage, cuda=False, cold=False)
    gdsio_at_once.check_room([one, job(tmp_path, "b", 1)], [plan, plan])
    with pytest.raises(BenchError, match=r"jobs on GPU 0 hold 0\.13 GB of it, and 0\.10 GB are free"):
        gdsio_at_once.check_room([one, two], [plan, plan])


# ---- meetings


def test_all_go_on_at_one_time_and_nobody_waits_for_who_has_left(tmp_path: Path) -> None:
    meetings = gate.Meetings(tmp_path / "gate")
    came: dict[int, list[float]] = {0: [], 1: [], 2: []}
    went: dict[int, list[float]] = {0: [], 1: [], 2: []}
    pipes = [os.pipe() for _ in went]

    def member(number: int) -> None:
        one = gate.Together(tmp_path / "gate", lambda **_: None)
        for turn in range(1 if number == 2 else 3):
            time.sleep(0.05 * number * (turn + 1))
            came[number].append(time.perf_counter())
            one.meet()
            went[number].append(time.perf_counter())
        os.close(pipes[number][1])

    threads = [threading.Thread(target=member, args=(number,)) for number in went]
    for thread in threads:
        thread.start()
    looked: list[int] = []
    ended: list[int] = []

    def look(number: int) -> None:
        assert number not in ended
        looked.append(number)

    def over(number: int) -> None:
        ended.append(number)
        os.close(pipes[number][0])

    meetings.serve([end for end, _ in pipes], look, over, 0.0)
    for thread in threads:
        thread.join()
    meetings.close()
    assert set(looked) == {0, 1, 2}
    assert sorted(ended) == [0, 1, 2]
    assert [len(times) for times in went.values()] == [3, 3, 1]
    for turn in range(3):
        last = max(times[turn] for times in came.values() if len(times) > turn)
        assert all(times[turn] > last for times in went.values() if len(times) > turn), turn


# ---- the sum


def test_the_sum_lasts_from_the_common_start_to_the_last_end() -> None:
    def made(name: str, seconds: list[float], labels: list[list[str]] | None = None) -> Any:
        base = record_rows.row(name, [1.0] * len(seconds), labels=labels)
        derived = {"op": "read", "xfer_type": 1, "threads": 2, "depth": 1, "dataset_bytes": MIB, "io_bytes": 4096,
                   "latency_of": "io"}  # fmt: skip
        return replace(base, verb="transfer", samples_s=seconds, bytes=MIB, units=256, derived=derived,
                       figures={"latency_mean_us": [10.0 if name == "a" else 30.0] * len(seconds)})  # fmt: skip

    both = [made("a", [1.0, 2.0, 1.0]), made("b", [3.0, 1.0, 9.0], [[], [], ["not_cold"]])]
    found = gdsio_line.total(both)
    assert (found.seconds, found.moved_bytes, found.ops, found.threads) == (5.0, 4 * MIB, 1024, 4)
    assert found.latency_us == pytest.approx(20.0)
    other = replace(both[1], derived={**both[1].derived, "op": "write", "io_bytes": 8192, "xfer_type": 2})
    text = gdsio_line.text(gdsio_line.total([both[0], other]))
    assert text.startswith("IoType: READ+WRITE XferType: CPUONLY+CPU_GPU Threads: 4 DataSetSize: 4096/2048(KiB)")
    assert "IOSize: n/a(KiB)" in text
