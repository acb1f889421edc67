"""Paths between PCI devices, against what nvidia-smi printed; links; odd trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import trees

from gdsstream.machine import Machine, Tree, pci, probe

# `nvidia-smi topo -mp` of a DGX-2, as the guide prints it: its first eight GPUs and four cards.
GUIDE = """
        GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7
GPU0    X    PIX  PXB  PXB  NODE NODE NODE NODE
GPU1    PIX  X    PXB  PXB  NODE NODE NODE NODE
GPU2    PXB  PXB  X    PIX  NODE NODE NODE NODE
GPU3    PXB  PXB  PIX  X    NODE NODE NODE NODE
GPU4    NODE NODE NODE NODE X    PIX  PXB  PXB
GPU5    NODE NODE NODE NODE PIX  X    PXB  PXB
GPU6    NODE NODE NODE NODE PXB  PXB  X    PIX
GPU7    NODE NODE NODE NODE PXB  PXB  PIX  X
GPU8    SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS
GPU15   SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS
mlx5_0  PIX  PIX  PXB  PXB  NODE NODE NODE NODE
mlx5_1  PXB  PXB  PIX  PIX  NODE NODE NODE NODE
mlx5_2  NODE NODE NODE NODE PIX  PIX  PXB  PXB
mlx5_3  NODE NODE NODE NODE PXB  PXB  PIX  PIX
"""


@pytest.fixture(scope="module")
def dgx2(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return probe(trees.build("dgx2", tmp_path_factory.mktemp("dgx2")))


def test_classes_are_those_of_nvidia_smi(dgx2: Machine):
    ends = {f"GPU{gpu.index}": gpu.pci for gpu in dgx2.gpus} | {nic.name: nic.pci for nic in dgx2.nics}
    header, *rows = (line.split() for line in GUIDE.strip().splitlines())
    for name, *classes in rows:
        assert [pci.path_class(ends[name], ends[column], nodes=2) for column in header] == classes, name
        assert [pci.path_class(ends[column], ends[name], nodes=2) for column in header] == classes, "and back"


def test_gpus_have_the_indices_of_nvidia_smi(dgx2: Machine):
    buses = [int(gpu.pci.address.split(":")[1], 16) for gpu in dgx2.gpus]
    assert buses == [0x34, 0x36, 0x39, 0x3B, 0x57, 0x59, 0x5C, 0x5E, 0xB7, 0xB9, 0xBC, 0xBE, 0xE0, 0xE2, 0xE5, 0xE7]
    assert {gpu.name for gpu in dgx2.gpus} == {"Tesla V100-SXM3-32GB"}, "NVSwitches are not GPUs"


def test_the_bridges_on_the_way(dgx2: Machine):
    drive, gpu = dgx2.pci["0000:2e:00.0"], dgx2.pci["0000:34:00.0"]
    way = ("0000:2d:00.0", "0000:2c:00.0", "0000:2d:04.0", "0000:32:00.0", "0000:33:00.0")
    assert pci.bridges_between(drive, gpu) == way
    assert pci.bridges_between(gpu, drive) == way[::-1]
    other = dgx2.pci["0000:57:00.0"]
    between = pci.bridges_between(drive, other)
    assert between[:3] == ("0000:2d:00.0", "0000:2c:00.0", "0000:2b:00.0"), "up to the root port"
    assert between[3] == "0000:4e:00.0"


def scan(tmp_path: Path, text: str) -> dict[str, pci.PciDevice]:
    return pci.scan(Tree(trees.Builder(tmp_path).build(text)))


def test_one_host_bridge_without_switches_is_phb(tmp_path: Path):
    devices = scan(
        tmp_path,
        """
pci0000:00 node=-1
  00:01.0 port 32x16
    01:00.0 gpu 10de:2335 32x16
  00:02.0 port 32x4
    02:00.0 nvme nvme0 32x4 4T a
pci0001:00 node=-1
  00:02.0 port 32x4
    02:00.0 nvme nvme1 32x4 4T b
""",
    )
    gpu, near, far = (devices[one] for one in ("0000:01:00.0", "0000:02:00.0", "0001:02:00.0"))
    assert pci.path_class(gpu, near) == "PHB"
    assert pci.path_class(gpu, far) == "NODE", "one node alone"
    assert pci.path_class(gpu, far, nodes=2) == "SYS", "no node is named, so that nothing says they are near"
    assert pci.path_class(gpu, gpu) == "X"


def test_functions_of_one_card_and_drives_behind_a_volume_manager(tmp_path: Path):
    devices = scan(
        tmp_path,
        """
