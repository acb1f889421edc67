"""What devices count beside the clock, and whether a GPU is free, with counters and a driver that are made up."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import pytest
from steady import Steady

from bench import busy, config, device_bytes, environment, files, measure, nvml, record, scenarios
from bench.config import BenchError
from bench.device_bytes import Count, Counters, Moved
from bench.loaders.pread import Pread
from bench.measure import FEWER_DEVICE_BYTES


def disk(sys: Path, name: str, read: int, written: int, *, below: tuple[str, ...] = ()) -> Path:
    """A block device as sysfs shows it, with sectors read and written."""
    place = sys / "class" / "block" / name
    place.mkdir(parents=True)
    (place / "stat").write_text(f"  10 0 {read} 5 20 0 {written} 7 0 0 0\n", encoding="ascii")
    for each in below:
        (place / "slaves").mkdir(exist_ok=True)
        (place / "slaves" / each).symlink_to(sys / "class" / "block" / each)
    return place


def number(sys: Path, directory: Path, name: str) -> None:
    """Make `name` the device of a directory's files."""
    device = os.stat(directory).st_dev
    (sys / "dev" / "block").mkdir(parents=True)
    (sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}").symlink_to(sys / "class" / "block" / name)


# ---- block devices


def test_bytes_of_the_device_below_a_directory_are_counted(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    place = disk(sys, "vda1", 100, 7)
    number(sys, tmp_path, "vda1")
    counters = Counters(tmp_path, "cpu", sys=sys)
    assert counters.source == "block device vda1"
    before = counters.read()
    assert before == Count(100 * 512, 7 * 512, None)
    (place / "stat").write_text("11 0 300 5 20 0 8 7 0 0 0\n", encoding="ascii")
    assert counters.between(before, counters.read(), 1) == Moved(200 * 512, 512, None)


def test_a_raid_is_counted_at_what_it_consists_of(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    for name, read in (("nvme0n1p1", 1), ("nvme1n1", 20), ("nvme2n1", 300)):
        disk(sys, name, read, 0)
    disk(sys, "md0", 9999, 9999, below=("nvme0n1p1", "nvme1n1"))
    disk(sys, "dm-0", 9999, 9999, below=("md0", "nvme2n1"))
    number(sys, tmp_path, "dm-0")
    counters = Counters(tmp_path, "cpu", sys=sys)
    assert counters.source == "block device nvme0n1p1, nvme1n1, nvme2n1"
    assert counters.read() == Count(321 * 512, 0, None)


def test_a_file_system_of_its_own_number_is_found_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(tmp_path / "sys", "sdz9", 5, 0)
    found = {"type": "btrfs", "source": "/dev/sdz9", "mount": "/"}
    monkeypatch.setattr(environment, "filesystem", lambda directory: found)
    assert Counters(tmp_path, "cpu", sys=tmp_path / "sys").source == "block device sdz9"


def test_where_there_is_no_device_the_record_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environment, "filesystem", lambda directory: {"type": "nfs4", "source": "host:/x", "mount": "/"}
    )
    counters = Counters(tmp_path, "cpu", sys=tmp_path / "sys")
    assert counters.source == f"no block device is counted: {tmp_path} is on nfs4"
    assert counters.between(counters.read(), counters.read(), 1) == Moved(None, None, None)
    if Path("/dev/shm").is_dir():
        monkeypatch.undo()
        assert "tmpfs" in Counters(Path("/dev/shm"), "cpu").source


def test_a_counter_that_wrapped_around_counts_nothing() -> None:
    assert device_bytes._difference(10, 3) is None
    assert device_bytes._difference(3, 10) == 7


def test_what_a_disk_really_wrote_is_counted(tmp_path: Path) -> None:
    counters = Counters(tmp_path, "cpu")
    before = counters.read()
    if before.written is None:
        pytest.skip(counters.source)
    size = 8 << 20
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, os.urandom(size))
    os.fsync(descriptor)
    os.close(descriptor)
    written = counters.between(before, counters.read(), size).written
    assert written is not None
    assert written >= size


# ---- in the record


class Told(Counters):
    """Reads as many bytes in each sample as it is told."""

    def __init__(self, reads: list[int | None]) -> None:
        self.source, self._reads = "a list", iter(reads)

    def read(self) -> Count:
        return Count(0, 0, 0)

    def between(self, before: Count, now: Count, nbytes: int) -> Moved:
        return Moved(next(self._reads), 0, None)


