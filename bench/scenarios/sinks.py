"""Where batches go: memory on the device that holds a sample until its bytes are verified."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench import ragged, record_shards
from bench.record_shards import NUMBER_BYTES, RecordShards
from bench.scenarios.base import VerificationError

if TYPE_CHECKING:
    import torch

#: What a step copies: (target, source) each.
Copies = Sequence[tuple["torch.Tensor", "torch.Tensor"]]


@dataclasses.dataclass(slots=True)
class Pass:
    """What one run delivered into the sink, and the iterator that it came from."""

    stream: Iterator[Any]
    records: int = 0
    bytes: int = 0
    #: Records and bytes of each batch.
    batches: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    #: Seconds until the first batch was there, and until the last one had been asked for.
    first_s: float = 0.0
    seconds: float = 0.0
    #: Whether the loader said that its epochs are over.
    ended: bool = False
    #: Marks at the beginning and the end of each step with compute.
    steps: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def took(self, records: int, nbytes: int) -> None:
        """Count a batch."""
        self.batches.append((records, nbytes))
        self.records += records
        self.bytes += nbytes


class Sink(ABC):
    """Memory for whole epochs, or for a part of one where it is smaller."""

    #: Whole epochs that it can hold, and records of a part of one.
    epochs: int
    records: int

    @abstractmethod
    def place(self, batch: Any, found: Pass) -> Copies:
        """Count the batch in `found`, and say where it goes. Raises VerificationError where it is no such batch."""

    @abstractmethod
    def resident(self, batch_size: int) -> Copies:
        """As a batch that is on the device already."""

    @abstractmethod
    def tensors(self, found: Pass) -> list[torch.Tensor]:
        """What was delivered."""

    @abstractmethod
    def check(self, found: Pass) -> npt.NDArray[np.int64]:
        """Compare every byte, and return the records' numbers. Raises VerificationError."""


