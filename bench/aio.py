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

import numpy as np
import numpy.typing as npt

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


class Prepared:
    """Reads or writes of `nbytes` each, made before anything is timed: `places` are int64 [ios, 2], descriptor and
    offset, and the memory of an io is the next of `slots` from `address` on, so that several may land in one where
    nobody looks at the bytes."""

    def __init__(
        self, places: npt.NDArray[np.int64], nbytes: int, address: int, slots: int, slot_bytes: int, *, write: bool
    ) -> None:
        self.nbytes = nbytes
        self._blocks = np.zeros(len(places), dtype=np.dtype(_Iocb))
        self._blocks["opcode"] = _PWRITE if write else _PREAD
        self._blocks["descriptor"], self._blocks["offset"] = places[:, 0], places[:, 1]
        self._blocks["nbytes"] = nbytes
        self._blocks["buffer"] = address + np.arange(len(places)) % slots * slot_bytes
        first = self._blocks.ctypes.data
        #: The address of each.
        self.pointers = np.arange(len(places), dtype=np.uint64) * ctypes.sizeof(_Iocb) + first


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
                    raise BenchError(_refused(blocks[slot].nbytes, event.result))
                if done is not None:
                    done(held[slot], now - began[slot])
                free.append(slot)
            flying -= count

    def stream(self, ios: Prepared) -> None:
        """Make all of them, with as little as can be done for each in between: a hundred thousand a second and more are
        the disk's limit then, and not this interpreter's."""
        at, sent, flying = ios.pointers.ctypes.data, 0, 0
        results = np.ctypeslib.as_array(self._events)["result"]
        while sent < len(ios.pointers) or flying:
            room = min(self._depth - flying, len(ios.pointers) - sent)
            if room:
                taken = self._call(self._submit, self._context, room, ctypes.c_void_p(at + 8 * sent))
                sent, flying = sent + taken, flying + taken
            least = max(1, min(flying, self._depth // 16))
            count = self._call(self._getevents, self._context, least, self._depth, self._events, None)
            if (results[:count] != ios.nbytes).any():
                wrong = int(results[:count][results[:count] != ios.nbytes][0])
                raise BenchError(_refused(ios.nbytes, wrong))
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


def _refused(nbytes: int, result: int) -> str:
    said = os.strerror(-result) if result < 0 else f"returned {result}"
    return f"an O_DIRECT io of {nbytes} bytes by kernel AIO: {said}"