pci0000:00 node=0
  00:01.0 port 16x16
    01:00.0 nic mlx5_0 ib0 16x16 100
    01:00.1 nic mlx5_1 ib1 16x16 100
""",
    )
    assert pci.path_class(devices["0000:01:00.0"], devices["0000:01:00.1"]) == "PIX"
    # Intel's VMD puts a host bridge of its own below a device: what shares only that goes through it.
    base = "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0"
    one, other = (
        pci.chain(f"{base}/10000:e0:{port}/10000:{bus}:00.0") for port, bus in (("06.0", "e1"), ("07.0", "e2"))
    )
    assert one == ("pci0000:00", "0000:00:0e.0", "pci10000:e0", "10000:e0:06.0", "10000:e1:00.0")
    a, b = (pci.PciDevice(way[-1], 0x010802, 0, 0, 0, None, way[:-1]) for way in (one, other))
    assert pci.path_class(a, b) == "PHB"


def test_links(tmp_path: Path):
    devices = scan(
        tmp_path,
        """
pci0000:00 node=0
  00:01.0 port 16x4
    01:00.0 nvme nvme0 16x4/32x4 4T in-an-old-slot
  00:02.0 port 32x4
    02:00.0 nvme nvme1 32x2/32x4 4T lost-lanes
  00:03.0 port 32x16
    03:00.0 gpu 10de:2335 2.5x16/32x16
  00:04.0 port 64x4
    04:00.0 nvme nvme2 64x4 4T flits
""",
    )
    old, lost, gpu, new = (devices[f"0000:0{number}:00.0"].link for number in range(1, 5))
    assert old is not None
    assert (old.max_speed, old.slow, old.narrow) == (16, False, False), "the port's best counts too"
    assert old.text() == "16 GT/s x4"
    assert lost is not None
    assert (lost.slow, lost.narrow) == (False, True)
    assert gpu is not None
    assert (gpu.slow, gpu.narrow) == (True, False)
    assert gpu.max_bytes_per_s == pytest.approx(63.015e9, rel=1e-4)
    assert gpu.bytes_per_s == pytest.approx(4e9), "8b/10b at the old speeds"
    assert new is not None
    assert new.bytes_per_s == pytest.approx(64e9 * 242 / 256 / 8 * 4)


@pytest.mark.parametrize("speed", ["Unknown", "", "0.0 GT/s PCIe"])
def test_a_link_without_a_speed(tmp_path: Path, speed: str):
    builder = trees.Builder(tmp_path)
    builder.build("pci0000:00 node=0\n  00:01.0 gpu 10de:2335 16x16")
    where = "/sys/devices/pci0000:00/0000:00:01.0"
    builder.file(f"{where}/current_link_speed", speed)
    builder.file(f"{where}/current_link_width", 255)
    link = pci.scan(Tree(tmp_path))["0000:00:01.0"].link
    assert link is not None
    assert (link.speed, link.width, link.bytes_per_s) == (None, None, None)
    assert (link.narrow, link.slow) == (False, False)
    assert link.text() == "? GT/s x?"


def test_half_a_device_is_still_listed(tmp_path: Path):
    builder = trees.Builder(tmp_path)
    builder.build("pci0000:00 node=0\n  00:01.0 gpu 10de:2335 16x16\n  00:02.0 gpu 10de:2335 16x16")
    where = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    for file in where.iterdir():
        file.unlink()
    (where / "class").mkdir()
    tree = Tree(tmp_path)
    devices = pci.scan(tree)
    assert list(devices) == ["0000:00:01.0", "0000:00:02.0"]
    assert devices["0000:00:01.0"].kind == 0
    assert tree.failures == [("/sys/devices/pci0000:00/0000:00:01.0/class", "Is a directory")]


def test_a_link_to_nowhere_is_left_out(tmp_path: Path):
    builder = trees.Builder(tmp_path)
    builder.link("/sys/bus/pci/devices/0000:09:00.0", "/sys/devices/pci0000:00/0000:09:00.0")
    assert pci.scan(Tree(tmp_path)) == {}
