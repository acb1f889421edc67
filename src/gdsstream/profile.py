"""Profiles: what `gdsstream tune` found, kept for one machine, mount and device, and picked up by whatever reads there.

One JSON file each, under $XDG_CONFIG_HOME (else ~/.config)/gdsstream/profiles. A profile holds as long as the same
source is mounted there and the machine is the one it was measured on: home directories are shared among machines, and
images are cloned. One that would fit but for the machine is ignored, with a warning that names it.

GDSSTREAM_PROFILE=0 leaves all profiles out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gdsstream import _native
from gdsstream.config import StreamConfig, parse_flag
from gdsstream.devices import device_name
from gdsstream.errors import ConfigError, WriteError
from gdsstream.notices import say_once
from gdsstream.small_files import config_folder, replace_text
from gdsstream.storage import Mount, find_mount

log = logging.getLogger(__name__)

AnyPath: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: The knobs that a profile may set.
TUNED = ("backend", "reader", "direct_io", "chunk_size", "io_depth", "num_threads", "direct_threads", "staging_bytes")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Here:
    """What a profile holds for.

    Attributes:
        host, cores, gpu: the machine: its name, its processor cores, and the name of the GPU (empty for the CPU).
        mount_point, source: the mount.
        device: "cpu", or the GPU's PCI address: CUDA's numbers depend on the environment.
    """

    host: str
    cores: int
    gpu: str
    mount_point: str
    source: str
    device: str

    def same_place(self, other: Here) -> bool:
        """Whether mount and device are the same, on whatever machine."""
        return (self.mount_point, self.source, self.device) == (other.mount_point, other.source, other.device)

    def machine(self) -> str:
        """The machine, in words."""
        return f"{self.host} ({self.cores} cores{f', {self.gpu}' if self.gpu else ''})"


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured and chosen.

    Attributes:
        here: what it holds for.
        knobs: of StreamConfig; empty where nothing was really better than the defaults.
        default_gb_per_s, tuned_gb_per_s: medians of the pairs.
        gain: the median ratio of the pairs; None without pairs.
        made_at: seconds since the epoch.
    """

    here: Here
    knobs: dict[str, Any]
    default_gb_per_s: float | None = None
    tuned_gb_per_s: float | None = None
    gain: float | None = None
    made_at: float = field(default_factory=time.time)


def profiles_folder() -> Path:
    """Where profiles are kept."""
    return config_folder() / "profiles"


def here(path: str | os.PathLike[str], device: torch.device) -> Here | None:
    """What a profile for `path` and `device` has to hold for; None where the path or its mount cannot be found."""
    real = os.path.realpath(path)
    mount = _mount(real)
    if mount is None:
        return None
    address = "cpu" if device.type == "cpu" else _native.pci_bus_id(device.index or 0).lower()
    return Here(os.uname().nodename, os.cpu_count() or 0, device_name(device), mount.point, mount.source, address)


def tuned_knobs(path: AnyPath, device: torch.device) -> dict[str, Any]:
    """The knobs of the profile for a path (of several the first) and a device; empty without one."""
    found = find_profile(path, device)
    return {} if found is None else dict(found.knobs)


def find_profile(path: AnyPath, device: torch.device) -> Profile | None:
    """The profile for a path (of several the first) and a device, of this machine; None without one.

    Warns once of each file that cannot be read, and of one that fits but for the machine where none does. Raises
    ConfigError where GDSSTREAM_PROFILE is not a flag.
    """
    kept = _load_all() if _wanted() else []
    first = path if isinstance(path, str | os.PathLike) else next(iter(path), None)
    if not kept or first is None:
        return None
    now = here(first, device)
    if now is None:
        return None
    others = []
    for file, profile in kept:
        if profile.here == now:
            return profile
        if profile.here.same_place(now):
            others.append((file, profile))
    for file, profile in others:
        _warn(
            file,
            f"it was tuned on {profile.here.machine()}, and this is {now.machine()}: "
            f"run gdsstream tune {now.mount_point}, or remove it",
        )
    return None


def store_profile(profile: Profile) -> Path:
    """Keep `profile`, in place of an older one for the same machine, mount and device; readers see the old file or the
    new one.

    Raises WriteError where the folder cannot be written.
    """
    path = profiles_folder() / _name(profile.here)
    content = {"version": _VERSION, **asdict(profile)}
    try:
        replace_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written: {error}; set XDG_CONFIG_HOME to a writable folder", error.errno
        ) from error
    return path


def _wanted() -> bool:
    text = os.environ.get("GDSSTREAM_PROFILE", "1")
    try:
        return parse_flag(text)
    except ValueError as error:
        raise ConfigError(f"environment variable GDSSTREAM_PROFILE={text!r}: {error}") from None


def _mount(real: str) -> Mount | None:
    try:
        device = os.stat(real).st_dev
    except OSError:
        return None  # whoever reads it says why
    return find_mount(real, f"{os.major(device)}:{os.minor(device)}")


def _name(of: Here) -> str:
    """Readable, and no other's: the same words with other punctuation are another place."""
    words = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") for text in (of.host, of.mount_point, of.device))
    key = "\0".join((of.host, of.mount_point, of.device))
    return f"{re.sub('-+', '-', words)[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


_Signature: TypeAlias = tuple[tuple[str, int, int], ...]
_cache: tuple[_Signature, list[tuple[str, Profile]]] = ((), [])


def _load_all() -> list[tuple[str, Profile]]:
    """Every profile that can be read, with its file; parsed anew only when a file changed."""
    global _cache
    folder = profiles_folder()
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                (entry.path, status.st_mtime_ns, status.st_size)
                for entry in entries
                if entry.name.endswith(".json") and not entry.name.startswith(".")
                for status in [entry.stat()]
            )
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            _warn(str(folder), str(error))
        return []
    signature = tuple(found)
    if signature != _cache[0]:
        _cache = (signature, [(path, profile) for path, _, _ in found if (profile := _load(path)) is not None])
    return _cache[1]


def _load(path: str) -> Profile | None:
    try:
        return _parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        _warn(path, str(error))
    except (ValueError, TypeError, KeyError) as error:  # ConfigError is a ValueError
        _warn(path, f"it is no profile: {error!r}; run gdsstream tune again, or remove it")
    return None


def _parse(data: Mapping[str, Any]) -> Profile:
    if data["version"] != _VERSION:
        raise ValueError(f"version {data['version']!r}, not {_VERSION}")
    place = Here(**data["here"])
    for name, value in asdict(place).items():
        if not isinstance(value, int if name == "cores" else str):
            raise TypeError(f"{name} is {value!r}")
    knobs = dict(data["knobs"])
    if unknown := sorted(set(knobs) - set(TUNED)):
        raise ValueError(f"{', '.join(unknown)}: not a setting of profiles")
    StreamConfig(**knobs)
    return Profile(place, knobs, *(data[name] for name in ("default_gb_per_s", "tuned_gb_per_s", "gain", "made_at")))


def _warn(path: str, why: str) -> None:
    say_once(log, f"{path} is ignored: {why}", about=path)


__all__ = [
    "TUNED",
    "AnyPath",
    "Here",
    "Profile",
    "find_profile",
    "here",
    "profiles_folder",
    "store_profile",
    "tuned_knobs",
]
