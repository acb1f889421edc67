"""Epochs of records: what is measured, that every loader delivers each record once, and that a wrong one is found."""

from __future__ import annotations

import io
import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import ROOT
from rich.console import Console
from safetensors.torch import load_file
from steady import Steady

from bench import config, files, loaders, measure, record, record_shards, report, scenarios
from bench.ceilings import Ceiling, Overlap
from bench.loaders.base import Job, Loader
from bench.scenarios.epoch import Epoch, request

MIB = 1 << 20
EPOCH = config.EpochConfig(
    "loader_epoch", "epoch", sizes=[4096], batch_bytes=256 << 10, sample_seconds=0.1, sample_bytes=8 * MIB
)
POOL = np.random.default_rng(0).integers(0, 256, 99_998, dtype=np.uint8)


@dataclass(eq=False)
class InMemory(Loader):
    """Delivers the records from memory, or as it is told."""

    fault: str = ""
    pause_s: float = 0.0
    verbs: ClassVar[frozenset[str]] = frozenset({"epoch"})
    asked: list[int] = field(default_factory=list, init=False)
    closed: int = field(default=0, init=False)

    def prepare(self, job: Job) -> None:
        assert job.epoch is not None
        self.request = job.epoch
        self.records = torch.cat([torch.from_numpy(table).clone() for table in job.epoch.shards.tables()])

    def epochs(self, count: int) -> Iterator[torch.Tensor]:
        self.asked.append(count)
        late = len(self.asked) == 3
        try:
            for number in range(count):
                yield from self._epoch(number, late)
        finally:
            self.closed += 1

    def _epoch(self, number: int, late: bool) -> Iterator[torch.Tensor]:
        total = len(self.records)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(number))
        if self.fault == "in order":
            order = torch.arange(total)
        if self.fault == "twice" and late:
            order[7] = order[total - 3]
        if self.fault == "short" and late:
            order = order[:-1]
        if self.fault == "long" and late:
            order = torch.cat((order, order[:1]))
        for begin in range(0, len(order), self.request.batch_size):
            if self.pause_s:
                time.sleep(self.pause_s)
            batch = self.records[order[begin : begin + self.request.batch_size]]
            if late and begin:
                if self.fault == "byte":
                    batch[5, 4095] ^= 1
                if self.fault == "number":
                    batch[5, 7] = 1
                if self.fault == "dtype":
                    batch = batch.view(torch.int8)
                if self.fault == "shape":
                    batch = batch.flatten()
                if self.fault == "raise":
                    raise OSError("the disk broke")
            yield batch


@pytest.fixture
def written(tmp_path: Path) -> Iterator[files.BenchFiles]:
    plan = scenarios.plan(EPOCH, files.Plan(tmp_path, 3, MIB, ""), cold=False)
    with files.written(plan) as found:
        assert list(found.directory.iterdir()) == []
        yield found


def measured(
    written: files.BenchFiles, rows: dict[str, Loader], scenario: config.EpochConfig = EPOCH, rounds: int = 2
) -> dict[str, record.Record]:
    workload = scenarios.build(scenario, written, "cpu")
    ceiling: Ceiling = Overlap(Steady(), workload) if workload.computes else Steady()
    result = measure.Runner(workload, rows, ceiling, cold=False, fresh_memory=False).run(rounds, 60.0)
    workload.close()
    assert list(written.directory.iterdir()) == []
    limit = {"kind": ceiling.kind, "detail": ceiling.describe(), "samples": result.ceilings}
    found = {}
    for name, outcome in result.outcomes.items():
        found[name] = record.make(
            name,
            outcome,
            workload,
            scenario=scenario.name,
            cold=False,
            ceiling=limit,
            config={},
            env=dict.fromkeys(record._ENV),
        )
        assert record.problems(json.loads(found[name].to_json())) == []
    return found


# ---- the dataset


