"""The test dataset: shards of records, known byte for byte.

Each shard is a safetensors file of one tensor, `data`, uint8 [records, record_bytes]; records of different sizes are in
two (ragged.py). A record begins with its number
as a little-endian 64-bit integer and goes on with the bytes of files.py's pool from a place of its own, so that what a
shuffled batch has to hold follows from the batch alone: the numbers say which records they are, and each has to come
once in an epoch. The first record begins at a multiple of 4 KiB in the file, for reads past the page cache.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

#: Of a record's number, at its beginning.
NUMBER_BYTES = 8
#: Where the first tensor of a shard begins.
DATA_OFFSET = 4096
FIELD = "data"

STEP = 1_000_003  # from one record's place in the pool to the next's; no divisor of the pool's length
_PIECE = 64 << 10  # columns of records that are made at a time
_BLOCK = 64 << 20  # bytes that are made at a time


@dataclass(frozen=True, slots=True)
class RecordShards:
    """The shards, and how many records each holds. Record numbers go through the shards in order.

    `sizes` are the bytes of each record where they differ, int64 [records]; `record_bytes` is their mean then, rounded.
    """

    directory: Path
    paths: tuple[str, ...]
    rows: tuple[int, ...]
    record_bytes: int
    sizes: npt.NDArray[np.int64] | None = None

    @property
    def num_records(self) -> int:
        return sum(self.rows)

    @property
    def data_bytes(self) -> int:
        return self.num_records * self.record_bytes if self.sizes is None else int(self.sizes.sum())

    def records(self, shard: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Each record of a shard, out of a mapping of the file."""
        data = np.memmap(self.paths[shard], dtype=np.uint8, mode="c")
        places = Places(self)
        first = sum(self.rows[:shard])
        for number in range(first, first + self.rows[shard]):
            _, offset, size = places[number]
            yield data[offset : offset + size]

    def tables(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Each shard's records as [records, record_bytes], a mapping of the file, where they are of one size."""
        for path, count in zip(self.paths, self.rows, strict=True):
            shape = (count, self.record_bytes)
            yield np.memmap(path, dtype=np.uint8, mode="c", offset=DATA_OFFSET, shape=shape)


class Places:
    """Where each record lies."""

    def __init__(self, shards: RecordShards) -> None:
        self._starts = np.concatenate(([0], np.cumsum(shards.rows))).tolist()
        self._record_bytes = shards.record_bytes
        #: Of every record's beginning, as if the shards' records lay end to end.
        self._bytes = None if shards.sizes is None else np.concatenate(([0], np.cumsum(shards.sizes))).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> tuple[int, int, int]:
        """Shard, byte offset in its file, and bytes."""
        shard = bisect_right(self._starts, number) - 1
        first = self._starts[shard]
        if self._bytes is None:
            return shard, DATA_OFFSET + (number - first) * self._record_bytes, self._record_bytes
        begin, end = self._bytes[number], self._bytes[number + 1]
        # The offsets come before the values: one more than the shard has records.
        values = DATA_OFFSET + NUMBER_BYTES * (self._starts[shard + 1] - first + 1)
        return shard, values + begin - self._bytes[first], end - begin


def write(
    directory: Path, pool: npt.NDArray[np.uint8], num_records: int, record_bytes: int, shards: int
) -> RecordShards:
    """Write `num_records` records into at most `shards` files in `directory`, which is made."""
    contents = RecordContents(pool, record_bytes, "cpu")
    paths, rows = write_files(directory, num_records, shards, lambda *part: _write_shard(contents, *part))
    return RecordShards(directory, paths, rows, record_bytes)


def write_files(
    directory: Path, num_records: int, shards: int, write_one: Callable[[str, int, int], None]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Make `directory`, and in it at most `shards` files, each by `write_one` of its path and its records' numbers from
    the first to one beyond the last. Returns the paths, and how many records each holds."""
    directory.mkdir()
    count = min(shards, num_records)
    bounds = [num_records * i // count for i in range(count + 1)]
    paths = tuple(str(directory / f"records-{i:05d}.safetensors") for i in range(count))
    with ThreadPoolExecutor(max_workers=min(count, os.cpu_count() or 1, 8)) as threads:
        jobs = [threads.submit(write_one, paths[i], bounds[i], bounds[i + 1]) for i in range(count)]
        for job in jobs:
            job.result()
    return paths, tuple(bounds[i + 1] - bounds[i] for i in range(count))


def header(entries: Mapping[str, Mapping[str, object]]) -> bytes:
    """Of a shard, in safetensors' format, of DATA_OFFSET bytes."""
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(DATA_OFFSET - 8)
    return struct.pack("<Q", len(text)) + text


def _write_shard(contents: RecordContents, path: str, first: int, last: int) -> None:
    import torch

    size = (last - first) * contents.record_bytes
    entry = {"dtype": "U8", "shape": [last - first, contents.record_bytes], "data_offsets": [0, size]}
    with open(path, "xb", buffering=0) as file:
        file.write(header({FIELD: entry}))
        for rows, begin, expected in contents.pieces(torch.arange(first, last)):
            at = DATA_OFFSET + rows.start * contents.record_bytes + begin
            data = expected.numpy()
            if data.shape[1] == contents.record_bytes:
                write_all(file.fileno(), data.data.cast("B"), at)
                continue
            for row in range(len(data)):
                write_all(file.fileno(), data[row].data, at + row * contents.record_bytes)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`, however often the system has to be asked."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


class RecordContents:
    """What records hold, made on `device`."""

    def __init__(self, pool: npt.NDArray[np.uint8], record_bytes: int, device: str) -> None:
        import torch

        self.record_bytes = record_bytes
        self._length = len(pool)
        self._width = min(record_bytes, _PIECE)
        once = torch.from_numpy(pool).to(device)
        # The pool goes on where it ends, and every place of it begins a window.
        self._windows = torch.cat((once, once[: self._width])).unfold(0, self._width, 1)

    def pieces(self, numbers: torch.Tensor) -> Iterator[tuple[slice, int, torch.Tensor]]:
        """(rows, first column, bytes [rows, columns]) until all of these records are covered; int64 `numbers` [n] on
        the device. Column by column of wide records."""
        import torch

        block = max(1, _BLOCK // self._width)
        for row in range(0, len(numbers), block):
            some = numbers[row : row + block]
            place = some * STEP
            for begin in range(0, self.record_bytes, self._width):
                made = torch.index_select(self._windows, 0, (place + begin) % self._length)
                made = made[:, : self.record_bytes - begin].contiguous()
                if begin == 0:
                    made[:, :NUMBER_BYTES] = some.view(-1, 1).view(torch.uint8)
                yield slice(row, row + len(some)), begin, made

    def first_difference(self, records: torch.Tensor) -> tuple[int, int] | None:
        """Row and byte of the first piece where `records`, uint8 [n, record_bytes] on the device, are not what their
        numbers say."""
        for rows, begin, made in self.pieces(numbers_of(records)):
            found = records[rows, begin : begin + made.shape[1]]
            if not bool((found == made).all()):
                row, column = ((found != made).nonzero()[0]).tolist()
                return rows.start + row, begin + column
        return None


def numbers_of(records: torch.Tensor) -> torch.Tensor:
    """The numbers, int64 [n], that records, uint8 [n, record_bytes], begin with."""
    import torch

    return records[:, :NUMBER_BYTES].contiguous().view(torch.int64).flatten()
