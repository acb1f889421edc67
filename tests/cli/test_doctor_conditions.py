"""Each condition by itself: a machine that is ready, one thing changed, and the one line that has to notice."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trees
from conditions import READY, SMALL

from gdsstream.doctor import Diagnosis, cufile, examine, routes, system
from gdsstream.doctor.context import Context
from gdsstream.doctor.cufile_json import CuFileConfig, load, parse
from gdsstream.doctor.software import Software, ask
from gdsstream.findings import Finding, Status
from gdsstream.machine import Tree, probe

OK, WARNING, PROBLEM, INFO = Status.OK, Status.WARNING, Status.PROBLEM, Status.INFO


class Ready:
    """The machine that is ready, to be spoilt."""

    def __init__(self, root: Path) -> None:
        self.builder = trees.Builder(root)
        self.root = self.builder.build(SMALL + READY)

    def write(self, path: str, text: str) -> None:
        self.builder.file(path, text)

    def remove(self, path: str) -> None:
        (self.root / path.lstrip("/")).unlink()

    def mount(self, point: str, line: str) -> None:
        """Another line of mountinfo; `line` begins with the device number."""
        with (self.root / "proc/self/mountinfo").open("a") as file:
            number, _, rest = line.partition(" ")
            file.write(f"99 1 {number} / {point} rw - {rest}\n")

    def examine(self, path: str | None = "/raid/model", **options: Any) -> Diagnosis:
        return examine(path, root=self.root, **options)

    def line(self, topic: str, path: str | None = "/raid/model", **options: Any) -> Finding:
        (found,) = [one for one in self.examine(path, **options).findings if one.topic == topic]
        return found


@pytest.fixture
def ready(tmp_path: Path) -> Ready:
    return Ready(tmp_path / "machine")


def test_nothing_is_in_the_way_to_begin_with(ready: Ready):
    found = ready.examine()
    assert [one for one in found.findings if one.status is PROBLEM] == []
    assert found.open_ways == ("nvidia-fs",)


# --- file systems, devices, sets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mount", "status", "said"),
    [
        ("9:0 xfs /dev/md1 rw,attr2", OK, "xfs on /mnt"),
        ("9:0 ext4 /dev/md1 rw,data=ordered", OK, "data=ordered"),
        ("9:0 ext4 /dev/md1 rw,data=writeback", PROBLEM, "data=writeback: cuFile needs ordered mode"),
        ("9:0 ext4 /dev/md1 rw,data=journal", PROBLEM, "data=journal"),
        ("9:0 ext4 /dev/md1 rw", WARNING, "the mount table does not say data=ordered"),
        ("0:77 btrfs /dev/md1 rw", PROBLEM, "cuFile does not read it directly"),
        ("0:77 zfs tank rw", PROBLEM, "cuFile does not read it directly"),
        ("0:77 tmpfs tmpfs rw", PROBLEM, "in memory"),
        ("0:77 overlay overlay rw,lowerdir=/a", PROBLEM, "a container's own layers"),
        ("0:77 nfs4 host:/export rw,proto=tcp", PROBLEM, "not over RDMA"),
        ("0:77 nfs host:/export rw,proto=rdma", OK, "over RDMA"),
        ("0:77 lustre mgs@o2ib:/scratch rw", WARNING, "lustre"),
        ("0:77 fuse.sshfs host: rw", PROBLEM, "cuFile does not read it directly"),
    ],
)
def test_file_systems(ready: Ready, mount: str, status: Status, said: str):
    ready.mount("/mnt", mount)
    found = ready.line("file system", "/mnt/x")
    assert found.status is status
    assert said in found.found
    assert bool(found.remedy) is (status is not OK)


def test_ext4s_own_page_tells_the_mode_that_the_mount_table_hides(ready: Ready):
    ready.mount("/mnt", "9:0 ext4 /dev/md1 rw")
    ready.write("/proc/fs/ext4/md1/options", "rw\ndelalloc\ndata=ordered\nbarrier")
    found = ready.line("file system", "/mnt/x")
    assert (found.status, "in effect, by default" in found.found) == (WARNING, True)
    ready.write("/proc/fs/ext4/md1/options", "rw\ndata=writeback")
    assert ready.line("file system", "/mnt/x").status is PROBLEM


def test_devices(ready: Ready):
    assert ready.line("device").found.startswith("md1 over nvme[0-3]n1: NVMe on PCIe")
    ready.write("/sys/class/nvme/nvme0/transport", "tcp")
    assert ready.line("device").status is WARNING
    ready.builder.build("pci0002:00 node=0\n  00:01.0 virtio vda 1T")
    ready.mount("/disk", f"{ready.builder.numbers['vda']} xfs /dev/vda rw")
    found = ready.line("device", "/disk/x")
    assert (found.status, "virtio; cuFile reads directly from NVMe only" in found.found) == (PROBLEM, True)


@pytest.mark.parametrize(("kind", "status"), [("LVM", WARNING), ("CRYPT", PROBLEM)])
def test_mapped_volumes(ready: Ready, kind: str, status: Status):
    ready.builder.build(f"dm dm-7 {kind} nvme4n1")
    ready.mount("/mnt", f"{ready.builder.numbers['dm-7']} xfs /dev/dm-7 rw")
    found = ready.line("mapped volume", "/mnt/x")
    assert found.status is status
    assert kind in found.found


@pytest.mark.parametrize(
    ("level", "status"), [("raid0", OK), ("raid1", WARNING), ("raid5", PROBLEM), ("raid10", PROBLEM)]
)
def test_raid_levels(ready: Ready, level: str, status: Status):
    ready.write("/sys/class/block/md1/md/level", level)
    assert ready.line("RAID").status is status


def test_sets_that_lack_members_or_are_torn_apart(ready: Ready):
    ready.write("/sys/class/block/md1/md/degraded", "2")
    assert ready.line("RAID state").found == "md1 misses 2 member(s)"
    assert ready.line("RAID spread").found.endswith("nvme[0-1]n1 | nvme[2-3]n1")


def test_udev_has_to_know_the_level(ready: Ready):
    assert not [one for one in ready.examine().findings if one.topic == "udev and RAID"]
    ready.write("/run/udev/data/b9:0", "E:ID_FS_TYPE=ext4")
    assert ready.line("udev and RAID").status is WARNING


def test_the_way_to_a_gpu(ready: Ready):
    assert ready.line("way to a GPU").status is OK
    ready.mount("/system", f"{ready.builder.numbers['nvme4n1']} xfs /dev/nvme4n1 rw")
    found = ready.line("way to a GPU", "/system/x")
    assert (found.status, found.found) == (WARNING, "SYS: nvme4n1 -> GPU[0-1], between NUMA nodes")


# --- routes ---------------------------------------------------------------------------------------------------------

P2PDMA = r"""
file /proc/sys/kernel/osrelease 6.8.0-45-generic
file /boot/config-6.8.0-45-generic CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y
file /proc/driver/nvidia/version NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build
file /proc/driver/nvidia/params RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"
file /sys/module/nvme_core/parameters/multipath N
file /etc/cufile.json { "properties": {"use_pci_p2pdma": true} }
"""


@pytest.fixture
def modern(tmp_path: Path) -> Ready:
    """A machine without nvidia-fs, on which P2PDMA is all set up for /data."""
    machine = Ready(tmp_path / "modern")
    machine.builder.build(P2PDMA)
    machine.mount("/data", f"{machine.builder.numbers['nvme4n1']} xfs /dev/nvme4n1 rw")
    for name in ("version", "modules"):
        machine.remove(f"/proc/driver/nvidia-fs/{name}")
    (machine.root / "proc/driver/nvidia-fs").rmdir()
    return machine


def test_p2pdma_alone_is_enough(modern: Ready):
    found = modern.examine("/data/x")
    assert found.open_ways == ("P2PDMA",)
    assert found.count(PROBLEM) == 0
    missing = modern.line("nvidia-fs", "/data/x")
    assert (missing.status, missing.found) == (
        INFO,
        "the kernel module is not loaded; not needed while P2PDMA is open",
    )


@pytest.mark.parametrize(
    ("topic", "path", "text"),
    [
        ("P2PDMA kernel", "/boot/config-6.8.0-45-generic", "# CONFIG_PCI_P2PDMA is not set"),
        ("P2PDMA kernel", "/proc/sys/kernel/osrelease", "5.15.0-91-generic"),
        (
            "P2PDMA driver",
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  x",
        ),
        (
            "P2PDMA driver",
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  x",
        ),
        ("P2PDMA parameters", "/proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1"'),
        ("P2PDMA multipath", "/sys/module/nvme_core/parameters/multipath", "Y"),
        ("P2PDMA in cuFile", "/etc/cufile.json", "{}"),
    ],
)
def test_each_condition_of_p2pdma(modern: Ready, topic: str, path: str, text: str):
    modern.write(path, text)
    found = modern.line(topic, "/data/x")
    assert found.status is PROBLEM
    assert found.remedy
    assert modern.line("nvidia-fs", "/data/x").status is PROBLEM, "now that both ways are blocked"
    assert modern.examine("/data/x").open_ways == ()


def test_p2pdma_cannot_read_a_set(modern: Ready):
    assert modern.line("P2PDMA and RAID").status is PROBLEM
    assert not [one for one in modern.examine("/data/x").findings if one.topic == "P2PDMA and RAID"]


def test_p2pdma_cannot_read_a_network(modern: Ready):
    modern.mount("/net", "0:77 nfs4 host:/export rw,proto=rdma")
    assert modern.line("P2PDMA and network", "/net/x").status is PROBLEM
    assert modern.line("nvidia-fs", "/net/x").status is PROBLEM
    assert not [one for one in modern.examine("/net/x").findings if one.topic == "device"]


def test_other_platforms_need_no_driver_parameters(modern: Ready):
    modern.write("/proc/sys/kernel/arch", "aarch64")
    topics = [one.topic for one in modern.examine("/data/x").findings]
    assert "P2PDMA parameters" not in topics
    assert "P2PDMA multipath" not in topics
    assert "P2PDMA driver" in topics


def test_the_kernel_tells_by_its_symbols_or_its_packed_configuration(modern: Ready):
    import gzip

    modern.remove("/boot/config-6.8.0-45-generic")
    assert modern.line("P2PDMA kernel", "/data/x").status is WARNING
    modern.write("/proc/kallsyms", "0000000000000000 d p2pdma_pgmap_ops")
    assert modern.line("P2PDMA kernel", "/data/x").status is OK
    (modern.root / "proc/config.gz").write_bytes(gzip.compress(b"CONFIG_PCI_P2PDMA=n\n"))
    assert modern.line("P2PDMA kernel", "/data/x").status is PROBLEM
    (modern.root / "proc/config.gz").write_bytes(b"no gzip")
    assert modern.line("P2PDMA kernel", "/data/x").status is OK, "then the symbols decide"


def test_nvidia_fs_without_its_device_or_the_nvme_driver(ready: Ready):
    ready.remove("/dev/nvidia-fs0")
    assert ready.line("nvidia-fs device").status is PROBLEM
    ready.write("/dev/nvidia-fs0", "")
    ready.write("/proc/driver/nvidia-fs/modules", "wekafsio: 1")
    assert ready.line("nvidia-fs drivers").status is PROBLEM
    ready.remove("/proc/driver/nvidia-fs/modules")
    assert ready.line("nvidia-fs drivers").status is WARNING


# --- the machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status"),
    [("NVIDIA GeForce RTX 4090", PROBLEM), ("NVIDIA Something New", WARNING), ("NVIDIA H100 80GB HBM3", OK)],
)
def test_gpu_classes(tmp_path: Path, name: str, status: Status):
    builder = trees.Builder(tmp_path)
    builder.build(f"pci0000:00 node=0\n  00:01.0 gpu 10de:1234 16x16 {name}")
    (found,) = [one for one in examine(root=tmp_path).findings if one.topic == "GPU"]
    assert found.status is status
    if status is OK:
        builder.file("/sys/devices/pci0000:00/0000:00:01.0/resource", "0 0 0\n0x10000000 0x1fffffff 0x14220c")
        (found,) = [one for one in examine(root=tmp_path).findings if one.topic == "GPU"]
        assert (found.status, "BAR1 256 MiB" in found.found) == (WARNING, True)


def test_no_driver(ready: Ready):
    ready.remove("/proc/driver/nvidia/version")
    assert ready.line("NVIDIA driver").status is PROBLEM


@pytest.mark.parametrize(("kind", "status"), [("DMA", WARNING), ("DMA-FQ", WARNING), ("identity", OK)])
def test_iommu(ready: Ready, kind: str, status: Status):
    ready.write("/sys/kernel/iommu_groups/7/type", kind)
    for address in ("0000:03:00.0", "0000:04:00.0"):
        ready.builder.link(f"/sys/bus/pci/devices/{address}/iommu_group", "/sys/kernel/iommu_groups/7")
    found = ready.line("IOMMU")
    assert found.status is status
    assert "(kernel: iommu=off)" in found.found
    if status is WARNING:
        assert "GPU0, nvme0n1" in found.found
        ready.write("/proc/sys/kernel/arch", "aarch64")
        assert ready.line("IOMMU").status is INFO


def config_space(control: int | None) -> bytes:
    """4 KiB with another extended capability and, behind it, ACS with this control register."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | (0x148 if control is not None else 0) << 20)
    if control is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x7F, control)
    return bytes(space)


