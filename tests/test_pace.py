"""How much a thread has under way at simulated disks: all of what they give, with little more than that takes."""

from __future__ import annotations

import heapq
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_plan, need_reader, random_bytes, source_of

import gdsstream
from gdsstream import _native, virtual_disks

MIB = 1 << 20
READ_BYTES = 512 << 10
THREADS = 4
# Of a lane.
LEAST_BYTES = 6 * MIB


@dataclass
class Disk:
    """A thread's share of one: each read takes `latency_s`, and `gb_per_s` are what all of them bring together."""

    latency_s: float
    gb_per_s: float
    free_s: float = 0.0

    def read(self, now_s: float, nbytes: int) -> float:
        """When it is over."""
        self.free_s = max(self.free_s, now_s + self.latency_s) + nbytes / self.gb_per_s / 1e9 * THREADS
        return self.free_s


def run(pace: _native.Pace, disk: Disk, seconds: float, now_s: float = 0.0) -> tuple[float, float]:
    """GB/s of all threads in the second half, and when it ended."""
    flying: list[tuple[float, float]] = []
    end_s, middle_s, moved = now_s + seconds, now_s + seconds / 2, 0
    disk.free_s = now_s
    pace.begin(int(now_s * 1e9))
    while now_s < end_s:
        while len(flying) * READ_BYTES < pace.limit_bytes:
            heapq.heappush(flying, (disk.read(now_s, READ_BYTES), now_s))
        now_s, began_s = heapq.heappop(flying)
        moved += READ_BYTES * (now_s >= middle_s)
        pace.arrived(1, READ_BYTES, int((now_s - began_s) * 1e9), int(now_s * 1e9))
    return moved * THREADS / (end_s - middle_s) / 1e9, now_s


@pytest.mark.parametrize(
    ("latency_s", "gb_per_s", "most_bytes"),
    [
        (0.0003, 2.3, 6 * MIB),  # a virtual disk
        (0.0001, 7.0, 9 * MIB),  # an NVMe drive
        (0.0003, 50.0, 64 * MIB),  # a RAID of many
        (0.006, 3.0, 40 * MIB),  # a volume of a cloud
        (0.008, 0.2, 8 * MIB),  # a disk that turns
    ],
)
def test_a_disk_gives_all_it_has_with_no_more_under_way_than_that_takes(
    latency_s: float, gb_per_s: float, most_bytes: int
) -> None:
    pace = _native.Pace(THREADS, LEAST_BYTES)
    rate, _ = run(pace, Disk(latency_s, gb_per_s), 0.5)
    assert rate > 0.95 * gb_per_s
    assert THREADS * pace.limit_bytes <= most_bytes


def test_it_follows_a_disk_that_others_use_as_well() -> None:
    pace = _native.Pace(THREADS, LEAST_BYTES)
    rates, limits, now_s = [], [], 0.0
    for gb_per_s in (20.0, 2.0, 20.0):
        rate, now_s = run(pace, Disk(0.0002, gb_per_s), 0.3, now_s)
        rates.append(rate / gb_per_s)
        limits.append(pace.limit_bytes)
    assert min(rates) > 0.95
    assert limits[1] == LEAST_BYTES // THREADS < min(limits[0], limits[2])


def test_a_pause_is_no_slow_disk() -> None:
    pace = _native.Pace(THREADS, LEAST_BYTES)
    _, now_s = run(pace, Disk(0.0002, 20.0), 0.3)
    limit = pace.limit_bytes
    run(pace, Disk(0.0002, 20.0), 0.01, now_s + 5.0)
    assert pace.limit_bytes == pytest.approx(limit, rel=0.1)


