"""Drives, sets, cards, nodes and GPUs of recorded machines, and of trees with pieces missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import trees

from gdsstream.machine import Machine, gpus, numa, probe
from gdsstream.machine.mounts import of_path
from gdsstream.machine.names import natural, runs


def build(tmp_path: Path, name: str, more: str = "") -> Machine:
    return probe(trees.build(name, tmp_path / name, more))


def test_a_dgx_a100(tmp_path: Path):
    machine = build(tmp_path, "dgx_a100")
    assert [gpu.pci.address for gpu in machine.gpus] == [
        f"0000:{bus}:00.0" for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
    ]
    assert [drive.name for drive in machine.drives] == [f"nvme{index}n1" for index in range(10)]
    assert [drive.pci.address[5:7] for drive in machine.drives if drive.pci] == (
        ["08", "09", "22", "23", "52", "53", "89", "8a", "c8", "c9"]
    )
    first = machine.drives[0]
    assert (first.model, first.nbytes, first.transport, first.numa_node) == (
        "SAMSUNG MZWLJ3T8HBLS-00007",
        3_840_000_000_000,
        "pcie",
        3,
    )
    system, data = machine.stacks
    assert (system.name, system.kind, system.members, system.disks) == (
        "md0",
        "raid1",
        ("nvme2n1p2", "nvme3n1p2"),
        ("nvme2n1", "nvme3n1"),
    )
    assert (data.name, data.kind, data.raid, data.degraded, data.chunk_bytes) == ("md1", "raid0", True, 0, 524288)
    assert machine.mounted_at(data) == ("/raid",)
    card = machine.nics[0]
    assert (card.name, card.rdma, card.interfaces, card.gbit_per_s) == ("mlx5_0", True, ("ib0",), 200)
    assert len(machine.nodes) == 8
    assert numa.distance(machine.nodes, 3, 1) == 12
    assert numa.distance(machine.nodes, 3, 7) == 32
    assert machine.tree.failures == []
    assert not machine.virtual


def test_a_virtual_machine(tmp_path: Path):
    machine = build(tmp_path, "cloud_h200")
    assert machine.virtual
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.line, gpu.p2pdma, gpu.bar1_bytes) == ("NVIDIA H200", gpus.GpuClass.DATA_CENTER, True, 2**36)
    (disk,) = machine.drives
    assert (disk.name, disk.transport, disk.nvme) == ("vda", "virtio", False)
    assert disk.pci is machine.pci["0000:00:02.0"]
    (nic,) = machine.nics
    assert (nic.rdma, nic.up, nic.gbit_per_s) == (False, False, None)


def test_a_path_is_found_by_its_name_alone(tmp_path: Path):
    machine = build(tmp_path, "workstation")
    info = of_path(machine.tree, "/home/tim/models/x.safetensors")
    assert (info.filesystem, info.mount_point, info.device, info.raid_level) == ("xfs", "/home/tim", "md0", "raid0")
    assert info.disks == ("nvme0n1", "nvme2n1", "nvme3n1", "nvme4n1", "nvme5n1")
    assert info.direct_io is None
    assert of_path(machine.tree, "/var/x").disks == ("nvme1n1",), "the partition's drive"


def test_a_path_without_any_mount(tmp_path: Path):
    trees.Builder(tmp_path)
    info = of_path(probe(tmp_path).tree, "/data")
    assert (info.filesystem, info.device, info.disks) == ("unknown", None, ())


def test_multipath_namespaces_hang_on_their_controller(tmp_path: Path):
    builder = trees.Builder(tmp_path)
    builder.build("pci0000:00 node=1\n  00:01.0 nvme nvme0 16x4 4T direct")
    controller = "/sys/devices/pci0000:00/0000:00:01.0/nvme/nvme0"
    subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    builder.link(f"{subsystem}/nvme0", controller)
    builder._block(f"{subsystem}/nvme0n2", "nvme", 259, "4T")
    builder.link(f"{subsystem}/nvme0n2/device", subsystem)
    builder._block(f"{controller}/nvme0c0n2", "nvme", 259, "4T")
    builder.link(f"{controller}/nvme0c0n2/device", controller)
    drives = {drive.name: drive for drive in probe(tmp_path).drives}
    assert set(drives) == {"nvme0n1", "nvme0n2"}, "the hidden path is no drive"
    assert drives["nvme0n2"].pci is not None
    assert (drives["nvme0n2"].pci.address, drives["nvme0n2"].numa_node) == ("0000:00:01.0", 1)


def test_drives_on_a_fabric_have_no_place(tmp_path: Path):
    builder = trees.Builder(tmp_path)
    controller = "/sys/devices/virtual/nvme-fabrics/ctl/nvme7"
    builder.file(f"{controller}/transport", "rdma")
    builder.file(f"{controller}/model", "Linux")
    builder._block(f"{controller}/nvme7n1", "nvme", 259, "4T")
    builder.link(f"{controller}/nvme7n1/device", controller)
    (drive,) = probe(tmp_path).drives
    assert (drive.transport, drive.pci, drive.numa_node) == ("rdma", None, None)


def test_stacks_on_stacks(tmp_path: Path):
    machine = build(tmp_path, "workstation", "dm dm-0 LVM md0\nmd md1 raid1 nvme0n1 nvme2n1 degraded=1")
    stacks = {stack.name: stack for stack in machine.stacks}
    assert (stacks["dm-0"].kind, stacks["dm-0"].raid, stacks["dm-0"].members) == ("LVM", False, ("md0",))
    assert stacks["dm-0"].disks == stacks["md0"].disks
    assert stacks["md1"].degraded == 1


def test_an_empty_root(tmp_path: Path):
    machine = probe(tmp_path)
    assert machine.gpus == machine.drives == machine.stacks == machine.nics == machine.nodes == []
    assert machine.tree.failures == []


def test_half_broken_trees_lose_what_is_broken_only(tmp_path: Path):
    root = trees.build("workstation", tmp_path)
    drive = (root / "sys/class/block/nvme3n1").resolve()
    (drive / "size").write_text("many\n")
    (drive / "dev").unlink()
    (root / "sys/class/block/md0").resolve().joinpath("md/level").unlink()
    (root / "sys/devices/system/node/node0/cpulist").write_text("0-x\n")
    (root / "sys/devices/system/node/node0/distance").write_text("near far\n")
    (root / "proc/driver/nvidia/gpus/0000:f1:00.0/information").write_text("???\n")
    (root / "sys/class/net/enp66s0/speed").unlink()
    (root / "sys/bus/pci/devices/0000:f1:00.0/resource").write_text("nonsense\n")
    (root / "proc/self/mountinfo").write_text("garbage\n\n24 1\n")
    machine = probe(root)
    lost = machine.drive("nvme3n1")
    assert lost is not None
    assert (lost.nbytes, lost.number) == (None, "")
    assert lost.pci is not None
    assert machine.stacks[0].kind == "unknown"
    assert (machine.nodes[0].num_cpus, machine.nodes[0].distances) == (0, {})
    assert (machine.gpus[0].name, machine.gpus[0].uuid, machine.gpus[0].bar1_bytes) == ("PCI 10de:2bb1", None, None)
    assert machine.nics[0].gbit_per_s is None
    assert machine.mounted_at(machine.stacks[0]) == ()
    assert machine.tree.failures == [("/sys/class/block/nvme3n1/size", "'many' is no number")]


def test_files_that_may_not_be_read_are_named():
    with trees.open_folder() as root:
        trees.build("cloud_h200", root)
        (root / "sys/bus/pci/devices/0000:00:04.0/numa_node").chmod(0)
        (root / "proc/driver/nvidia/gpus/0000:00:04.0/information").chmod(0)
        with trees.without_rights():
            machine = probe(root)
    assert [gpu.name for gpu in machine.gpus] == ["PCI 10de:2335"], "the rest still runs"
    assert machine.tree.failures == [
        ("/sys/devices/pci0000:00/0000:00:04.0/numa_node", "Permission denied"),
        ("/proc/driver/nvidia/gpus/0000:00:04.0/information", "Permission denied"),
    ]


@pytest.mark.parametrize(
    ("name", "line", "p2pdma"),
    [
        ("NVIDIA H200", "data centre", True),
        ("NVIDIA H100 80GB HBM3", "data centre", True),
        ("NVIDIA A100-SXM4-80GB", "data centre", True),
        ("A100-SXM4-40GB", "data centre", True),
        ("NVIDIA L40S", "data centre", True),
        ("NVIDIA GH200 480GB", "data centre", True),
        ("NVIDIA B200", "data centre", True),
        ("Tesla V100-SXM3-32GB", "data centre", False),
        ("Tesla T4", "data centre", False),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "workstation", None),
        ("NVIDIA RTX A6000", "workstation", None),
        ("NVIDIA RTX 6000 Ada Generation", "workstation", None),
        ("Quadro RTX 8000", "workstation", None),
        ("NVIDIA GeForce RTX 4090", "GeForce", False),
        ("NVIDIA TITAN RTX", "GeForce", False),
        ("PCI 10de:2335", "unknown", None),
    ],
)
def test_product_lines(name: str, line: str, p2pdma: bool | None):
    assert gpus.gpu_class(name) == line
    assert gpus.Gpu(0, name, None, None, None).p2pdma is p2pdma  # type: ignore[arg-type]


def test_names_in_runs():
    assert runs(["nvme0n1", "nvme1n1", "nvme4n1p2", "nvme5n1p2"]) == "nvme[0-1]n1 nvme[4-5]n1p2"
    assert runs(["0", "1", "2", "5"]) == "0-2 5"
    assert runs(["mlx5_0", "mlx5_1", "eth0", "md"]) == "mlx5_[0-1] eth0 md"
    assert runs([]) == "-"
    assert sorted(["mlx5_10", "mlx5_9", "eth0"], key=natural) == ["eth0", "mlx5_9", "mlx5_10"]
