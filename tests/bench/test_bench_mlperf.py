"""MLPerf Storage's workloads: samples that differ in size, the utilisation, and that a wrong loader is found."""

from __future__ import annotations

import gc
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from steady import Steady

from bench import config, files, loaders, measure, ragged, record, report, results, run, scenarios
from bench.ceilings import Ceiling, Overlap
from bench.clock import Clock
from bench.compute import Compute
from bench.config_mlperf import AcceleratorTimes, MlperfConfig, WorkloadConfig
from bench.loaders.base import Job, Loader
from bench.record_shards import STEP, Places
from bench.scenarios import mlperf
from bench.scenarios.mlperf import Step

MIB = 1 << 20
POOL = np.random.default_rng(0).integers(0, 256, 99_998, dtype=np.uint8)
RAGGED = WorkloadConfig(20_000, 8, AcceleratorTimes(h100=0.002), 0.9, sample_bytes_std=6_000)
FIXED = WorkloadConfig(4_100, 32, AcceleratorTimes(b200=0.001, a100=0.004), 0.7)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Each sample begins with a collection, which takes longest for the modules that are imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def scenario(workload: WorkloadConfig, **changes: Any) -> MlperfConfig:
    given: dict[str, Any] = {"compute": [True], "sample_seconds": 0.05, "sample_bytes": 8 * MIB, "most_samples": 512}
    given["least_steps"] = 4
    return MlperfConfig("mlperf", "mlperf", workloads={"small": workload}, **(given | changes))


@dataclass(eq=False)
class InMemory(Loader):
    """Delivers the samples from memory, or as it is told."""

    fault: str = ""
    pause_s: float = 0.0
    verbs: ClassVar[frozenset[str]] = frozenset({"mlperf"})
    passes: int = field(default=0, init=False)

    def prepare(self, job: Job) -> None:
        assert job.epoch is not None
        shards, self.size = job.epoch.shards, job.epoch.batch_size
        self.ragged = shards.sizes is not None
        self.samples = [torch.tensor(each) for i in range(len(shards.paths)) for each in shards.records(i)]

    def epochs(self, count: int) -> Iterator[Any]:
        self.passes += 1
        for number in range(count):
            order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(number)).tolist()
            for begin in range(0, len(order), self.size):
                time.sleep(self.pause_s)
                yield self._batch([self.samples[i] for i in order[begin : begin + self.size]], begin)

    def _batch(self, samples: list[torch.Tensor], begin: int) -> Any:
        if not self.ragged:
            return torch.stack(samples)
        values, offsets = ragged.collate(samples)
        if self.passes > 1 and begin:
            if self.fault == "byte":
                values[100] ^= 1
            if self.fault == "number":
                values[6] = 1
            if self.fault == "border":
                offsets[1] += 1
            if self.fault == "end":
                offsets[-1] -= 1
            if self.fault == "dtype":
                offsets = offsets.int()
            if self.fault == "long":
                return ragged.Ragged(values.repeat(1000), offsets)
            if self.fault == "stacked":
                return values
        return ragged.Ragged(values, offsets)


@contextmanager
def dataset(directory: Path, of: MlperfConfig) -> Iterator[files.BenchFiles]:
    with files.written(scenarios.plan(of, files.Plan(directory, 2, MIB, ""), cold=False)) as written:
        yield written


def measured(directory: Path, of: MlperfConfig, rows: dict[str, Loader], rounds: int = 2) -> dict[str, record.Record]:
    with dataset(directory, of) as written:
        workload = scenarios.build(of, written, "cpu")
        ceiling: Ceiling = Overlap(Steady(), workload) if workload.computes else Steady()
        result = measure.Runner(workload, rows, ceiling, cold=False, fresh_memory=False).run(rounds, 60.0)
        workload.close()
        assert list(written.directory.iterdir()) == []
    limit = {"kind": ceiling.kind, "detail": ceiling.describe(), "samples": result.ceilings}
    env = dict.fromkeys(record._ENV)
    found = {
        name: record.make(name, outcome, workload, scenario="mlperf", cold=False, ceiling=limit, config={}, env=env)
        for name, outcome in result.outcomes.items()
    }
    assert all(record.problems(json.loads(row.to_json())) == [] for row in found.values())
    return found


def derived(row: record.Record) -> dict[str, Any]:
    assert (row.status, row.reason, row.verified) == ("ok", None, True)
    assert row.derived is not None
    return row.derived


# ---- shards of different sizes


def test_shards_hold_numbered_records_of_the_sizes_drawn(tmp_path: Path) -> None:
    sizes = ragged.sizes(60_000, 40_000, 23, 3)
    shards = ragged.write(tmp_path / "shards", POOL, sizes, 4)
    assert (shards.num_records, shards.data_bytes, len(shards.paths)) == (23, sizes.sum(), 4)
    records = [each for path in shards.paths for each in _parted(load_file(path))]
    mapped = [torch.tensor(each) for shard in range(4) for each in shards.records(shard)]
    assert all(map(torch.equal, records, mapped))
    places = Places(shards)
    for number, found in enumerate(records):
        assert len(found) == sizes[number] == places[number][2]
        assert found[:8].clone().view(torch.int64).tolist() == [number]
        assert np.array_equal(found[8:].numpy(), POOL[(np.arange(8, len(found)) + number * STEP) % len(POOL)])


