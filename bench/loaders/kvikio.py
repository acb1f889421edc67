"""kvikio: one destination a file, all files read at once.

Where nvidia-fs is missing kvikio uses its POSIX path through pinned bounce buffers; `route` says so, and such a row is
no measurement of GPUDirect Storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders import headers
from bench.loaders.base import Job, Loader, need, need_cuda

if TYPE_CHECKING:
    import torch


@dataclass
class Kvikio(Loader):
    """`num_threads` of kvikio's pool and `task_size`, the bytes that one thread reads at a time."""

    num_threads: int = 12
    task_size: int = 8 << 20

    verbs: ClassVar[frozenset[str]] = frozenset({"read", "gather"})

    _library: Any = field(default=None, init=False, repr=False)
    _defaults: Any = field(default=None, init=False, repr=False)
    _found: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        need_cuda(job, "kvikio (every read of it needs libcuda)")

    def prepare(self, job: Job) -> None:
        self._library = need("kvikio", "kvikio-cu13")
        self._defaults = need("kvikio.defaults", "kvikio-cu13")
        self._job = job

    def arm(self) -> None:
        import torch

        # The pool is the process's: two rows with different settings would otherwise share the last one's, and so
        # would gdsstream's own engine over kvikio.
        assert self._job is not None
        wanted = {"num_threads": self.num_threads, "task_size": self.task_size}
        self._found = {key: self._defaults.get(key) for key in wanted}
        if self._found == wanted:
            return
        self._defaults.set(wanted)
        # New threads make their streams and buffers in their first read, which is not to be the measured one.
        header = headers.read(self._job.paths[0])
        count = min(header.data_bytes, self.num_threads * self.task_size)
        scratch = torch.empty(count, dtype=torch.uint8, device=self._job.device)
        with self._library.CuFile(header.path, "r") as file:
            file.pread(scratch, count, header.data_start, self.task_size).get()

    def disarm(self) -> None:
        if self._found:
            self._defaults.set(self._found)
            self._found = {}

    def load(self) -> dict[str, torch.Tensor]:
        import torch

        assert self._job is not None
        tensors: dict[str, torch.Tensor] = {}
        pending = []
        for path in self._job.paths:
            header = headers.read(path)
            data = torch.empty(header.data_bytes, dtype=torch.uint8, device=self._job.device)
            file = self._library.CuFile(path, "r")
            future = file.pread(data, header.data_bytes, header.data_start, self.task_size)
            pending.append((file, future, header, data))
        for file, future, header, data in pending:
            count = future.get()
            file.close()
            if count != header.data_bytes:
                raise OSError(f"{header.path}: kvikio read {count} of {header.data_bytes} bytes")
            tensors.update(headers.views(header, data))
        return tensors

    def gather(self) -> torch.Tensor:
        import torch

        assert self._job is not None
        assert self._job.request is not None
        request = self._job.request
        records = torch.empty((len(request.offsets), request.length), dtype=torch.uint8, device=self._job.device)
        files = [self._library.CuFile(path, "r") for path in self._job.paths]
        rows = zip(request.file_index.tolist(), request.offsets.tolist(), records, strict=True)
        futures = [files[file].pread(row, request.length, offset) for file, offset, row in rows]
        short = sum(future.get() != request.length for future in futures)
        for file in files:
            file.close()
        if short:
            raise OSError(f"kvikio read {short} of {len(futures)} records short")
        return records

    def route(self) -> str | None:
        properties = need("kvikio.cufile_driver", "kvikio-cu13")
        try:
            available = bool(properties.get("is_gds_available"))
        except Exception:
            available = False
        if self._defaults.is_compat_mode_preferred() or not available:
            return "kvikio's POSIX path, pinned bounce buffers: not GDS"
        return "cuFile; whether it is GDS only its own counters prove"
