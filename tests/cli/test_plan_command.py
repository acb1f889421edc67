"""`gdsstream plan`: tables, JSON, exit codes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200-2026-11-21"
RATES = ("--link-gbps", 55.4, "--storage-gbps", 20, "--tflops", 610)

Run = Callable[..., Result]
RunJson = Callable[..., Any]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of a model of 47 layers of 128 experts and a dense one before them; the data is a hole of 58 GB."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 2048)}
    for layer in range(48):
        inside = f"model.layers.{layer}."
        shapes[f"{inside}input_layernorm.weight"] = (2048,)
        for name, rows, columns in (("q", 4096, 2048), ("k", 512, 2048), ("v", 512, 2048), ("o", 2048, 4096)):
            shapes[f"{inside}self_attn.{name}_proj.weight"] = (rows, columns)
        for part in [f"experts.{e}." for e in range(128)] if layer else [""]:
            width = 768 if layer else 6144
            for name, shape in (("gate", (width, 2048)), ("up", (width, 2048)), ("down", (2048, width))):
                shapes[f"{inside}mlp.{part}{name}_proj.weight"] = shape
    entries, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    header = json.dumps(entries).encode()
    folder = tmp_path_factory.mktemp("moe")
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    (folder / "config.json").write_text(json.dumps({"num_experts_per_tok": 8}))
    return folder


def test_the_tables(run: Run, moe: Path, snapshot: Callable[[str, str], None]):
    setup = ("--tokens", 65536, "--slots", 3, "--host-cache-bytes", "12GB", "--recompute")
    result = run("plan", moe, *setup, *RATES)
    assert result.exit_code == 0
    head, _, rest = result.stdout.partition("\n\n")
    # Where its lines break depends on the path.
    assert " ".join(head.split()).startswith(f"{moe}: 48 layers (model.layers.{{i}}.), 58.66 GB; 622.33 MB beside them")
    snapshot("plan", rest)


def test_the_comparison(run: Run, moe: Path, snapshot: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(RESULTS)
    rates = ("--link-gbps", 55.4, "--storage-gbps", 54.6, "--tflops", 610)
    result = run("plan", moe, "--tokens", 8192, *rates, "--compare", "pipeline.jsonl")
    assert result.exit_code == 0
    snapshot("plan_compare", result.stdout[result.stdout.index("Predicted and measured") :])


def test_json_has_every_layer(run_json: RunJson, moe: Path):
    found = run_json("plan", moe, "--tokens", 8192, *RATES, "--host-cache-bytes", "10GB")
    assert (found["num_layers"], found["pattern"]) == (48, "model.layers.{i}.")
    assert found["other_bytes"] == 2 * 151936 * 2048
    dense, expert = found["layers"][:2]
    attention = 2 * 2048 * 4096 + 2 * 512 * 2048
    assert dense["flops_per_token"] == 2 * (attention + 3 * 6144 * 2048)
    assert (expert["num_experts"], expert["active_experts"]) == (128, 8)
    assert expert["flops_per_token"] == 2 * (attention + 8 * 3 * 768 * 2048)
    assert expert["nbytes"] == 2 * (2048 + attention + 128 * 3 * 768 * 2048)
    assert expert["forward_s"] == pytest.approx(expert["flops_per_token"] * 8192 / 610e12)
    assert expert["from_storage_s"] == pytest.approx(expert["nbytes"] / 20e9)
    host = found["passes"]["training"]["host_layers"]
    assert host == [layer["index"] for layer in found["layers"] if layer["tier"] == "host"]
    assert 0 < sum(found["layers"][i]["nbytes"] for i in host) <= 10e9
    assert found["compare"] is None


def test_json_and_tables_come_from_link_and_storage_alone(run_json: RunJson, moe: Path):
    found = run_json("plan", moe, "--tokens", 8192, "--link-gbps", 25, "--storage-gbps", 10)
    assert found["rates"]["link_gb_per_s"] == {"value": 25.0, "origin": "given", "source": "given by --link-gbps"}
    assert found["rates"]["compute_tflops"]["origin"] == "assumed"
    assert found["passes"]["forward"]["overhead"] > 1


def test_a_measured_layer_instead_of_a_rate(run_json: RunJson, moe: Path):
    rates = ("--link-gbps", 55, "--storage-gbps", 20, "--compute-ms", 30)
    found = run_json("plan", moe, "--tokens", 4096, *rates)
    seconds = [layer["forward_s"] for layer in found["layers"]]
    assert sum(seconds) / len(seconds) == pytest.approx(0.030)


def test_a_comparison_beyond_the_aim_is_exit_code_1(run: Run, run_json: RunJson, moe: Path):
    arguments = ("plan", moe, "--tokens", 8192, *RATES, "--compare", RESULTS / "pipeline.jsonl")
    result = run(*arguments)
    assert result.exit_code == 1
    assert "6 of 9 rows" in result.stdout
    found = run_json(*arguments, "--loader", "stream_mapped")["compare"]
    assert found["within"]
    assert {row["loader"] for row in found["rows"]} == {"stream_mapped"}
    assert len(found["skipped"]) == 12


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "--tokens"),
        (("--tokens", 0), 2, "--tokens"),
        (("--tokens", 1, "--link-gbps", 0), 2, "--link-gbps"),
        (("--tokens", 1, "--host-cache-bytes", "3 boxes"), 2, "3 boxes"),
        (("--tokens", 1, "--tflops", 1, "--compute-ms", 1), 2, "--compute-ms"),
        (("--tokens", 1, "--loader", "x"), 2, "--compare"),
        (("--tokens", 1, "--compare", "/nonexistent"), 2, "/nonexistent"),
        (("--tokens", 1, *RATES, "--active-experts", 200), 3, "a layer has 128"),
        (("--tokens", 1, *RATES, "--layers", "blocks.{i}."), 3, "blocks.{i}."),
    ],
)
def test_what_cannot_be_planned_is_said(run: Run, moe: Path, arguments: tuple[object, ...], code: int, said: str):
    result = run("plan", moe, *arguments)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a link that can be measured")
def test_what_is_not_given_is_measured(run: Run, run_json: RunJson, moe: Path):
    rates = run_json("plan", moe, "--tokens", 1, "--link-gbps", 1)["rates"]
    assert (rates["link_gb_per_s"]["origin"], rates["storage_gb_per_s"]["origin"]) == ("given", "measured")
    assert rates["storage_gb_per_s"]["value"] > 0
    result = run("plan", moe, "--tokens", 1, "--storage-gbps", 1)
    assert result.exit_code == 3
    assert "--link-gbps" in result.stderr


def test_a_checkpoint_that_is_not_there(run: Run, tmp_path: Path):
    assert run("plan", tmp_path / "nothing", "--tokens", 1, *RATES).exit_code == 2
    (tmp_path / "empty").mkdir()
    result = run("plan", tmp_path / "empty", "--tokens", 1, *RATES)
    assert (result.exit_code, "no *.safetensors" in result.stderr) == (3, True)


def test_neither_torch_nor_a_driver_is_needed(moe: Path):
    code = (
        "import sys; from gdsstream.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    arguments = ["plan", str(moe), "--tokens", "8192", *map(str, RATES), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
