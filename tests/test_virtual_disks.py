"""What sysfs and procfs tell of virtual disks with a single queue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gdsstream.virtual_disks import interrupt_cpu, single_queue_requests


@pytest.fixture(autouse=True)
def afresh() -> None:
    single_queue_requests.cache_clear()
    interrupt_cpu.cache_clear()


@pytest.mark.parametrize(
    ("disks", "expected"),
    [
        ({"vda": (1, "256\n")}, 256),
        ({"vda": (1, "256\n"), "vdb": (1, "128\n"), "loop0": None}, 128),
        ({"vda": (4, "256\n")}, 0),
        ({"vda": (1, "256\n"), "nvme0n1": (8, "1023\n")}, 0),
        ({"vda": (1, "")}, 0),
        ({"sda": (1, "256\n")}, 0),
        ({"loop0": None}, 0),
        ({}, 0),
    ],
)
def test_single_queue_disks_are_told_by_sysfs(
    tmp_path: Path, disks: dict[str, tuple[int, str] | None], expected: int
) -> None:
    assert single_queue_requests(str(tmp_path)) == 0  # no sysfs
    (tmp_path / "block").mkdir()
    for name, disk in disks.items():
        folder = tmp_path / "block" / name
        (folder / "queue").mkdir(parents=True)
        if disk is not None:
            (folder / "device").mkdir()
            (folder / "queue" / "nr_requests").write_text(disk[1])
            for number in range(disk[0]):
                (folder / "mq" / str(number)).mkdir(parents=True)
    single_queue_requests.cache_clear()
    assert single_queue_requests(str(tmp_path)) == expected


class Machine:
    """Trees of sysfs and procfs, with a virtio disk "vda", its partition "vda1", and a volume on that, "dm-0"."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder / "sys"
        self.proc = folder / "proc"
        self.pci = self.sys / "devices/pci0000:00/0000:00:02.0"
        self.disk = self.add_disk("vda", "virtio1")
        (self.disk / "vda1").mkdir()
        (self.disk / "vda1/partition").write_text("1\n")
        self.number("254:1", self.disk / "vda1")
        self.volume = self.sys / "devices/virtual/block/dm-0"
        (self.volume / "slaves").mkdir(parents=True)
        (self.volume / "slaves/vda1").symlink_to(self.disk / "vda1")
        self.number("253:0", self.volume)
        self.number("254:0", self.disk)
        self.add_interrupt(36, "virtio1-req.0", "3\n")
        self.add_interrupt(35, "virtio1-config", "0\n")
        self.add_interrupt(37, "virtio11-req.0", "0\n")

    def add_disk(self, name: str, device: str, queues: int = 1) -> Path:
        disk = self.pci / device / "block" / name
        for queue in range(queues):
            (disk / "mq" / str(queue)).mkdir(parents=True)
        (disk / "device").symlink_to(self.pci / device)
        return disk

    def number(self, number: str, block: Path) -> None:
        link = self.sys / "dev/block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(block)

    def add_interrupt(self, irq: int, action: str, cpus: str) -> None:
        folder = self.proc / "irq" / str(irq)
        (folder / action).mkdir(parents=True)
        (folder / "effective_affinity_list").write_text(cpus)

    def ask(self, major: int, minor: int) -> int:
        interrupt_cpu.cache_clear()
        return interrupt_cpu(os.makedev(major, minor), sysfs=str(self.sys), procfs=str(self.proc))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    return Machine(tmp_path)


@pytest.mark.parametrize("number", [(254, 0), (254, 1), (253, 0)])
def test_the_cpu_of_a_disk_a_partition_and_a_volume(machine: Machine, number: tuple[int, int]) -> None:
    assert machine.ask(*number) == 3


def test_one_interrupt_for_all_queues_or_all_of_the_device(machine: Machine) -> None:
    one = machine.add_disk("vdb", "virtio2")
    two = machine.add_disk("vdc", "virtio3")
    machine.number("254:16", one)
    machine.number("254:32", two)
    machine.add_interrupt(40, "virtio2-virtqueues", "1\n")
    machine.add_interrupt(41, "virtio3", "2\n")
    assert (machine.ask(254, 16), machine.ask(254, 32)) == (1, 2)


def test_a_device_that_sysfs_does_not_know(machine: Machine) -> None:
    assert machine.ask(0, 40) == -1


def test_a_volume_on_two_disks_has_no_one_cpu(machine: Machine) -> None:
    other = machine.add_disk("vdb", "virtio2")
    machine.add_interrupt(40, "virtio2-req.0", "3\n")
    (machine.volume / "slaves/vdb").symlink_to(other)
    assert machine.ask(253, 0) == -1
    assert machine.ask(254, 0) == 3


def test_several_queues_have_an_interrupt_each(machine: Machine) -> None:
    (machine.disk / "mq/1").mkdir()
    assert machine.ask(254, 0) == -1


def test_a_disk_that_is_not_virtio(machine: Machine) -> None:
    machine.number("8:0", machine.add_disk("sda", "0:0:0:0"))
    machine.add_interrupt(40, "0:0:0:0-req.0", "3\n")
    assert machine.ask(8, 0) == -1


@pytest.mark.parametrize("cpus", ["0-3\n", "\n", "what\n", "7\n"])
def test_an_interrupt_of_no_single_cpu_or_of_one_that_we_may_not_use(machine: Machine, cpus: str) -> None:
    (machine.proc / "irq/36/effective_affinity_list").write_text(cpus)
    assert machine.ask(254, 0) == -1


def test_trees_that_are_cut_down(machine: Machine) -> None:
    (machine.proc / "irq/36/effective_affinity_list").unlink()
    assert machine.ask(254, 0) == -1
    (machine.disk / "device").unlink()
    assert machine.ask(254, 0) == -1
    (machine.disk / "mq/0").rmdir()
    (machine.disk / "mq").rmdir()
    assert machine.ask(254, 0) == -1


def test_this_machine_tells_a_cpu_that_is_there(tmp_path: Path) -> None:
    cpu = interrupt_cpu(tmp_path.stat().st_dev)
    assert cpu == -1 or cpu in os.sched_getaffinity(0)
