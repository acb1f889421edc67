"""What a number was taken on: enough to tell whether two records may be compared."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import hardware

_PREFIXES = ("GDSSTREAM_", "KVIKIO_", "CUFILE_", "FASTSAFETENSORS_", "INSTANTTENSOR_", "RUNAI_STREAMER_", "DALI_")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MALLOC_CONF", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF")
_PACKAGES = (
    "gdsstream",
    "torch",
    "safetensors",
    "numpy",
    "hydra-core",
    "fastsafetensors",
    "instanttensor",
    "runai-model-streamer",
    "kvikio-cu12",
    "kvikio-cu13",
    "webdataset",
    "litdata",
    "mosaicml-streaming",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
)
#: Type -> name of filesystems that reach their storage over a network, or through the host of a virtual machine.
_NETWORK = {
    "nfs": "NFS",
    "nfs4": "NFS",
    "cifs": "SMB",
    "smb3": "SMB",
    "lustre": "Lustre",
    "ceph": "CephFS",
    "gpfs": "GPFS",
    "beegfs": "BeeGFS",
    "wekafs": "WekaFS",
    "glusterfs": "GlusterFS",
    "orangefs": "OrangeFS",
    "panfs": "PanFS",
    "afs": "AFS",
    "9p": "9P",
    "virtiofs": "virtiofs",
    "fuse": "FUSE",
}
#: Of FUSE, those that only show local files in another way.
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.bindfs", "fuse.ntfs-3g", "fuse.portal")
_ROOT = Path(__file__).resolve().parent.parent


def collect(directory: Path, device: str) -> dict[str, Any]:
    """The environment of a run whose files are in `directory`. What cannot be found out is None."""
    return {
        "commit": commit(),
        "gpu": _gpu(device),
        **host(),
        **hardware.collect(directory, device),
        "host_id": hardware.host_id(),
        "load_average": os.getloadavg()[0],
        "filesystem": filesystem(directory),
        "profile": _profile(directory, device),
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) or name in _VARIABLES
        },
    }


def host() -> dict[str, Any]:
    """Which machine this is, as far as it can be told without a GPU's libraries."""
    return {
        "kernel": platform.release(),
        "cpu_model": _first_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "driver": _driver(),
    }


def filesystem(directory: Path) -> dict[str, str] | None:
    """Type, source and mount point of the filesystem that holds `directory`, from /proc/self/mountinfo.

    `network` names it as well where its storage is another machine's, or may be: a cache beyond this machine's is then
    warm or cold as it likes.
    """
    if not directory.exists():
        return None
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = None
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), [*map(_unescaped, right.split())]
        if len(fields) <= 4 or len(kind) < 2:
            continue
        mount = _unescaped(fields[4])
        # The last mount whose point holds the directory is the one that is seen; overlays show another device number.
        if directory.resolve().is_relative_to(mount) and (
            fields[2] == wanted or found is None or len(mount) > len(found["mount"])
        ):
            found = {"type": kind[0], "source": kind[1], "mount": mount}
    if found is not None and (network := network_name(found["type"])) is not None:
        found["network"] = network
    return found


def network_note(env: Mapping[str, Any]) -> str | None:
    """What a reader has to know where the files of a run were on a network; None where they were not."""
    found = env.get("filesystem")
    if not isinstance(found, Mapping) or "network" not in found:
        return None
    return (
        f"The files are on {found['network']} ({found['source']}): a cold cache is this machine's alone, whatever the "
        "other side keeps in memory."
    )


def network_name(kind: str) -> str | None:
    """What people call a filesystem of that type whose storage is, or may be, elsewhere; None for others."""
    if kind.startswith("fuse.") and kind not in _LOCAL_FUSE:
        return f"FUSE ({kind.removeprefix('fuse.')})"
    return _NETWORK.get(kind)


def _unescaped(field: str) -> str:
    """Blanks and backslashes are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def commit() -> str | None:
    """Of this repository, with "-dirty" where files differ from it."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None


def _profile(directory: Path, device: str) -> dict[str, Any] | None:
    """The knobs that gdsstream takes from a profile for these files; None without one, or without gdsstream."""
    try:
        from gdsstream.devices import parse_device
        from gdsstream.profile import find_profile
    except ImportError:
        return None
    found = find_profile(directory, parse_device(device))
    return None if found is None else dict(found.knobs)


def _gpu(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    import torch

    return str(torch.cuda.get_device_name(device))


def _driver() -> str | None:
    first = _read("/proc/driver/nvidia/version").partition("\n")[0]
    # "NVRM version: NVIDIA UNIX ... Kernel Module for x86_64  580.159.04  Release Build ..."
    numbers = [word for word in first.split() if word[:1].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str | None:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