def test_acs(ready: Ready):
    ports = [path.name for path in (ready.root / "sys/bus/pci/devices").iterdir()]

    def put(address: str, content: bytes) -> None:
        (ready.root / "sys/bus/pci/devices" / address / "config").write_bytes(content)

    for port in ports:
        put(port, config_space(None))
    assert ready.line("ACS").status is OK
    put("0000:01:00.0", config_space(0x1D))
    found = ready.line("ACS")
    assert (found.status, "on at 0000:01:00.0:" in found.found) == (WARNING, True)
    put("0000:01:00.0", config_space(0x01))
    assert ready.line("ACS").status is OK, "source validation alone redirects nothing"
    put("0000:01:00.0", config_space(0x1D)[:64])
    found = ready.line("ACS")
    assert (found.status, "only root sees" in found.found) == (INFO, True)
    put("0000:40:01.0", config_space(0x1D))
    assert "0000:40" not in ready.line("ACS").found, "no GPU shares that port with a drive"


def test_containers_and_their_limits(ready: Ready):
    assert ready.line("container").found == "not in a container that we know of; no limits of memory or cores"
    ready.write("/.dockerenv", "")
    ready.write("/proc/self/cgroup", "0::/pod/ours")
    ready.write("/sys/fs/cgroup/pod/memory.max", str(2 * 2**30))
    ready.write("/sys/fs/cgroup/pod/ours/memory.max", "max")
    ready.write("/sys/fs/cgroup/cpu.max", "350000 100000")
    found = ready.line("container")
    assert found.status is WARNING, "the group around ours counts too"
    assert found.found == "in a container (Docker); limits: memory 2 GiB, 3.5 cores"
    ready.write("/sys/fs/cgroup/pod/memory.max", str(64 * 2**30))
    assert ready.line("container").status is INFO


