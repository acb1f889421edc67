"""Checks of the machine: kernel, driver, GPUs, IOMMU, ACS, container, locked memory, io_uring."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from gdsstream.doctor.context import Context
from gdsstream.findings import Finding, Status
from gdsstream.machine.gpus import GpuClass
from gdsstream.machine.pci import PciDevice, path_class

_GIB = 2**30
# What P2P redirection and source validation are called in the control register of the ACS capability.
_ACS_CAPABILITY, _ACS_REDIRECT = 0x000D, 0x0004 | 0x0008
_EXTENDED_CONFIG = 0x100
_SMALL_BAR1 = 256 * 2**20
_LOCKED_FOR_RDMA = 2**30


def kernel(context: Context) -> Iterator[Finding]:
    """Its version; old ones lack what is needed by any route."""
    release = context.tree.read("/proc/sys/kernel/osrelease")
    if release is None:
        yield Finding("kernel", Status.INFO, "unknown: /proc/sys/kernel/osrelease cannot be read")
    else:
        virtual = ", in a virtual machine" if context.machine.virtual else ""
        yield Finding("kernel", Status.INFO, f"Linux {release}{virtual}")


def driver(context: Context) -> Iterator[Finding]:
    """The kernel module, and what CUDA says of the user-space half."""
    version = driver_version(context)
    if version is None:
        yield Finding(
            "NVIDIA driver",
            Status.PROBLEM,
            "not loaded: there is no /proc/driver/nvidia/version",
            "install the driver (open kernel modules, 565 or newer), or start the container with --gpus all",
        )
        return
    name, _, is_open = version
    kind = "open kernel module" if is_open else "proprietary kernel module"
    yield Finding("NVIDIA driver", Status.OK, f"{name}, {kind}")


def driver_version(context: Context) -> tuple[str, tuple[int, ...], bool] | None:
    """("565.57.01", (565, 57, 1), whether it is the open kernel module) of the loaded driver."""
    text = context.tree.read("/proc/driver/nvidia/version") or ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text + " ")
    if found is None:
        return None
    return found[1], tuple(int(part) for part in found[1].split(".")), "Open Kernel Module" in text


def cuda(context: Context) -> Iterator[Finding]:
    """The driver's CUDA version against torch's."""
    software = context.software
    if software is None:
        yield Finding("CUDA", Status.INFO, "not asked: a recorded tree has no process")
        return
    torch = f"torch {software.torch} built for CUDA {software.torch_cuda}" if software.torch_cuda else ""
    torch = torch or (f"torch {software.torch} built without CUDA" if software.torch else "torch is not installed")
    if software.driver_cuda is None:
        remedy = "install the NVIDIA driver; in a container, start it with --gpus all"
        yield Finding("CUDA", Status.PROBLEM, f"libcuda cannot be used: {software.driver_reason}; {torch}", remedy)
        return
    can = ".".join(map(str, software.driver_cuda))
    if software.torch_cuda is None:
        yield Finding("CUDA", Status.PROBLEM, f"driver {can}, but {torch}", "install torch built for CUDA")
    elif _version(software.torch_cuda)[0] > software.driver_cuda[0]:
        remedy = "update the driver, or install a torch built for an older CUDA"
        yield Finding("CUDA", Status.PROBLEM, f"driver {can} is too old for {torch}", remedy)
    else:
        yield Finding("CUDA", Status.OK, f"driver {can}; {torch}")


def gpus(context: Context) -> Iterator[Finding]:
    """Each kind of GPU once: its product line, and the window through which drives reach its memory."""
    kinds: dict[tuple[str, int | None], list[str]] = {}
    for gpu in context.machine.gpus:
        kinds.setdefault((gpu.name, gpu.bar1_bytes), []).append(f"GPU{gpu.index}")
    if not kinds:
        remedy = "check lspci; in a container or a virtual machine the GPU has to be passed through"
        yield Finding("GPU", Status.PROBLEM, "no NVIDIA GPU on the PCI bus", remedy)
    by_name = {gpu.name: gpu for gpu in context.machine.gpus}
    for (name, bar1), names in kinds.items():
        line = by_name[name].line
        count = f"{len(names)} x " if len(names) > 1 else ""
        window = f", BAR1 {_size(bar1)}" if bar1 else ""
        found = f"{count}{name.removeprefix('NVIDIA ')} ({line} class{window})"
        if line is GpuClass.GEFORCE:
            remedy = "cuFile reads directly to data centre and workstation GPUs only; use backend staged or mapped"
            yield Finding("GPU", Status.PROBLEM, found, remedy)
        elif line is GpuClass.UNKNOWN:
            remedy = "load the driver for its name; GeForce GPUs cannot do GPUDirect Storage"
            yield Finding("GPU", Status.WARNING, found, remedy)
        elif bar1 is not None and bar1 <= _SMALL_BAR1:
            remedy = "enable Above 4G Decoding and Resizable BAR in the firmware; small windows need bounce buffers"
            yield Finding("GPU", Status.WARNING, found, remedy)
        else:
            yield Finding("GPU", Status.OK, found)


def iommu(context: Context) -> Iterator[Finding]:
    """Whether addresses are translated between the drives and the GPUs: traffic then goes by the root complex."""
    kinds: dict[str, list[str]] = {}
    for name, device in _ends(context):
        kind = context.tree.read(f"/sys/bus/pci/devices/{device.address}/iommu_group/type")
        if kind is not None:
            kinds.setdefault(kind, []).append(name)
    asked = re.findall(r"\b(?:intel_|amd_)?iommu=\S+", context.tree.read("/proc/cmdline") or "")
    said = f" (kernel: {' '.join(asked)})" if asked else ""
    translated = [name for kind, names in kinds.items() if kind != "identity" for name in names]
    if not kinds:
        yield Finding("IOMMU", Status.OK, f"none between GPUs and drives{said}")
    elif not translated:
        yield Finding("IOMMU", Status.OK, f"pass-through{said}")
    elif not context.x86:
        yield Finding("IOMMU", Status.INFO, f"translates for {_some(translated)}, as this platform expects{said}")
    else:
        yield Finding(
            "IOMMU",
            Status.WARNING,
            f"translates for {_some(translated)}{said}: reads between devices fail or go by the root complex",
            "boot with intel_iommu=off or amd_iommu=off, or with iommu=pt where the platform supports that",
        )


def acs(context: Context) -> Iterator[Finding]:
    """Whether a switch sends traffic between devices up to the root complex (Access Control Services)."""
    ports = sorted(set(_ports_between(context)))
    if not ports:
        yield Finding("ACS", Status.OK, "no PCIe switch between the drives and a GPU")
        return
    redirecting, hidden = [], []
    for port in ports:
        control = _acs_control(context.tree.read_bytes(f"/sys/bus/pci/devices/{port}/config"))
        if control is None:
            hidden.append(port)
        elif control & _ACS_REDIRECT:
            redirecting.append(port)
    if redirecting:
        yield Finding(
            "ACS",
            Status.WARNING,
            f"on at {_some(redirecting)}: a switch sends traffic between its devices up to the root complex",
            "turn it off in the firmware, or boot with pci=disable_acs_redir=ADDRESS; setpci does until the next boot",
        )
    elif hidden:
        found = f"not readable at {_some(hidden)}: only root sees the whole configuration space"
        yield Finding(
            "ACS", Status.INFO, found, "run gdsstream doctor once as root, or see /proc/driver/nvidia-fs/bridges"
        )
    else:
        yield Finding("ACS", Status.OK, f"off at the {len(ports)} switch ports between the drives and their GPUs")


def _ports_between(context: Context) -> Iterator[str]:
    from gdsstream.machine.pci import bridges_between

    for drive in context.drives:
        for gpu in context.machine.gpus:
            if drive.pci and path_class(drive.pci, gpu.pci) in ("PIX", "PXB"):
                yield from bridges_between(drive.pci, gpu.pci)


def _acs_control(config: bytes | None) -> int | None:
    """The ACS control register, 0 without one; None where the extended configuration space is hidden."""
    if config is None or len(config) <= _EXTENDED_CONFIG:
        return None
    offset = _EXTENDED_CONFIG
    for _ in range(64):
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int(struct.unpack_from("<H", config, offset + 6)[0])
        offset = header >> 20
        if offset < _EXTENDED_CONFIG or offset + 8 > len(config):
            break
    return 0


def container(context: Context) -> Iterator[Finding]:
    """Whether we are in one, and its limits of memory and cores."""
    tree = context.tree
    marks = [name for name, path in (("Docker", "/.dockerenv"), ("Podman", "/run/.containerenv")) if tree.exists(path)]
    groups = tree.read("/proc/self/cgroup") or ""
    if not marks and re.search(r"kubepods|docker|containerd|libpod|lxc", groups):
        marks = ["by its control group"]
    limits = []
    memory = _least_memory(context, groups)
    if memory is not None:
        limits.append(f"memory {_size(memory)}")
    quota = re.match(r"(\d+) (\d+)", tree.read("/sys/fs/cgroup/cpu.max") or "")
    if quota:
        limits.append(f"{int(quota[1]) / int(quota[2]):g} cores")
    where = f"in a container ({marks[0]})" if marks else "not in a container that we know of"
    found = f"{where}; {'limits: ' + ', '.join(limits) if limits else 'no limits of memory or cores'}"
    if memory is not None and memory < 4 * _GIB:
        remedy = "page cache and pinned memory count against the limit: give the container more memory"
        yield Finding("container", Status.WARNING, found, remedy)
    else:
        yield Finding("container", Status.INFO, found)


def _least_memory(context: Context, groups: str) -> int | None:
    """The smallest limit of our control group and those around it (version 2), or version 1's."""
    ours = next((line[3:] for line in groups.splitlines() if line.startswith("0::")), "/")
    limits = []
    while True:
        limits.append(context.tree.read(f"/sys/fs/cgroup{ours.rstrip('/')}/memory.max"))
        if ours.strip("/") == "":
            break
        ours = ours.rpartition("/")[0] or "/"
    limits.append(context.tree.read("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    # Version 1 says "no limit" with a number beyond any memory.
    known = [int(text) for text in limits if text and text.isdigit() and int(text) < 2**60]
    return min(known, default=None)


def locked_memory(context: Context) -> Iterator[Finding]:
    """The limit of locked memory: RDMA and io_uring's fixed buffers count against it, CUDA's pinned memory does not."""
    line = re.search(r"^Max locked memory\s+(\S+)", context.tree.read("/proc/self/limits") or "", re.MULTILINE)
    if line is None:
        yield Finding("locked memory", Status.INFO, "/proc/self/limits does not tell")
        return
    if line[1] == "unlimited":
        yield Finding("locked memory", Status.OK, "unlimited")
        return
    limit = int(line[1])
    network = context.storage is not None and context.storage.is_network
    if network and limit < _LOCKED_FOR_RDMA:
        remedy = (
            "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a container"
        )
        yield Finding(
            "locked memory", Status.WARNING, f"{_size(limit)}, which RDMA registrations count against", remedy
        )
    else:
        yield Finding("locked memory", Status.OK, f"{_size(limit)}; memory that CUDA pins does not count against it")


def io_uring(context: Context) -> Iterator[Finding]:
    """Whether the staged route may read with it; GPUDirect Storage does without."""
    setting = context.tree.read("/proc/sys/kernel/io_uring_disabled")
    reason = context.software.io_uring_reason if context.software else None
    if reason:
        found = f"not available: {reason}"
    elif setting == "2" or (setting == "1" and context.software is None):
        found = f"forbidden by the kernel (io_uring_disabled = {setting})"
    else:
        yield Finding("io_uring", Status.OK, "available" if context.software else "not disabled by the kernel")
        return
    remedy = (
        "the staged route reads with threads instead; to allow it: sysctl kernel.io_uring_disabled=0, and the "
        "container's seccomp profile"
    )
    yield Finding("io_uring", Status.WARNING, found, remedy)


def _ends(context: Context) -> Iterator[tuple[str, PciDevice]]:
    for gpu in context.machine.gpus:
        yield f"GPU{gpu.index}", gpu.pci
    for drive in context.drives:
        if drive.pci:
            yield drive.name, drive.pci


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "unknown"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


__all__ = [
    "acs",
    "container",
    "cuda",
    "driver",
    "driver_version",
    "gpus",
    "io_uring",
    "iommu",
    "kernel",
    "locked_memory",
]
