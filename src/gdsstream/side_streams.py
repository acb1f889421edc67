"""A loader's own streams: what is read is behind one of them, and transforms run on the other.

    allocating     nothing is computed here but padding: memory for batches comes from it, and reads wait for it only
    transforming   collate_fn and transform, beside the consumer's own work

They are two, so that the copies of a batch never wait for the transform of the one before. On the CPU there are none,
and everything happens in its turn. torch's caching allocator hands memory back to the stream that it came from; streams
of closed loaders are kept for the next ones, which so get their memory too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from gdsstream import _native
from gdsstream.batches import Jagged
from gdsstream.devices import current_stream, driver_replaced, on_stream

_spare: dict[int, list[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = {}


class SideStreams:
    """The streams of one iterator on `device`. `handle` is what reads are submitted behind; None on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle: int | None = None
        self._fences: deque[_native.Fence] = deque()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._owner: _native.FenceStream | None = None
        if device.type != "cuda":
            return
        self._owner = _native.FenceStream(device.index)
        if driver_replaced():
            self._second = _native.FenceStream(device.index)
            self.handle, self._transform_handle = self._owner.handle, self._second.handle
        else:
            spare = _spare.setdefault(device.index, [])
            self._streams = spare.pop() if spare else (_stream(device), _stream(device))
            self.handle, self._transform_handle = (int(stream.cuda_stream) for stream in self._streams)

    @property
    def asynchronous(self) -> bool:
        """Whether there is a stream to be ahead on."""
        return self.handle is not None

    def allocating(self) -> AbstractContextManager[Any]:
        """Within, memory is allocated, and filled, on the first stream."""
        return self._on(0)

    def transforming(self) -> AbstractContextManager[Any]:
        """Within, work is queued on the second stream."""
        return self._on(1)

    def fence(self, stream: int | None = None) -> _native.Fence | None:
        """A fence at what `stream`, by default the current one, has queued by now; None on the CPU."""
        if self._owner is None:
            return None
        fence = self._fences.popleft() if self._fences else _native.Fence(self._owner)
        fence.record(current_stream(self.device) if stream is None else stream)
        return fence

    def give_back(self, fence: _native.Fence | None) -> None:
        """A fence whose record nobody asks for any more; what was ordered behind it stays so."""
        if fence is not None:
            self._fences.append(fence)

    def order(self, fence: _native.Fence | None, stream: int | None = None) -> None:
        """Make `stream`, by default the current one, wait for a fence."""
        if fence is not None:
            fence.order(current_stream(self.device) if stream is None else stream)

    def used_by_current(self, value: object) -> None:
        """The current stream uses tensors of another one: their memory is not given away before it is done."""
        if self._streams is not None:
            _record(value, torch.cuda.current_stream(self.device), set())

    def close(self) -> None:
        self._fences.clear()
        if self._streams is not None:
            _spare[self.device.index].append(self._streams)
            self._streams = None

    def _on(self, which: int) -> AbstractContextManager[Any]:
        if self._streams is not None:
            return torch.cuda.stream(self._streams[which])
        if self.handle is not None:
            return on_stream(self.device, (self.handle, self._transform_handle)[which])
        return nullcontext()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _record(value: object, stream: torch.Stream, seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
        return
    if isinstance(value, str | bytes | int | float | None) or id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[object] = ()
    if isinstance(value, Jagged):
        inside = (value.values, value.offsets)
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        inside = vars(value).values()
    for each in inside:
        _record(each, stream, seen)


__all__ = ["SideStreams"]
