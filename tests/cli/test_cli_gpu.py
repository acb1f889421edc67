"""The commands against a real GPU and this machine's own storage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from layer_files import write_layers
from safetensors.torch import load_file as load_reference
from stats_support import engine_stats, io_of, until, write_data

import gdsstream
from gdsstream.stats import process_stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
MIB = 1 << 20

Run = Callable[..., Result]
RunJson = Callable[..., Any]

READING = """
import select, sys, gdsstream
loaded = gdsstream.load_file(sys.argv[1], device="cuda", backend="staged")
print("read", flush=True)
select.select([sys.stdin], [], [], 60)
"""


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_doctor_knows_the_gpu_and_its_exit_code_says_what_it_found(tmp_path: Path, run: Run, run_json: RunJson):
    write_data(tmp_path, 2 * MIB)
    document = run_json("doctor", tmp_path)
    found = [one for section in document["sections"] for one in section["findings"]]
    gpu = next(one for one in found if one["topic"] == "GPU")
    # sysfs and the driver's files know it without the maker's name.
    assert torch.cuda.get_device_name(0).removeprefix("NVIDIA ") in gpu["found"]
    problems = [one for one in found if one["status"] == "problem"]
    assert run("doctor", tmp_path).exit_code == (1 if problems else 0)


def test_a_proof_is_cufiles_own_counters(tmp_path: Path, run: Run, run_json: RunJson):
    pytest.importorskip("kvikio", reason="the proof reads through kvikio's cuFile")
    write_data(tmp_path, 4 * MIB)
    document = run_json("doctor", tmp_path, "--prove")
    proof = document["proof"]
    assert (document["verdict"] == "proven") is (proof is not None)
    if proof is None:
        # Without cuFile's own counters nothing is proved, whatever the read brought.
        assert run("doctor", tmp_path, "--prove").exit_code == 1
    else:
        assert proof["nbytes"] > 0
        assert proof["evidence"] in ("nvidia-fs", "cufile")


def test_limits_measures_every_station_on_the_way(tmp_path: Path, run_json: RunJson):
    write_data(tmp_path, 64 * MIB)
    document = run_json("limits", tmp_path, "--device", "cuda", "--seconds", "3")
    found = {one["name"]: one for one in document["stations"]}
    link, memory = found["PCIe link"], found["GPU memory"]
    assert 1 < link["measured_gb_per_s"] < memory["measured_gb_per_s"] < 20e3
    for station in (link, memory):
        if station["specified_gb_per_s"]:
            assert station["measured_gb_per_s"] < station["specified_gb_per_s"]
    counted = [one for one in document["stations"] if one["counts"] and one["limit_gb_per_s"]]
    assert document["binding"]["gb_per_s"] == min(one["limit_gb_per_s"] for one in counted)


def test_statistics_of_loads_to_a_gpu(counting: Path, tmp_path: Path):
    write_layers(tmp_path / "model", 2, files=1)
    (path,) = (tmp_path / "model").glob("*.safetensors")
    wanted = load_reference(path)
    nbytes = sum(tensor.nbytes for tensor in wanted.values())
    loaded = gdsstream.load_file(path, device="cuda", config=gdsstream.StreamConfig(stats=3, backend="staged"))
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in wanted.items())
    ways = [io_of(route, "staged", "cuda:0") for route in ("page cache", "direct")]
    assert sum(one.bytes for one in ways) >= nbytes
    assert sum(sum(one.sizes) for one in ways) == sum(one.operations for one in ways) > 0
    assert engine_stats("staged", "cuda:0").pinned_bytes == process_stats().pinned_bytes > 0


def test_another_process_with_a_gpu_is_seen(counting: Path, tmp_path: Path, run_json: RunJson):
    write_layers(tmp_path / "model", 2, files=1)
    (path,) = (tmp_path / "model").glob("*.safetensors")
    child = subprocess.Popen(
        [sys.executable, "-c", READING, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GDSSTREAM_STATS": "3"},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "read\n"
        nbytes = sum(tensor.nbytes for tensor in load_reference(path).values())
        until(lambda: run_json("stats", child.pid)["reads"]["bytes"] >= nbytes, "the bytes of the other process")
        document = run_json("stats", child.pid)
        assert any(one["device"] == "cuda:0" and one["pinned_bytes"] > 0 for one in document["engines"])
    finally:
        child.communicate("\n", timeout=60)
    assert child.returncode == 0
