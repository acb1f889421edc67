"""`gdsstream pack` and `gdsstream verify`: what they print, their JSON, and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from layer_files import write_layers
from support import SOURCE

from gdsstream.checkpoint import Checkpoint
from gdsstream.cli.progress import size
from gdsstream.pack import PackReport, pack_checkpoint
from gdsstream.verify import VerifyReport, verify_checkpoint

Run = Callable[..., Result]
BAD = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a source of three layers; the current directory, so that what is printed is the same everywhere."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write_layers(Path("source"), 3, files=2)
    Path("source/config.json").write_text("{}")
    Path("source/pytorch_model.bin").touch()
    return tmp_path / "work"


@pytest.fixture
def packed(folder: Path) -> Path:
    pack_checkpoint("source", "packed")
    return folder / "packed"


def damage(folder: Path) -> None:
    """A byte of a tensor, and a byte too few."""
    spec = Checkpoint.open(folder).spec(BAD)
    with (folder / "model-layer-00001.safetensors").open("r+b") as file:
        file.seek(spec.offset)
        byte = file.read(1)[0]
        file.seek(spec.offset)
        file.write(bytes([byte ^ 1]))
    last = folder / "model-layer-00002.safetensors"
    os.truncate(last, last.stat().st_size - 1)


@pytest.fixture
def fixed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from run to run does not: paths, whose length decides where lines end, and times."""

    def packed_as(*arguments: Any, **options: Any) -> PackReport:
        report = pack_checkpoint(*arguments, **options)
        return replace(report, source="/work/source", destination="/work/packed", seconds=0.5)

    def verified_as(*arguments: Any, **options: Any) -> VerifyReport:
        report = verify_checkpoint(*arguments, **options)
        differences = [each._replace(file=each.file.replace(str(folder), "/work")) for each in report.differences]
        return replace(report, path="/work/packed", seconds=0.5, route="a route", differences=tuple(differences))

    monkeypatch.setattr("gdsstream.cli.pack.pack_checkpoint", packed_as)
    monkeypatch.setattr("gdsstream.cli.verify.verify_checkpoint", verified_as)


def test_pack_and_verify_in_words(run: Run, folder: Path, fixed: None, snapshot: Callable[[str, str], None]) -> None:
    for name, code, arguments in (
        ("pack", 0, ("pack", "source", "packed")),
        ("verify", 0, ("verify", "packed")),
        ("verify_differences", 1, ("verify", "packed")),
    ):
        if code:
            damage(folder / "packed")
        result = run(*arguments)
        assert result.exit_code == code
        snapshot(name, result.stdout)


def test_many_layers_are_not_all_listed(run: Run, folder: Path) -> None:
    write_layers(Path("many"), 20, shapes={"w": (4,)})
    result = run("pack", "many", "packed")
    assert "model-layer-00009.safetensors" in result.stdout
    assert "model-layer-00010.safetensors" not in result.stdout
    assert "model-rest.safetensors" in result.stdout
    assert "10 more like these" in result.stdout


def test_pack_in_json(run_json: Callable[..., Any], folder: Path) -> None:
    found = run_json("pack", "source", "packed")
    assert (found["num_layers"], found["num_tensors"], found["pattern"]) == (3, 17, "model.layers.{i}.")
    assert found["destination"] == str(folder / "packed")
    assert found["copied"] == ["config.json"]
    assert found["skipped"] == ["pytorch_model.bin"]
    assert sum(file["nbytes"] for file in found["files"]) == found["nbytes"]
    assert os.path.isfile(found["checksums"])


def test_verify_in_json(run: Run, run_json: Callable[..., Any], packed: Path) -> None:
    found = run_json("verify", "packed")
    assert (found["ok"], found["differences"], found["num_files"]) == (True, [], 4)
    damage(packed)
    found = run_json("verify", "packed")
    assert found["ok"] is False
    assert [each["tensor"] for each in found["differences"]] == [BAD, None]
    spec = Checkpoint.open(packed / "model-layer-00001.safetensors").spec(BAD)
    assert found["differences"][0]["offset"] == spec.offset
    assert found["differences"][0]["nbytes"] == spec.nbytes
    assert found["differences"][1]["offset"] is None
    assert run("verify", "packed", "--json").exit_code == 1
    assert run("verify", "packed/model-rest.safetensors", "--json").exit_code == 0


def test_pack_by_a_pattern(run_json: Callable[..., Any], folder: Path) -> None:
    assert run_json("pack", "source", "packed", "--layers", "model.layers.{i}.mlp.")["pattern"].endswith("mlp.")


def test_verify_past_the_page_cache(run_json: Callable[..., Any], packed: Path) -> None:
    assert run_json("verify", "packed", "--direct-io", "--device", "cpu")["ok"]


def test_exit_codes(run: Run, packed: Path) -> None:
    for arguments, code, message in (
        (("pack", "missing", "out"), 2, "does not exist"),
        (("pack", "source"), 2, "Missing argument 'DST_DIR'"),
        (("verify", "missing"), 2, "does not exist"),
        (("verify", "source"), 3, "has no model.safetensors.checksums.json"),
        (("pack", "source", "packed"), 3, "is not empty"),
        (("pack", "source", "source/inside"), 3, "inside of the source"),
        (
            ("pack", "source", "out", "--layers", "h.{i}."),
            3,
            "no tensor's name begins with 'h.{i}.'; one is named 'model.",
        ),
        (("verify", "packed", "--device", "tpu"), 3, "device 'tpu'"),
    ):
        result = run(*arguments)
        assert (result.exit_code, message in result.stderr) == (code, True), result.stderr
        assert result.stdout == ""
        if code == 3:
            assert result.stderr.startswith("error: ")
    assert not (packed.parent / "out").exists()


def test_help_says_what_the_data_is_aligned_to(run: Run) -> None:
    assert "begins at a multiple of 4 KiB" in run("pack", "--help").stdout
    assert "--direct-io" in run("verify", "--help").stdout


def test_a_bar_only_where_somebody_looks(packed: Path) -> None:
    command = [sys.executable, "-m", "gdsstream", "verify", str(packed), "--json", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm"}
    quiet = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    leader, follower = os.openpty()
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=follower, text=True, timeout=60)
    os.close(follower)
    drawn = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert shown.returncode == 0
    assert shown.stdout.startswith("{")
    assert "verifying" in drawn


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_240_000_000, "1.24 GB"), (2e12, "2.00 TB")]
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert size(int(nbytes)) == text
