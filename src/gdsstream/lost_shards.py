"""on_error="skip": shards that cannot be read any more, and batches without their records.

A batch that fails is read again without the files that are to blame: those that are not what their stamps say, and
where there are none, those whose records fail when they are read alone. Later batches of the epoch leave them out from
the start; the next epoch tries them again. Nothing is left out uncounted, or for another reason than its own shard.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gdsstream.batch_reader import BatchReader, Flight
from gdsstream.errors import ReadError
from gdsstream.open_files import OpenFiles
from gdsstream.records import Located, RecordTable
from gdsstream.regular_files import FileStamp

log = logging.getLogger(__name__)

# What says nothing about a shard: skipping it would lose data for want of a descriptor or of memory.
_NOT_THE_SHARD = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_ATTEMPTS = 3


class LostShards:
    """The shards of `table` that are lost, and what is done without them. `said` are paths whose loss was logged."""

    def __init__(self, table: RecordTable, files: OpenFiles, reader: BatchReader, said: set[str]) -> None:
        self._table = table
        self._files = files
        self._reader = reader
        self._said = said
        self._lost: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._epoch = -1

    def leave_out(self, flight: Flight) -> None:
        """Take the records of lost shards out of a batch that is to be read, and tell it which those are."""
        if flight.work.epoch > self._epoch:
            self._epoch, self._lost = flight.work.epoch, self._lost[:0]
        if not len(self._lost):
            return
        files = flight.work.located[0].file
        gone = np.isin(files, self._lost)
        if not gone.any():
            return
        numbers, counts = np.unique(files[gone], return_counts=True)
        paths = [self._table.paths[number] for number in numbers.tolist()]
        flight.skipped = dict(zip(paths, counts.tolist(), strict=True))
        flight.located = _chosen(flight.work.located, ~gone)

    def salvage(self, flight: Flight, error: ReadError) -> None:
        """Read a batch that failed with `error` again, without what cannot be read. Raises what cannot be helped."""
        for _ in range(_ATTEMPTS):
            self._reader.abandon(flight)
            if error.errno in _NOT_THE_SHARD:
                raise error
            self._lose(flight, error)
            self.leave_out(flight)
            if flight.empty:
                return
            try:
                self._reader.lay_out(flight)
                self._reader.submit(flight)
                self._reader.wait(flight)
            except ReadError as again:
                error = again
            else:
                return
        raise error

    def _lose(self, flight: Flight, error: ReadError) -> None:
        numbers = np.unique(flight.located[0].file).tolist()
        lost = [number for number in numbers if not self._unchanged(number)]
        if not lost:
            lost = [number for number in numbers if not self._readable(flight, number)]
        self._files.forget(lost)
        self._lost = np.union1d(self._lost, np.array(lost, dtype=np.int32))
        for number in lost:
            path = self._table.paths[number]
            if path not in self._said:
                self._said.add(path)
                # As text: a record that kept the error would keep what its traceback does.
                log.warning(
                    '%s cannot be read any more, its records are left out (on_error="skip"): %s', path, str(error)
                )

    def _unchanged(self, number: int) -> bool:
        try:
            return FileStamp.of(self._table.paths[number]) == self._table.stamps[number]
        except OSError:
            return False

    def _readable(self, flight: Flight, number: int) -> bool:
        """Read a file's records of a batch alone, into memory of their own."""
        alone = Flight(flight.work, _chosen(flight.located, flight.located[0].file == number))
        self._reader.lay_out(alone)
        try:
            self._reader.submit(alone, borrow=False)
            self._reader.wait(alone)
        except ReadError:
            return False
        finally:
            self._reader.abandon(alone)
        return True


def _chosen(located: Sequence[Located], which: NDArray[np.bool_]) -> tuple[Located, ...]:
    return tuple(Located(where.file[which], where.offset[which], where.nbytes[which]) for where in located)


__all__ = ["LostShards"]
