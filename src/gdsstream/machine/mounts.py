"""What is mounted from which drive or set, and what a path of a tree sits on."""

from __future__ import annotations

import os

from gdsstream.machine.tree import Tree
from gdsstream.storage import StorageInfo, describe, describe_recorded, read_mounts


def mounted(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Mount points by block device: by "major:minor", and by the name at the end of the source ("nvme0n1p1")."""
    tree.read("/proc/self/mountinfo")  # what cannot be read is a failure of the tree
    points: dict[str, list[str]] = {}
    for mount in read_mounts(tree.procfs):
        keys = {mount.device}
        if mount.source.startswith("/dev/"):
            keys.add(os.path.basename(mount.source))
        for key in keys:
            points.setdefault(key, []).append(mount.point)
    return {key: tuple(dict.fromkeys(found)) for key, found in points.items()}


def of_path(tree: Tree, path: str | os.PathLike[str]) -> StorageInfo:
    """What `path` sits on: asked on this machine, worked out from its name in a recorded tree.

    Raises ReadError for a path of this machine that cannot be reached.
    """
    if tree.live:
        return describe(path)
    return describe_recorded(path, sysfs=tree.sysfs, procfs=tree.procfs)


__all__ = ["mounted", "of_path"]
