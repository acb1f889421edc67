"""Checks of one path: file system, device, RAID, O_DIRECT, page cache, the way to a GPU, and the stored proof."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

from gdsstream.affinity import links_below_best, nearest, spread
from gdsstream.doctor.context import Context
from gdsstream.errors import GdsStreamError
from gdsstream.findings import Finding, Status
from gdsstream.machine.names import runs
from gdsstream.storage import StorageInfo, residency

# Network file systems whose clients NVIDIA lists as able to hand bytes to a GPU, given RDMA and the vendor's modules.
_GDS_NETWORKS = frozenset({"beegfs", "gpfs", "lustre", "wekafs"})
_LARGE_BLOCK = 4096


def filesystem(context: Context) -> Iterator[Finding]:
    """Its type and mount options: cuFile reads ext4 in ordered mode and XFS, and a few network file systems."""
    info = _info(context)
    where = f"{info.filesystem} on {info.mount_point or '?'}"
    move = "put the files on ext4 (data=ordered) or XFS on NVMe"
    if info.filesystem == "unknown":
        yield Finding("file system", Status.WARNING, "no mount was found for the path", "check /proc/self/mountinfo")
    elif info.filesystem == "xfs":
        yield Finding("file system", Status.OK, where)
    elif info.filesystem == "ext4":
        yield _ext4(context, info, where)
    elif info.is_memory:
        yield Finding("file system", Status.PROBLEM, f"{where}: the files are in memory, not on a drive", move)
    elif info.filesystem == "overlay":
        found = f"{where}: a container's own layers, which cuFile cannot read directly"
        yield Finding("file system", Status.PROBLEM, found, f"{move}, and mount that folder into the container")
    elif info.filesystem.startswith("nfs"):
        if "proto=rdma" in info.mount_options:
            yield Finding("file system", Status.OK, f"{where}, over RDMA")
        else:
            remedy = "mount it with proto=rdma,port=20049; the server has to offer NFS over RDMA"
            yield Finding("file system", Status.PROBLEM, f"{where}, not over RDMA", remedy)
    elif info.filesystem in _GDS_NETWORKS:
        remedy = "its client needs the vendor's GDS support and RDMA; --prove tells whether it has them"
        yield Finding("file system", Status.WARNING, where, remedy)
    else:
        yield Finding("file system", Status.PROBLEM, f"{where}: cuFile does not read it directly", move)


def _ext4(context: Context, info: StorageInfo, where: str) -> Finding:
    said = next((option for option in info.mount_options if option.startswith("data=")), None)
    if said == "data=ordered":
        return Finding("file system", Status.OK, f"{where}, data=ordered")
    remount = f"in /etc/fstab, mount {info.mount_point} with data=ordered"
    if said is not None:
        return Finding("file system", Status.PROBLEM, f"{where}, {said}: cuFile needs ordered mode", remount)
    # Newer kernels do not list the default; the file system's own page in /proc does.
    device = os.path.basename(info.source or "")
    effective = context.tree.read(f"/proc/fs/ext4/{device}/options") or ""
    mode = next((line for line in effective.split() if line.startswith("data=")), "")
    if mode not in ("", "data=ordered"):
        return Finding("file system", Status.PROBLEM, f"{where}, {mode}: cuFile needs ordered mode", remount)
    known = " (it is in effect, by default)" if mode else ""
    found = f"{where}; the mount table does not say data=ordered{known}, and some versions of cuFile look for it there"
    return Finding(
        "file system", Status.WARNING, found, f"{remount}, or see cufile.log for what your version makes of it"
    )


def device(context: Context) -> Iterator[Finding]:
    """What the blocks come from: NVMe on PCIe, and nothing between that cuFile does not see through."""
    info = _info(context)
    if info.is_network or info.is_memory:
        return
    if info.device is None:
        remedy = "in a container, mount the folder from a disk of the host"
        yield Finding("device", Status.WARNING, f"no block device was found for {info.source or info.path}", remedy)
        return
    drives = runs(info.disks)
    stacked = f" over {drives}" if info.disks and info.disks != (info.device,) else ""
    if context.local_nvme:
        models = ", ".join(dict.fromkeys(drive.model for drive in context.drives if drive.model))
        yield Finding("device", Status.OK, f"{info.device}{stacked}: NVMe on PCIe{f' ({models})' if models else ''}")
    elif context.drives and all(drive.nvme for drive in context.drives):
        kinds = ", ".join(dict.fromkeys(drive.transport for drive in context.drives))
        found = f"{info.device}{stacked}: NVMe over {kinds}"
        yield Finding("device", Status.WARNING, found, "NVMe over RDMA needs DOCA or MLNX_OFED; --prove tells")
    else:
        kind = ", ".join(dict.fromkeys(drive.transport for drive in context.drives)) or "not NVMe"
        found = f"{info.device}{stacked}: {kind}; cuFile reads directly from NVMe only"
        yield Finding(
            "device", Status.PROBLEM, found, "put the files on an NVMe drive; in a virtual machine, pass one through"
        )
    for stack in context.machine.stacks:
        if not stack.raid and stack.name in (info.device, *info.members):
            crypt = stack.kind == "CRYPT"
            found = f"{stack.name} is a {stack.kind} volume: " + (
                "the processor has to decrypt every byte" if crypt else "cuFile is not documented for mapped volumes"
            )
            remedy = "use a plain partition or a RAID0 set" + ("" if crypt else "; --prove tells")
            yield Finding("mapped volume", Status.PROBLEM if crypt else Status.WARNING, found, remedy)


def raid(context: Context) -> Iterator[Finding]:
    """The level of an md set, what it lacks, and how far its drives are from each other."""
    info = _info(context)
    if not info.raid_level:
        return
    drives = f"{info.raid_level} of {len(info.disks)} drives"
    if info.raid_level == "raid0":
        yield Finding("RAID", Status.OK, f"{drives} ({runs(info.disks)})")
    elif info.raid_level == "raid1":
        found = f"{drives}: cuFile is documented for raid0"
        yield Finding("RAID", Status.WARNING, found, "use raid0 for data that can be fetched again; --prove tells")
    else:
        found = f"{drives}: cuFile reads raid0 directly, no other level"
        yield Finding("RAID", Status.PROBLEM, found, "make it a raid0, and keep a copy elsewhere")
    for stack in context.machine.stacks:
        if not stack.raid or not set(stack.disks) & set(info.disks) or stack.kind != info.raid_level:
            continue
        if stack.degraded:
            found, remedy = f"{stack.name} misses {stack.degraded} member(s)", f"see mdadm --detail /dev/{stack.name}"
            yield Finding("RAID state", Status.WARNING, found, remedy)
        how = spread(context.machine, stack)
        if how.apart:
            parts = " | ".join(runs(part) for part in how.parts)
            remedy = "for one GPU, make a set of the drives near it (gdsstream topo)"
            yield Finding("RAID spread", Status.WARNING, f"its drives sit on different NUMA nodes: {parts}", remedy)


def direct_io(context: Context) -> Iterator[Finding]:
    """Whether O_DIRECT works, and in what blocks (statx)."""
    info = _info(context)
    if info.is_memory:
        yield Finding("O_DIRECT", Status.PROBLEM, "means nothing for files in memory", "put the files on a drive")
        return
    blocks = f"addresses in {info.memory_alignment}, offsets in {info.offset_alignment} bytes"
    if info.direct_io is None:
        why = (
            "not tried: a recorded tree has no files" if not context.tree.live else "not tried: there is no file in it"
        )
        yield Finding("O_DIRECT", Status.INFO, f"{why}; {blocks}")
    elif not info.direct_io:
        remedy = (
            "cuFile needs it; network file systems may want a mount option, encrypted or compressed files refuse it"
        )
        yield Finding("O_DIRECT", Status.PROBLEM, "a read with O_DIRECT fails here", remedy)
    elif max(info.memory_alignment, info.offset_alignment) > _LARGE_BLOCK:
        remedy = "reads that are not aligned to that go through bounce buffers; gdsstream pack aligns to 4 KiB"
        yield Finding("O_DIRECT", Status.WARNING, f"works; {blocks}", remedy)
    else:
        yield Finding("O_DIRECT", Status.OK, f"works; {blocks}")


def page_cache(context: Context) -> Iterator[Finding]:
    """How much of the file is in memory already: what is, needs no drive on gdsstream's other routes."""
    if context.sample is None or _info(context).is_memory:
        return
    try:
        share = residency(context.sample)
    except (GdsStreamError, ImportError) as error:
        yield Finding("page cache", Status.INFO, str(error))
        return
    name = os.path.basename(context.sample)
    found = f"{share:.0%} of {name} is cached"
    if share >= 0.5:
        yield Finding(
            "page cache", Status.INFO, f"{found}: the staged and mapped routes read it from memory, cuFile does not"
        )
    else:
        yield Finding("page cache", Status.INFO, found)


