"""A ring of device buffers for borrowed batches: allocated once, and filled again behind whoever used them.

    FREE -> FILLED -> HANDED OUT -> FREE, with a fence on every stream that used it

A buffer grows only where a batch of ragged records is larger than any before; otherwise nothing is allocated in the
loop.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from gdsstream import _native
from gdsstream.devices import allocate
from gdsstream.plan import ALIGNMENT_BYTES
from gdsstream.side_streams import SideStreams

_POLL_S = 0.0002
# Ragged batches differ by little: room for the next larger one saves an allocation.
_SPARE_SHARE = 8


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory for one batch; `fences` are to be passed before it is written again. `lost` says that reads of a batch
    which was interrupted may write to it still: the next one gets other memory."""

    memory: torch.Tensor
    lost: bool = False
    fences: list[_native.Fence] = field(default_factory=list)


class BufferRing:
    """`count` buffers of `nbytes` bytes each. Raises MemoryBudgetError."""

    def __init__(self, count: int, nbytes: int, streams: SideStreams) -> None:
        self._streams = streams
        with streams.allocating():
            self._buffers = [Buffer(allocate((nbytes,), torch.uint8, streams.device)) for _ in range(count)]
        self._free = deque(self._buffers)

    @property
    def nbytes(self) -> int:
        """Of all buffers together."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def ready(self, nbytes: int) -> Buffer:
        """The buffer that is free for longest, of at least `nbytes`: `take` it. What is read into it has to be
        submitted behind the allocating stream, which waits for its fences. The caller takes no more than there are."""
        buffer = self._free[0]
        if buffer.lost or buffer.memory.nbytes < nbytes:
            _passed(buffer)
            wanted = nbytes + nbytes // _SPARE_SHARE if buffer.memory.nbytes < nbytes else buffer.memory.nbytes
            buffer.memory = buffer.memory.new_empty(0)
            with self._streams.allocating():
                buffer.memory = allocate((wanted,), torch.uint8, self._streams.device)
            buffer.lost = False
        for fence in buffer.fences:
            self._streams.order(fence, self._streams.handle)
        fences, buffer.fences = buffer.fences, []
        for fence in fences:
            self._streams.give_back(fence)
        return buffer

    def take(self, buffer: Buffer) -> None:
        """It is not free any more."""
        self._free.remove(buffer)

    def give_back(self, buffer: Buffer, fences: list[_native.Fence]) -> None:
        """Nobody uses it behind these fences. Idempotent, as long as it is not taken again."""
        buffer.fences = fences
        if buffer not in self._free:
            self._free.append(buffer)

    def close(self) -> None:
        """Let the memory go once nothing uses it any more. What is under way has to be drained before."""
        for buffer in self._buffers:
            _passed(buffer)
        self._buffers.clear()
        self._free.clear()


def buffer_bytes(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin in one buffer, and how large it has to be."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return starts, end


def _passed(buffer: Buffer) -> None:
    for fence in buffer.fences:
        while not fence.done():
            time.sleep(_POLL_S)


__all__ = ["Buffer", "BufferRing", "buffer_bytes"]
