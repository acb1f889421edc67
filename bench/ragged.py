"""Records of different sizes: their shards, and the batches that they come in.

A shard is a safetensors file of two tensors: `data.values`, uint8 [total], its records end to end, and `data.offsets`,
int64 [records + 1], where each begins; which gdsstream reads as one ragged field. What a record holds is the same as in
record_shards.py.

A batch is anything with `values`, uint8 [total], and `offsets`, int64 [records + 1]: gdsstream's own Jagged, or the
`Ragged` here, which other libraries' loaders are given a collate function for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.record_shards import (
    DATA_OFFSET,
    FIELD,
    NUMBER_BYTES,
    STEP,
    RecordShards,
    header,
    write_all,
    write_files,
)

if TYPE_CHECKING:
    import torch

#: Of the mean, what a drawn size is at least, and at most less than twice.
LEAST_SHARE = 0.01


def sizes(mean: int, std: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` sizes in bytes, normally distributed, clipped to LEAST_SHARE x mean and (2 - LEAST_SHARE) x mean, which
    leaves the mean as it is. The first ones do not depend on how many are drawn.

    DLIO, which MLPerf Storage drives, makes a sample a square image whose sides are drawn one by one from a normal
    distribution of sqrt(mean) and std / (2 sqrt(mean)), at least 1 each: its sizes have the same mean, and 0.7 of the
    standard deviation that its configuration names. Here they have the one that is named.
    """
    drawn = np.random.default_rng(seed).normal(mean, std, count)
    return np.clip(np.rint(drawn), max(LEAST_SHARE * mean, NUMBER_BYTES), (2 - LEAST_SHARE) * mean).astype(np.int64)


def write(
    directory: Path, pool: npt.NDArray[np.uint8], record_sizes: npt.NDArray[np.int64], shards: int
) -> RecordShards:
    """Write records of these sizes into at most `shards` files in `directory`, which is made."""
    contents = Contents(pool)

    def write_one(path: str, first: int, last: int) -> None:
        own = record_sizes[first:last]
        offsets = np.concatenate(([0], np.cumsum(own))).astype("<i8")
        count, total = len(offsets) * NUMBER_BYTES, int(offsets[-1])
        entries = {
            f"{FIELD}.offsets": {"dtype": "I64", "shape": [len(offsets)], "data_offsets": [0, count]},
            f"{FIELD}.values": {"dtype": "U8", "shape": [total], "data_offsets": [count, count + total]},
        }
        with open(path, "xb", buffering=0) as file:
            file.write(header(entries))
            write_all(file.fileno(), offsets.data.cast("B"), DATA_OFFSET)
            for number, size, begin in zip(range(first, last), own.tolist(), offsets.tolist(), strict=False):
                for done, piece in contents.pieces(number, size):
                    write_all(file.fileno(), piece.data, DATA_OFFSET + count + begin + done)

    paths, rows = write_files(directory, len(record_sizes), shards, write_one)
    return RecordShards(directory, paths, rows, round(float(record_sizes.mean())), record_sizes)


class Contents:
    """What records hold, in pieces of the pool."""

    def __init__(self, pool: npt.NDArray[np.uint8]) -> None:
        self._pool = pool

    def places(self, number: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(byte of the record, byte of the pool, bytes) of each piece behind the number."""
        done = NUMBER_BYTES
        while done < size:
            place = (number * STEP + done) % len(self._pool)
            count = min(size - done, len(self._pool) - place)
            yield done, place, count
            done += count

    def pieces(self, number: int, size: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """(byte of the record, bytes), its number first."""
        yield 0, np.frombuffer(np.int64(number).astype("<i8").tobytes(), dtype=np.uint8)
        for done, place, count in self.places(number, size):
            yield done, self._pool[place : place + count]


class Ragged(NamedTuple):
    """A batch; record i is values[offsets[i] : offsets[i + 1]]."""

    values: torch.Tensor
    offsets: torch.Tensor

    def to(self, device: str, *, non_blocking: bool = False) -> Ragged:
        """As torch.Tensor.to."""
        return Ragged(*(each.to(device, non_blocking=non_blocking) for each in self))


def collate(records: Sequence[torch.Tensor]) -> Ragged:
    """One batch of them; in a worker process in shared memory, as torch's own function makes it."""
    import torch

    lengths = torch.tensor([0, *(len(record) for record in records)])
    offsets = torch.cumsum(lengths, 0)
    out = None
    if torch.utils.data.get_worker_info() is not None:
        total = int(offsets[-1])
        storage = records[0]._typed_storage()._new_shared(total, device=records[0].device)  # type: ignore[no-untyped-call]
        out = records[0].new(storage).resize_(total)
    return Ragged(torch.cat(list(records), out=out), offsets)