def way_to_gpu(context: Context) -> Iterator[Finding]:
    """How the bytes get from the path's drives to the nearest GPU, and links that lost lanes."""
    machine = context.machine
    names = {drive.name for drive in context.drives}
    by_class: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for drive in context.drives:
        best = nearest(machine, drive, machine.gpus)
        if best.path is not None:
            by_class.setdefault(best.path, {}).setdefault(best.first, []).append(drive.name)
    for path, pairs in by_class.items():
        found = f"{path}: {', '.join(f'{runs(ends)} -> {runs(gpus)}' for gpus, ends in pairs.items())}"
        if path in ("PIX", "PXB"):
            yield Finding("way to a GPU", Status.OK, f"{found}, below one switch")
        elif machine.virtual:
            yield Finding("way to a GPU", Status.INFO, f"{found}, as the hypervisor shows it")
        elif path == "SYS":
            remedy = "use drives on the GPU's NUMA node (gdsstream topo); cuFile goes by a nearer GPU or bounce buffers"
            yield Finding("way to a GPU", Status.WARNING, f"{found}, between NUMA nodes", remedy)
        else:
            yield Finding(
                "way to a GPU", Status.INFO, f"{found}, through the processor's root complex, no switch shared"
            )
    for text in links_below_best(machine):
        if text.split(" ", 1)[0] in names or text.startswith("GPU"):
            found, _, remedy = text.partition(": ")
            yield Finding("PCIe link", Status.WARNING, found, remedy)


