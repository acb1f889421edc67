"""For loaders that cannot read the shards: where they write the records in their own format, and how they deliver.

A converted copy lies in a folder beside the shards, and is removed when the loader is closed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.loaders.base import EpochRequest, Job, Unavailable

if TYPE_CHECKING:
    import torch

#: Beside the records themselves, for headers and indexes; a tar file pads every record.
_OVERHEAD = 1.05
_RECORD_OVERHEAD = 2048


def request_of(job: Job) -> EpochRequest:
    assert job.epoch is not None
    return job.epoch


def folder(job: Job, name: str) -> Path:
    """A new folder for a copy of the records. Raises Unavailable where there is no room for one."""
    request = request_of(job)
    needed = int(job.data_bytes * _OVERHEAD) + _RECORD_OVERHEAD * request.shards.num_records
    free = shutil.disk_usage(request.directory).free
    if needed > free:
        raise Unavailable(
            f"its own format needs {needed / 1e9:.2f} GB beside the shards, and {request.directory} has room for "
            f"{free / 1e9:.2f} GB"
        )
    found = request.directory / name
    found.mkdir()
    return found


def rows(job: Job) -> Iterator[npt.NDArray[np.uint8]]:
    """Every record, in the order of the numbers."""
    for table in request_of(job).shards.tables():
        yield from table


def files_in(directory: Path) -> list[str]:
    """Paths of all files in a folder, as cache.py wants them."""
    return sorted(str(path) for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def remove(directory: Path | None) -> None:
    """Remove a folder, where there is one."""
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def to_device(batches: Iterable[torch.Tensor], job: Job) -> Iterator[torch.Tensor]:
    """Batches of host memory on the device, copied on the current stream, as a training loop does."""
    for batch in batches:
        yield batch.to(job.device, non_blocking=True)