def _parted(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.split(tensors["data.values"], tensors["data.offsets"].diff().tolist()))


# ---- the utilisation


STEPS = [Step(1.0, 0.0, 3.0), Step(1.0, 4.0, 6.0), Step(1.0, 6.0, 8.0), Step(1.0, 9.0, 11.0)]


def test_utilisation_is_compute_over_the_time_from_the_first_steps_end() -> None:
    assert mlperf.utilisation([STEPS], 2.0) == pytest.approx(6 / 8)
    # Kernels that the loader slowed down count as they are alone.
    assert mlperf.utilisation([STEPS], 1.5) == pytest.approx(4.5 / 8)
    # No more than the device worked.
    assert mlperf.utilisation([STEPS], 5.0) == pytest.approx(6 / 8)


def test_the_first_step_of_every_epoch_is_left_out() -> None:
    later = [Step(1.0, 100.0, 102.0), Step(1.0, 102.0, 104.0)]
    assert mlperf.utilisation([STEPS, later], 2.0) == pytest.approx((6 + 2) / (8 + 2))
    assert mlperf.utilisation([STEPS, later[:1]], 2.0) == pytest.approx(6 / 8)


def test_a_batch_that_is_not_full_counts_for_its_share() -> None:
    steps = [Step(1.0, 0.0, 2.0), Step(1.0, 2.0, 4.0), Step(0.25, 4.0, 6.0)]
    assert mlperf.utilisation([steps], 2.0) == pytest.approx(2.5 / 4)


def test_a_single_step_has_no_utilisation() -> None:
    assert mlperf.utilisation([[Step(1.0, 0.0, 2.0)]], 2.0) == 0.0
    assert mlperf.utilisation([], 2.0) == 0.0


# ---- loaders


