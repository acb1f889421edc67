"""torch.cuda.gds: a GdsFile each, loaded whole into a storage on the GPU, one after the other.

The header is loaded with the data, so that file and memory are read from their beginnings, which cuFile needs for the
way past the CPU; the tensors are views behind it. Calls keep the interpreter's lock, so that threads would gain
nothing. Not every torch says that a read was short, so the end of the memory is cleared before: it may hold the same
bytes from the load before. Whether cuFile works here, be it in its compatibility mode, is found by loading.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.loaders import headers
from bench.loaders.base import Job, Loader, Unavailable, need, need_cuda

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia-fs")
_PROBE_BYTES = 4096
_CLEARED_BYTES = 64


@dataclass
class TorchGds(Loader):
    """`register_buffers` registers each new storage with cuFile, and takes that back, within every load."""

    register_buffers: bool = False

    _gds: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        need_cuda(job, "torch.cuda.gds")

    def prepare(self, job: Job) -> None:
        self._gds = need("torch.cuda.gds", "torch")
        self._job = job
        path = job.paths[0]
        try:
            # GdsFile always opens so, and leaves a warning behind where it cannot.
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError as error:
            raise Unavailable(f"torch.cuda.gds needs O_DIRECT, which {path} refuses: {error.strerror}") from error
        self._probe(path)

    def _probe(self, path: str) -> None:
        """Load the beginning of a file. Raises Unavailable with what torch or cuFile said, or where it is wrong."""
        import torch

        assert self._job is not None
        scratch = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self._job.device)
        try:
            self._load(path, scratch)
        except RuntimeError as error:
            raise Unavailable(f"torch.cuda.gds cannot load here: {str(error).partition(chr(10))[0]}") from error
        with open(path, "rb") as file:
            wanted = file.read(_PROBE_BYTES)
        if bytes(scratch.cpu().numpy()[: len(wanted)]) != wanted:
            raise Unavailable("torch.cuda.gds reported no error, and loaded other bytes than the file has")

    def load(self) -> dict[str, torch.Tensor]:
        import torch

        assert self._job is not None
        tensors: dict[str, torch.Tensor] = {}
        for path in self._job.paths:
            header = headers.read(path)
            data = torch.empty(header.data_start + header.data_bytes, dtype=torch.uint8, device=self._job.device)
            self._load(path, data)
            tensors.update(headers.views(header, data[header.data_start :]))
        return tensors

    def _load(self, path: str, data: torch.Tensor) -> None:
        import torch

        assert self._job is not None
        data[-_CLEARED_BYTES:].zero_()
        if self._job.cuda:
            torch.cuda.current_stream(self._job.device).synchronize()  # cuFile knows no streams here
        storage = data.untyped_storage()
        file = self._gds.GdsFile(path, os.O_RDONLY)  # closed when it is dropped
        if not self.register_buffers:
            file.load_storage(storage)
            return
        self._gds.gds_register_buffer(storage)
        try:
            file.load_storage(storage)
        finally:
            self._gds.gds_deregister_buffer(storage)

    def route(self) -> str | None:
        registered = ", buffers registered in every load" if self.register_buffers else ""
        if _DRIVER.exists():
            return f"cuFile; whether it is GDS only its own counters prove{registered}"
        return f"cuFile without nvidia-fs, most likely its compatibility mode: not shown to be GDS{registered}"
