"""How much memory may be pinned, on /proc and /sys trees written by hand."""

from __future__ import annotations

from pathlib import Path

from gdsstream.engine.budget import free_bytes

KIB = 1024


def trees(tmp_path: Path, meminfo: str, **cgroup: str) -> dict[str, str]:
    for folder in ("proc", "cgroup/memory"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/meminfo").write_text(meminfo)
    for name, text in cgroup.items():
        (tmp_path / "cgroup" / name.replace("__", "/").replace("_", ".", 1)).write_text(text)
    return {"procfs": str(tmp_path / "proc"), "cgroupfs": str(tmp_path / "cgroup")}


def test_free_memory_is_what_machine_and_group_can_spare(tmp_path: Path):
    meminfo = "MemTotal: 4000 kB\nMemAvailable: 2000 kB\n"
    nine_tenths = int(2000 * KIB * 0.9)
    assert free_bytes(**trees(tmp_path, meminfo)) == nine_tenths
    group = trees(tmp_path, meminfo, memory_max="max\n", memory_current="5\n")
    assert free_bytes(**group) == nine_tenths
    group = trees(tmp_path, meminfo, memory_max="1000000\n", memory_current="400000\n")
    assert free_bytes(**group) == 540_000
    # What the group caches of files makes room; its tmpfs does not.
    stat = "file 350000\nactive_file 50000\ninactive_file 200000\nshmem 100000\n"
    group = trees(tmp_path, meminfo, memory_max="1000000\n", memory_current="400000\n", memory_stat=stat)
    assert free_bytes(**group) == int(850_000 * 0.9)
    group = trees(tmp_path, meminfo, memory_max="1000000\n", memory_current="2000000\n", memory_stat="file x y\n")
    assert free_bytes(**group) == 0
    assert free_bytes(procfs=str(tmp_path / "none"), cgroupfs=str(tmp_path / "none")) == 0


def test_free_memory_in_a_group_of_version_1(tmp_path: Path):
    trees(tmp_path, "")
    for name, text in {
        "limit_in_bytes": "1000000",
        "usage_in_bytes": "900000",
        "stat": "active_file 1\ntotal_active_file 300000\ntotal_inactive_file 100000\n",
    }.items():
        (tmp_path / "cgroup/memory" / f"memory.{name}").write_text(text)
    assert free_bytes(procfs=str(tmp_path / "proc"), cgroupfs=str(tmp_path / "cgroup")) == 450_000
