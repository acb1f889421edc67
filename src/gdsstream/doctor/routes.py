"""The two ways in which a drive can reach a GPU's memory: nvidia-fs, and the kernel's own PCI P2PDMA.

One open way is enough. So each condition is looked at first, and judged afterwards: what fails is a problem while the
other way is blocked too, and only worth a note while the other is open.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass

from gdsstream.doctor.context import Context
from gdsstream.doctor.software import Software
from gdsstream.doctor.system import driver_version
from gdsstream.findings import Finding, Status

_P2PDMA_KERNEL = (6, 2)
_P2PDMA_DRIVER = (565,)
_P2PDMA_CUFILE = (1, 13)  # CUDA 12.8
_REGISTRY = ("RMForceStaticBar1=1", "RmForceDisableIomapWC=1")


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a way: met, not met, or None where that cannot be told."""

    topic: str
    met: bool | None
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways, with its conditions."""

    name: str
    conditions: tuple[Condition, ...]

    @property
    def failing(self) -> int:
        """How many conditions fail for certain."""
        return sum(one.met is False for one in self.conditions)

    @property
    def blocked(self) -> bool:
        """Whether a condition fails for certain."""
        return self.failing > 0


def ways(context: Context) -> tuple[Way, Way]:
    """nvidia-fs and P2PDMA, as this machine and path have them."""
    return Way("nvidia-fs", tuple(_nvidia_fs(context))), Way("P2PDMA", tuple(_p2pdma(context)))


def findings(context: Context) -> Iterator[Finding]:
    """Every condition of both ways, each judged by whether the other way is open."""
    first, second = ways(context)
    for way, other in ((first, second), (second, first)):
        for one in way.conditions:
            yield _judge(one, needed=other.blocked, other=other.name)


def _judge(one: Condition, *, needed: bool, other: str) -> Finding:
    if one.met:
        return Finding(one.topic, Status.OK, one.found)
    if needed:
        return Finding(one.topic, Status.WARNING if one.met is None else Status.PROBLEM, one.found, one.remedy)
    return Finding(one.topic, Status.INFO, f"{one.found}; not needed while {other} is open")


def _nvidia_fs(context: Context) -> Iterator[Condition]:
    tree = context.tree
    version = tree.read("/proc/driver/nvidia-fs/version")
    if version is None:
        install = "install it (package nvidia-gds, or nvidia-fs-dkms) and run modprobe nvidia-fs"
        if tree.exists("/proc/driver/nvidia-fs"):
            yield Condition("nvidia-fs", None, "loaded, but its version cannot be read", "run as root, or see dmesg")
        else:
            yield Condition("nvidia-fs", False, "the kernel module is not loaded", install)
        return
    yield Condition("nvidia-fs", True, f"loaded, {' '.join(version.split())}")
    if tree.exists("/dev") and not tree.exists("/dev/nvidia-fs0"):
        remedy = "pass the devices into the container: --device /dev/nvidia-fs0 and the others of /dev/nvidia-fs*"
        yield Condition(
            "nvidia-fs device", False, "/dev/nvidia-fs0 is missing, so cuFile cannot talk to the module", remedy
        )
    modules = tree.read("/proc/driver/nvidia-fs/modules")
    if context.storage is not None and not context.local_nvme:
        return  # the drive's own line says so
    if modules is None:
        yield Condition("nvidia-fs drivers", None, "which drivers it works with cannot be read", "see gdscheck -p")
    elif "nvme" in modules:
        yield Condition("nvidia-fs drivers", True, "the nvme driver is registered with it")
    else:
        remedy = "install the NVMe driver of DOCA or MLNX_OFED (--with-nvmf), or use P2PDMA"
        yield Condition("nvidia-fs drivers", False, "the kernel's nvme driver is not registered with it", remedy)


def _p2pdma(context: Context) -> Iterator[Condition]:
    yield _p2pdma_kernel(context)
    yield _p2pdma_driver(context)
    if context.x86:
        yield _p2pdma_registry(context)
        yield _p2pdma_multipath(context)
    yield _p2pdma_gpu(context)
    if context.software is not None:
        yield _p2pdma_cufile(context.software)
    enabled = context.config.flag("properties.use_pci_p2pdma")
    yield Condition(
        "P2PDMA in cuFile",
        enabled,
        f"properties.use_pci_p2pdma is {str(enabled).lower()} ({context.config.origins['properties.use_pci_p2pdma']})",
        'set "properties": {"use_pci_p2pdma": true} in cufile.json, or CUFILE_USE_PCIP2PDMA=true',
    )
    storage = context.storage
    if storage is not None and storage.is_network:
        remedy = "use nvidia-fs with the RDMA modules of DOCA, MLNX_OFED or the file system's vendor"
        yield Condition("P2PDMA and network", False, "the path is on a network, and P2PDMA reads local NVMe", remedy)
    if storage is not None and storage.raid_level:
        remedy = "use nvidia-fs for RAID sets, or one drive with its own file system"
        yield Condition(
            "P2PDMA and RAID", False, f"the path is on {storage.raid_level}, which P2PDMA cannot read", remedy
        )


def _p2pdma_kernel(context: Context) -> Condition:
    built = _built_with_p2pdma(context)
    version = context.kernel
    name = ".".join(map(str, version)) if version else "unknown"
    remedy = "boot a kernel of 6.2 or newer that is built with CONFIG_PCI_P2PDMA"
    if built is False:
        return Condition("P2PDMA kernel", False, f"kernel {name} is built without CONFIG_PCI_P2PDMA", remedy)
    if version is not None and version < _P2PDMA_KERNEL:
        return Condition("P2PDMA kernel", False, f"kernel {name} is older than 6.2", remedy)
    if built is None or version is None:
        found = f"kernel {name}; whether it has CONFIG_PCI_P2PDMA cannot be told"
        return Condition("P2PDMA kernel", None, found, "see /boot/config-* or grep p2pdma /proc/kallsyms")
    return Condition("P2PDMA kernel", True, f"kernel {name} with CONFIG_PCI_P2PDMA")


def _built_with_p2pdma(context: Context) -> bool | None:
    tree = context.tree
    release = tree.read("/proc/sys/kernel/osrelease") or ""
    config = tree.read(f"/boot/config-{release}")
    if config is None and (packed := tree.read_bytes("/proc/config.gz")):
        try:
            config = gzip.decompress(packed).decode(errors="replace")
        except (OSError, EOFError):
            config = None
    if config is not None:
        return "CONFIG_PCI_P2PDMA=y" in config
    symbols = tree.read_bytes("/proc/kallsyms")
    return b"p2pdma_pgmap_ops" in symbols if symbols else None


def _p2pdma_driver(context: Context) -> Condition:
    remedy = "install the open kernel modules of driver 565 or newer"
    version = driver_version(context)
    if version is None:
        return Condition("P2PDMA driver", False, "no NVIDIA driver is loaded", remedy)
    name, number, is_open = version
    if not is_open:
        return Condition(
            "P2PDMA driver", False, f"{name} is the proprietary kernel module; it needs the open one", remedy
        )
    if number < _P2PDMA_DRIVER:
        return Condition("P2PDMA driver", False, f"{name} is older than 565", remedy)
    return Condition("P2PDMA driver", True, f"{name}, open kernel module")


def _p2pdma_registry(context: Context) -> Condition:
    said = context.tree.read("/proc/driver/nvidia/params")
    if said is None:
        return Condition("P2PDMA parameters", None, "/proc/driver/nvidia/params cannot be read", "load the driver")
    missing = [one for one in _REGISTRY if one.lower() not in said.lower()]
    if not missing:
        return Condition("P2PDMA parameters", True, f"the driver has {' and '.join(_REGISTRY)}")
    remedy = (
        f'in /etc/modprobe.d/nvidia-p2pdma.conf: options nvidia NVreg_RegistryDwords="{";".join(_REGISTRY)};" '
        "then rebuild the initramfs and reboot"
    )
    return Condition("P2PDMA parameters", False, f"the driver lacks {' and '.join(missing)}", remedy)


def _p2pdma_multipath(context: Context) -> Condition:
    setting = context.tree.read("/sys/module/nvme_core/parameters/multipath")
    if setting in ("Y", "1"):
        remedy = "in /etc/modprobe.d/nvme.conf: options nvme_core multipath=N, then rebuild the initramfs and reboot"
        return Condition(
            "P2PDMA multipath", False, "nvme_core multipath is on, which P2PDMA cannot read through", remedy
        )
    return Condition("P2PDMA multipath", True, "NVMe multipath is off" if setting else "NVMe multipath is not built in")


def _p2pdma_gpu(context: Context) -> Condition:
    gpus = context.machine.gpus
    remedy = "it needs a data centre GPU since Ampere"
    if not gpus:
        return Condition("P2PDMA GPU", False, "there is no NVIDIA GPU", remedy)
    names = ", ".join(dict.fromkeys(gpu.name.removeprefix("NVIDIA ") for gpu in gpus))
    listed = [gpu.p2pdma for gpu in gpus]
    if any(one is True for one in listed):
        return Condition("P2PDMA GPU", True, f"NVIDIA lists {names} for it")
    if all(one is False for one in listed):
        return Condition("P2PDMA GPU", False, f"NVIDIA does not list {names} for it", remedy)
    return Condition("P2PDMA GPU", None, f"NVIDIA does not list {names}; --prove tells", remedy)


def _p2pdma_cufile(software: Software) -> Condition:
    remedy = "install nvidia-cufile of CUDA 12.8 or newer (libcufile 1.13)"
    if software.cufile is None:
        return Condition("P2PDMA libcufile", False, "libcufile is not installed", remedy)
    name = ".".join(map(str, software.cufile))
    if software.cufile < _P2PDMA_CUFILE:
        return Condition("P2PDMA libcufile", False, f"libcufile {name} is older than 1.13", remedy)
    return Condition("P2PDMA libcufile", True, f"libcufile {name}")


__all__ = ["Condition", "Way", "findings", "ways"]
