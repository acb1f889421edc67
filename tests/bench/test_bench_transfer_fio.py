"""The row that runs fio: by fio's own clock, and not checked; skipped where there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transfer_support import BASE, KIB, MIB, built, run, workload

from bench import record

# Says what it would have read at 2 GB/s, and what it was asked.
STAND_IN = """#!/usr/bin/env python3
import json, sys
if "--version" in sys.argv:
    print("fio-3.99")
    raise SystemExit
asked = dict(each[2:].partition("=")[::2] for each in sys.argv[1:])
with open({log!r}, "a") as log:
    print(json.dumps(asked), file=log)
nbytes = int(asked["size"]) * int(asked["numjobs"])
read = {{"io_bytes": nbytes * {read_share}, "bw_bytes": 2_000_000_000}}
print("fio: a note before\\n" + json.dumps({{"jobs": [{{"error": 0, "read": read}}]}}))
"""
ROW = {"threads": 4, "depth": 16, "io_bytes": 64 * KIB}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH whose fio is a stand-in, that has a python beside it."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/local/bin:/usr/bin:/bin")
    return place


def stand_in(place: Path, read_share: int = 1) -> Path:
    log = place.parent / "log"
    (place / "fio").write_text(STAND_IN.format(log=str(log), read_share=read_share))
    (place / "fio").chmod(0o755)
    return log


def measured(directory: Path, **changes: Any) -> Any:
    directory.mkdir()
    scenario = replace(BASE, **changes)
    with workload(directory, scenario, count=1) as made:
        if not scenario.ops[0].endswith("write") and not _direct(made.job.paths[0]):
            pytest.skip("O_DIRECT is refused here")
    return run(directory, scenario, {"fio": built("fio_4x16", **ROW)}, rounds=2, count=1)["fio"]


def _direct(path: str) -> bool:
    from bench import cache

    return cache.refuses_direct(path) is None


def test_its_rate_is_fios_and_its_bytes_are_not_checked(tmp_path: Path, path: Path) -> None:
    log = stand_in(path)
    row = measured(tmp_path / "files")
    assert row.status == "ok", row.reason
    assert row.gb_per_s["median"] == pytest.approx(2.0)
    assert row.verified is False
    assert record.problems(json.loads(row.to_json())) == []
    assert "fio-3.99, 4 jobs x iodepth 16, by fio's own clock" in row.route
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(asked) == 3, "a first load and two samples"
    one = asked[0]
    assert (one["bs"], one["direct"], one["ioengine"], one["iodepth"], one["numjobs"]) == (
        "65536", "1", "libaio", "16", "4",
    )  # fmt: skip
    assert one["size"] == one["offset_increment"] == str(MIB // 4)


def test_bytes_that_it_did_not_read_are_a_failed_row(tmp_path: Path, path: Path) -> None:
    stand_in(path, read_share=0)
    row = measured(tmp_path / "files")
    assert (row.status, row.samples_s) == ("failed", [])
    assert "fio read 0 of 1048576 bytes" in row.reason


def test_without_fio_the_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    row = measured(tmp_path / "files")
    assert (row.status, row.reason) == ("skipped", "fio is not installed: install the package fio of this system")


def test_it_reads_one_file_in_order_only(tmp_path: Path, path: Path) -> None:
    stand_in(path)
    row = measured(tmp_path / "files", ops=["randread"])
    assert row.status == "skipped"
    assert "scenario.ops=[read] storage.files=1" in row.reason
