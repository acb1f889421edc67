"""Machines as a page of text each, and the /sys, /proc and /etc that they become in a folder.

A line is an address or a word, and what comes with it; PCI devices are indented below the port that they hang on:

    pci0000:2b node=0                               a host bridge, and the NUMA node of all below it
      2b:00.0 port 8x16                             a port; its link: 8 GT/s, 16 lanes ("8x8/16x16": now / at best)
        2c:00.0 gpu 10de:1db8 8x16 Tesla V100       a GPU and the name that the driver gives it
        2d:00.0 nvme nvme2 8x4 3.84T Micron 9200    an NVMe drive: controller, link, size, model
        2e:00.0 nic mlx5_0 ib0 8x16 100             an RDMA card: device, interface, link, Gbit/s (0: down)
        2f:00.0 eth eth0 8x4 25                     a card without RDMA
        30:00.0 other 10de:1ac2 068000 8x16         anything else: ids, class
        31:00.0 virtio vda 256G                     a virtual disk
    node 0 cpus=0-23 memory=768G distances=10,20
    partition nvme0n1p1
    md md0 raid0 nvme2n1 nvme3n1                    a set; "degraded=1" for a missing member
    dm dm-0 LVM nvme0n1p1                           a mapped volume
    mount md0 /data ext4 rw,data=ordered            a device (or a word such as "tmpfs"), where, type, options
    file /proc/sys/kernel/osrelease 6.8.0           one file; "\\n" in its text starts a line
    link /etc/cufile.json gds/cufile.json
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    """Decimal bytes from "3.84T"."""
    return int(float(text[:-1]) * _UNITS[text[-1]])


class Builder:
    """Writes one machine below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.numbers: dict[str, str] = {}
        self._minor = {"nvme": 0, "md": 0, "dm": 0, "vd": 0}
        self._mounts = 20
        for folder in ("sys/bus/pci/devices", "sys/class/block", "sys/dev/block", "proc/self", "etc"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def file(self, path: str, text: object) -> Path:
        """Write a file, and the folders above it."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")
        return place

    def link(self, path: str, target: str) -> None:
        """A link; an absolute target becomes a relative one, as sysfs has them."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if target.startswith("/"):
            target = os.path.relpath(self.root / target.lstrip("/"), os.path.realpath(place.parent))
        place.symlink_to(target)

    def build(self, text: str) -> Path:
        """Write all that `text` describes; returns the root."""
        above: list[tuple[int, str]] = []  # indentation and sysfs path of the devices around a line
        node = domain = ""
        for line in text.splitlines():
            line = line.split(" # ")[0].rstrip()
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            indent, words = len(line) - len(line.lstrip()), line.split()
            while above and above[-1][0] >= indent:
                above.pop()
            if host := re.fullmatch(r"pci([0-9a-f]{4,}):([0-9a-f]{2})", words[0]):
                domain, node = host[1], words[1].removeprefix("node=") if len(words) > 1 else "-1"
                above = [(indent, f"/sys/devices/{words[0]}")]
            elif re.fullmatch(r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", words[0]):
                where = f"{above[-1][1]}/{domain}:{words[0]}"
                self._pci(where, node, words[1], words[2:])
                above.append((indent, where))
            else:
                getattr(self, f"_{words[0]}")(*words[1:])
        return self.root

    # --- PCI devices ------------------------------------------------------------------------------------------------

    def _pci(self, where: str, node: str, what: str, words: list[str]) -> None:
        address = where.rpartition("/")[2]
        self.link(f"/sys/bus/pci/devices/{address}", where)
        self.file(f"{where}/numa_node", node)
        ids, kind = getattr(self, f"_pci_{what}")(where, words)
        vendor, device = ids.split(":")
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            self.file(f"{where}/{name}", f"0x{value}")
        for word in words:
            if match := re.fullmatch(r"([\d.]+)x(\d+)(?:/([\d.]+)x(\d+))?", word):
                speed, width, best_speed, best_width = match.groups()
                self.file(f"{where}/current_link_speed", f"{float(speed)} GT/s PCIe")
                self.file(f"{where}/current_link_width", width)
                self.file(f"{where}/max_link_speed", f"{float(best_speed or speed)} GT/s PCIe")
                self.file(f"{where}/max_link_width", best_width or width)

    def _pci_port(self, where: str, words: list[str]) -> tuple[str, str]:
        return "1000:c010", "060400"

    def _pci_other(self, where: str, words: list[str]) -> tuple[str, str]:
        return words[0], words[1]

    def _pci_gpu(self, where: str, words: list[str]) -> tuple[str, str]:
        address = where.rpartition("/")[2]
        ids, _, *name = words
        self.file(f"{where}/resource", "0x0 0x0 0x0\n0x200000000000 0x200fffffffff 0x14220c\n0x0 0x0 0x0")
        if name:
            text = (
                f"Model: \t\t {' '.join(name)}\nIRQ:   \t\t 11\nGPU UUID: \t GPU-{address}\nBus Location: \t {address}"
            )
            self.file(f"/proc/driver/nvidia/gpus/{address}/information", text)
        return ids, "030200"

    def _pci_nvme(self, where: str, words: list[str]) -> tuple[str, str]:
        name, _, nbytes, *model = words
        controller = f"{where}/nvme/{name}"
        self.file(f"{controller}/model", " ".join(model) + "   ")
        self.file(f"{controller}/transport", "pcie")
        self.link(f"{controller}/device", where)
        self.link(f"/sys/class/nvme/{name}", controller)
        self._block(f"{controller}/{name}n1", "nvme", 259, nbytes)
        self.link(f"{controller}/{name}n1/device", controller)
        return "144d:a824", "010802"

    def _pci_virtio(self, where: str, words: list[str]) -> tuple[str, str]:
        self._block(f"{where}/virtio0/block/{words[0]}", "vd", 254, words[1])
        self.link(f"{where}/virtio0/block/{words[0]}/device", f"{where}/virtio0")
        return "1af4:1042", "010000"

    def _pci_nic(self, where: str, words: list[str]) -> tuple[str, str]:
        name, interface, _, rate = words
        folder = f"{where}/infiniband/{name}"
        self.file(f"{folder}/ports/1/rate", f"{rate} Gb/sec (4X HDR)")
        self.file(f"{folder}/ports/1/state", "4: ACTIVE" if int(rate) else "1: DOWN")
        self.link(f"{folder}/device", where)
        self.link(f"/sys/class/infiniband/{name}", folder)
        self._interface(where, interface, int(rate))
        return "15b3:1017", "020700"

    def _pci_eth(self, where: str, words: list[str]) -> tuple[str, str]:
        self._interface(where, words[0], int(words[2]))
        return "8086:1593", "020000"

    def _interface(self, where: str, name: str, rate: int) -> None:
        self.file(f"{where}/net/{name}/operstate", "up" if rate else "down")
        self.file(f"{where}/net/{name}/speed", rate * 1000 if rate else -1)
        self.link(f"{where}/net/{name}/device", where)
        self.link(f"/sys/class/net/{name}", f"{where}/net/{name}")

    def _block(self, where: str, kind: str, major: int, nbytes: str | int) -> None:
        number = f"{major}:{self._minor[kind]}"
        self._minor[kind] += 1
        name = where.rpartition("/")[2]
        self.numbers[name] = number
        self.file(f"{where}/dev", number)
        self.file(f"{where}/size", (size(nbytes) if isinstance(nbytes, str) else nbytes) // 512)
        self.file(f"{where}/queue/logical_block_size", 512)
        self.file(f"{where}/queue/rotational", 0)
        self.link(f"/sys/class/block/{name}", where)
        self.link(f"/sys/dev/block/{number}", where)

    # --- the other lines --------------------------------------------------------------------------------------------

    def _node(self, index: str, *words: str) -> None:
        said = dict(word.split("=") for word in words)
        folder = f"/sys/devices/system/node/node{index}"
        self.file(f"{folder}/cpulist", said["cpus"])
        self.file(f"{folder}/distance", said["distances"].replace(",", " "))
        self.file(f"{folder}/meminfo", f"Node {index} MemTotal:       {size(said['memory']) // 1024} kB")

    def _partition(self, name: str) -> None:
        disk = os.path.realpath(self.root / "sys/class/block" / re.sub(r"p?\d+$", "", name))
        where = "/" + os.path.relpath(disk, self.root) + f"/{name}"
        self._block(where, "nvme", 259, 10**12)
        self.file(f"{where}/partition", name[-1])

    def _md(self, name: str, level: str, *words: str) -> None:
        members = [word for word in words if "=" not in word]
        where = f"/sys/devices/virtual/block/{name}"
        sizes = [int((self.root / "sys/class/block" / one / "size").read_text()) * 512 for one in members]
        self._block(where, "md", 9, sizes[0] if level == "raid1" else sum(sizes))
        self.file(f"{where}/md/level", level)
        self.file(f"{where}/md/chunk_size", 524288)
        self.file(f"{where}/md/degraded", dict(word.split("=") for word in words if "=" in word).get("degraded", 0))
        self._slaves(where, members)

    def _dm(self, name: str, kind: str, *members: str) -> None:
        where = f"/sys/devices/virtual/block/{name}"
        self._block(where, "dm", 253, 10**12)
        self.file(f"{where}/dm/uuid", f"{kind}-0123456789")
        self.file(f"{where}/dm/name", "vg-data")
        self._slaves(where, list(members))

    def _slaves(self, where: str, members: list[str]) -> None:
        for one in members:
            self.link(f"{where}/slaves/{one}", "/" + os.path.relpath(self._real_block(one), self.root))

    def _real_block(self, name: str) -> str:
        return os.path.realpath(self.root / "sys/class/block" / name)

    def _mount(self, device: str, point: str, kind: str, options: str) -> None:
        self._mounts += 1
        number = self.numbers.get(device, f"0:{self._mounts}")
        source = f"/dev/{device}" if device in self.numbers else device
        line = f"{self._mounts} 1 {number} / {point} rw,relatime shared:1 - {kind} {source} {options}\n"
        with (self.root / "proc/self/mountinfo").open("a") as file:
            file.write(line)

    def _file(self, path: str, *words: str) -> None:
        self.file(path, " ".join(words).replace("\\n", "\n").replace("\\t", "\t"))

    def _link(self, path: str, target: str) -> None:
        self.link(path, target)


def build(name: str, root: Path, more: str = "") -> Path:
    """The recorded machine of that name below `root`, and what `more` adds to it."""
    return Builder(root).build((RECORDED / f"{name}.txt").read_text() + "\n" + more)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def without_rights() -> Iterator[None]:
    """Within, we are nobody if we were root, who may read everything."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was == 0:
            os.seteuid(0)
