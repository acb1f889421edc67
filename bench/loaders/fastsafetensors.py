"""fastsafetensors: all files in one call. Its tensors share ownership of the device buffer, so no clone is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Job, Loader, need

if TYPE_CHECKING:
    import torch


@dataclass
class Fastsafetensors(Loader):
    """`nogds` False uses cuFile, which needs nvidia-fs to be more than its POSIX mode."""

    nogds: bool = True
    max_threads: int = 16
    bounce_buffer_kb: int = 16 * 1024

    _library: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        self._library = need("fastsafetensors", "fastsafetensors")
        self._job = job

    def load(self) -> dict[str, torch.Tensor]:
        assert self._job is not None
        loader = self._library.SafeTensorsFileLoader(
            None,
            self._job.device,
            bbuf_size_kb=self.bounce_buffer_kb,
            max_threads=self.max_threads,
            nogds=self.nogds,
            # Binding the process to a NUMA node would bind the loaders after it too.
            set_numa=False,
        )
        try:
            loader.add_filenames({0: list(self._job.paths)})
            buffers = loader.copy_files_to_device()
            try:
                return {name: buffers.get_tensor(name) for name in loader.get_keys()}
            finally:
                buffers.close()
        finally:
            loader.close()

    def route(self) -> str | None:
        return f"bounce buffers, {self.max_threads} threads" if self.nogds else "cuFile, or its POSIX mode"

    def pinned_bytes(self) -> int | None:
        return None
