"""What a file sits on: against small /proc and /sys trees, and against this machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gdsstream import storage
from gdsstream.errors import ConfigError, ReadError
from gdsstream.storage import describe, residency


class Machine:
    """A made-up /proc and /sys around a real directory, whose device number they use."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.data.mkdir()
        self.file = self.data / "model.safetensors"
        self.file.write_bytes(bytes(8192))
        device = os.stat(self.file).st_dev
        self.number = f"{os.major(device)}:{os.minor(device)}"
        self.sys, self.proc = root / "sys", root / "proc"
        (self.sys / "dev/block").mkdir(parents=True)
        (self.sys / "class/block").mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        self._mounts = [f"1 0 {self.number} / / rw - ext4 /dev/root rw"]
        self._write_mounts()

    def mount(self, line: str) -> None:
        self._mounts.append(line)
        self._write_mounts()

    def _write_mounts(self) -> None:
        (self.proc / "self/mountinfo").write_text("\n".join(self._mounts) + "\n")

    def block(self, where: str, number: str = "", **files: object) -> Path:
        """A device directory under /sys/devices with its links; keys are file names, "__" for "/"."""
        path = self.sys / "devices" / where
        path.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            target = path / name.replace("__", "/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"{value}\n")
        self.link(self.sys / "class/block" / path.name, path)
        if number:
            self.link(self.sys / "dev/block" / number, path)
        return path

    def link(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def nvme(self, index: int, node: int | None, block_size: int = 512) -> Path:
        """One NVMe disk behind its controller and PCI function."""
        controller = self.sys / f"devices/pci0000:{index:02x}/0000:{index:02x}:00.0/nvme/nvme{index}"
        controller.mkdir(parents=True)
        self.link(controller / "device", controller.parent.parent)
        if node is not None:
            (controller.parent.parent / "numa_node").write_text(f"{node}\n")
        disk = self.block(
            f"{controller.relative_to(self.sys / 'devices')}/nvme{index}n1",
            queue__rotational=0,
            queue__logical_block_size=block_size,
        )
        self.link(disk / "device", controller)
        return disk

    def stack(self, upper: Path, *lower: Path) -> None:
        for one in lower:
            self.link(upper / "slaves" / one.name, one)

    def describe(self, path: Path | None = None) -> storage.StorageInfo:
        return describe(path or self.file, sysfs=str(self.sys), procfs=str(self.proc))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    # What statx says about the real file is not what the made-up device says.
    monkeypatch.setattr(storage, "_native", lambda: FakeNative)
    return Machine(tmp_path)


class FakeNative:
    answer = (0, 0)

    @classmethod
    def file_alignment(cls, path: str) -> tuple[int, int]:
        return cls.answer


def test_raid0_over_five_nvme_with_xfs(machine: Machine):
    disks = [machine.nvme(index, node=1, block_size=4096 if index == 3 else 512) for index in (0, 1, 2, 3, 10)]
    md = machine.block("virtual/block/md127", machine.number, md__level="raid0", queue__logical_block_size=512)
    machine.stack(md, *disks)
    machine.mount(f"30 1 {machine.number} / {machine.data} rw,noatime shared:1 - xfs /dev/md127 rw,attr2,sunit=1024")
    info = machine.describe()
    assert (info.filesystem, info.mount_point, info.source) == ("xfs", str(machine.data), "/dev/md127")
    assert info.mount_options == ("rw", "noatime", "attr2", "sunit=1024")
    assert (info.device, info.raid_level) == ("md127", "raid0")
    assert info.members == ("nvme0n1", "nvme1n1", "nvme2n1", "nvme3n1", "nvme10n1")
    assert info.disks == info.members
    assert info.numa_node == 1
    assert info.rotational is False
    assert (info.memory_alignment, info.offset_alignment) == (4096, 4096), "the largest block among the members"
    assert not info.is_memory
    assert not info.is_network


def test_lvm_over_raid_over_partitions(machine: Machine):
    partitions = []
    for index, node in ((0, 0), (1, 1)):
        disk = machine.nvme(index, node)
        partitions.append(
            machine.block(f"{disk.relative_to(machine.sys / 'devices')}/nvme{index}n1p2", partition=2, size=1)
        )
    md = machine.block("virtual/block/md0", md__level="raid1")
    machine.stack(md, *partitions)
    dm = machine.block("virtual/block/dm-3", machine.number, dm__name="vg-models", queue__logical_block_size=512)
    machine.stack(dm, md)
    machine.mount(f"30 1 {machine.number} / {machine.data} rw - ext4 /dev/mapper/vg-models rw")
    info = machine.describe()
    assert (info.device, info.raid_level) == ("dm-3", "raid1")
    assert info.members == ("nvme0n1p2", "nvme1n1p2")
    assert info.disks == ("nvme0n1", "nvme1n1")
    assert info.numa_node is None, "the disks hang on two nodes"
    assert info.offset_alignment == 512


def test_partition_of_a_raid(machine: Machine):
    md = machine.block("virtual/block/md0", md__level="raid5")
    machine.stack(md, machine.nvme(0, 0), machine.nvme(1, 0))
    machine.block("virtual/block/md0/md0p1", machine.number, partition=1)
    info = machine.describe()
    assert (info.device, info.raid_level, info.members) == ("md0p1", "raid5", ("nvme0n1", "nvme1n1"))


def test_plain_nvme_partition(machine: Machine):
    disk = machine.nvme(4, node=-1)
    machine.block(f"{disk.relative_to(machine.sys / 'devices')}/nvme4n1p1", machine.number, partition=1)
    info = machine.describe()
    assert (info.device, info.raid_level, info.members, info.disks) == ("nvme4n1p1", None, (), ("nvme4n1",))
    assert info.rotational is False
    assert info.numa_node is None, "-1 says that the machine has no nodes"
    assert (info.memory_alignment, info.offset_alignment) == (512, 512)


def test_nvme_multipath_finds_the_node_of_a_controller(machine: Machine):
    controller = machine.sys / "devices/pci0000:00/0000:00:01.0/nvme/nvme7"
    controller.mkdir(parents=True)
    (controller.parent.parent / "numa_node").write_text("3\n")
    subsystem = machine.sys / "devices/virtual/nvme-subsystem/nvme-subsys7"
    disk = machine.block("virtual/nvme-subsystem/nvme-subsys7/nvme7n1", machine.number, queue__rotational=0)
    machine.link(disk / "device", subsystem)
    machine.link(subsystem / "nvme7", controller)
    assert machine.describe().numa_node == 3


def test_spinning_disk(machine: Machine):
    machine.block("pci0/block/sda", machine.number, queue__rotational=1)
    assert machine.describe().rotational is True


def test_tmpfs_is_memory_and_proves_nothing_about_direct_io(machine: Machine):
    machine.block("virtual/block/loop0", machine.number)
    machine.mount(f"30 1 {machine.number} / {machine.data} rw - tmpfs tmpfs rw,size=1g")
    info = machine.describe()
    assert info.is_memory
    assert not info.is_network
    assert info.direct_io is False
    assert info.device is None
    assert info.memory_alignment == 4096


@pytest.mark.parametrize("filesystem", ["nfs4", "lustre", "virtiofs", "fuse.sshfs"])
def test_network_filesystems(machine: Machine, filesystem: str):
    machine.mount(f"30 1 {machine.number} / {machine.data} rw - {filesystem} server:/export/models rw,vers=4.2")
    info = machine.describe()
    assert info.is_network
    assert (info.source, info.device, info.disks) == ("server:/export/models", None, ())


def test_the_longest_mount_with_the_right_device_wins(machine: Machine):
    deep = machine.data / "a b"
    deep.mkdir()
    file = deep / "x"
    file.write_bytes(b"x")
    escaped = str(deep).replace(" ", "\\040")
    machine.mount(f"30 1 {machine.number} /sub {machine.data} rw - ext4 /dev/outer rw")
    machine.mount(f"31 1 {machine.number} /bound {escaped} ro - ext4 /dev/inner\\134x rw")
    machine.mount(f"32 1 0:999 / {escaped} rw - tmpfs hidden rw")
    machine.mount(f"33 1 {machine.number} / {machine.data}-other rw - ext4 /dev/neighbour rw")
    info = machine.describe(file)
    assert (info.mount_point, info.source) == (str(deep), "/dev/inner\\x")
    assert info.mount_options[:2] == ("ro", "rw")
    assert machine.describe().source == "/dev/outer"


def test_the_last_of_two_mounts_on_one_point_counts(machine: Machine):
    machine.mount(f"30 1 {machine.number} / {machine.data} rw - ext4 /dev/first rw")
    machine.mount(f"31 1 {machine.number} / {machine.data} rw - ext4 /dev/second rw")
    assert machine.describe().source == "/dev/second"


def test_an_anonymous_device_number_leads_through_the_source(machine: Machine):
    machine.nvme(2, node=0)
    (machine.proc / "self/mountinfo").write_text(f"30 1 0:77 / {machine.data} rw - btrfs /dev/nvme2n1 rw,subvol=/\n")
    info = machine.describe()
    assert (info.filesystem, info.device, info.numa_node) == ("btrfs", "nvme2n1", 0)


@pytest.mark.parametrize("visible", [True, False])
def test_overlayfs_leads_to_the_device_of_its_upper_layer(machine: Machine, visible: bool):
    # Another filesystem than the file's own, as an upper layer is; hidden ones belong to another mount namespace.
    upper = "/proc" if visible else "/nonexistent/upper"
    device = os.stat("/proc").st_dev
    machine.nvme(2, node=0)
    machine.link(
        machine.sys / "dev/block" / f"{os.major(device)}:{os.minor(device)}", machine.sys / "class/block/nvme2n1"
    )
    (machine.proc / "self/mountinfo").write_text(f"30 1 0:77 / / rw - overlay overlay rw,upperdir={upper}\n")
    info = machine.describe()
    assert (info.filesystem, info.source) == ("overlay", "overlay")
    assert info.device == ("nvme2n1" if visible else None)


def test_links_are_followed_to_the_file(machine: Machine):
    link = machine.data.parent / "link"
    link.symlink_to(machine.file)
    assert machine.describe(link).path == str(machine.file)


@pytest.mark.parametrize("damage", ["no trees", "garbage", "empty files", "loop"])
def test_half_broken_trees_raise_nothing(machine: Machine, damage: str):
    md = machine.block("virtual/block/md0", machine.number, md__level="", queue__rotational="x")
    if damage == "no trees":
        info = describe(machine.file, sysfs="/nonexistent", procfs="/nonexistent")
        assert (info.filesystem, info.mount_point, info.source) == ("unknown", None, None)
        assert info.device is None
    elif damage == "garbage":
        (machine.proc / "self/mountinfo").write_bytes(b"\xff\xfe\n1 2\n- -\n30 1 8:1 / / rw ext4\n" + b" " * 50)
        info = machine.describe()
        assert info.filesystem == "unknown"
    else:
        if damage == "loop":
            machine.stack(md, md)
        info = machine.describe()
        assert info.device == "md0"
    assert (info.raid_level, info.numa_node, info.rotational) == (None, None, None)
    assert info.memory_alignment == 4096


def test_statx_decides_about_alignment(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    machine.block("pci0/block/sda", machine.number, queue__logical_block_size=512)
    monkeypatch.setattr(FakeNative, "answer", (4, 1024))
    info = machine.describe()
    assert (info.memory_alignment, info.offset_alignment) == (4, 1024)
    assert machine.describe(machine.data).offset_alignment == 512, "a directory has none of its own"


def test_direct_io_is_tried(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    assert machine.describe(machine.data).direct_io is None

    def refuse(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    assert machine.describe().direct_io is False


def test_a_missing_path_says_so(tmp_path: Path):
    for ask in (describe, residency):
        with pytest.raises(ReadError, match="cannot be reached") as caught:
            ask(tmp_path / "none")
        assert caught.value.errno == errno.ENOENT
        assert str(tmp_path / "none") in str(caught.value)


def test_this_machine(tmp_path: Path):
    file = tmp_path / "x"
    file.write_bytes(b"x" * 10_000)
    info = describe(file)
    assert info.path == str(file.resolve())
    assert info.filesystem != "unknown"
    assert str(file).startswith(str(info.mount_point))
    assert info.memory_alignment & (info.memory_alignment - 1) == 0
    if os.path.isdir("/dev/shm"):
        assert describe("/dev/shm").is_memory


def test_residency_follows_reads_and_evictions(tmp_path: Path):
    pytest.importorskip("gdsstream._native", reason="the native module is not built")
    file = tmp_path / "x"
    file.write_bytes(os.urandom(1 << 20))
    assert residency(file) == 1.0
    assert residency(file, 4096, 10**9) == 1.0
    assert residency(file, 1 << 20) == 0.0
    assert residency(file, 0, 0) == 0.0
    if describe(file).is_memory:
        pytest.skip("pages of a filesystem in memory cannot be evicted")
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert residency(file) < 1.0


def test_residency_divides_by_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []

    class Native:
        @staticmethod
        def resident_bytes(path: str, offset: int, nbytes: int) -> int:
            asked.append((offset, nbytes))
            return 250

    monkeypatch.setattr(storage, "_native", lambda: Native)
    file = tmp_path / "x"
    file.write_bytes(bytes(1500))
    assert residency(file, 500) == 0.25
    assert residency(file, 1000, 10_000) == 0.5
    assert asked == [(500, 1000), (1000, 500)]
    for offset, nbytes in ((-1, None), (0, -1)):
        with pytest.raises(ConfigError, match="negative"):
            residency(file, offset, nbytes)
