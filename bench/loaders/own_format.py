"""For loaders that cannot read the shards: where they write the records in their own format.

A converted copy lies in a folder beside the shards, and is removed when the loader is closed.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.loaders.base import EpochRequest, Job, Loader, Unavailable

#: Beside the records themselves, for headers and indexes; a tar file pads every record.
_OVERHEAD = 1.05
_RECORD_OVERHEAD = 2048

#: Of a tar file: its unit, which a header takes one of, and how the name of a record's member ends.
BLOCK, MEMBER = tarfile.BLOCKSIZE, "bin"


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


def write_tars(job: Job, directory: Path) -> list[str]:
    """A tar file of each shard, as WebDataset has them: a member for each record, called by its number. Returns their
    paths."""
    shards = request_of(job).shards
    paths = []
    number = 0
    for shard in range(len(shards.paths)):
        paths.append(str(directory / f"records-{shard:05d}.tar"))
        with tarfile.open(paths[-1], "x", format=tarfile.USTAR_FORMAT) as tar:
            for row in shards.records(shard):
                member = tarfile.TarInfo(member_name(number))
                member.size = len(row)
                tar.addfile(member, io.BytesIO(row.data))
                number += 1
    return paths


def member_name(number: int) -> str:
    return f"{number:012d}.{MEMBER}"


def tar_bytes(record_bytes: int) -> int:
    """What a record of this size takes of a tar file: the header and whole blocks."""
    return BLOCK - record_bytes // -BLOCK * BLOCK


def held(job: Job, records: int, nbytes: int) -> int:
    """How many records a buffer for shuffling holds: so many, or as many as `nbytes` have room for; two at least."""
    return max(2, min(records, nbytes // request_of(job).shards.record_bytes))


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
