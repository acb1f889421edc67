"""Kernel AIO through its bare system calls: many O_DIRECT ios in flight from one thread, for ceilings and as a route
of its own.

Older than io_uring, without its rings, and enabled on machines where io_uring is not. Only files opened with O_DIRECT
are asynchronous with it, which is all that is needed here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator

from bench.config import BenchError

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # setup, destroy, getevents, submit
_PREAD, _PWRITE = 0, 1


class _Iocb(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("result_descriptor", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("iocb", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class Queue:
    """Room for `depth` ios in flight. Raises BenchError where the system has no kernel AIO, or refuses an io."""

    def __init__(self, depth: int) -> None:
        if platform.machine() not in _CALLS:
            raise BenchError(f"no kernel AIO call numbers are known for {platform.machine()}")
        self._setup, self._destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._depth = depth
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, depth, ctypes.byref(self._context))
        self._blocks, self._events = (_Iocb * depth)(), (_Event * depth)()

    def close(self) -> None:
        """Give it back; waits for what is in flight."""
        self._libc.syscall(ctypes.c_long(self._destroy), self._context)

    def move(
        self,
        numbers: Iterator[int],
        io: Callable[[int, int], tuple[int, int, int, int]],
        done: Callable[[int, float], None] | None = None,
        *,
        write: bool = False,
    ) -> None:
        """Make the ios of these numbers. `io(number, slot)` gives descriptor, offset, bytes and address; `done` is
        told the seconds from before an io was submitted until it was found complete, together with others."""
        blocks, free = self._blocks, list(range(self._depth))
        held = [0] * self._depth
        began = [0.0] * self._depth
        opcode, flying = _PWRITE if write else _PREAD, 0
        while True:
            batch = list(zip(free, numbers, strict=False)) if free else []
            if batch:
                now = time.perf_counter()
                pointers = (ctypes.c_void_p * len(batch))()
                for place, (slot, number) in enumerate(batch):
                    block = blocks[slot]
                    block.data, block.opcode = slot, opcode
                    block.descriptor, block.offset, block.nbytes, block.buffer = io(number, slot)
                    held[slot], began[slot] = number, now
                    pointers[place] = ctypes.addressof(block)
                self._submit_all(pointers, len(batch))
                free, flying = free[len(batch) :], flying + len(batch)
            if not flying:
                return
            count = self._call(self._getevents, self._context, 1, self._depth, self._events, None)
            now = time.perf_counter()
            for event in self._events[:count]:
                slot = int(event.data)
                if event.result != blocks[slot].nbytes:
                    said = os.strerror(-event.result) if event.result < 0 else f"returned {event.result}"
                    raise BenchError(f"an O_DIRECT io of {blocks[slot].nbytes} bytes by kernel AIO: {said}")
                if done is not None:
                    done(held[slot], now - began[slot])
                free.append(slot)
            flying -= count

    def _submit_all(self, pointers: ctypes.Array[ctypes.c_void_p], count: int) -> None:
        """The kernel may take a part at a time."""
        taken = 0
        while taken < count:
            rest = ctypes.byref(pointers, taken * ctypes.sizeof(ctypes.c_void_p))
            taken += self._call(self._submit, self._context, count - taken, rest)

    def _call(self, number: int, *arguments: object) -> int:
        plain = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
        result = int(self._libc.syscall(ctypes.c_long(number), *plain))
        if result < 0:
            code = ctypes.get_errno()
            raise BenchError(f"kernel AIO failed: {os.strerror(code)}")
        return result
