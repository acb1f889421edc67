"""One batch, read: memory, one submit to the engine, and the wait for it.

Owned batches get memory of their own; borrowed ones a buffer of the ring. Shards stay open while a batch reads from
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gdsstream import _native
from gdsstream.batch_buffers import Buffer, BufferRing, buffer_bytes
from gdsstream.batches import BatchLayout, FieldFormat, Jagged, Value, lay_out
from gdsstream.devices import allocate_all, memory_of
from gdsstream.engine.native import NativeEngine, NativeTransfer
from gdsstream.feed import Work
from gdsstream.open_files import OpenFiles
from gdsstream.records import Located
from gdsstream.side_streams import SideStreams

_POLL_S = 0.0005


@dataclass(eq=False, slots=True)
class Flight:
    """A batch under way: begun, landed, finished, handed out. `located` is what of its work is read.

    After an interrupt, one that is not `begun` is given up, and its work begins anew in another; every other step can
    be done again.
    """

    work: Work
    located: tuple[Located, ...]
    begun: bool = False  # and not in the hands of what cannot be done again
    skipped: dict[str, int] = field(default_factory=dict)  # records that are left out, by their shard's path
    layout: BatchLayout | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    offsets: list[torch.Tensor | None] = field(default_factory=list)
    transfers: list[NativeTransfer] = field(default_factory=list)
    buffer: Buffer | None = None
    prepared: _native.Fence | None = None  # behind padding and offsets
    failure: Exception | None = None
    result: Any = None
    finished: _native.Fence | None = None  # behind the transform
    is_finished: bool = False
    stream: int | None = None  # that it landed on, or was handed out on

    @property
    def num_records(self) -> int:
        return len(self.located[0].file)

    @property
    def empty(self) -> bool:
        """Whether none of its records can be read."""
        return self.failure is None and not self.num_records


class BatchReader:
    """Reads batches.

    Args:
        engine, files: what reads, and what is open.
        formats: the fields of a batch.
        streams: the loader's own: memory comes from the allocating one, and reads are behind it.
        ring: buffers for borrowed batches; None gives each its own memory.
    """

    def __init__(
        self,
        engine: NativeEngine,
        files: OpenFiles,
        formats: Sequence[FieldFormat],
        streams: SideStreams,
        ring: BufferRing | None,
    ) -> None:
        self._engine = engine
        self._files = files
        self._formats = formats
        self._names = [form.field.name for form in formats]
        self._streams = streams
        self._ring = ring

    def lay_out(self, flight: Flight) -> bool:
        """Plan a batch, and say whether its shards can be open beside those in use."""
        flight.layout = lay_out(self._formats, flight.located)
        return self._files.room_for(flight.layout.files.tolist())

    def submit(self, flight: Flight, *, borrow: bool = True) -> None:
        """Start to read a batch that is laid out. Where its shards cannot all be open at once, it is read in parts, and
        all but the last are waited for. Raises what engine and allocation raise; `abandon` it then."""
        layout = flight.layout
        assert layout is not None
        with self._streams.allocating():
            prepared = self._allocate(flight, layout, self._ring if borrow else None)
            numbers = layout.files.tolist()
            for first in range(0, len(numbers), self._files.limit):
                if first:
                    # Which puts the allocating stream behind the copies of this part, and so those of the next.
                    self.wait(flight)
                self._submit_part(flight, layout, first, numbers[first : first + self._files.limit])
            if prepared:
                flight.prepared = self._streams.fence()

    def landed(self, flight: Flight) -> bool:
        """Whether `wait` would come back at once."""
        return all(transfer.done() for transfer in flight.transfers)

    def wait(self, flight: Flight) -> None:
        """Return when the bytes can be used on the current stream. Raises the read's failure."""
        try:
            for transfer in flight.transfers:
                transfer.wait()
        except Exception:  # but not Ctrl-C, after which it is waited for again
            self._files.give_back(flight)
            raise
        flight.transfers.clear()  # which keep their files open
        self._files.give_back(flight)

    def abandon(self, flight: Flight) -> None:
        """Stop reading, and return once nothing can be written to its memory any more."""
        for transfer in flight.transfers:
            transfer.cancel()
        for transfer in flight.transfers:
            while not transfer.drained():
                time.sleep(_POLL_S)
        flight.transfers.clear()
        self._files.give_back(flight)

    def values(self, flight: Flight) -> dict[str, Value]:
        """What was read, by field, for the current stream, which waits for what was queued before the reads."""
        self._streams.order(flight.prepared)
        prepared, flight.prepared = flight.prepared, None
        self._streams.give_back(prepared)
        values: list[Value] = [
            tensor if offsets is None else Jagged(tensor, offsets)
            for tensor, offsets in zip(flight.tensors, flight.offsets, strict=True)
        ]
        return dict(zip(self._names, values, strict=True))

    def samples(self, flight: Flight) -> list[Any]:
        """The records one by one, as the dataset gives them, but views of the batch."""
        assert flight.layout is not None
        rows = [
            tensor.unbind(0) if part.offsets is None else torch.split(tensor, np.diff(part.offsets).tolist())
            for tensor, part in zip(flight.tensors, flight.layout.parts, strict=True)
        ]
        if len(rows) == 1:
            return list(rows[0])
        return [dict(zip(self._names, sample, strict=True)) for sample in zip(*rows, strict=True)]

    def _submit_part(self, flight: Flight, layout: BatchLayout, first: int, numbers: list[int]) -> None:
        """Start to read what is in files[first : first + len(numbers)] of a layout."""
        whole = len(numbers) == len(layout.files)
        plan = layout.plan if whole else layout.only(first, first + len(numbers))
        if not len(plan.file):
            return
        opened = self._files.take(numbers, flight)
        if layout.stride and whole:
            # No addresses are computed for what the engine can count itself.
            out = flight.tensors[0]
            transfer = self._engine.gather(opened, plan.file, plan.file_offset, layout.stride, out)
        else:
            bases = np.array([tensor.data_ptr() for tensor in flight.tensors], dtype=np.uint64)
            targets = bases[plan.buffer] + plan.buffer_offset.astype(np.uint64)
            transfer = self._engine.submit_to(opened, plan, targets, flight.tensors, self._streams.handle)
        flight.transfers.append(transfer)

    def _allocate(self, flight: Flight, layout: BatchLayout, ring: BufferRing | None) -> bool:
        """Memory for a batch; whether something was queued on the allocating stream for it."""
        parts = layout.parts
        if ring is None:
            flight.tensors = allocate_all([(part.shape, part.format.dtype) for part in parts], self._engine.device)
        else:
            starts, nbytes = buffer_bytes([part.nbytes for part in parts])
            if flight.buffer is not None and flight.buffer.memory.nbytes < nbytes:
                ring.give_back(flight.buffer, [])
                flight.buffer = None
            if flight.buffer is None:
                flight.buffer = ring.ready(nbytes)
                ring.take(flight.buffer)
            memory = flight.buffer.memory
            flight.tensors = [
                memory[start : start + part.nbytes].view(part.format.dtype).view(part.shape)
                for start, part in zip(starts, parts, strict=True)
            ]
        flight.offsets = [None] * len(parts)
        prepared = False
        for index, part in enumerate(parts):
            if part.format.pad is not None:
                flight.tensors[index].fill_(part.format.pad)
                prepared = True
            if part.offsets is not None:
                flight.offsets[index] = self._on_device(part.offsets)
                prepared = True
        return prepared

    def _on_device(self, offsets: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(offsets)
        device = memory_of(self._engine.device)
        # From pageable memory the copy would make the host wait for what is queued before it.
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


__all__ = ["BatchReader", "Flight"]
