"""For loaders that cannot read the shards: where they write the records in their own format.

A converted copy lies in a folder beside the shards, and is removed when the loader is closed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.loaders.base import EpochRequest, Job, Loader, Unavailable

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
    shards = request_of(job).shards
    for shard in range(len(shards.paths)):
        yield from shards.records(shard)


def files_in(directory: Path) -> list[str]:
    """Paths of all files in a folder, as cache.py wants them."""
    return sorted(str(path) for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


@dataclass
class Converted(Loader):
    """A loader of a converted copy: `convert` makes `_directory`, and names what is read of it in `_files`."""

    _directory: Path | None = field(default=None, init=False, repr=False)
    _files: list[str] = field(default_factory=list, init=False, repr=False)

    def paths(self, job: Job) -> list[str]:
        return self._files

    def close(self) -> None:
        super().close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self._files = None, []
