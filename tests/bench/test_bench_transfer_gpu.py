"""The routes that end on a GPU, over stand-ins in CPU memory: that every byte moves, and that short ios are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transfer_stand_ins import CuFileApi, Kvikio, Stream
from transfer_support import BASE, KIB, MIB, built, run

from bench import cufile_files
from bench.loaders import transfer_bounce, transfer_cufile_batch, transfer_kvikio, transfer_route


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Kvikio, CuFileApi]:
    """Stand-ins for what the GPU's routes call; memory is the CPU's."""
    kvikio, api = Kvikio(), CuFileApi()
    names = {
        "kvikio": kvikio,
        "kvikio.defaults": kvikio.defaults,
        "kvikio.cufile_driver": SimpleNamespace(get=lambda name: False),
        "cuda.bindings.cufile": api,
    }
    for module in (transfer_kvikio, cufile_files):
        monkeypatch.setattr(module, "need", lambda name, package: names[name])
    for module in (transfer_kvikio, transfer_bounce, transfer_cufile_batch):
        monkeypatch.setattr(module, "need_gpu", lambda job, what: None)
    monkeypatch.setattr(transfer_route.Route, "new_stream", lambda self: Stream())
    return kvikio, api


@pytest.mark.parametrize("op", ["read", "randread", "write", "randwrite"])
def test_every_gpu_route_moves_every_byte_of_a_stand_in(tmp_path: Path, op: str, gpu: tuple[Kvikio, CuFileApi]) -> None:
    names = ["storage_gpu", "kvikio_default", "kvikio_16x1mib", "kvikio_whole", "storage_cpu_gpu",
             "storage_cpu_gpu_async", "page_cache_cpu_gpu", "gpu_async_stream", "gpu_batch",
             "gpu_batch_stream"]  # fmt: skip
    small = {"kvikio_default": {"io_bytes": 256 * KIB}, "kvikio_16x1mib": {"io_bytes": 128 * KIB}}
    rows = run(tmp_path, replace(BASE, ops=[op], depth=[3]), {n: built(n, **small.get(n, {})) for n in names})
    assert {name: row.reason for name, row in rows.items() if row.status != "ok"} == {}
    kinds = {name: row.derived["latency_of"] for name, row in rows.items()}
    assert kinds["storage_gpu"] == "io"
    assert kinds["kvikio_default"] == "stretch of ios"
    assert kinds["gpu_batch"] == kinds["gpu_batch_stream"] == kinds["gpu_async_stream"] == "batch of 3 ios"
    assert "not GDS" in rows["storage_gpu"].route
    assert "not proven to be GDS" in rows["gpu_batch"].route or "counters prove" in rows["gpu_batch"].route
    kvikio, api = gpu
    assert (api.opened, api.streams, api.pending) == (0, 0, {})  # all given back
    assert kvikio.values == {"num_threads": 1, "task_size": 4 << 20}


def test_one_whole_read_is_cut_by_kvikio_and_not_by_us(tmp_path: Path, gpu: tuple[Kvikio, CuFileApi]) -> None:
    row = run(tmp_path, BASE, {"kvikio_whole": built("kvikio_whole", io_bytes=64 * KIB)})["kvikio_whole"]
    assert row.status == "ok"
    assert (MIB, 64 * KIB) in gpu[0].tasks


def test_a_short_io_fails_the_row(tmp_path: Path, gpu: tuple[Kvikio, CuFileApi]) -> None:
    kvikio, api = gpu
    kvikio.short_by, api.status = 1, 64
    names = ["storage_gpu", "gpu_async_stream", "gpu_batch"]
    rows = run(tmp_path, replace(BASE, ops=["write"]), {name: built(name) for name in names})
    assert [row.status for row in rows.values()] == ["failed"] * 3
    assert "moved 65535 of 65536 bytes" in rows["storage_gpu"].reason
    assert "status 64" in rows["gpu_batch"].reason


def test_a_job_for_another_gpu_says_how_to_run_it(tmp_path: Path, gpu: tuple[Kvikio, CuFileApi]) -> None:
    row = run(tmp_path, BASE, {"job": built("storage_gpu", gpu_dev_id=5)})["job"]
    assert row.status == "skipped"
    assert "CUDA_VISIBLE_DEVICES=5" in row.reason