def proof(context: Context) -> Iterator[Finding]:
    """What cuFile's own counters said of this mount, if they were ever asked."""
    if not context.tree.live:
        yield Finding("proof", Status.INFO, "a recorded tree has none")
        return
    stored = context.proof
    if stored is None:
        found = "none stored for this mount, so backend auto does not choose cufile here"
        yield Finding("proof", Status.INFO, found, "gdsstream doctor PATH --prove reads through cuFile and counts")
        return
    when = time.strftime("%Y-%m-%d", time.localtime(stored.made_at))
    found = f"{stored.evidence}'s counters saw {stored.reads} direct reads on {when} ({stored.nbytes} bytes)"
    yield Finding("proof", Status.OK, found)


def path(context: Context) -> Iterator[Finding]:
    """What it leads to."""
    info = _info(context)
    if context.sample is None:
        why = "no file in it is tried" if context.tree.live else "in a recorded tree"
        yield Finding("path", Status.INFO, f"{info.path} ({why})")
    elif context.sample == info.path:
        yield Finding("path", Status.INFO, f"{info.path} ({os.path.getsize(info.path):,} bytes)")
    else:
        yield Finding("path", Status.INFO, f"{info.path}, tried with {os.path.relpath(context.sample, info.path)}")


def _info(context: Context) -> StorageInfo:
    assert context.storage is not None, "these checks run with a path only"
    return context.storage


def largest_file(folder: str, most: int = 10_000) -> str | None:
    """The largest regular file directly in a folder, among the first `most` entries; None without one."""
    best: tuple[int, str] | None = None
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= most:
                break
            if entry.is_file() and not re.match(r"\.", entry.name):
                best = max(best or (-1, ""), (entry.stat().st_size, entry.path))
    return best[1] if best else None


__all__ = [
    "device",
    "direct_io",
    "filesystem",
    "largest_file",
    "page_cache",
    "path",
    "proof",
    "raid",
    "way_to_gpu",
]
