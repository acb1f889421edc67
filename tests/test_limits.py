"""Ceilings: what links carry by specification, which station binds, and bare reads of real files."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machine import trees
from support import need_direct, random_bytes

from gdsstream import ceilings, rates
from gdsstream.ceilings import Measured
from gdsstream.errors import ConfigError, ReadError
from gdsstream.limits import Limits, Measurements, Target, limits, stations
from gdsstream.link_rates import nic_rate, pcie_rate, set_rate, way_up
from gdsstream.machine import Drive, Machine, Nic, PciDevice, probe
from gdsstream.machine.mounts import of_path
from gdsstream.machine.pci import Link
from gdsstream.sample_files import SampleFiles, drop_cached
from gdsstream.storage import residency

MIB = 2**20
GB = 1e9
GEN5_X16 = Link(32.0, 16, 32.0, 16)
GEN4_X4 = Link(16.0, 4, 16.0, 4)


def device(address: str, link: Link | None = GEN4_X4, *parents: str) -> PciDevice:
    return PciDevice(address, 0, 0, 0, 0, link, parents)


def drive(name: str, pci: PciDevice | None) -> Drive:
    return Drive(name, "259:0", None, None, "pcie", pci, 0)


# --- specifications -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "gb_per_s"),
    [
        (GEN5_X16, 57.61),
        (GEN4_X4, 7.20),
        (Link(8.0, 16, 8.0, 16), 14.40),
        (Link(5.0, 4, 5.0, 4), 1.83),
        (Link(16.0, 2, 16.0, 4), 3.60),
        (Link(2.5, 16, 32.0, 16), 3.66),
    ],
)
def test_pcie_carries_256_bytes_in_280(link: Link, gb_per_s: float):
    rate = pcie_rate(link)
    assert rate is not None
    assert rate / GB == pytest.approx(gb_per_s, abs=0.01)


def test_a_link_that_sleeps_wakes_up_but_gets_no_lanes_back():
    assert pcie_rate(Link(2.5, 16, 32.0, 16), awake=True) == pcie_rate(GEN5_X16)
    assert pcie_rate(Link(2.5, 8, 32.0, 16), awake=True) == pytest.approx((pcie_rate(GEN5_X16) or 0) / 2)
    assert pcie_rate(None) is None
    assert pcie_rate(Link(None, 4, None, 4)) is None


def test_a_card_has_the_slower_of_line_and_bus():
    fast = Nic("mlx5_0", True, (), device("a", GEN5_X16), 400.0, True)
    assert (nic_rate(fast) or 0) / GB == pytest.approx(49.02, abs=0.01)
    assert nic_rate(replace(fast, pci=device("a", GEN4_X4))) == pcie_rate(GEN4_X4)
    assert (nic_rate(replace(fast, rdma=False, pci=None, gbit_per_s=100.0)) or 0) / GB == pytest.approx(11.77, abs=0.01)
    assert nic_rate(replace(fast, gbit_per_s=None)) is None


@pytest.mark.parametrize(
    ("level", "holding"), [("raid0", 4), ("raid10", 4), ("raid5", 3), ("raid4", 3), ("raid6", 2), (None, 4)]
)
def test_a_set_goes_at_the_pace_of_its_slowest_drive(level: str | None, holding: int):
    drives = [drive(f"nvme{i}n1", device(str(i), GEN4_X4)) for i in range(4)]
    single = pcie_rate(GEN4_X4) or 0.0
    assert set_rate(drives, level)[0] == pytest.approx(holding * single)
    drives[2] = drive("nvme2n1", device("2", Link(16.0, 2, 16.0, 4)))
    assert set_rate(drives, level)[0] == pytest.approx(holding * single / 2)
    assert set_rate(drives[:1], None) == (single, "7.20 GB/s of its PCIe link")


def test_a_drive_that_does_not_tell_makes_the_set_unknown():
    assert set_rate([drive("nvme0n1", device("0")), drive("vda", None)], "raid0") == (
        None,
        "vda: no PCIe link to be seen",
    )
    assert set_rate([], None) == (None, "no drive to be seen")
    assert way_up([drive("vda", None)], {}) == (None, "")


def test_a_shared_port_holds_back_what_is_below_it():
    ports = {name: device(name, link) for name, link in (("root", GEN5_X16), ("up", GEN4_X4), ("other", GEN5_X16))}
    below = [drive(f"nvme{i}n1", device(str(i), GEN4_X4, "pci0000:00", "root", "up")) for i in range(3)]
    apart = drive("nvme9n1", device("9", GEN4_X4, "pci0000:40", "other"))
    single = pcie_rate(GEN4_X4) or 0.0
    assert way_up([*below, apart], ports) == (pytest.approx(2 * single), "up")
    assert way_up([below[0], apart], ports) == (None, ""), "nothing is lost"


# --- a machine of the guide -----------------------------------------------------------------------------------------


@pytest.fixture
def a100(tmp_path: Path) -> Machine:
    return probe(trees.build("dgx_a100", tmp_path))


def of_a100(machine: Machine, measured: Measurements | None = None, path: str = "/raid/model", gpu: int = 0) -> Limits:
    info = of_path(machine.tree, path)
    target = Target(
        torch.device("cuda", gpu), machine.gpus[gpu].pci, "NVIDIA A100", (1555 * GB, "2 x 1.2 GHz x 5120 bit")
    )
    found = stations(machine, info, target, measured or Measurements())
    return Limits(path, f"cuda:{gpu}", info, found)


def test_the_guides_equation(a100: Machine):
    # Eight drives of PCIe 4 x4 in a raid0, a GPU behind PCIe 4 x16: the GPU's link binds.
    found = of_a100(a100)
    assert [one.name for one in found.stations] == ["drives", "file system", "page cache", "PCIe link", "GPU memory"]
    drives, link = found.station("drives"), found.station("PCIe link")
    assert drives is not None
    assert link is not None
    assert drives.formula == "raid0: 8 x 7.20 GB/s of its PCIe link"
    assert (drives.limit or 0) / GB == pytest.approx(57.61, abs=0.01)
    assert (link.limit or 0) / GB == pytest.approx(28.81, abs=0.01)
    assert found.binding is link
    assert found.rates() == {}, "a plan asks for what was measured"


def test_what_was_measured_counts(a100: Machine):
    measured = {
        "file system": Measured(24 * GB, "reads"),
        "PCIe link": Measured(26.1 * GB, "copies"),
        "page cache": Measured(9 * GB, "reads of cached pages"),
        "GPU memory": Measured(1300 * GB, "copies"),
    }
    found = of_a100(a100, Measurements(measured))
    assert [one.name for one in found.ranking] == ["file system", "PCIe link", "drives", "GPU memory"]
    assert found.rates() == {
        "storage": rates.Rate(24 * GB, "measured: reads", "measured"),
        "link": rates.Rate(26.1 * GB, "measured: copies", "measured"),
    }
    assert rates.rates_for(found.rates()).from_storage == 24 * GB


def test_a_specification_below_what_went_through_it_does_not_count(a100: Machine):
    found = of_a100(a100, Measurements({"file system": Measured(60 * GB, "reads")}))
    drives = found.station("drives")
    assert drives is not None
    assert not drives.counts
    assert "exceeded" in drives.formula


def test_the_hop_between_nodes(a100: Machine):
    # The system's drives are on node 2, GPU 0 on node 3.
    measured = Measurements({"NUMA hop": Measured(20 * GB, "copies")})
    hop = of_a100(a100, measured, path="/var/model").station("NUMA hop")
    assert hop is not None
    assert (hop.which, hop.specified, hop.limit) == ("node 2 to 3", None, 20 * GB)
    assert of_a100(a100, measured).station("NUMA hop") is None, "the set is on many nodes"


def test_a_network_is_its_cards(a100: Machine):
    info = replace(of_path(a100.tree, "/raid"), filesystem="nfs4", is_network=True, disks=())
    found = stations(a100, info, Target(torch.device("cpu")), Measurements())
    assert [one.name for one in found] == ["network", "file system", "page cache"]
    up = [nic for nic in a100.nics if nic.up and nic.rdma]
    assert found[0].specified == pytest.approx(sum(nic_rate(nic) or 0 for nic in up))


# --- this machine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(random_bytes(9 * MIB))
    return path


def test_bare_reads_of_a_file(file: Path):
    need_direct(file)
    sample = SampleFiles(file)
    for direct in (True, False):
        found = ceilings.storage(sample, direct=direct, seconds=2)
        assert found.rate > 0
        assert 1 <= len(found.samples) <= 3
        assert ("O_DIRECT" in found.how) is direct
    assert ceilings.cached(sample).rate > 0


def test_cached_reads_of_a_small_file_on_many_cores(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    found = ceilings.cached(SampleFiles(file))
    assert found.rate > 0
    assert "best of 2 settings" in found.how, "more threads have less than a block each"


def test_no_time_is_one_setting(file: Path):
    found = ceilings.storage(SampleFiles(file), direct=False, seconds=0)
    assert "best of 1 settings" in found.how


def test_reads_are_bounded(file: Path, monkeypatch: pytest.MonkeyPatch):
    sample = SampleFiles(file)
    asked: list[int] = []
    window = sample.window
    monkeypatch.setattr(sample, "window", lambda nbytes: asked.append(nbytes) or window(nbytes))
    ceilings.storage(sample, direct=False, seconds=60)
    assert sum(asked) <= ceilings.storage_bytes(sample)
    assert len(asked) == 3 + sum(
        threads * block <= 9 * MIB for threads in ceilings.THREADS for block in ceilings.BLOCKS
    )


def test_the_limits_of_this_machine(file: Path):
    found = limits(file, "cpu", seconds=1)
    assert found.binding is not None
    assert found.binding.name in ("file system", "drives", "switches", "network")
    assert found.station("PCIe link") is None
    storage = found.station("file system")
    assert storage is not None
    assert storage.measured is not None
    assert set(found.rates()) == {"storage"}


def test_copies_count_their_bytes(monkeypatch: pytest.MonkeyPatch):
    # With the CPU in place of a GPU, and a clock on which each copy takes a second.
    clock = itertools.count()
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(ceilings, "_COPY_BYTES", MIB)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(ceilings, "node_cpus", lambda node: sorted(os.sched_getaffinity(0))[: node + 1])
    cpu, before = torch.device("cpu"), os.sched_getaffinity(0)
    assert ceilings.pinned_copy(cpu, cpus=sorted(before)[:1]).samples == (MIB,) * 3
    assert ceilings.device_copy(cpu).samples == (2 * MIB,) * 3
    hop = ceilings.node_copy(0, 1)
    assert hop is not None
    assert hop.samples == (MIB,) * 3
    assert os.sched_getaffinity(0) == before, "only threads that are gone were bound"
    monkeypatch.setattr(ceilings, "node_cpus", lambda node: [])
    assert ceilings.node_copy(0, 1) is None


@pytest.mark.gpu
def test_the_limits_of_a_gpu(file: Path):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    found = limits(file, "cuda", seconds=1)
    link, memory = found.station("PCIe link"), found.station("GPU memory")
    assert link is not None
    assert memory is not None
    assert link.measured is not None
    assert memory.measured is not None
    assert 0 < link.measured.rate < memory.measured.rate
    assert memory.specified is None or memory.measured.rate < memory.specified
    assert set(found.rates()) == {"storage", "link"}


def test_a_read_that_fails_says_where(file: Path):
    sample = SampleFiles(file)
    file.write_bytes(bytes(MIB))
    with pytest.raises(ReadError, match=f"{file}: .* bytes at offset .*; it changed meanwhile"):
        ceilings.storage(sample, direct=False, seconds=1)


def test_too_little_to_measure(tmp_path: Path):
    (tmp_path / "small").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="name a larger file"):
        limits(tmp_path / "small", "cpu")
    with pytest.raises(ConfigError, match="has 0 bytes to read"):
        limits(tmp_path, "cpu")
    with pytest.raises(ReadError, match="cannot be reached: No such file"):
        limits(tmp_path / "missing", "cpu")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        limits("/dev/null", "cpu")


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("a", 2 * MIB + 5), ("b", 3 * MIB), ("c", MIB - 1), (".d", 4 * MIB)):
        (tmp_path / name).write_bytes(random_bytes(size))
    return tmp_path


def test_windows_follow_each_other_and_go_round(folder: Path):
    sample = SampleFiles(folder)
    assert [(Path(path).name, size) for path, size in sample.files] == [("b", 3 * MIB), ("a", 2 * MIB)]

    def window(nbytes: int) -> list[tuple[str, int, int]]:
        return [(Path(one.path).name, one.offset // MIB, one.nbytes // MIB) for one in sample.window(nbytes)]

    assert window(2 * MIB) == [("b", 0, 2)]
    assert window(2 * MIB + 17) == [("b", 2, 1), ("a", 0, 1)]
    assert window(100 * MIB) == [("a", 1, 1), ("b", 0, 3), ("a", 0, 1)]


def test_pages_are_dropped(folder: Path):
    need_direct(folder / "b")
    (folder / "b").read_bytes()
    pieces = SampleFiles(folder / "b").window(MIB)
    assert drop_cached(pieces) == 0
    assert residency(folder / "b") == 0


def test_holes_are_told(folder: Path):
    with (folder / "hole").open("wb") as file:
        file.truncate(4 * MIB)
    assert SampleFiles(folder).sparse == [str(folder / "hole")]
