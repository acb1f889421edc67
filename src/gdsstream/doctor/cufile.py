"""Checks of cuFile's user-space half: libcufile, cufile.json, kvikio, and the udev database that both read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gdsstream.doctor.context import Context
from gdsstream.findings import Finding, Status

_SHOWN = (
    "properties.allow_compat_mode",
    "properties.force_compat_mode",
    "properties.use_pci_p2pdma",
    "properties.max_direct_io_size_kb",
    "properties.max_device_cache_size_kb",
    "properties.max_device_pinned_mem_size_kb",
    "properties.use_poll_mode",
    "execution.parallel_io",
    "execution.max_io_threads",
    "profile.cufile_stats",
)


def library(context: Context) -> Iterator[Finding]:
    """libcufile itself."""
    software = context.software
    if software is None:
        yield Finding("libcufile", Status.INFO, "not asked: a recorded tree has no process")
    elif software.cufile is None:
        remedy = "pip install gdsstream[cu12] or gdsstream[cu13], whichever CUDA your torch was built for"
        yield Finding("libcufile", Status.PROBLEM, "not found: neither the library nor a package nvidia-cufile", remedy)
    else:
        version = ".".join(map(str, software.cufile))
        yield Finding("libcufile", Status.OK, f"{version} ({software.cufile_source})")


def kvikio(context: Context) -> Iterator[Finding]:
    """kvikio's version, and whether it would call cuFile at all."""
    software = context.software
    mode = context.environ.get("KVIKIO_COMPAT_MODE", "")
    said = f"KVIKIO_COMPAT_MODE={mode}" if mode else "KVIKIO_COMPAT_MODE is not set (AUTO)"
    if software is None:
        yield Finding("kvikio", Status.INFO, "not asked: a recorded tree has no process")
    elif software.kvikio is None:
        remedy = "pip install gdsstream[cu12] or gdsstream[cu13], whichever CUDA your torch was built for"
        yield Finding("kvikio", Status.PROBLEM, "not installed, and the cufile backend reads through it", remedy)
    elif software.kvikio_posix is None:
        reason = software.kvikio_reason
        yield Finding("kvikio", Status.PROBLEM, f"{software.kvikio} cannot be used: {reason}", "see the lines above")
    elif software.kvikio_posix:
        asked = mode.upper() in ("ON", "TRUE", "YES", "1")
        remedy = "unset KVIKIO_COMPAT_MODE" if asked else "AUTO needs libcufile and a readable /run/udev, and no WSL"
        yield Finding("kvikio", Status.PROBLEM, f"{software.kvikio}, on its own POSIX path; {said}", remedy)
    else:
        yield Finding("kvikio", Status.OK, f"{software.kvikio}, calls cuFile (which may still fall back); {said}")


def udev(context: Context) -> Iterator[Finding]:
    """The udev database: kvikio takes its POSIX path without it, and cuFile learns the RAID level from it."""
    tree = context.tree
    remedy = "in a container: --volume /run/udev:/run/udev:ro; else start systemd-udevd"
    before = len(tree.failures)
    entries = tree.listdir("/run/udev")
    if not entries:
        why = tree.failures[-1][1] if len(tree.failures) > before else "empty" if tree.exists("/run/udev") else "absent"
        found = f"/run/udev is {why}: kvikio then keeps to its POSIX path"
        yield Finding("udev", Status.PROBLEM, found, remedy)
        return
    yield Finding("udev", Status.OK, "/run/udev is readable")
    storage = context.storage
    for stack in context.machine.stacks:
        if not stack.raid or storage is None or stack.name not in (storage.device, *storage.members):
            continue
        if "MD_LEVEL=" not in (tree.read(f"/run/udev/data/b{stack.number}") or ""):
            yield Finding(
                "udev and RAID",
                Status.WARNING,
                f"udev does not know the level of {stack.name}, which is where cuFile looks it up",
                'add a udev rule: KERNEL=="md*", IMPORT{program}="/sbin/mdadm --detail --export $devnode"',
            )


def config(context: Context) -> Iterator[Finding]:
    """cufile.json: found, valid, and what it forbids for this path."""
    one = context.config
    if one.error is not None:
        remedy = "repair the file, or point CUFILE_ENV_PATH_JSON at another: cuFile refuses to start with it"
        yield Finding("cufile.json", Status.PROBLEM, f"{one.path}: {one.error}", remedy)
    elif one.path is None:
        remedy = "put one at /etc/cufile.json or name one in CUFILE_ENV_PATH_JSON to change what is built in"
        yield Finding("cufile.json", Status.INFO, "not found, so what is built in holds", remedy)
    else:
        changed = sum(origin != "built in" for origin in one.origins.values())
        yield Finding("cufile.json", Status.OK, f"{one.path} (values set: {changed})")
    values = ", ".join(f"{name.partition('.')[2]} {_text(one.values[name])}{_origin(context, name)}" for name in _SHOWN)
    yield Finding("cuFile settings", Status.INFO, values)
    if one.flag("properties.force_compat_mode"):
        remedy = "set properties.force_compat_mode to false (or unset CUFILE_FORCE_COMPAT_MODE)"
        yield Finding(
            "compat mode", Status.PROBLEM, "force_compat_mode is on: every read takes cuFile's POSIX path", remedy
        )
    elif one.flag("properties.allow_compat_mode"):
        found = "allow_compat_mode is on: where GDS does not work, cuFile reads by POSIX without a word"
        yield Finding(
            "compat mode", Status.INFO, found, "to get an error instead, set properties.allow_compat_mode to false"
        )
    else:
        yield Finding("compat mode", Status.OK, "off: what cuFile cannot read directly is an error")
    yield from _denied(context)
    for wrong, right in one.misspelt:
        yield Finding(
            "cufile.json key", Status.WARNING, f"cuFile does not know {wrong} and ignores it", f"write {right}"
        )


def _denied(context: Context) -> Iterator[Finding]:
    storage = context.storage
    for kind, entry in context.config.denied:
        if storage is None:
            yield Finding("deny list", Status.INFO, f"cufile.json keeps cuFile from {kind}: {entry}")
            continue
        forbidden: dict[str, list[str | None]] = {
            "filesystems": [storage.filesystem],
            "mounts": [storage.mount_point],
            "devices": [f"/dev/{name}" for name in (storage.device, *storage.members, *storage.disks)],
            "drivers": ["nvme"] if context.local_nvme else [],
        }
        if entry in forbidden[kind] or (kind == "devices" and f"/dev/{entry}" in forbidden[kind]):
            remedy = f"remove it from denylist.{kind} in {context.config.path}"
            yield Finding("deny list", Status.PROBLEM, f"cufile.json keeps cuFile from {kind}: {entry}", remedy)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _origin(context: Context, name: str) -> str:
    origin = context.config.origins[name]
    return "" if origin == "built in" else f" ({origin})"


__all__ = ["config", "kvikio", "library", "udev"]