@pytest.mark.parametrize("size", [512, 4096, 150_001])
def test_shards_hold_numbered_records_known_byte_for_byte(tmp_path: Path, size: int) -> None:
    shards = record_shards.write(tmp_path / "shards", POOL, 41, size, 4)
    assert (shards.num_records, shards.data_bytes, len(shards.paths)) == (41, 41 * size, 4)
    found = torch.cat([load_file(path)["data"] for path in shards.paths])
    mapped = torch.cat([torch.from_numpy(table) for table in shards.tables()])
    assert torch.equal(found, mapped)
    assert record_shards.numbers_of(found).tolist() == list(range(41))
    for number in (0, 1, 40):
        place = (np.arange(8, size) + number * record_shards.STEP) % len(POOL)
        assert np.array_equal(found[number, 8:].numpy(), POOL[place])
    contents = record_shards.RecordContents(POOL, size, "cpu")
    order = torch.randperm(41)
    assert contents.first_difference(found[order]) is None
    for row, byte in ((0, 8), (17, size - 1), (40, size // 2)):
        spoilt = found.clone()
        spoilt[row, byte] ^= 1
        assert contents.first_difference(spoilt) == (row, byte)


def test_fewer_records_than_shards(tmp_path: Path) -> None:
    shards = record_shards.write(tmp_path / "shards", POOL, 3, 1000, 8)
    assert shards.rows == (1, 1, 1)


# ---- loaders


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "shard_loader"},
        {"kind": "shard_loader", "borrow": True},
        {"kind": "shard_loader", "shuffle": "block", "prefetch_batches": 1},
        {"kind": "torch_dataloader", "dataset": "shards"},
        {"kind": "torch_dataloader", "dataset": "shards", "num_workers": 2},
        {"kind": "torch_dataloader", "dataset": "memmap", "num_workers": 2},
        {"kind": "torch_dataloader", "dataset": "memmap"},
        {"kind": "torch_dataloader", "dataset": "pread"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_loaders_are_measured_and_verified(written: files.BenchFiles, options: dict[str, Any]) -> None:
    row = measured(written, {"row": loaders.build("row", options)})["row"]
    assert (row.status, row.reason, row.verified) == ("ok", None, True)
    assert len(row.samples_s) == 2
    found = row.derived
    assert found is not None
    assert (found["record_bytes"], found["batch_size"], found["num_records"]) == (4096, 64, 768)
    assert found["dataset_bytes"] == 3 * MIB
    assert all(0 < s["first"] <= s["all"] for s in _seconds(row))
    assert row.units == pytest.approx(row.figures["epochs"][0] * 768)
    if options.get("num_workers"):
        assert found["cpu_s_per_gb_with_workers"] >= (row.cpu_s_per_gb or 0)
    assert "shuffle" in str(row.route)


def test_a_closed_loader_leaves_no_workers(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    prepare = torch.utils.data.DataLoader.__init__
    monkeypatch.setattr(
        torch.utils.data.DataLoader, "__init__", lambda self, *a, **k: (kept.append(self), prepare(self, *a, **k))[1]
    )
    options = {"kind": "torch_dataloader", "dataset": "memmap", "num_workers": 2}
    assert measured(written, {"row": loaders.build("row", options)})["row"].status == "ok"
    assert kept, "a loader that somebody holds on to is not collected"
    assert not multiprocessing.active_children()


def _seconds(row: record.Record) -> list[dict[str, float]]:
    pairs = zip(row.figures["first_batch_s"], row.samples_s, strict=True)
    return [{"first": first, "all": seconds} for first, seconds in pairs]


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [
        ("webdataset", "webdataset", "webdataset"),
        ("litdata", "litdata", "litdata"),
        ("mosaic_streaming", "streaming", "mosaicml-streaming"),
        ("dali", "nvidia.dali", "nvidia-dali-cuda130"),
    ],
)
class TestPeers:
    def test_one_that_is_installed_delivers_every_record(
        self, written: files.BenchFiles, kind: str, module: str, package: str
    ) -> None:
        pytest.importorskip(module, exc_type=ImportError)
        workers = {} if kind == "dali" else {"num_workers": 2}
        row = measured(written, {"row": loaders.build("row", {"kind": kind, **workers})})["row"]
        assert (row.status, row.reason, row.verified) == ("ok", None, True)

    def test_one_that_is_missing_is_a_row_with_the_reason(
        self, written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, package: str
    ) -> None:
        for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
        row = measured(written, {"row": loaders.build("row", {"kind": kind})})["row"]
        assert (row.status, row.reason) == ("skipped", f"not installed: pip install {package}")


def test_a_copy_in_another_format_needs_room(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("webdataset")
    usage = namedtuple("usage", "free")(MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    row = measured(written, {"row": loaders.build("row", {"kind": "webdataset"})})["row"]
    assert row.status == "skipped"
    assert "its own format needs 0.00 GB beside the shards, and" in str(row.reason)


# ---- what is found


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("twice", "was delivered 2 times in an epoch"),
        ("short", "767 records were delivered in 1 epochs, not 768"),
        ("long", "batch 12 is torch.uint8 (1, 4096) on cpu, expected torch.uint8 (0, 4096) on cpu"),
        ("byte", "row 69 of the sample, by its number record"),
        ("number", "differs at byte"),
        ("dtype", "batch 1 is torch.int8 (64, 4096) on cpu, expected torch.uint8 (64, 4096) on cpu"),
        ("shape", "batch 1 is torch.uint8 (262144,) on cpu"),
        ("in order", "they are not shuffled"),
        ("raise", "OSError: the disk broke"),
    ],
)
def test_a_fault_is_found(written: files.BenchFiles, fault: str, reason: str) -> None:
    # One epoch fits, so that the third pass is a whole one too.
    scenario = replace(EPOCH, sample_bytes=3 * MIB, sample_seconds=5.0)
    rows = measured(written, {"bad": InMemory(fault), "good": InMemory()}, scenario, rounds=3)
    assert rows["bad"].status == "failed"
    assert reason in str(rows["bad"].reason)
    assert rows["bad"].verified is (fault == "raise")
    assert (rows["good"].status, rows["good"].verified) == ("ok", True)


def test_more_epochs_than_were_asked_for_are_found(written: files.BenchFiles) -> None:
    class Eager(InMemory):
        def epochs(self, count: int) -> Iterator[torch.Tensor]:
            yield from super().epochs(count + 1)

    # Long enough that no load is cut short on a busy machine.
    row = measured(written, {"row": Eager()}, replace(EPOCH, sample_seconds=5.0))["row"]
    assert "1536 records were delivered in 1 epochs, not 768" in str(row.reason)


# ---- how long a sample is


def test_a_fast_loader_delivers_as_many_epochs_as_are_kept(written: files.BenchFiles) -> None:
    loader = InMemory()
    row = measured(written, {"row": loader}, replace(EPOCH, sample_seconds=5.0))["row"]
    assert loader.asked == [1, 2, 2]
    assert (row.units, row.figures["batches"]) == (2 * 768, [24, 24])


def test_a_slow_loader_delivers_a_part_of_an_epoch(written: files.BenchFiles) -> None:
    loader = InMemory(pause_s=0.02)
    row = measured(written, {"row": loader}, replace(EPOCH, sample_seconds=0.1))["row"]
    # The first load takes a whole epoch, of twelve batches, which is no more than five samples.
    assert loader.asked == [1, 1, 1]
    assert row.status == "ok"
    assert row.figures["batches"] == [row.figures["batches"][0]] * 2
    assert 2 <= row.figures["batches"][0] <= 5
    assert loader.closed == 3


def test_of_a_cold_cache_no_sample_reads_a_second_epoch(tmp_path: Path) -> None:
    loader = InMemory()
    with files.written(scenarios.plan(EPOCH, files.Plan(tmp_path, 3, MIB, ""), cold=True)) as found:
        row = measured(found, {"row": loader}, replace(EPOCH, sample_seconds=5.0))["row"]
    assert loader.asked == [1, 1, 1]
    assert (row.units, row.figures["epochs"]) == (768, [1, 1])


def test_an_epoch_that_is_a_little_longer_than_a_sample_is_delivered_whole(written: files.BenchFiles) -> None:
    # Twelve batches, 0.24 s.
    row = measured(written, {"row": InMemory(pause_s=0.02)}, replace(EPOCH, sample_seconds=0.23))["row"]
    assert row.figures["batches"] == [12, 12]


def test_a_dataset_that_cannot_be_kept_whole_is_delivered_in_part(written: files.BenchFiles) -> None:
    loader = InMemory()
    row = measured(written, {"row": loader}, replace(EPOCH, sample_bytes=MIB, sample_seconds=5.0))["row"]
    assert row.figures["batches"] == [4, 4]
    assert row.reason is None


def test_at_least_two_batches_are_in_an_epoch(tmp_path: Path) -> None:
    scenario = replace(EPOCH, sizes=[300_000], batch_bytes=100 * MIB)
    with files.written(scenarios.plan(scenario, files.Plan(tmp_path, 2, MIB, ""), cold=False)) as found:
        row = measured(found, {"row": InMemory()}, scenario, rounds=1)["row"]
    assert row.derived is not None
    assert (row.derived["num_records"], row.derived["batch_size"], row.reason) == (6, 3, None)


# ---- with compute


def test_compute_is_measured_alone_and_beside_the_loader(written: files.BenchFiles) -> None:
    scenario = replace(EPOCH, compute_ms=2.0, sample_bytes=3 * MIB, sample_seconds=0.5)
    rows = measured(written, {"fast": InMemory(), "slow": InMemory(pause_s=0.01)}, scenario, rounds=3)
    for row in rows.values():
        assert row.derived is not None
        assert row.ceiling["kind"] == "max(compute, steady)"
        ratios = sorted(
            (seconds - first) / batches / alone - 1
            for seconds, first, batches, alone in zip(
                row.samples_s,
                row.figures["first_batch_s"],
                row.figures["batches"],
                row.figures["compute_s"],
                strict=True,
            )
        )
        assert row.derived["overhead"] == pytest.approx(ratios[1])
    assert rows["slow"].derived is not None
    assert 0.01 <= rows["slow"].derived["stall_s"] < 1  # longer on a busy machine
    assert rows["slow"].derived["overhead"] > 0.5


# ---- what a ceiling reads


@pytest.mark.parametrize(("size", "count"), [(4096, 4096), (MIB, 16), (2 * MIB, None), (4097, None)])
def test_the_ceiling_of_records_up_to_a_mebibyte_reads_each_of_them_in_random_order(
    tmp_path: Path, size: int, count: int | None
) -> None:
    shards = record_shards.write(tmp_path / "shards", POOL, 16 * MIB // size, size, 4)
    asked = request(shards, seed=0)
    if count is None:
        assert asked is None  # blocks are as fast, or an io with O_DIRECT cannot be a record
        return
    assert asked is not None
    assert asked.length == size
    places = {(int(f), int(at)) for f, at in zip(asked.file_index, asked.offsets, strict=True)}
    assert len(places) == len(asked.offsets) == count
    in_order = np.lexsort((asked.offsets, asked.file_index))
    assert (in_order != np.arange(count)).any()
    numbers = {int.from_bytes(Path(shards.paths[f]).read_bytes()[at : at + 8], "little") for f, at in places}
    assert numbers == set(range(count))


# ---- what is refused


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (files.Plan(Path(), 3, MIB, "", tensors=5), "'storage.tensors' has to be null"),
        (files.Plan(Path(), 1, 10_000, ""), "is 10000 bytes, which is less than 4 records of 4096 bytes"),
    ],
)
def test_files_that_cannot_serve_are_refused(plan: files.Plan, message: str) -> None:
    with pytest.raises(config.BenchConfigError, match=message):
        scenarios.plan(EPOCH, plan, cold=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": []}, "'scenario.sizes' is empty"),
        ({"sizes": ["4k"]}, "holds '4k'; it has to be a list of whole numbers"),
        ({"sizes": [100]}, "'scenario.sizes' is 100; it has to be at least 512"),
        ({"batch_bytes": 0}, "'scenario.batch_bytes' is 0"),
        ({"sample_bytes": 0}, "'scenario.sample_bytes' is 0"),
        ({"sample_seconds": 0.0}, "'scenario.sample_seconds' is 0.0; it has to be positive"),
        ({"compute_ms": -1.0}, "'scenario.compute_ms' is -1.0"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(config.BenchConfigError) as caught:
        replace(EPOCH, **changes)
    assert message in str(caught.value)


def test_a_wrong_dataset_is_named() -> None:
    with pytest.raises(config.BenchConfigError, match="'dataset' is 'tar'; valid: memmap, pread, shards"):
        loaders.build("row", {"kind": "torch_dataloader", "dataset": "tar"})


def test_each_size_is_a_part() -> None:
    parts = config.parts(replace(EPOCH, sizes=[4096, 65536]))
    assert [part.sizes for part in parts] == [[4096], [65536]]  # type: ignore[attr-defined]


# ---- the table and the command


@pytest.mark.parametrize("compute_ms", [0.0, 1.0])
def test_the_table_has_a_section_for_each_size(tmp_path: Path, compute_ms: float) -> None:
    rows: list[record.Record] = []
    for size in (4096, 2 * MIB):
        scenario = replace(EPOCH, sizes=[size], compute_ms=compute_ms)
        with files.written(scenarios.plan(scenario, files.Plan(tmp_path, 8, MIB, ""), cold=False)) as found:
            rows += measured(found, {"mine": InMemory(), "slow": InMemory(pause_s=0.1)}, scenario, 3).values()
    text = io.StringIO()
    report.show(rows, Console(file=text, width=120))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("loader_epoch: 8.4 MB a dataset, warm cache, cpu")
    names = [(line.split()[0], *line.split()[1:3]) for line in lines if " KiB " in line or " MiB " in line]
    last = "compute" if compute_ms else "ceiling"
    shown = [name[0] for name in names if name[0] in ("mine", "slow", last)]
    assert shown == ["mine", "slow", last] * 2
    assert ("overhead %" in lines[1]) == bool(compute_ms)
    assert ("k/s" in lines[1]) == (not compute_ms)
    assert all(len(line.rstrip()) <= 120 for line in lines)


def test_the_smoke_experiment_writes_valid_rows(tmp_path: Path) -> None:
    where = [f"hydra.run.dir={tmp_path}/hydra", f"storage.dir={tmp_path}", f"output={tmp_path}/rows.jsonl"]
    run = subprocess.run(
        [sys.executable, "-m", "bench.run", "experiment=loader_epoch_smoke", "device=cpu", *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["loader"], row["status"]) for row in rows] == [
        (name, "ok")
        for _ in range(2)
        for name in ("shard_loader", "shard_loader_borrowed", "dataloader_shards_0", "dataloader_memmap_2")
    ]
    assert all(record.problems(row) == [] for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hydra", "rows.jsonl"]


def test_a_workload_removes_its_dataset(written: files.BenchFiles) -> None:
    workload = Epoch(written, "cpu", EPOCH)
    assert [path.name for path in written.directory.iterdir()] == ["records-4096"]
    workload.close()
    assert list(written.directory.iterdir()) == []