@pytest.mark.parametrize("workload", [RAGGED, FIXED], ids=["ragged", "fixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "shard_loader"},
        {"kind": "shard_loader", "borrow": True},
        {"kind": "shard_loader", "backend": "mapped"},
        {"kind": "torch_dataloader", "dataset": "shards"},
        {"kind": "torch_dataloader", "dataset": "shards", "num_workers": 2},
        {"kind": "torch_dataloader", "dataset": "memmap"},
        {"kind": "torch_dataloader", "dataset": "pread"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_loaders_are_measured_and_verified(tmp_path: Path, options: dict[str, Any], workload: WorkloadConfig) -> None:
    row = measured(tmp_path, scenario(workload), {"row": loaders.build("row", options)})["row"]
    found = derived(row)
    sizes = mlperf.drawn(scenario(workload), workload, 2 * MIB)
    assert (found["num_records"], found["dataset_bytes"]) == (len(sizes), sizes.sum())
    assert found["sample_bytes_std"] == pytest.approx(sizes.std())
    assert 0 < found["utilisation"] <= 1
    assert found["passes"] == (found["utilisation"] >= workload.target_utilisation)
    assert all(batches >= 4 for batches in row.figures["batches"])
    needed = found["target_utilisation"] * workload.batch_size * sizes.mean() / found["table_compute_s"] / 1e9
    assert found["needed_gb_per_s"] == pytest.approx(needed)
    assert row.units_per_s is not None
    assert found["samples_per_s"] == pytest.approx(row.units_per_s["median"])


def test_a_loader_that_is_late_costs_utilisation(tmp_path: Path) -> None:
    of = scenario(RAGGED, sample_seconds=0.3)
    late = derived(measured(tmp_path, of, {"row": InMemory(pause_s=0.02)})["row"])
    ready = derived(measured(tmp_path, of, {"row": InMemory()})["row"])
    assert late["stall_s"] >= 0.018
    # The host is at most one step ahead, and on the CPU not even that: 2 ms of 22 and more.
    assert late["utilisation"] < 0.35 < ready["utilisation"]
    assert late["passes"] == 0


def test_without_compute_the_rate_says_how_many_accelerators_it_feeds(tmp_path: Path) -> None:
    row = measured(tmp_path, scenario(RAGGED, compute=[False]), {"row": InMemory()})["row"]
    found = derived(row)
    assert row.ceiling["kind"] == "steady"
    assert "utilisation" not in found
    assert row.gb_per_s is not None
    assert found["accelerators_fed"] == pytest.approx(row.gb_per_s["median"] / found["needed_gb_per_s"])


def test_the_scale_shortens_the_compute(tmp_path: Path) -> None:
    of = scenario(FIXED, compute_scale=0.5, accelerator="a100")
    found = derived(measured(tmp_path, of, {"row": InMemory()})["row"])
    assert (found["accelerator"], found["table_compute_s"], found["compute_scale"]) == ("a100", 0.002, 0.5)


def test_a_batch_that_is_not_full_has_less_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    # So long that it is several products on a machine that is busy with something else, too; none is made here.
    compute = Compute("cpu", Clock("cpu"), 0.1)
    products: list[int] = []
    monkeypatch.setattr(compute, "_products", products.append)
    for share in (1.0, 0.5, 0.0):
        compute.run(share)
    whole = products[0]
    assert products == [whole, round(whole / 2), 1]
    assert whole > 1


def test_dali_needs_samples_of_one_size(tmp_path: Path) -> None:
    row = measured(tmp_path, scenario(RAGGED), {"row": loaders.build("row", {"kind": "dali"})})["row"]
    assert (row.status, row.reason) == (
        "skipped",
        "its iterator for torch needs samples of one shape, and these records differ in size",
    )


@pytest.mark.parametrize(
    ("kind", "module"), [("webdataset", "webdataset"), ("litdata", "litdata"), ("mosaic_streaming", "streaming")]
)
@pytest.mark.parametrize("workload", [RAGGED, FIXED], ids=["ragged", "fixed"])
def test_a_peer_that_is_installed_is_verified(tmp_path: Path, kind: str, module: str, workload: WorkloadConfig) -> None:
    pytest.importorskip(module, exc_type=ImportError)
    built = loaders.build("row", {"kind": kind, "num_workers": 2})
    derived(measured(tmp_path, scenario(workload), {"row": built})["row"])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("byte", "differs at byte 100"),
        ("number", "has the number 2"),
        ("border", "bytes, not "),
        ("end", "do not part its"),
        ("dtype", "the offsets of batch 1 are torch.int32"),
        ("long", "and there were to be no more than"),
        ("stacked", "batch 1 is Tensor, expected values and their offsets"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: str, reason: str) -> None:
    rows = measured(tmp_path, scenario(RAGGED), {"bad": InMemory(fault), "good": InMemory()}, 1)
    assert (rows["bad"].status, rows["bad"].verified) == ("failed", False)
    assert reason in str(rows["bad"].reason)
    derived(rows["good"])


# ---- the run and its table


def test_a_run_has_both_parts_and_one_table(tmp_path: Path) -> None:
    settings = config.BenchConfig(
        MlperfConfig(
            "mlperf", "mlperf", rounds=3, workloads={"big": RAGGED, "small": FIXED}, sample_seconds=0.03,
            sample_bytes=4 * MIB, most_samples=64,
        ),
        config.StorageConfig(str(tmp_path), 2, MIB),
        loaders={
            "shard_loader": {"kind": "shard_loader"},
            "dataloader": {"kind": "torch_dataloader", "dataset": "shards"},
        },
        device="cpu",
    )  # fmt: skip
    text = io.StringIO()
    out = Console(file=text, width=120)
    rows = run.measure(settings, tmp_path / "rows.jsonl", out)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert [(row.status, results.part(row)) for row in rows] == [
        ("ok", part) for part in ("big", "big, without compute", "small", "small, without compute") for _ in range(2)
    ]
    (group,) = results.groups(results.read(tmp_path / "rows.jsonl"))
    assert len(group.measured) == 8
    report.show(group.measured, out)
    lines = text.getvalue().splitlines()
    title = next(number for number, line in enumerate(lines) if line.startswith("mlperf: big, small, warm cache"))
    assert all(len(line.rstrip()) <= 120 for line in lines[title:])
    for name in ("AU %", "target", "GB/s", "% of ceiling", "x peer", "feeds", "stall"):
        assert name in lines[title + 1]
    shown = [line.split()[:3] for line in lines[title:] if line.startswith(("shard_loader", "dataloader", "ceiling "))]
    assert sorted(shown[:2]) == [["dataloader", "big", "h100"], ["shard_loader", "big", "h100"]]
    assert [row[:2] for row in (shown[2], shown[5])] == [["ceiling", "big"], ["ceiling", "small"]]
    assert any(line.startswith("big: 64 samples of ") and " ± " in line for line in lines)


@pytest.mark.parametrize("compute", [True, False])
def test_one_part_alone_has_a_table_too(tmp_path: Path, compute: bool) -> None:
    rows = measured(tmp_path, scenario(FIXED, compute=[compute]), {"mine": InMemory(), "slow": InMemory(pause_s=0.01)})
    content = report.content(list(rows.values()))
    (section,) = content.sections
    assert [row.loader for row in section.records] == ["mine", "slow"]
    cells = {column.title: column.cell(rows["mine"]) for column in content.columns}
    assert bool(cells["AU %"]) == compute
    assert bool(cells["GB/s"]) == bool(cells["feeds"]) == (not compute)


def test_a_utilisation_that_the_rate_does_not_sustain_is_marked(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, scenario(FIXED), {"mine": InMemory()}).values()
    (rate,) = measured(tmp_path, scenario(FIXED, compute=[False]), {"mine": InMemory()}).values()
    for fed, marked in ((100.0, False), (0.1, True)):
        rate.derived = {**derived(rate), "accelerators_fed": fed}
        content = report.content([row, rate])
        (section,) = content.sections
        assert section.records == [row]
        cell = next(column.cell(row) for column in content.columns if column.title == "AU %")
        assert cell.endswith(" ‡") == marked
        assert any(note.startswith("‡") for note in content.notes) == marked
