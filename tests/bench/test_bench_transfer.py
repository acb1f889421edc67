"""Transfers on the CPU: that each route moves every byte, and that wrong ones are found, read or written."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transfer_support import BASE, KIB, MIB, built, plain, run, workload

from bench import files, record, report, report_transfer, results, scenarios, sweeps
from bench import transfer_ops as ops_
from bench.config import BenchError, TransferConfig, parts
from bench.loaders import transfer_posix
from bench.loaders.base import Job
from bench.loaders.transfer_route import Threads

# ---- the routes of a machine without a GPU


@pytest.mark.parametrize("op", ["read", "randread", "write", "randwrite"])
def test_every_cpu_route_moves_every_byte(tmp_path: Path, op: str) -> None:
    names = ["storage_cpu", "storage_cpu_aio", "storage_cpu_buffered", "engine_staged", "engine_direct"]
    rows = run(tmp_path, replace(BASE, ops=[op]), {name: built(name) for name in names})
    for name, row in rows.items():
        if name.startswith("engine") and op.endswith("write"):
            assert (row.status, row.reason[:33]) == ("skipped", "gdsstream's engines read only; te")
            continue
        assert (row.status, row.reason, row.verified) == ("ok", None, True), name
        assert row.units == 16
        assert row.bytes == MIB
        assert record.problems(results.json.loads(row.to_json())) == []
        assert row.derived["op"] == op
        assert (row.derived["fsync"] is None) == op.endswith("read")
    timed = rows["storage_cpu"].derived
    assert 0 < timed["latency_p50_us"] <= timed["latency_p95_us"] <= timed["latency_p99_us"] <= timed["latency_max_us"]
    assert (timed["threads"], timed["depth"], timed["latency_of"]) == (2, 2, "io")


def test_an_io_range_and_an_offset_go_through_all_routes(tmp_path: Path) -> None:
    scenario = replace(BASE, io_range=[4096, 12288, 4096], offset_bytes=8192, ops=["read"])
    (part,) = parts(scenario)
    assert isinstance(part, TransferConfig)
    rows = run(tmp_path, part, {name: built(name) for name in ("storage_cpu", "storage_cpu_aio", "engine_staged")})
    assert {name: row.reason for name, row in rows.items() if row.status != "ok"} == {}
    assert rows["storage_cpu"].units == 128


def test_an_offset_that_is_not_aligned_is_moved_and_the_row_says_how(tmp_path: Path) -> None:
    rows = run(tmp_path, replace(BASE, shift_bytes=[1]), {"storage_cpu": built("storage_cpu")})
    row = rows["storage_cpu"]
    assert row.status == "ok"
    assert row.derived["direct"] is row.route.startswith("O_DIRECT")
    # A file system in memory takes O_DIRECT at any offset.
    memory = os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev
    refused = "page cache, since O_DIRECT refuses 65536 bytes at offset 1"
    assert row.route.startswith("O_DIRECT" if memory else refused)


def test_rows_of_one_part_differ_in_ios_threads_and_depth(tmp_path: Path) -> None:
    given = {
        "plain": built("storage_cpu"),
        "more": built("storage_cpu", io_bytes=4096, threads=4, depth=1),
        "deep": built("storage_cpu_aio", io_bytes=128 * KIB, depth=8),
    }
    rows = run(tmp_path, BASE, given)
    assert {name: (row.derived["io_bytes"], row.derived["threads"], row.derived["depth"], row.units)
            for name, row in rows.items()} == {
        "plain": (64 * KIB, 2, 2, 16), "more": (4096, 4, 1, 256), "deep": (128 * KIB, 2, 8, 8),
    }  # fmt: skip


def test_a_row_whose_ios_are_too_large_or_too_deep_is_skipped_with_the_reason(tmp_path: Path) -> None:
    given = {"large": built("storage_cpu", io_bytes=2 * MIB), "deep": built("storage_cpu", depth=129)}
    rows = run(tmp_path, BASE, given)
    assert [row.status for row in rows.values()] == ["skipped", "skipped"]
    assert "do not fit into files" in rows["large"].reason
    assert rows["deep"].reason == "depth is 129; it has to be at most 128"


def test_sample_seconds_gives_a_slow_row_fewer_ios(tmp_path: Path) -> None:
    @dataclass
    class Slow(transfer_posix.Posix):
        def transfer(self, ops: Any) -> Any:
            import time

            time.sleep(0.0005 * len(ops))
            return super().transfer(ops)

    scenario = replace(BASE, io_bytes=[4096], total_bytes=[64 * MIB], sample_seconds=0.02)
    rows = run(tmp_path, scenario, {"slow": Slow(), "fast": built("storage_cpu_buffered")})
    assert rows["slow"].status == rows["fast"].status == "ok"
    assert rows["slow"].units < rows["fast"].units
    assert rows["slow"].bytes == 4096 * rows["slow"].units


@pytest.mark.parametrize("op", ["randread", "write"])
@pytest.mark.parametrize("fault", ["skips", "shifts", "flips"])
def test_an_io_that_is_not_made_or_made_wrong_is_found(tmp_path: Path, op: str, fault: str) -> None:
    @dataclass
    class Faulty(transfer_posix.Posix):
        def transfer(self, ops: Any) -> Any:
            if fault == "flips":
                place = int(ops.place[3])
                if op == "write":
                    self.memory()[place + 9] ^= 1
                super().transfer(ops)
                if op != "write":
                    self.memory()[place + 9] ^= 1
                return None
            wrong = copy.copy(ops)
            if fault == "shifts":
                wrong.offset = ops.offset.copy()
                wrong.offset[3] ^= 4096
            else:
                for name in ("file", "offset", "nbytes", "place"):
                    setattr(wrong, name, np.delete(getattr(ops, name), 3))
            return super().transfer(wrong)

    scenario = replace(BASE, ops=[op], io_bytes=[4096], total_bytes=[64 * KIB])
    row = run(tmp_path, scenario, {"faulty": Faulty()})["faulty"]
    assert (row.status, row.verified) == ("failed", False)
    assert "differs within" in row.reason


def test_bytes_that_an_earlier_sample_wrote_do_not_pass(tmp_path: Path) -> None:
    @dataclass
    class OnlyOnce(transfer_posix.Posix):
        done = False

        def transfer(self, ops: Any) -> Any:
            if not self.done:
                self.done = True
                return super().transfer(ops)
            return np.ones(len(ops))

    for op in ("read", "write"):
        row = run(tmp_path, replace(BASE, ops=[op]), {"once": OnlyOnce()})["once"]
        assert (row.status, row.verified) == ("failed", False)
        # Without verification of every sample it passes, and the row says so.
        loose = run(tmp_path, replace(BASE, ops=[op], verify=False), {"once": OnlyOnce()})["once"]
        assert (loose.status, loose.derived["samples_verified"]) == ("ok", "the first load")


def test_fsync_inside_is_timed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(os, "fdatasync", called.append)
    given = {"storage_cpu_buffered": built("storage_cpu_buffered")}
    row = run(tmp_path, replace(BASE, ops=["write"], fsync=True), given)["storage_cpu_buffered"]
    assert len(called) == 2 * 3  # files, samples with the first load
    assert row.derived["fsync"] is True
    run(tmp_path, replace(BASE, ops=["write"]), {"storage_cpu_buffered": built("storage_cpu_buffered")})
    assert len(called) == 6


def test_without_a_gpu_gpu_routes_say_what_torch_says(tmp_path: Path) -> None:
    names = ["storage_gpu", "storage_cpu_gpu", "storage_cpu_gpu_async", "page_cache_cpu_gpu", "gpu_async_stream",
             "gpu_batch", "gpu_batch_stream"]  # fmt: skip
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    rows = run(tmp_path, BASE, {name: built(name) for name in names})
    assert {row.status for row in rows.values()} == {"skipped"}
    assert all("there is none: Torch not compiled with CUDA" in row.reason or "NVIDIA" in row.reason
               for row in rows.values())  # fmt: skip


def test_a_write_that_the_disk_has_no_room_for_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    room = files.room(tmp_path)
    chosen = files.Plan(tmp_path, 1, int(room * 0.6), "a test")
    assert scenarios.plan(replace(BASE, ops=["read"]), chosen, cold=False).by_part
    with pytest.raises(BenchError, match=r"has room for .* GB; lower storage\.files"):
        scenarios.plan(replace(BASE, ops=["read", "write"]), chosen, cold=False)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_one_thread_ends_the_others() -> None:
    pool, seen = Threads(3, "cpu"), []

    def work(thread: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            seen.append(number)
            if number == 5:
                raise OSError("broken")

    try:
        with pytest.raises(OSError, match="broken"):
            pool.each(work, ops_.make("read", [4096], 4096 * 10**5, [MIB]))
        assert len(seen) < 10**5
    finally:
        pool.close()


# ---- tables and plots


def test_a_run_that_could_not_begin_is_reported(tmp_path: Path) -> None:
    scenario = replace(BASE, ops=["read", "write"], io_bytes=[4096, 8192])
    env = dict.fromkeys(record._ENV) | {"versions": {}}
    config = {"scenario": plain(scenario), "loaders": {"x": {"kind": "transfer_posix"}}}
    row = record.unmeasured("x", "no CUDA device", scenario, cold=False, config=config, env=env)
    assert record.problems(results.json.loads(row.to_json())) == []
    assert results.part(row) == ""
    out = io.StringIO()
    report.show([row], Console(file=out, width=120))
    assert "no CUDA device" in out.getvalue()


def test_the_table_and_the_sweep_show_what_was_measured(tmp_path: Path) -> None:
    rows = []
    for part in parts(replace(BASE, io_bytes=[4096, 64 * KIB])):
        assert isinstance(part, TransferConfig)
        rows += list(run(tmp_path, part, {n: built(n) for n in ("storage_cpu", "engine_staged")}).values())
    out = io.StringIO()
    report.show(rows, Console(file=out, width=120))
    text = out.getvalue()
    for wanted in ("ios/s", "p50", "p99", "% of ceiling", "2 x 2", "own", "64 KiB", "4 KiB"):
        assert wanted in text, wanted
    assert len(text.splitlines()) == len([line for line in text.splitlines() if len(line) <= 120])
    assert len(results.groups(rows)) == 1
    # Routes beside each other: a row for each size, where nothing else differs.
    beside = report.more(rows)[0]
    assert [column.title for column in beside.columns] == ["op", "io", "storage_cpu", "engine_staged", "ceiling"]
    cells = [[column.cell(each) for column in beside.columns] for each in beside.sections[0].records]
    assert [line[:2] for line in cells] == [["read", "4 KiB"], ["read", "64 KiB"]]
    of_engine = next(row for row in rows if row.loader == "engine_staged")
    assert cells[0][3] == f"{of_engine.units_per_s['median']:,.0f}"
    assert report_transfer.beside(rows[:2]) is None
    found = [sweep for sweep in sweeps.find(rows) if sweep.knob == "scenario.io_bytes"]
    assert [[at for at, _ in line.points] for line in found[0].lines] == [[4096, 65536]] * 2
    from bench.plots import sweep

    picture, caption = sweep.draw(found[0], tmp_path / "sweep.png")
    assert picture.stat().st_size > 10_000
    assert "size of an io" in caption


def test_rows_with_settings_of_their_own_are_a_sweep(tmp_path: Path) -> None:
    from record_rows import row

    def made(name: str, threads: int | None, rate: float) -> record.Record:
        scenario = {"ops": ["read"], "io_bytes": [MIB], "threads": [8], "depth": [1]}
        config = {"scenario": scenario, "loaders": {name: {"kind": "transfer_posix", "threads": threads}}}
        return row(name, [rate], verb="transfer", derived={}, config=config)

    (found,) = sweeps.find([made("one", 1, 1.0), made("four", 4, 3.0), made("default", None, 5.0)])
    assert found.knob == "scenario.threads"
    assert [(at, [each.loader for each in records]) for at, records in found.lines[0].points] == [
        (1, ["one"]),
        (4, ["four"]),
        (8, ["default"]),
    ]


def test_lines_of_other_ios_have_ceilings_of_their_own() -> None:
    from bench.plots.sweep import _apart
    from bench.sweeps import Line

    def line(size: int, op: str, verb: str = "transfer") -> Line:
        config = {"scenario": {"ops": [op], "io_bytes": [size]}}
        return Line("x", "", [(depth, [SimpleNamespace(verb=verb, config=config)]) for depth in (1.0, 2.0)])  # type: ignore[list-item]

    assert _apart([line(4096, "read"), line(8192, "read")])
    assert _apart([line(4096, "read"), line(4096, "write")])
    assert not _apart([line(4096, "read"), line(4096, "read")])
    assert not _apart([line(4096, "read", "epoch"), line(8192, "read", "epoch")])


def test_job_is_of_the_files_that_are_moved(tmp_path: Path) -> None:
    with workload(tmp_path, replace(BASE, ops=["write"])) as made:
        job: Job = made.job
        assert all(Path(path).name.startswith("written-") for path in job.paths)
        assert [os.path.getsize(path) for path in job.paths] == [MIB, MIB]
