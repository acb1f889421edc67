"""`gdsstream tune`: what it announces, shows, keeps and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import gdsstream
from gdsstream import load, tune_path
from gdsstream.errors import ReadError
from gdsstream.profile import Here, find_profile
from gdsstream.storage import describe_recorded
from gdsstream.trials import Trials
from gdsstream.tuning_space import Place

MIB = 2**20
CPU = torch.device("cpu")

Run = Callable[..., Result]


@pytest.fixture
def file(make_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of 9 MiB."""
    return make_checkpoint(tensors={"w": ("U8", (9 * MIB,), bytes(9 * MIB))})


@pytest.fixture(autouse=True)
def _own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def rates(monkeypatch: pytest.MonkeyPatch, of: Callable[[dict[str, Any]], float]) -> None:
    """Reads are as fast as `of` says, and take no time."""
    monkeypatch.setattr(Trials, "measure", lambda self, knobs, nbytes: of(dict(knobs)))


def kept(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (tmp_path / "config").rglob("*.json")]


def test_a_dry_run_reads_and_writes_nothing(
    file: Path, tmp_path: Path, run: Run, run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    def refuse(knobs: dict[str, Any]) -> float:
        raise AssertionError("something was read")

    rates(monkeypatch, refuse)
    document = run_json("tune", file, "--device", "cpu", "--dry-run")
    assert (document["dry_run"], document["result"]) == (True, None)
    plan = document["plan"]
    rounds = [one["nbytes"] * (one["settings"] + 1) for one in plan["rounds"]]
    assert plan["most_bytes"] == plan["rounds"][0]["nbytes"] + sum(rounds) + 2 * plan["pairs"] * plan["pair_bytes"]
    text = run("tune", file, "--device", "cpu", "--dry-run").stdout
    assert "reads at most" in text
    assert "Nothing was read now" in text
    assert kept(tmp_path) == []


def test_settings_that_are_better_are_kept_and_used(
    file: Path, tmp_path: Path, run: Run, run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    rates(monkeypatch, lambda knobs: 2.0 if knobs else 1.0)
    document = run_json("tune", file, "--device", "cpu")
    result = document["result"]
    assert (result["better"], result["gain"], result["gain_at_least"]) == (True, 2.0, 2.0)
    assert result["default"]["gb_per_s"] == [1.0] * 11
    assert result["default"]["effective"]["staging_bytes"] == 96 * MIB
    (profile,) = kept(tmp_path)
    assert profile["knobs"] == result["profile"]["knobs"] == result["tuned"]["knobs"]
    assert profile["knobs"]["backend"] == "staged"
    gdsstream.release_engines()
    gdsstream.load_file(file)
    ((_, config),) = load._engines
    assert {knob: getattr(config, knob) for knob in profile["knobs"]} == profile["knobs"]
    gdsstream.release_engines()
    assert "The tuned settings are faster: the median of 11 pairs is 2.00 x" in run("tune", file).stdout.replace(
        "\n", " "
    )


def test_settings_that_are_not_really_better_are_not(
    file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    rates(monkeypatch, lambda knobs: 2.0 if knobs else 1.0)
    run("tune", file, "--device", "cpu")
    rates(monkeypatch, lambda knobs: 1.02 if knobs else 1.0)
    result = run("tune", file, "--device", "cpu")
    assert result.exit_code == 0
    assert "The default stays" in result.stdout
    assert "profile (the default)" in result.stdout
    (profile,) = kept(tmp_path)
    assert profile["knobs"] == {}, "in place of what an earlier run found"
    found = find_profile(file, CPU)
    assert found is not None
    assert (found.gain, found.knobs) == (pytest.approx(1.02), {})


def test_this_machine(file: Path, tmp_path: Path, run_json: Callable[..., Any], run: Run):
    document = run_json("tune", file, "--device", "cpu", "--seconds", "2")
    result, plan = document["result"], document["plan"]
    assert 0 < result["read_bytes"] <= plan["most_bytes"]
    assert result["default"]["median_gb_per_s"] > 0
    assert "CPU memory" in result["default"]["route"]
    assert all(one["gb_per_s"] > 0 or one["failure"] for one in result["trials"])
    assert bool(kept(tmp_path)[0]["knobs"]) is result["better"]
    quick = run("tune", file, "--device", "cpu", "--seconds", "0.01")
    assert quick.stderr.startswith("reads at most ")
    assert "no time to try anything else; give more --seconds" in quick.stdout.replace("\n", " ")
    assert kept(tmp_path)[0]["knobs"] == {}


@pytest.mark.gpu
def test_a_gpu(file: Path, tmp_path: Path, run_json: Callable[..., Any]):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    document = run_json("tune", file, "--device", "cuda", "--seconds", "5")
    assert document["result"]["default"]["median_gb_per_s"] > 0
    (profile,) = kept(tmp_path)
    assert profile["here"]["gpu"] == torch.cuda.get_device_name(0)
    assert find_profile(file, torch.device("cuda", 0)) is not None


def test_what_the_environment_sets_goes_before_the_profile(file: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDSSTREAM_NUM_THREADS", "3")
    monkeypatch.setenv("GDSSTREAM_PROFILE", "0")
    text = run("tune", file, "--device", "cpu", "--dry-run").stdout
    assert "GDSSTREAM_NUM_THREADS: set in the environment, which goes before a profile" in text
    assert "GDSSTREAM_PROFILE=0: 0 leaves all profiles out" in text


def test_trials_leave_profile_and_environment_out(file: Path, monkeypatch: pytest.MonkeyPatch):
    from gdsstream.sample_files import SampleFiles

    monkeypatch.setenv("GDSSTREAM_NUM_THREADS", "1")
    trials = Trials(SampleFiles(file), CPU)
    assert trials.measure({"direct_io": False, "num_threads": 2}, MIB) > 0
    assert "x2 -> CPU memory" in trials.route({"direct_io": False, "num_threads": 2})
    assert trials.measure({"direct_io": False}, MIB) > 0
    assert trials.route({"direct_io": False}) != ""
    trials.close()


def test_a_read_that_fails_is_an_error_and_leaves_no_profile(
    file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    def fail(knobs: dict[str, Any]) -> float:
        raise ReadError("eio")

    rates(monkeypatch, fail)
    result = run("tune", file, "--device", "cpu")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (3, "error: eio")
    assert kept(tmp_path) == []


def test_wrong_input(tmp_path: Path, file: Path, run: Run):
    assert run("tune", tmp_path / "missing").exit_code == 2
    assert run("tune", file, "--seconds", "0").exit_code == 2
    (tmp_path / "small").write_bytes(bytes(10))
    result = run("tune", tmp_path / "small", "--device", "cpu")
    assert result.exit_code == 3
    assert "name a larger file" in result.stderr


def test_what_people_see(
    file: Path,
    run: Run,
    machine: Callable[..., Path],
    snapshot: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
):
    """As on a machine of 16 cores with a GPU, whose best is O_DIRECT from 4 threads; without what differs each time."""
    root = machine("dgx_a100")
    info = describe_recorded("/raid/model", sysfs=str(root / "sys"), procfs=str(root / "proc"))
    place = Place(cores=16, gpu=True, direct=True, prefers_direct=True, io_uring=True, cufile=True)
    made = tune_path.Tuner.__init__
    ran = tune_path.Tuner.run

    def init(self: tune_path.Tuner, path: Path, device: str, *, seconds: float) -> None:
        made(self, path, "cpu", seconds=seconds)
        families = tuple(tune_path.space(place))
        here = Here("dgx", 16, "A100", "/raid", "/dev/md1", "0000:07:00.0")
        schedule = tune_path.tuning.plan(families, 2 << 30)
        changes = {"path": "/raid/model", "device": "cuda:0", "families": families, "schedule": schedule, "info": info}
        self.task = replace(self.task, here=here, cold=True, **changes)

    def finish(self: tune_path.Tuner, **options: Any) -> tune_path.Tuned:
        route = "O_DIRECT by io_uring x4 of depth 256 -> cuda:0"
        file = Path("/home/user/.config/gdsstream/profiles/dgx-raid-0000-07-00-0-0badcafe.json")
        return replace(ran(self, **options), routes=(route, route), file=file, seconds=42.0, notes=("an example",))

    def rate(knobs: dict[str, Any]) -> float:
        if knobs.get("backend") == "cufile":
            raise ReadError("no cuFile in this test")
        base = {None: 20.0, 1: 10.0, 2: 18.0, 4: 24.0, 8: 22.0}.get(
            knobs.get("direct_threads", knobs.get("num_threads")), 15.0
        )
        return base - 5 * ("direct_io" in knobs) + 0.001 * knobs.get("io_depth", 0)

    monkeypatch.setattr(tune_path.Tuner, "__init__", init)
    monkeypatch.setattr(tune_path.Tuner, "run", finish)
    rates(monkeypatch, rate)
    snapshot("tune", run("tune", file, "--device", "cpu").stdout)
    monkeypatch.setattr(tune_path.Tuner, "notes", lambda self: ())
    snapshot("tune_dry_run", run("tune", file, "--device", "cpu", "--dry-run").stdout)
