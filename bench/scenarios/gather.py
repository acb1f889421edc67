"""Verb `gather`: many small records from random places, as a data loader reads samples.

Records start at multiples of their length, so that they can also be read with O_DIRECT; the same records in the same
order are used for every loader and every round.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.files import BenchFiles
from bench.loaders.base import GatherRequest, Job, Loader
from bench.scenarios.base import VerificationError, Workload

if TYPE_CHECKING:
    import torch


class Gather(Workload):
    """Records verified against an independent read of the files through a mapping."""

    verb = "gather"
    unit = "records"

    def __init__(self, files: BenchFiles, device: str, records: int, record_bytes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        slots = np.array([os.path.getsize(path) // record_bytes for path in files.paths], dtype=np.int64)
        file_index = random.integers(0, len(slots), records).astype(np.int32)
        offsets = (random.random(records) * slots[file_index]).astype(np.int64) * record_bytes
        self.request = GatherRequest(file_index, offsets, record_bytes)
        self.job = Job(files.paths, files.data_bytes, device, self.request)
        self.units = records

    @property
    def sample_bytes(self) -> int:
        return self.request.total_bytes

    def least_device_bytes(self) -> int:
        places = (self.request.file_index.astype(np.int64) << 48) + self.request.offsets
        return len(np.unique(places)) * self.request.length

    def run(self, loader: Loader) -> torch.Tensor:
        return loader.gather()

    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        return [delivered]

    def verify(self, delivered: Any) -> None:
        import torch

        request = self.request
        shape = (len(request.offsets), request.length)
        if tuple(delivered.shape) != shape or delivered.dtype != torch.uint8:
            raise VerificationError(f"got {delivered.dtype} {tuple(delivered.shape)}, expected torch.uint8 {shape}")
        if delivered.device.type != torch.device(self.job.device).type:
            raise VerificationError(f"the records are on {delivered.device}, not on {self.job.device}")
        records = delivered.cpu().numpy()
        for index, path in enumerate(self.job.paths):
            rows = np.flatnonzero(request.file_index == index)
            data = np.memmap(path, dtype=np.uint8, mode="r")
            table = data[: len(data) // request.length * request.length].reshape(-1, request.length)
            wrong = np.flatnonzero((records[rows] != table[request.offsets[rows] // request.length]).any(axis=1))
            if len(wrong):
                row = int(rows[wrong[0]])
                raise VerificationError(f"record {row} differs (file {path}, offset {int(request.offsets[row])})")
