from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bench import config, config_chosen, loaders

EVERY = [(group, name) for group in config.groups() for name in config.options(group)]


@contextmanager
def composed(*overrides: str) -> Iterator[dict[str, Any]]:
    with initialize_config_dir(str(config.CONFIG_DIR), version_base="1.3"):
        plain = OmegaConf.to_container(compose("bench", list(overrides)), resolve=True)
    assert isinstance(plain, dict)
    yield {str(key): value for key, value in plain.items()}


def test_the_groups_are_the_ones_that_the_bench_has() -> None:
    assert config.groups() == ["cache", "experiment", "loader", "reference", "scenario", "storage", "workload"]


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_every_config_composes_and_its_loaders_can_be_built(group: str, name: str) -> None:
    choice = f"{group}=[{name}]" if group in ("loader", "workload") else f"{group}={name}"
    # A workload is mlperf's, and that needs one.
    needed = {"workload": ["scenario=mlperf"], "scenario": ["workload=[unet3d]"] if name == "mlperf" else []}
    config.check_overrides([choice])
    with composed(choice, *needed.get(group, [])) as plain:
        settings = config.build(plain)
    for row, options in settings.loaders.items():
        assert settings.scenario.verb in config.VERBS
        assert loaders.build(row, options).verbs


def test_every_experiment_chooses_loaders_that_have_its_verb() -> None:
    for name in config.options("experiment"):
        with composed(f"experiment={name}") as plain:
            settings = config.build(plain)
        for row, options in settings.loaders.items():
            assert settings.scenario.verb in loaders.build(row, options).verbs, (name, row)


def test_the_command_line_wins_over_the_experiment() -> None:
    with composed("experiment=default", "cache=cold", "loader=[pread]", "scenario.rounds=3") as plain:
        settings = config.build(plain)
    assert settings.cache.state == "cold"
    assert list(settings.loaders) == ["pread"]
    assert settings.scenario.rounds == 3


