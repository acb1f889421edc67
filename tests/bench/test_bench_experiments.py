"""Experiments with rows of their own: that the rows are what their names say, and that they measure it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_bench_config import composed

import gdsstream
from bench import config, files, loaders, scenarios
from bench.loaders.base import Job, Unavailable
from bench.loaders.gdsstream_devices import Devices
from bench.scenarios.base import VerificationError

MIB = 1 << 20


def settings(*overrides: str) -> config.BenchConfig:
    with composed(*overrides) as plain:
        return config.build(plain)


def test_a_row_of_the_staging_ring_is_named_after_its_ring_slots_and_threads() -> None:
    rows = settings("experiment=staging_ring").loaders
    assert len(rows) == 9
    for name, options in rows.items():
        knobs = gdsstream.StreamConfig(**{key: value for key, value in options.items() if key != "kind"})
        slots = knobs.staging_bytes // knobs.slot_bytes
        threads = "" if knobs.num_threads == 12 else f"_{knobs.num_threads}"
        assert name == f"ring_{knobs.staging_bytes // MIB}mib_{slots}x{knobs.slot_bytes // MIB}{threads}"
    default = gdsstream.StreamConfig()
    found = gdsstream.StreamConfig(**{key: value for key, value in rows["ring_96mib_6x16"].items() if key != "kind"})
    assert (found.staging_bytes, found.slot_bytes, found.chunk_bytes) == (
        default.staging_bytes, default.slot_bytes, default.chunk_bytes,
    )  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> files.BenchFiles:
    plan = files.Plan(tmp_path, 3, MIB, "")
    with files.written(plan, keep=True) as found:
        return found


def test_files_go_to_devices_in_turn_and_all_of_them_arrive(written: files.BenchFiles) -> None:
    workload = scenarios.build(config.ScenarioConfig("x", "read"), written, "cpu")
    loader = loaders.build("row", {"kind": "gdsstream_devices", "devices": [0, 1]})
    loader.prepare(workload.job)
    assert loader.route() == "staged, to cpu: 2 files and cpu: 1 files"
    delivered = workload.run(loader)
    workload.verify(delivered)
    name = next(iter(delivered))
    delivered[name].view(-1).view(torch.uint8)[0] ^= 1
    with pytest.raises(VerificationError, match="differs from byte 0"):
        workload.verify(delivered)
    loader.close()


def test_devices_that_are_not_there_or_come_twice_are_named(written: files.BenchFiles) -> None:
    with pytest.raises(config.BenchConfigError, match="each once"):
        loaders.build("row", {"kind": "gdsstream_devices", "devices": [0, 0]})
    with pytest.raises(Unavailable, match="there is no cuda:99"):
        Devices(devices=[99]).prepare(Job(written.paths, written.data_bytes, "cuda:0"))
    with pytest.raises(Unavailable, match="3 files are too few for 4"):
        Devices(devices=[0, 1, 2, 3]).prepare(Job(written.paths, written.data_bytes, "cpu"))


def test_a_dataset_has_no_more_records_than_asked(tmp_path: Path) -> None:
    plan = files.Plan(tmp_path, 4, MIB, "")
    for most, expected in ((100, 100), (None, 1024)):
        scenario = config.EpochConfig("loader_epoch", "epoch", sizes=[4096], most_records=most, sample_bytes=64 * MIB)
        with files.written(scenarios.plan(scenario, plan, cold=False)) as found:
            assert scenarios.build(scenario, found, "cpu").units == expected


def test_what_a_loader_costs_is_measured_beside_others() -> None:
    kinds = [options["kind"] for options in settings("experiment=loader_epoch_compute").loaders.values()]
    assert kinds[0] == "shard_loader"
    assert {"torch_dataloader", "litdata"} <= set(kinds)
    workers = [o.get("num_workers") for o in settings("experiment=loader_epoch").loaders.values() if "num_workers" in o]
    assert sorted(workers) == [0, 0, 4, 4, 8, 8]
