"""verify_checkpoint: every byte of a packed checkpoint, compared with the checksums beside it.

It goes by what the sidecar lists: a file that is missing, cut off or not readable is one difference, and the others are
read all the same. Bytes are read by the engine as a load reads them, and looked at on the device: memory is bounded,
and what was found is independent of the route.

What is in the page cache is read from there, so that a verify right after a copy says nothing about the disk;
`direct_io=True` reads from the disk where the filesystem can.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gdsstream.checksum import checksum, finish, partial_sums
from gdsstream.config import StreamConfig
from gdsstream.devices import default_device, parse_device
from gdsstream.engine import merge
from gdsstream.errors import CheckpointError, ReadError
from gdsstream.header import CheckpointFile, TensorSpec, read_file
from gdsstream.load import shared_engine
from gdsstream.portions import Portion, Source, read_portions
from gdsstream.regular_files import PathLike, status_of
from gdsstream.sidecar import SIDECAR_NAME, Difference, FileRecord, difference, hex_of, read_sidecar

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what differs.

    Attributes:
        path: the directory or the file.
        num_files, num_tensors, nbytes: how much the sidecar lists; of it, `verified_bytes` were read and looked at.
        seconds: wall time.
        route: what moved the bytes, as the engine reports it.
        differences: empty where all is as it was recorded; by file, then by offset.
    """

    path: str
    num_files: int
    num_tensors: int
    nbytes: int
    verified_bytes: int
    seconds: float
    route: str
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes looked at in a second."""
        return self.verified_bytes / self.seconds / 1e9 if self.seconds else 0.0


def verify_checkpoint(
    path: PathLike,
    *,
    device: torch.device | str | int | None = None,
    progress: Progress | None = None,
    config: StreamConfig | None = None,
    **knobs: Any,
) -> VerifyReport:
    """Compare a checkpoint with the checksums that `pack` wrote beside it.

    Args:
        path: a packed directory, or one safetensors file in it.
        device: where checksums are computed; None is a GPU where there is one.
        progress: called with the bytes that were looked at and the bytes in all, as they grow.
        config, **knobs: see StreamConfig.

    Returns:
        The report; what differs is in it, and no error.

    Raises CheckpointNotFoundError where path or sidecar are missing, CheckpointError for a sidecar that is damaged or
    lacks the file, ConfigError, BackendUnavailableError, MemoryBudgetError.
    """
    started = time.perf_counter()
    target = parse_device(default_device() if device is None else device)
    where = os.path.abspath(os.fsdecode(path))
    engine = shared_engine(target, merge(config, knobs, path=where, device=target))
    directory, records = _records(where)
    run = _Run(directory, records, progress)
    if directory == where:
        run.find_unlisted()
    for portion in read_portions(engine, run.sources()):
        run.look_at(portion)
    return VerifyReport(
        path=where,
        num_files=len(records),
        num_tensors=sum(len(record.tensors) for record in records.values()),
        nbytes=run.nbytes,
        verified_bytes=run.verified_bytes,
        seconds=time.perf_counter() - started,
        route=engine.route,
        differences=tuple(sorted(run.differences, key=lambda each: (each.file, each.offset or 0))),
    )


def _records(path: str) -> tuple[str, dict[str, FileRecord]]:
    """The directory, and what is recorded of its files, or of the one file that is asked for."""
    if stat.S_ISDIR(status_of(path).st_mode):
        return path, read_sidecar(path)
    directory, name = os.path.split(path)
    records = read_sidecar(directory)
    if name not in records:
        raise CheckpointError(
            f"{path} is not in the {SIDECAR_NAME} beside it; name one of {', '.join(sorted(records))}"
        )
    return directory, {name: records[name]}


class _Run:
    """One verification: what was found so far."""

    def __init__(self, directory: str, records: dict[str, FileRecord], progress: Progress | None) -> None:
        self._directory = directory
        self._records = records
        self._progress = progress
        # By path and name: the sums of tensors that are not complete yet; None for those that cannot be.
        self._sums: dict[tuple[str, str], int | None] = {}
        self.nbytes = sum(each.nbytes for record in records.values() for each in record.tensors.values())
        self.verified_bytes = 0
        self.differences: list[Difference] = []

    def find_unlisted(self) -> None:
        """Files that a load may read, and of which nothing is known."""
        for name in os.listdir(self._directory):
            if name.endswith(".safetensors") and name not in self._records and not name.startswith("."):
                self._file_differs(os.path.join(self._directory, name), f"is not in {SIDECAR_NAME}")

    def sources(self) -> Iterator[Source]:
        """The files, with those of their tensors that can be compared."""
        for name, record in sorted(self._records.items()):
            path = os.path.join(self._directory, name)
            try:
                file, specs = read_file(path, 0)
                header = _header_checksum(file)
            except (CheckpointError, ReadError) as error:
                self._file_differs(path, str(error).removeprefix(path).lstrip(": "))
                continue
            found = [difference(path, spec, record.tensors.get(spec.name), None) for spec in specs]
            self.differences += [each for each in found if each is not None]
            for lacking in sorted(record.tensors.keys() - {spec.name for spec in specs}):
                self.differences.append(Difference(path, lacking, None, None, "is not in the file"))
            if header != record.header:
                self._file_differs(
                    path,
                    f"the header has the checksum {hex_of(header)}, not {hex_of(record.header)}: names, dtypes, "
                    "shapes, order or metadata changed",
                )
            yield Source([file], [spec for spec, wrong in zip(specs, found, strict=True) if wrong is None])

    def look_at(self, portion: Portion) -> None:
        """Compare the tensors that end in a portion; remember what the others add."""
        path = portion.source.files[0].path
        if portion.error is not None:
            for spec, _ in portion.parts:
                if self._sums.setdefault((path, spec.name), 0) is not None:
                    reason = f"({spec.nbytes} bytes) cannot be read: {portion.error}"
                    self.differences.append(Difference(path, spec.name, spec.offset, spec.nbytes, reason))
                    self._sums[path, spec.name] = None
            return
        sums = torch.stack(partial_sums([piece for _, piece in portion.parts])).tolist()
        for (spec, piece), added in zip(portion.parts, sums, strict=True):
            before = self._sums.setdefault((path, spec.name), 0)
            if before is None:
                continue
            self._sums[path, spec.name] = before + added
            if piece.start + piece.data.numel() == spec.nbytes:
                self._compare(path, spec, finish(spec.nbytes, [self._sums.pop((path, spec.name)) or 0]))
        if self._progress is not None:
            self._progress(self.verified_bytes, self.nbytes)

    def _compare(self, path: str, spec: TensorSpec, found: int) -> None:
        record = self._records[os.path.basename(path)].tensors[spec.name]
        wrong = difference(path, spec, record, found)
        if wrong is not None:
            self.differences.append(wrong)
        self.verified_bytes += spec.nbytes

    def _file_differs(self, path: str, reason: str) -> None:
        self.differences.append(Difference(path, None, None, None, reason))


def _header_checksum(file: CheckpointFile) -> int:
    """Of all that comes before the data. Raises ReadError."""
    try:
        with open(file.path, "rb") as opened:
            raw = opened.read(file.data_start)
    except OSError as error:
        raise ReadError(f"{file.path}: its header cannot be read again: {error.strerror}", error.errno) from error
    return checksum(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


__all__ = ["Progress", "VerifyReport", "verify_checkpoint"]
