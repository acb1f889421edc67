"""Context: all that the checks look at, gathered once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gdsstream.doctor.cufile_json import CuFileConfig
from gdsstream.doctor.software import Software
from gdsstream.machine import Drive, Machine, Tree
from gdsstream.proofs import GdsProof
from gdsstream.storage import StorageInfo


@dataclass(frozen=True, slots=True)
class Context:
    """What the checks look at.

    Attributes:
        machine: its tree is where the checks read further files.
        config: cuFile's.
        environ: the environment of the process that would read.
        software: None for a recorded tree.
        storage: what the path sits on; None without a path.
        sample: the file that is tried where the path is a folder; None where there is none, or for a recorded tree.
        proof: the stored proof for the path's mount.
    """

    machine: Machine
    config: CuFileConfig
    environ: Mapping[str, str]
    software: Software | None = None
    storage: StorageInfo | None = None
    sample: str | None = None
    proof: GdsProof | None = None

    @property
    def tree(self) -> Tree:
        return self.machine.tree

    @property
    def drives(self) -> list[Drive]:
        """The drives below the path; without a path, all NVMe drives."""
        if self.storage is None:
            return [drive for drive in self.machine.drives if drive.nvme]
        return [drive for drive in map(self.machine.drive, self.storage.disks) if drive]

    @property
    def kernel(self) -> tuple[int, int] | None:
        """The kernel's version."""
        found = re.match(r"(\d+)\.(\d+)", self.tree.read("/proc/sys/kernel/osrelease") or "")
        return (int(found[1]), int(found[2])) if found else None

    @property
    def x86(self) -> bool:
        """Whether the processor is x86, which needs more set up for reads between devices than others do."""
        said = self.tree.read("/proc/sys/kernel/arch") or (os.uname().machine if self.tree.live else "x86_64")
        return said == "x86_64"

    @property
    def local_nvme(self) -> bool:
        """Whether the path, if one was given, sits on NVMe drives of this machine."""
        drives = self.drives
        return bool(drives) and all(drive.nvme and drive.transport == "pcie" for drive in drives)


__all__ = ["Context"]