class FixedSink(Sink):
    """Records of one size: a row each."""

    def __init__(
        self, shards: RecordShards, pool: npt.NDArray[np.uint8], nbytes: int, least_records: int, device: str
    ) -> None:
        import torch

        rows = max(nbytes // shards.record_bytes, least_records)
        rows = rows // shards.num_records * shards.num_records or rows
        # Zeros, so that on the CPU no page has to be made while a sample is timed.
        self._rows = torch.zeros((rows, shards.record_bytes), dtype=torch.uint8, device=device)
        self._contents = record_shards.RecordContents(pool, shards.record_bytes, device)
        self.records, self.epochs = rows, rows // shards.num_records

    def place(self, batch: Any, found: Pass) -> Copies:
        room = self._rows[found.records : found.records + len(batch)]
        if batch.shape != room.shape or batch.dtype != room.dtype or batch.device != room.device:
            raise VerificationError(
                f"batch {len(found.batches)} is {batch.dtype} {tuple(batch.shape)} on {batch.device}, expected "
                f"{room.dtype} {tuple(room.shape)} on {room.device}"
            )
        found.took(len(batch), batch.nbytes)
        return [(room, batch)]

    def resident(self, batch_size: int) -> Copies:
        return [(self._rows[-batch_size:], self._rows[:batch_size])]

    def tensors(self, found: Pass) -> list[torch.Tensor]:
        return [self._rows[: found.records]]

    def check(self, found: Pass) -> npt.NDArray[np.int64]:
        records = self._rows[: found.records]
        numbers: npt.NDArray[np.int64] = record_shards.numbers_of(records).cpu().numpy()
        wrong = self._contents.first_difference(records)
        if wrong is not None:
            row, byte = wrong
            raise VerificationError(_differs(row, numbers[row], byte))
        return numbers


class RaggedSink(Sink):
    """Records of different sizes, end to end, and the offsets of each batch."""

    def __init__(
        self, shards: RecordShards, pool: npt.NDArray[np.uint8], nbytes: int, least_records: int, device: str
    ) -> None:
        import torch

        assert shards.sizes is not None
        self._sizes = shards.sizes
        # However a part of an epoch is drawn, this many of the largest ones fit.
        largest = np.cumsum(np.sort(shards.sizes)[::-1])
        size = max(nbytes, int(largest[min(least_records, len(largest)) - 1]))
        self.epochs = size // shards.data_bytes
        size = self.epochs * shards.data_bytes or size
        self.records = int(np.searchsorted(largest, size, side="right"))
        self._values = torch.zeros(size, dtype=torch.uint8, device=device)
        # As many offsets as the most records have in batches of one.
        most = max(self.records, self.epochs * shards.num_records)
        self._offsets = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._mean = shards.record_bytes
        self._pieces = ragged.Contents(pool)
        self._pool = torch.from_numpy(pool).to(device)

    def place(self, batch: Any, found: Pass) -> Copies:
        number = len(found.batches)
        values, offsets = getattr(batch, "values", None), getattr(batch, "offsets", None)
        if values is None or offsets is None:
            raise VerificationError(f"batch {number} is {type(batch).__name__}, expected values and their offsets")
        for name, has, room in (("values", values, self._values), ("offsets", offsets, self._offsets)):
            if has.dtype != room.dtype or has.device != room.device or has.ndim != 1:
                raise VerificationError(
                    f"the {name} of batch {number} are {has.dtype} {tuple(has.shape)} on {has.device}, expected "
                    f"{room.dtype} of one dimension on {room.device}"
                )
        at = found.records + number
        rooms = self._values[found.bytes : found.bytes + len(values)], self._offsets[at : at + len(offsets)]
        if [len(room) for room in rooms] != [len(values), len(offsets)]:
            raise VerificationError(
                f"batch {number} has {len(offsets) - 1} records of {len(values)} bytes, and there were to be no more "
                f"than {len(rooms[0])} bytes"
            )
        found.took(len(offsets) - 1, len(values))
        return list(zip(rooms, (values, offsets), strict=True))

    def resident(self, batch_size: int) -> Copies:
        nbytes = min(batch_size * self._mean, len(self._values))
        return [(self._values[-nbytes:], self._values[:nbytes])]

    def tensors(self, found: Pass) -> list[torch.Tensor]:
        return [self._values[: found.bytes]]

    def check(self, found: Pass) -> npt.NDArray[np.int64]:
        starts, lengths = self._lie(found)
        numbers = self._numbers(starts)
        for row, (number, start, size) in enumerate(
            zip(numbers.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        ):
            if not 0 <= number < len(self._sizes):
                raise VerificationError(f"row {row} has the number {number}, and there are {len(self._sizes)} records")
            if size != self._sizes[number]:
                raise VerificationError(
                    f"row {row} of the sample, by its number record {number}, has {size} bytes, not "
                    f"{self._sizes[number]}"
                )
            self._compare(row, number, start, size)
        return numbers

    def _lie(self, found: Pass) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each record begins, and its bytes, by the offsets that were delivered."""
        offsets = self._offsets[: found.records + len(found.batches)].cpu().numpy()
        starts, lengths = [], []
        at = base = 0
        for number, (records, nbytes) in enumerate(found.batches):
            own = offsets[at : at + records + 1]
            if own[0] != 0 or own[-1] != nbytes or (np.diff(own) < NUMBER_BYTES).any():
                raise VerificationError(
                    f"the offsets of batch {number} go from {own[0]} to {own[-1]} and do not part its {nbytes} bytes "
                    f"into records"
                )
            starts.append(base + own[:-1])
            lengths.append(np.diff(own))
            at, base = at + records + 1, base + nbytes
        return np.concatenate(starts), np.concatenate(lengths)

    def _numbers(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import torch

        at = torch.from_numpy(starts).to(self._values.device).view(-1, 1)
        bytes_ = self._values[at + torch.arange(NUMBER_BYTES, device=at.device)]
        found: npt.NDArray[np.int64] = bytes_.view(torch.int64).flatten().cpu().numpy()
        return found

    def _compare(self, row: int, number: int, start: int, size: int) -> None:
        import torch

        for done, place, count in self._pieces.places(number, size):
            has = self._values[start + done : start + done + count]
            expected = self._pool[place : place + count]
            if not torch.equal(has, expected):
                byte = done + int((has != expected).nonzero()[0])
                raise VerificationError(_differs(row, number, byte))


def _differs(row: int, number: int, byte: int) -> str:
    return f"row {row} of the sample, by its number record {number}, differs at byte {byte}"


def make(shards: RecordShards, pool: npt.NDArray[np.uint8], nbytes: int, least_records: int, device: str) -> Sink:
    """The sink of a dataset, of about `nbytes`, but room for `least_records` of them in any case."""
    kind = FixedSink if shards.sizes is None else RaggedSink
    return kind(shards, pool, nbytes, least_records, device)