@pytest.mark.parametrize(
    ("threads", "least_bytes"), [(1, 6 * MIB), (2, 3 * MIB), (4, 3 * MIB // 2), (8, 3 * MIB // 4), (32, 3 * MIB // 4)]
)
def test_a_lane_begins_with_six_mebibytes_and_never_has_less(threads: int, least_bytes: int) -> None:
    pace = _native.Pace(threads, LEAST_BYTES)
    assert pace.limit_bytes == least_bytes
    run(pace, Disk(0.01, 0.001), 5.0)
    assert pace.limit_bytes == least_bytes


def test_a_single_read_or_an_instant_says_nothing() -> None:
    pace = _native.Pace(1, LEAST_BYTES)
    pace.begin(0)
    pace.arrived(1, 1 << 30, 10, 10**9)
    assert pace.limit_bytes == LEAST_BYTES  # one read, however long it took
    pace.begin(0)
    pace.arrived(100, 1 << 30, 10, 10**5)
    assert pace.limit_bytes == LEAST_BYTES  # a tenth of a millisecond
    pace.arrived(100, 1 << 30, 10, 2 * 10**6)
    assert pace.limit_bytes == 16 * MIB


# ---- an engine that keeps to it


def read(path: Path, **knobs: Any) -> tuple[bytes, dict[str, int]]:
    """What a file of 64 MiB holds, read in two groups with O_DIRECT, and what the engine counted."""
    plan = make_plan(
        [(0, 0, 40 * MIB + 5, 0, 0, 0), (0, 40 * MIB + 5, 24 * MIB - 5, 0, 40 * MIB + 5, 1)], (64 * MIB,), 2
    )
    out = torch.zeros(64 * MIB, dtype=torch.uint8)
    with gdsstream.open_engine("staged", device="cpu", direct_io=True, direct_threads=4, **knobs) as engine:
        transfer = engine.submit([source_of(path)], plan, [out])
        transfer.wait(0)
        transfer.wait(1)
        return out.numpy().tobytes(), engine.stats()


@pytest.fixture(autouse=True)
def single_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_disks, "single_queue_requests", lambda: 256)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pace")
    need_reader({"reader": "io_uring", "direct_io": True}, folder)
    path = folder / "data.bin"
    path.write_bytes(random_bytes(64 * MIB))
    return path


def test_paced_reads_go_through_small_slots_of_a_ring_of_their_own(path: Path) -> None:
    got, counted = read(path, faults="delay_us=4000")
    assert got == path.read_bytes()
    # Half a MiB each, of 40 MiB and some bytes, and of 24.
    assert counted["tasks"] == 81 + 48
    assert counted["staging_slots"] == 64
    assert counted["staging_bytes"] == 32 * MIB
    assert counted["staging_slots_held"] == 0
    # The second group begins within a block, which both of them read.
    assert counted["read_bytes"] == 64 * MIB + 4096


@pytest.mark.parametrize("fault", ["eio@40", "short@40", "nomem@40"])
def test_a_fault_fails_the_transfer_and_the_next_one_arrives(path: Path, fault: str, no_leaks: None) -> None:
    plan = make_plan([(0, 0, 64 * MIB, 0, 0, 0)], (64 * MIB,))
    out = torch.zeros(64 * MIB, dtype=torch.uint8)
    with gdsstream.open_engine(
        "staged", device="cpu", direct_io=True, direct_threads=1, faults=f"{fault},delay_us=500"
    ) as engine:
        with pytest.raises(gdsstream.GdsStreamError):
            engine.submit([source_of(path)], plan, [out]).wait()
        engine.submit([source_of(path)], plan, [out]).wait()
        assert engine.stats()["staging_slots_held"] == 0
    assert out.numpy().tobytes() == path.read_bytes()


def test_the_ring_of_paced_reads_is_bounded_too(path: Path) -> None:
    got, counted = read(path, staging_bytes=4 * MIB, chunk_size=256 * 1024)
    assert got == path.read_bytes()
    assert counted["staging_bytes"] <= 4 * MIB
    assert counted["staging_slots"] > 1


@pytest.mark.parametrize("slot_bytes", [4096, 65536 + 2048])
def test_a_lane_has_slots_of_whole_pages_and_not_too_small(slot_bytes: int) -> None:
    lane = _native.Lane("pread", direct=True, threads=1, depth=1, read_bytes=4096, slot_bytes=slot_bytes)
    with pytest.raises(gdsstream.ConfigError, match=f"a slot has {slot_bytes} bytes"):
        _native.Engine(device=-1, slot_bytes=MIB, staging_bytes=MIB, numa_node=-1, cpus=[], lanes=[lane])


def test_a_depth_that_was_asked_for_is_kept_with_tasks_of_a_slot_each(path: Path) -> None:
    got, counted = read(path, faults="delay_us=4000", io_depth=256)
    assert got == path.read_bytes()
    assert counted["tasks"] == 3 + 2


def test_other_disks_are_read_as_deep_as_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_disks, "single_queue_requests", lambda: 0)
    got, counted = read(path, faults="delay_us=4000")
    assert got == path.read_bytes()
    assert counted["tasks"] == 3 + 2


@pytest.mark.parametrize(
    ("requests", "knobs", "says"),
    [
        (256, {}, "x2 of depth 256, paced"),
        (128, {}, "x2 of depth 128, paced"),
        (256, {"direct_threads": 4}, "x4 of depth 128, paced"),
        (256, {"direct_threads": 3}, "x3 of depth 170, paced"),
        (256, {"direct_threads": 1}, "x1 of depth 256, paced"),
        (1024, {"direct_threads": 1}, "x1 of depth 256, paced"),
        (1, {"direct_threads": 4}, "x4 of depth 1, paced"),
        (256, {"direct_threads": 4, "io_depth": 100}, "x4 of depth 100"),
        (0, {}, "x4 of depth 256"),
    ],
)
def test_no_more_is_under_way_than_twice_what_the_queue_takes(
    path: Path, monkeypatch: pytest.MonkeyPatch, requests: int, knobs: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(virtual_disks, "single_queue_requests", lambda: requests)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    plan = make_plan([(0, 0, MIB, 0, 0, 0)], (MIB,))
    out = torch.zeros(MIB, dtype=torch.uint8)
    with gdsstream.open_engine("staged", device="cpu", direct_io=True, **knobs) as engine:
        engine.submit([source_of(path)], plan, [out]).wait()
        assert engine.route == f"O_DIRECT by io_uring {says} -> CPU memory"
    assert out.numpy().tobytes() == path.read_bytes()[:MIB]
