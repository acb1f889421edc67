"""fio itself, where it is installed: what its own kernel AIO engine reads of the same file with the same ios.

The seconds of a sample are fio's: those that its rate takes for what the row moves. A process that starts and lays out
its jobs would else be a part of every sample, which is not what other documents call fio's rate. fio drops what it
reads, so that no byte can be compared: the row says that it is not checked. Its CPU time is not this process's, either.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.config_base import BenchError
from bench.loaders.base import Job, Unavailable
from bench.loaders.transfer_route import Route

if TYPE_CHECKING:
    from bench.transfer_ops import Ops

_LIMIT_S = 300.0


@dataclass
class Fio(Route):
    """`threads` jobs of `depth` ios each, every job in a stretch of its own of one file."""

    on_host: ClassVar[bool] = True
    delivers_bytes: ClassVar[bool] = False

    _version: str = field(default="", init=False, repr=False)
    _seconds: float | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        super().check(job)
        assert job.transfer is not None
        if shutil.which("fio") is None:
            raise Unavailable("fio is not installed: install the package fio of this system")
        if job.transfer.op != "read" or len(job.paths) > 1:
            raise Unavailable("this row is fio's sequential read of one file: scenario.ops=[read] storage.files=1")

    def start(self) -> None:
        if not self.open_files(direct=True).direct:
            raise Unavailable("fio reads past the page cache here, and O_DIRECT is refused")
        self._version = _run(["fio", "--version"]).strip()

    def transfer(self, ops: Ops) -> None:
        size = self.io_bytes or self.request.io_bytes
        share = ops.total_bytes // self.num_threads // size * size
        if not share:
            raise BenchError(
                f"{ops.total_bytes} bytes are less than an io of {size} for each of {self.num_threads} jobs"
            )
        command = [
            "fio", "--name=read", f"--filename={self.job.paths[0]}", "--rw=read", f"--bs={size}", "--direct=1",
            "--ioengine=libaio", f"--iodepth={self.in_flight}", f"--numjobs={self.num_threads}", "--thread",
            f"--size={share}", f"--offset_increment={share}", "--group_reporting", "--readonly", "--invalidate=0",
            "--output-format=json",
        ]  # fmt: skip
        said = _run(command)
        found = json.loads(said[said.index("{") :])["jobs"][0]
        rate = found["read"]["bw_bytes"]
        if found["error"] or not rate or found["read"]["io_bytes"] != share * self.num_threads:
            raise BenchError(
                f"fio read {found['read']['io_bytes']} of {share * self.num_threads} bytes: {found['error']}"
            )
        self._seconds = ops.total_bytes / rate

    @property
    def own_seconds(self) -> float | None:
        return self._seconds

    def route(self) -> str:
        return self.said(f"{self._version}, {self.num_threads} jobs x iodepth {self.in_flight}, by fio's own clock")

    def details(self) -> dict[str, Any]:
        return {**super().details(), "latency_of": None, "registered": None}


def _run(command: list[str]) -> str:
    made = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if made.returncode != 0:
        raise BenchError(f"fio ended with exit status {made.returncode}: {(made.stderr or made.stdout).strip()[-200:]}")
    return made.stdout