def test_version_1_control_groups(ready: Ready):
    ready.write("/proc/self/cgroup", "4:memory:/kubepods/x\n1:name=systemd:/")
    ready.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert ready.line("container").found == "in a container (by its control group); no limits of memory or cores"
    ready.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**30))
    assert "memory 1 GiB" in ready.line("container").found


def test_locked_memory_matters_on_networks(ready: Ready):
    assert ready.line("locked memory").found == "unlimited"
    ready.write("/proc/self/limits", "Max locked memory         8388608              8388608              bytes")
    assert ready.line("locked memory").status is OK
    ready.mount("/mnt", "0:77 nfs host:/export rw,proto=rdma")
    assert ready.line("locked memory", "/mnt/x").status is WARNING
    ready.remove("/proc/self/limits")
    assert ready.line("locked memory").status is INFO


def test_io_uring(ready: Ready):
    assert ready.line("io_uring").status is OK
    ready.write("/proc/sys/kernel/io_uring_disabled", "2")
    assert ready.line("io_uring").status is WARNING


# --- what only a process can say ------------------------------------------------------------------------------------

GOOD = Software("2.9.1", "12.8", (13, 0), "", (1, 13), "libcufile.so.0", "25.12.0", False, "", "")


def say(ready: Ready, check: Callable[[Context], Any], software: Software, **environ: str) -> Finding:
    context = Context(probe(ready.root), CuFileConfig(None), environ, software)
    (found,) = check(context)
    assert isinstance(found, Finding)
    return found


