"""`gdsstream limits`: tables, JSON, exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from gdsstream.ceilings import Measured
from gdsstream.limits import Limits, Measurements, Target, stations
from gdsstream.machine import probe
from gdsstream.machine.mounts import of_path

MIB = 2**20
GB = 1e9

Run = Callable[..., Result]


def a100(root: Path, path: str, measured: dict[str, Measured], *notes: str) -> Limits:
    """From a path of the guide's machine to its first GPU."""
    machine = probe(root)
    info = of_path(machine.tree, path)
    target = Target(
        torch.device("cuda", 0), machine.gpus[0].pci, "NVIDIA A100-SXM4-40GB", (1555e9, "2 x 1.2 GHz x 5120")
    )
    missing = {"drives": "see the file system"}
    return Limits(path, "cuda:0", info, stations(machine, info, target, Measurements(measured, missing)), 10**9, notes)


@pytest.mark.parametrize(
    ("name", "path", "measured"),
    [
        (
            "limits_raid",
            "/raid/model",
            {
                "file system": Measured(46.2 * GB, "reads by O_DIRECT, 32 threads x 4 MiB, best of 10 settings"),
                "page cache": Measured(31 * GB, "reads of cached pages, 64 threads x 1 MiB"),
                "PCIe link": Measured(26.2 * GB, "copies of 512 MiB from pinned memory"),
                "GPU memory": Measured(1340 * GB, "copies within its memory, reads and writes counted"),
            },
        ),
        ("limits_specified", "/var/model", {}),
    ],
)
def test_what_people_see(
    name: str,
    path: str,
    measured: dict[str, Measured],
    machine: Callable[..., Path],
    run: Run,
    snapshot: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    found = a100(machine("dgx_a100"), path, measured, "raid1 reads one stream from one drive")
    monkeypatch.setattr("gdsstream.limits.limits", lambda *_, **__: found)
    result = run("limits", tmp_path, "--device", "cuda")
    assert result.exit_code == 0
    snapshot(name, result.stdout)


def test_json_of_a_machine_with_a_gpu(
    machine: Callable[..., Path],
    run_json: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    found = a100(machine("dgx_a100"), "/raid/model", {"file system": Measured(20 * GB, "reads", (19 * GB, 20 * GB))})
    monkeypatch.setattr("gdsstream.limits.limits", lambda *_, **__: found)
    document = run_json("limits", tmp_path)
    assert document["binding"] == {"station": "file system", "gb_per_s": 20.0, "measured": True}
    by_name = {one["name"]: one for one in document["stations"]}
    assert by_name["file system"]["samples_gb_per_s"] == [19.0, 20.0]
    assert by_name["PCIe link"]["measured_gb_per_s"] is None
    assert by_name["PCIe link"]["limit_gb_per_s"] == pytest.approx(28.81, abs=0.01)
    assert document["disks"] == [f"nvme{i}n1" for i in (0, 1, 4, 5, 6, 7, 8, 9)]


def test_this_machine(run_json: Callable[..., Any], tmp_path: Path):
    (tmp_path / "data.bin").write_bytes(bytes(8 * MIB))
    document = run_json("limits", tmp_path, "--device", "cpu", "--seconds", "0.5")
    assert document["device"] == "cpu"
    assert document["binding"]["gb_per_s"] > 0
    assert document["most_read_bytes"] == 14 * 8 * MIB


def test_wrong_input(run: Run, tmp_path: Path):
    assert run("limits", tmp_path / "missing").exit_code == 2
    (tmp_path / "small").write_bytes(bytes(10))
    result = run("limits", tmp_path / "small", "--device", "cpu")
    assert result.exit_code == 3
    assert "it takes at least 8388608: name a larger file" in result.stderr
    (tmp_path / "large").write_bytes(bytes(8 * MIB))
    assert run("limits", tmp_path / "large", "--device", "tpu").exit_code == 3
