"""MLPerf Storage's workloads as they are configured: their numbers, what is refused, and how large samples are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bench import config, files, ragged, scenarios
from bench.config_mlperf import AcceleratorTimes, MlperfConfig, WorkloadConfig
from bench.scenarios import mlperf

MIB = 1 << 20
#: Sample bytes, standard deviation, batch, seconds on A100, H100 and B200, and the target.
TABLE = {
    "unet3d": (146_600_628, 68_341_808, 7, (0.636, 0.323, 0.162), 0.90),
    "resnet50": (114_660, 0, 400, (0.435, 0.224, None), 0.90),
    "cosmoflow": (2_828_486, 71_311, 1, (0.00551, 0.0035, None), 0.70),
    "retinanet": (322_957, 0, 24, (None, None, 0.04755), 0.85),
    "flux": (2_164_832, 0, 48, (None, None, 1.35), 0.90),
    "dlrm": (761, 0, 16_384, (None, None, 0.000375), 0.70),
}
RAGGED = WorkloadConfig(20_000, 8, AcceleratorTimes(h100=0.002), 0.9, sample_bytes_std=6_000)
FIXED = WorkloadConfig(4_100, 32, AcceleratorTimes(b200=0.001, a100=0.004), 0.7)


def scenario(workload: WorkloadConfig, most_samples: int = 512) -> MlperfConfig:
    return MlperfConfig("mlperf", "mlperf", workloads={"small": workload}, most_samples=most_samples)


@contextmanager
def composition(*overrides: str) -> Iterator[MlperfConfig]:
    config.check_overrides(overrides)
    with initialize_config_dir(str(config.CONFIG_DIR), version_base="1.3"):
        plain = OmegaConf.to_container(compose("bench", list(overrides)), resolve=True)
    assert isinstance(plain, dict)
    found = config.build({str(key): value for key, value in plain.items()}).scenario
    assert isinstance(found, MlperfConfig)
    yield found


# ---- the table


def test_the_workloads_are_those_of_the_table() -> None:
    assert config.options("workload") == sorted(TABLE)
    with composition("experiment=mlperf") as found:
        assert list(found.workloads) == list(TABLE)
    for name, workload in found.workloads.items():
        times = workload.compute_s
        assert TABLE[name] == (
            workload.sample_bytes,
            workload.sample_bytes_std,
            workload.batch_size,
            (times.a100, times.h100, times.b200),
            workload.target_utilisation,
        )
        assert "mlcommons/storage" in workload.source


@pytest.mark.parametrize(
    ("name", "accelerator", "seconds"),
    [("unet3d", "h100", 0.323), ("flux", "b200", 1.35), ("dlrm", "b200", 0.000375), ("cosmoflow", "h100", 0.0035)],
)
def test_one_workload_is_chosen_by_name(name: str, accelerator: str, seconds: float) -> None:
    with composition("experiment=mlperf", f"workload={name}") as found:
        assert list(found.workloads) == [name]
    parts = config.parts(found)
    assert [part.compute for part in parts] == [[True], [False]]  # type: ignore[attr-defined]
    (part, _) = parts
    assert isinstance(part, MlperfConfig)
    assert part.emulated == accelerator
    assert part.only[1].seconds(part.emulated) == seconds


def test_every_workload_and_both_of_its_parts_are_a_part_of_the_run() -> None:
    of = MlperfConfig("m", "mlperf", workloads={"a": RAGGED, "b": FIXED})
    found = [(next(iter(p.workloads)), p.compute, p.emulated) for p in of.parts()]  # type: ignore[attr-defined]
    assert found == [("a", [True], "h100"), ("a", [False], "h100"), ("b", [True], "b200"), ("b", [False], "b200")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload=unet4d", "unknown workload 'unet4d'; did you mean 'unet3d'?"),
        ("scenario.workloads.unet3d.batchsize=3", "did you mean 'batch_size'?"),
        ("scenario.workloads.unet.batch_size=3", "did you mean 'unet3d'?"),
        ("scenario.workloads.unet3d.compute_s.h200=1", "did you mean 'h100'?"),
        ("scenario.accelerator=h200", "'scenario.accelerator' is 'h200'; did you mean 'h100'?"),
        ("workload=[]", "no workload is chosen; choose with workload=[unet3d,resnet50]"),
        ("scenario.compute_scale=0", "'scenario.compute_scale' is 0.0; it has to be positive"),
        ("scenario.sample_seconds=-1", "'scenario.sample_seconds' is -1.0"),
        ("scenario.compute=[]", "'scenario.compute' is []; it is a list of true and false"),
        ("scenario.compute=[1]", "'scenario.compute' is [1]"),
        ("scenario.least_steps=1", "'scenario.least_steps' is 1; it has to be at least 2"),
        ("scenario.most_samples=0", "'scenario.most_samples' is 0"),
        ("scenario.sample_bytes=0", "'scenario.sample_bytes' is 0"),
        ("scenario.workloads.flux.batch_size=0", "'scenario.workloads.flux.batch_size' is 0"),
        ("scenario.workloads.flux.sample_bytes=8", "'scenario.workloads.flux.sample_bytes' is 8"),
        ("scenario.workloads.flux.sample_bytes_std=-1", "sample_bytes_std' is -1"),
        ("scenario.workloads.flux.target_utilisation=90", "target_utilisation' is 90.0; it is a share"),
        ("scenario.workloads.flux.compute_s.b200=0", "'scenario.workloads.flux.compute_s.b200' is 0.0"),
        ("scenario.workloads.flux.compute_s.b200=null", "'scenario.workloads.flux.compute_s' has no seconds"),
        ("scenario.workloads.flux.compute_s=3", "'scenario.workloads.flux.compute_s' is 3; it has to be a mapping"),
        ("scenario.workloads.flux.batch_size=many", "'scenario.workloads.flux.batch_size' is 'many' (str)"),
    ],
)
def test_a_wrong_value_is_named(override: str, message: str) -> None:
    rest = [] if override.startswith("workload") else ["workload=[unet3d,flux]"]
    with (
        pytest.raises(config.BenchConfigError) as caught,
        composition("scenario=mlperf", "loader=[shard_loader]", *rest, override),
    ):
        pass
    assert message in str(caught.value)


def test_an_accelerator_that_a_workload_lacks_is_an_error_that_names_those_it_has() -> None:
    chosen = "workload=[unet3d,flux]", "scenario.accelerator=a100"
    message = "workload flux has no seconds for it; it has: b200"
    with pytest.raises(config.BenchConfigError, match=message), composition("experiment=mlperf", *chosen):
        pass
    with composition("experiment=mlperf", "workload=[unet3d,resnet50]", "scenario.accelerator=a100") as found:
        assert [part.emulated for part in found.parts()] == ["a100"] * 4  # type: ignore[attr-defined]


def test_workloads_are_this_scenarios_only() -> None:
    message = r"unknown key 'scenario\.workloads'"
    with pytest.raises(config.BenchConfigError, match=message), composition("workload=unet3d"):
        pass


# ---- sizes


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row[1]])
def test_sizes_have_the_tables_mean_and_standard_deviation(name: str) -> None:
    mean, std = TABLE[name][:2]
    found = ragged.sizes(mean, std, 200_000, 0)
    assert found.mean() == pytest.approx(mean, rel=0.003)
    # What is clipped takes some of it: 3 % where the standard deviation is half of the mean.
    assert found.std() == pytest.approx(std, rel=0.035)
    assert found.min() >= mean // 100
    assert found.max() <= 1.99 * mean
    assert np.array_equal(found[:100], ragged.sizes(mean, std, 100, 0))
    assert not np.array_equal(found[:100], ragged.sizes(mean, std, 100, 1))


def test_a_dataset_is_whole_batches_within_its_room() -> None:
    of = scenario(RAGGED, most_samples=10_000)
    found = mlperf.drawn(of, RAGGED, 2 * MIB)
    assert len(found) % 8 == 0
    assert 2 * MIB - 10 * 40_000 < found.sum() <= 2 * MIB
    assert len(mlperf.drawn(scenario(FIXED, most_samples=100), FIXED, 2 * MIB)) == 96
    assert len(mlperf.drawn(of, RAGGED, 200_000)) == 0


def test_storage_that_cannot_hold_two_batches_is_refused() -> None:
    with pytest.raises(config.BenchConfigError, match="workload small needs 2 batches of 8 samples, about 320000"):
        scenarios.plan(scenario(RAGGED), files.Plan(Path(), 1, 200_000, ""), cold=False)
    with pytest.raises(config.BenchConfigError, match=r"'storage\.tensors' has to be null"):
        scenarios.plan(scenario(RAGGED), files.Plan(Path(), 1, MIB, "", tensors=3), cold=False)