def changed(**values: Any) -> Software:
    from dataclasses import replace

    return replace(GOOD, **values)


@pytest.mark.parametrize(
    ("check", "software", "status", "said"),
    [
        (system.cuda, GOOD, OK, "driver 13.0; torch 2.9.1 built for CUDA 12.8"),
        (system.cuda, changed(driver_cuda=(12, 4), torch_cuda="13.0"), PROBLEM, "too old"),
        (system.cuda, changed(driver_cuda=None, driver_reason="no libcuda.so.1"), PROBLEM, "no libcuda.so.1"),
        (system.cuda, changed(torch_cuda=None), PROBLEM, "built without CUDA"),
        (system.cuda, changed(torch=None, torch_cuda=None), PROBLEM, "torch is not installed"),
        (system.io_uring, GOOD, OK, "available"),
        (system.io_uring, changed(io_uring_reason="EPERM"), WARNING, "not available: EPERM"),
        (cufile.library, GOOD, OK, "1.13 (libcufile.so.0)"),
        (cufile.library, changed(cufile=None), PROBLEM, "not found"),
        (cufile.kvikio, GOOD, OK, "calls cuFile (which may still fall back)"),
        (cufile.kvikio, changed(kvikio=None), PROBLEM, "not installed"),
        (cufile.kvikio, changed(kvikio_posix=None, kvikio_reason="no libcuda"), PROBLEM, "no libcuda"),
        (cufile.kvikio, changed(kvikio_posix=True), PROBLEM, "on its own POSIX path; KVIKIO_COMPAT_MODE is not set"),
    ],
)
def test_software(ready: Ready, check: Callable[[Context], Any], software: Software, status: Status, said: str):
    found = say(ready, check, software)
    assert found.status is status
    assert said in found.found
    assert bool(found.remedy) is (status is not OK)


