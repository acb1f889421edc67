"""Proofs that GPUDirect Storage works: mount by mount, kept between processes.

A request for GDS that quietly took another path looks just like one that did not, so that GDS is only chosen
automatically where cuFile's own counters once saw it at work. A proof holds for one machine and one mount, as long as
the same source is mounted there.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdsstream.errors import ReadError
from gdsstream.notices import say_once
from gdsstream.small_files import cache_folder, replace_text
from gdsstream.storage import find_mount, read_mounts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GdsProof:
    """That cuFile's own counters once saw reads from a mount go straight to a GPU.

    Attributes:
        mount_point, source: the mount; a proof holds only while the same source is mounted there.
        evidence: whose counters: "nvidia-fs" or "cufile".
        reads: direct reads that they counted.
        nbytes: bytes that were read for the proof.
        host: the machine; home directories, and with them this file, are often shared among many.
        made_at: seconds since the epoch.
    """

    mount_point: str
    source: str
    evidence: str
    reads: int
    nbytes: int
    host: str = field(default_factory=lambda: os.uname().nodename)
    made_at: float = field(default_factory=time.time)

    def _key(self) -> tuple[str, str, str]:
        return self.host, self.mount_point, self.source


def proofs_path() -> Path:
    """Where proofs are kept: $XDG_CACHE_HOME (else ~/.cache)/gdsstream/gds-proofs.json."""
    return cache_folder() / "gds-proofs.json"


def gds_proof(mount_point: str, *, procfs: str = "/proc") -> GdsProof | None:
    """The stored proof for what is mounted on `mount_point` of this machine now, if there is one."""
    sources = [mount.source for mount in read_mounts(procfs) if mount.point == mount_point]
    return _match(_load_proofs(), mount_point, sources[-1]) if sources else None


def proven(paths: Iterable[str | os.PathLike[str]], *, procfs: str = "/proc") -> GdsProof | None:
    """The proof for the mount of the first of `paths`, if every one of them lies on a mount that has one.

    None without paths, and for one that cannot be reached: whoever reads it says why. Without any stored proof, which
    is the common case, no path is looked at.
    """
    proofs = _load_proofs()
    first: GdsProof | None = None
    # A checkpoint's shards share a folder, so that one look at the mounts does for them all. The device alone would
    # not do: a bind mount has its filesystem's, and a proof of its own or none.
    found: dict[tuple[int, str], GdsProof | None] = {}
    for path in paths if proofs else ():
        real = os.path.realpath(path)
        try:
            device = os.stat(real).st_dev
        except OSError:
            return None
        place = (device, os.path.dirname(real))
        if place not in found:
            mount = find_mount(real, f"{os.major(device)}:{os.minor(device)}", procfs=procfs)
            found[place] = _match(proofs, mount.point, mount.source) if mount else None
        if found[place] is None:
            return None
        first = first or found[place]
    return first


def store_gds_proof(proof: GdsProof) -> Path:
    """Keep `proof`, in place of an older one for the same mount; readers see the old file or the new one.

    Raises:
        ReadError: the cache directory cannot be written.
    """
    path = proofs_path()
    kept = [other for other in _load_proofs() if other._key() != proof._key()]
    content = json.dumps({"version": 1, "proofs": [asdict(one) for one in (*kept, proof)]}, indent=1) + "\n"
    try:
        replace_text(path, content)
    except OSError as error:
        raise ReadError(
            f"{path} cannot be written: {error}; set XDG_CACHE_HOME to a writable one", error.errno
        ) from error
    return path


def _match(proofs: list[GdsProof], mount_point: str, source: str) -> GdsProof | None:
    key = (os.uname().nodename, mount_point, source)
    return next((proof for proof in proofs if proof._key() == key), None)


def _load_proofs() -> list[GdsProof]:
    path = proofs_path()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [_parse_proof(entry) for entry in data["proofs"]]
    except OSError as error:
        reason = "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else str(error)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"not a list of proofs: {error!r}"
    if reason:
        say_once(log, f"{path} is ignored ({reason}); remove it", about=str(path))
    return []


def _parse_proof(entry: dict[str, Any]) -> GdsProof:
    proof = GdsProof(**entry)
    for name, kind in (("mount_point", str), ("source", str), ("evidence", str), ("host", str), ("reads", int)):
        if not isinstance(getattr(proof, name), kind):
            raise TypeError(f"{name} is {getattr(proof, name)!r}")
    if proof.reads <= 0:
        raise ValueError(f"reads is {proof.reads}, which proves nothing")
    return proof


__all__ = ["GdsProof", "gds_proof", "proofs_path", "proven", "store_gds_proof"]