@pytest.mark.parametrize("cold", [True, False])
def test_a_cold_read_of_fewer_bytes_than_the_files_hold_is_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    monkeypatch.setattr(measure.cache, "evict", lambda paths: 0)
    with files.written(files.Plan(tmp_path, 1, 1 << 20, "")) as written:
        workload = scenarios.build(config.ScenarioConfig("load_model", "read"), written, "cpu")
        size = workload.sample_bytes
        counters = Told([0, size, size // 2, 2 * size, size])
        runner = measure.Runner(
            workload, {"x": Pread()}, Steady(), cold=cold, fresh_memory=False, counters=counters
        )  # fmt: skip
        outcome = runner.run(4, 30.0).outcomes["x"]
    assert outcome.status == "ok", outcome.reason
    labels = [FEWER_DEVICE_BYTES in sample.labels for sample in outcome.samples]
    assert labels == [False, cold, False, False]
    row = record.make(
        "x", outcome, workload, scenario="load_model", cold=cold, config={}, env=dict.fromkeys(record._ENV),
        ceiling={"kind": "steady", "detail": "", "samples": [10.0] * 4}, devices="a list",
    )  # fmt: skip
    reads = [size, size // 2, 2 * size, size]
    assert row.device_bytes == {"source": "a list", "read": reads, "written": [0] * 4, "gpu_received": None}
    assert row.gb_per_s is not None
    assert row.gb_per_s["n"] == 4
    plain = json.loads(row.to_json())
    assert record.problems(plain) == []
    plain["device_bytes"]["read"] = [1]
    assert record.problems(plain) == ["device_bytes.read: has no value for each sample"]


# ---- the GPU


class Library:
    """libnvidia-ml with one GPU, as far as the bench calls it."""

    def __init__(self, processes: list[tuple[int, int]], used: int = 4 << 20, received: int | None = 7) -> None:
        self.processes, self.used, self.received = processes, used, received
        self.asked: list[Any] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: ctypes.c_uint, handle: Any) -> int:
        self.asked.append(number.value)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        self.asked.append(name)
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        room, count._obj.value = count._obj.value, len(self.processes)
        if room < len(self.processes):
            return 7
        for place, (pid, used) in zip(found, self.processes, strict=False):
            place.pid, place.used = pid, used
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, found: Any) -> int:
        if found._obj.version != 40 | 2 << 24:
            return 25
        found._obj.used = self.used
        return 0

    def nvmlDeviceGetFieldValues(self, handle: Any, count: int, found: Any) -> int:
        found._obj.status = 0 if self.received is not None and found._obj.field == 198 else 3
        found._obj.value = self.received or 0
        return 0

    class _Text:
        restype: Any = None

        def __call__(self, status: int) -> bytes:
            return b"Not Supported"

    nvmlErrorString = _Text()


def driver(monkeypatch: pytest.MonkeyPatch, library: Any) -> Any:
    def opened(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(nvml.ctypes, "CDLL", opened)
    monkeypatch.setattr(busy, "_PATIENCE_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


def test_a_free_gpu_may_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Library([]))
    assert busy.check(allow=False) == "no other process"


def test_a_busy_gpu_is_refused_by_name_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Library([(4321, 3 * 10**9), (99, (1 << 64) - 1)]))
    with pytest.raises(BenchError) as caught:
        busy.check(allow=False)
    assert "process 4321 (3.00 GB), process 99 (memory unknown)" in str(caught.value)
    assert "allow_busy_gpu=true" in str(caught.value)
    assert busy.check(allow=True) == "allowed beside process 4321 (3.00 GB), process 99 (memory unknown)"


def test_memory_of_processes_that_cannot_be_seen_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Library([], used=30 * 10**9))
    with pytest.raises(BenchError, match=r"cannot be seen from here \(30.00 GB\)"):
        busy.check(allow=False)


def test_a_process_that_is_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver(monkeypatch, Library([(4321, 10**9)]))
    monkeypatch.setattr(busy, "_PATIENCE_S", 30.0)
    monkeypatch.setattr(busy.time, "sleep", lambda seconds: library.processes.clear())
    assert busy.check(allow=False) == "no other process"


def test_what_cannot_be_found_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, None)
    assert busy.check(allow=False).startswith("not found out: libnvidia-ml.so.1 cannot be opened")
    driver(monkeypatch, object())
    assert busy.check(allow=False) == "not found out: the driver is too old for nvmlInit_v2"


def test_more_processes_than_expected_are_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Library([(pid, 1) for pid in range(1, 101)]))
    assert len(nvml.open_device().processes()) == 100


@pytest.mark.parametrize(("visible", "asked"), [("", 0), ("3,1", 3), ("GPU-ab,GPU-cd", b"GPU-ab")])
def test_the_first_visible_gpu_is_asked(monkeypatch: pytest.MonkeyPatch, visible: str, asked: object) -> None:
    library = driver(monkeypatch, Library([]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml.open_device()
    assert library.asked == [asked]


def test_pcie_is_counted_where_the_driver_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver(monkeypatch, Library([], received=100))
    counters = Counters(tmp_path, "cuda:0", sys=tmp_path / "sys")
    before = counters.read()
    library.received = 250
    assert counters.between(before, counters.read(), 150).gpu_received == 150
    library.received = nvml.COUNTER + 60  # an H200's has 32 bits: it begins anew
    assert counters.between(before, counters.read(), 1 << 30).gpu_received == nvml.COUNTER - 40
    assert counters.between(before, counters.read(), 3 << 30).gpu_received is None, "it may have gone round twice"
    assert counters.source.endswith("; PCIe by NVML")
    library.received = None
    assert counters.between(before, counters.read(), 150).gpu_received is None
    assert "PCIe is not counted: the driver has no counter" in Counters(tmp_path, "cuda:0").source