def test_kvikios_own_switch_is_named(ready: Ready):
    found = say(ready, cufile.kvikio, changed(kvikio_posix=True), KVIKIO_COMPAT_MODE="ON")
    assert (found.remedy, "KVIKIO_COMPAT_MODE=ON" in found.found) == ("unset KVIKIO_COMPAT_MODE", True)


@pytest.mark.parametrize(("version", "met"), [((1, 13), True), ((1, 12), False), (None, False)])
def test_libcufile_for_p2pdma(ready: Ready, version: tuple[int, int] | None, met: bool):
    context = Context(
        probe(ready.root),
        CuFileConfig(None, values={}, origins={"properties.use_pci_p2pdma": "file"}),
        {},
        changed(cufile=version),
    )
    (found,) = [one for one in routes.ways(context)[1].conditions if one.topic == "P2PDMA libcufile"]
    assert found.met is met


def test_asking_this_process():
    import torch

    found = ask()
    assert (found.torch, found.torch_cuda) == (torch.__version__, torch.version.cuda)
    assert (found.driver_cuda is None) is bool(found.driver_reason)
    assert (found.kvikio_posix is None) is bool(found.kvikio_reason)
    assert found.io_uring_reason is not None


# --- cufile.json ----------------------------------------------------------------------------------------------------


