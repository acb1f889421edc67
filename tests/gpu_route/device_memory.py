"""Device memory as torch's allocator hands it out: what is dropped goes to work of the stream it was allocated for.

The stand-in's device memory is host memory. Given back to the heap at once, a copy that is still queued would write
into whatever Python puts there next, although on a GPU the same program is right: who gets the memory next is ordered
behind the copies by that stream. Here it stays apart until its stream has got as far as it was filled when the last
tensor went, and is watched from then on: a copy that comes later than that is one that nothing orders.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gpu_route.stand_in import StandIn

from gdsstream import devices

_PATTERN = 0xA5
_WATCHED_BYTES = 128 << 20
_CUDA = torch.device("cuda", 0)


class _Block:
    """Memory of one tensor; when the last view of it is gone, so is this."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        self._stream = devices.current_stream(_CUDA)
        self._raw = torch.empty(nbytes, dtype=torch.uint8)
        self.__array_interface__ = {
            "data": (self._raw.data_ptr(), False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._memory.give_back(self._raw, self._stream)


class DeviceMemory:
    """Tensors of the stand-in's device memory, and what became of those that were dropped."""

    def __init__(self, fake: StandIn) -> None:
        self._fake = fake
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()
        self._watched: deque[torch.Tensor] = deque()
        self._watched_bytes = 0
        self._lock = threading.Lock()
        self.written_after = 0  # blocks that were written to when they had long been somebody else's

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor, as torch.empty."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0 or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        storage = torch.from_numpy(np.asarray(_Block(self, nbytes))).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape))

    def install(self) -> None:
        """From now on gdsstream allocates here."""
        devices.torch = _TorchWith(self.empty)

    def give_back(self, raw: torch.Tensor, stream: int) -> None:
        self._waiting.append((self._fake.place(stream), raw))
        self._settle()

    def check(self) -> None:
        """What was given back is as it was since then. Call it when every stream is idle."""
        self._settle()
        for raw in self._watched:
            self._look_at(raw)
        assert self.written_after == 0, "a copy wrote into device memory that was somebody else's by then"

    def _settle(self) -> None:
        # A finaliser may run in the middle of this, in the same thread.
        if not self._lock.acquire(blocking=False):
            return
        try:
            for _ in range(len(self._waiting)):
                place, raw = self._waiting.popleft()
                if self._fake.reached(place):
                    ctypes.memset(raw.data_ptr(), _PATTERN, raw.nbytes)
                    self._watched.append(raw)
                    self._watched_bytes += raw.nbytes
                else:
                    self._waiting.append((place, raw))
            while self._watched_bytes > _WATCHED_BYTES:
                raw = self._watched.popleft()
                self._watched_bytes -= raw.nbytes
                self._look_at(raw)
        finally:
            self._lock.release()

    def _look_at(self, raw: torch.Tensor) -> None:
        self.written_after += not bool(np.all(raw.numpy() == _PATTERN))


class _TorchWith(ModuleType):
    """torch, but for `empty`."""

    def __init__(self, empty: Any) -> None:
        super().__init__("torch")
        self.empty = empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