def test_a_row_in_yaml_names_every_option_of_its_loader() -> None:
    for name in config.options("loader"):
        with composed(f"loader=[{name}]") as plain:
            options = plain["loaders"][name]
        assert set(options) == {"kind", *loaders.option_names(options["kind"])}, name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("storage.filez=3", "unknown key 'storage.filez'; did you mean 'files'?"),
        ("devise=cpu", "unknown key 'devise'; did you mean 'device'?"),
        ("scenario.moe.hiden=64", "unknown key 'scenario.moe.hiden'; did you mean 'hidden'?"),
        ("scenario.tokns=[64]", "unknown key 'scenario.tokns'; did you mean 'tokens'?"),
        ("scenario.tokens.more=1", "unknown key 'scenario.tokens.more'; valid: nothing"),
        ("scenario=load_modl", "unknown scenario 'load_modl'; did you mean 'load_model'?"),
        ("loader=[pread,safetensor]", "unknown loader 'safetensor'; did you mean 'safetensors'?"),
        ("loaders.pread.num_thread=3", "unknown option 'loaders.pread.num_thread'; did you mean 'num_threads'?"),
        ("loaders.prea.num_threads=3", "did you mean 'pread'?"),
        ("loader=[zzz]", "valid: aio_as_fio_4x16, dali, "),
        ("loader.pread.num_threads=3", "did you mean 'loaders.pread.num_threads'?"),
        ("loader.pread.threads=3", "did you mean 'loaders.pread.threads'? That is an unknown option"),
    ],
)
def test_an_unknown_override_names_the_nearest_valid_one(override: str, message: str) -> None:
    with pytest.raises(config.BenchConfigError) as caught:
        config.check_overrides([override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=smoke", "scenario.io_bytes=[4096]"], "no key of scenario load_model, only of transfer; valid: "),
        (["scenario.seed=3"], "'scenario.seed' is no key of scenario load_model, only of loader_epoch, "),
        (["experiment=transfer_smoke", "scenario=random_read", "scenario.depth=[1]"], "no key of scenario random_read"),
        (
            ["experiment=smoke", "loaders.kvikio_tuned.num_threads=3"],
            "kvikio_tuned is no row of this run, which has gdsstream_staged, safetensors, pread; add it with loader=[",
        ),
        (["experiment=loader_epoch", "loaders.sl10.num_threads=9"], "one of experiment=loader_epoch_threads"),
    ],
)
def test_a_key_of_what_was_not_chosen_says_so(overrides: list[str], message: str) -> None:
    config.check_overrides(overrides)
    with pytest.raises(config.BenchConfigError, match=re.escape(message)):
        config_chosen.check(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=transfer_smoke", "scenario.io_bytes=[4096]"],
        ["experiment=smoke", "loader=[kvikio_tuned,pread]", "loaders.kvikio_tuned.num_threads=3"],
        ["experiment=smoke", "loader=pread", "loaders.pread.num_threads=3"],
        ["experiment=smoke,random", "scenario.records=3,4", "-m"],
        ["experiment=loader_epoch_threads", "loaders.sl10.num_threads=9"],
        ["experiment=two_gpus", "loaders.both_gpus.backend=mapped"],
        ["experiment=mlperf", "scenario.workloads.unet3d.batch_size=3"],
        ["experiment=reference", "scenario.rounds=3"],
        ["loader=[pread],[safetensors]", "loaders.pread.num_threads=3", "-m"],
    ],
)
def test_a_key_of_what_was_chosen_passes(overrides: list[str]) -> None:
    config.check_overrides([each for each in overrides if each != "-m"])
    config_chosen.check(overrides)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for arguments in (
        [f"hydra.run.dir={tmp_path}/new/${{now:%Y}}"],
        [f"hydra.run.dir={tmp_path}/file/x", "--cfg", "job"],
    ):
        config_chosen.check_directory(arguments)
    with pytest.raises(config.BenchConfigError, match=r"file/x cannot be made in .*file: it is no directory; choose"):
        config_chosen.check_directory([f"hydra.run.dir='{tmp_path}/file/x'"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # as of a file system that is mounted read-only
    with pytest.raises(config.BenchConfigError, match=r"outputs/bench cannot be made .* hydra\.run\.dir="):
        config_chosen.check_directory(["experiment=smoke"])
    with pytest.raises(config.BenchConfigError, match=r"multirun/bench cannot .* hydra\.sweep\.dir="):
        config_chosen.check_directory(["experiment=smoke", "-m"])


def test_sizes_can_have_a_unit() -> None:
    changes = ["scenario.io_bytes=[4K,1MiB]", "scenario.total_bytes=[8m]", "storage.file_bytes=1G"]
    with composed("experiment=transfer_smoke", *changes) as plain:
        built = config.build(plain)
    assert isinstance(built.scenario, config.TransferConfig)
    assert (built.scenario.io_bytes, built.scenario.total_bytes) == ([4096, 1 << 20], [8 << 20])
    assert built.storage.file_bytes == 1 << 30


@pytest.mark.parametrize(
    ("override", "message"),
    [("scenario.io_bytes=[4Q]", "holds '4Q'"), ("storage.file_bytes=much", "'storage.file_bytes' is 'much'")],
)
def test_what_is_no_size_is_refused(override: str, message: str) -> None:
    with composed("experiment=transfer_smoke", override) as plain, pytest.raises(config.BenchConfigError) as caught:
        config.build(plain)
    assert message in str(caught.value)


@pytest.mark.parametrize("override", ["hydra.run.dir=/x", "+new=1", "~loader", "--multirun", "cache=warm,cold"])
def test_what_is_hydras_is_left_to_hydra(override: str) -> None:
    config.check_overrides([override])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"foo": 1}, "unknown key 'foo'"),
        ({"cache": {"state": "hot"}}, "'cache.state' is 'hot'"),
        ({"cache": 3}, "'cache' is 3; it has to be a mapping"),
        ({"device": "gpu"}, "'device' is 'gpu'"),
        ({"output": "a.jsonl", "resume": "b.jsonl"}, "'output' and 'resume' both name a file"),
        ({"storage": {"files": "many"}}, "'storage.files' is 'many' (str); it has to be int or null"),
        ({"storage": {"files": True}}, "'storage.files' is True (bool)"),
        ({"storage": {"file_bytes": 5}}, "at least 1048576"),
        ({"scenario": {"name": "x", "verb": "reed"}}, "did you mean 'read'?"),
        ({"scenario": {"verb": "read"}}, "key 'scenario.name' is missing"),
        ({"loaders": {}}, "no loader is chosen"),
        ({"scenario": {"name": "x", "verb": "read", "tokens": [1]}}, "unknown key 'scenario.tokens'"),
        ({"scenario": {"name": "x", "verb": "pipeline", "tokens": []}}, "'scenario.tokens' is empty"),
        ({"scenario": {"name": "x", "verb": "pipeline", "tokens": [8, "9"]}}, "holds '9'; it has to be a list of"),
        ({"scenario": {"name": "x", "verb": "pipeline", "tokens": 8}}, "'scenario.tokens' is 8 (int)"),
        ({"scenario": {"name": "x", "verb": "pipeline", "long": 20}}, "'scenario.long' is 20"),
        ({"scenario": {"name": "x", "verb": "pipeline", "sample_seconds": 0}}, "has to be positive"),
        ({"scenario": {"name": "x", "verb": "pipeline", "steps": 3}}, "unknown key 'scenario.steps'"),
        ({"scenario": {"name": "x", "verb": "train", "layers": 0}}, "'scenario.layers' is 0"),
        ({"scenario": {"name": "x", "verb": "train", "moe": {"hidden": 100}}}, "has to be a multiple of 16"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"scenario": {"name": "x", "verb": "read"}, "loaders": {"pread": {"kind": "pread"}}}
    config.build(good)
    with pytest.raises(config.BenchConfigError) as caught:
        config.build(good | changes)
    assert message in str(caught.value)


def test_a_scenario_of_several_numbers_of_tokens_has_a_part_for_each() -> None:
    with composed("experiment=pipeline") as plain:
        scenario = config.build(plain).scenario
    assert isinstance(scenario, config.PipelineConfig)
    assert [part.tokens for part in config.parts(scenario)] == [[8192], [16384], [22528], [32768]]  # type: ignore[attr-defined]
    assert config.parts(config.ScenarioConfig("x", "read")) == [config.ScenarioConfig("x", "read")]


def test_a_wrong_loader_is_named() -> None:
    with pytest.raises(config.BenchConfigError, match="did you mean 'kvikio'"):
        loaders.build("row", {"kind": "kvikia"})
    with pytest.raises(config.BenchConfigError, match=r"unknown key 'loaders\.row\.thread'"):
        loaders.build("row", {"kind": "pread", "thread": 3})
    with pytest.raises(config.BenchConfigError, match="has to be int"):
        loaders.build("row", {"kind": "pread", "num_threads": "3"})


def test_importing_the_bench_imports_neither_torch_nor_a_peer() -> None:
    code = """
import importlib, pkgutil, sys, bench
for module in pkgutil.walk_packages(bench.__path__, "bench."):
    importlib.import_module(module.name)
heavy = {"torch", "safetensors", "fastsafetensors", "instanttensor", "runai_model_streamer", "kvikio", "gdsstream"}
print(sorted(heavy & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.strip() == "[]"