def test_the_file_as_nvidia_ships_it():
    content = parse(
        """
{
    "logging": {
        // log directory, e.g. "/home/<xxx>"
        //"dir": "/home/<xxx>",
        "level": "ERROR" /* or "WARN" */
    },
    "url": "http://host//path", // a comment
    "denylist": { "mounts": ["/a", "/b,"], },
}
"""
    )
    assert content == {
        "logging": {"level": "ERROR"},
        "url": "http://host//path",
        "denylist": {"mounts": ["/a", "/b,"]},
    }


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": }', "{'a': 1}"])
def test_what_is_no_json(text: str):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_an_error_names_the_line():
    with pytest.raises(ValueError, match="line 3 column"):
        parse('{\n// a comment\n"a": 1 "b": 2\n}')


def test_environment_over_file_over_built_in(tmp_path: Path):
    builder = trees.Builder(tmp_path)
    builder.file("/etc/cufile.json", '{"properties": {"allow_compat_mode": false, "max_direct_io_size_kb": 1024}}')
    builder.file("/home/me/mine.json", '{"properties": {"use_pci_p2pdma": true}}')
    tree = Tree(tmp_path)
    config = load(tree, {"CUFILE_ALLOW_COMPAT_MODE": "true"})
    assert config.path == "/etc/cufile.json"
    assert (config.values["properties.allow_compat_mode"], config.origins["properties.allow_compat_mode"]) == (
        True,
        "environment",
    )
    assert config.origins["properties.max_direct_io_size_kb"] == "file"
    assert config.origins["execution.max_io_threads"] == "built in"
    named = load(tree, {"CUFILE_ENV_PATH_JSON": "/home/me/mine.json"})
    assert named.flag("properties.use_pci_p2pdma")
    assert named.values["properties.max_direct_io_size_kb"] == 16384, "one file, not both"
    missing = load(tree, {"CUFILE_ENV_PATH_JSON": "/home/me/none.json"})
    assert missing.error == "CUFILE_ENV_PATH_JSON names it, and it does not exist"


@pytest.mark.parametrize(
    ("text", "topic", "status", "said"),
    [
        ("{ broken", "cufile.json", PROBLEM, "not the JSON that cuFile reads"),
        ('{"properties": {"force_compat_mode": true}}', "compat mode", PROBLEM, "force_compat_mode is on"),
        ("{}", "compat mode", INFO, "without a word"),
        ('{"denylist": {"filesystems": ["ext4"]}}', "deny list", PROBLEM, "filesystems: ext4"),
        ('{"blacklist": {"mounts": ["/raid"]}}', "deny list", PROBLEM, "mounts: /raid"),
        ('{"denylist": {"devices": ["/dev/nvme0n1"]}}', "deny list", PROBLEM, "devices: /dev/nvme0n1"),
        ('{"denylist": {"drivers": ["nvme"]}}', "deny list", PROBLEM, "drivers: nvme"),
        ('{"execution": {"num_io_threads": 8}}', "cufile.json key", WARNING, "does not know execution.num_io_threads"),
    ],
)
def test_what_the_file_says(ready: Ready, text: str, topic: str, status: Status, said: str):
    ready.write("/etc/cufile.json", text)
    found = ready.line(topic)
    assert found.status is status
    assert said in found.found
    assert found.remedy


def test_deny_lists_for_other_places_do_not_matter(ready: Ready):
    ready.write("/etc/cufile.json", '{"denylist": {"mounts": ["/other"], "filesystems": ["lustre"], "devices": 3}}')
    assert not [one for one in ready.examine().findings if one.topic == "deny list"]
    assert len([one for one in ready.examine(None).findings if one.topic == "deny list"]) == 2
