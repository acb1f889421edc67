"""Kernel AIO through its bare system calls: many O_DIRECT reads in flight from one thread, for the cold ceiling.

Older than io_uring, without its rings, and enabled on machines where io_uring is not. Only files opened with O_DIRECT
are asynchronous with it, which is all that is needed here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Sequence

from bench.config import BenchError
from bench.loaders.base import GatherRequest

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # setup, destroy, getevents, submit
_PREAD = 0


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


class Aio:
    """The reads of one request. Raises BenchError where the system has no kernel AIO."""

    def __init__(self, paths: Sequence[str], request: GatherRequest) -> None:
        if platform.machine() not in _CALLS:
            raise BenchError(f"no kernel AIO call numbers are known for {platform.machine()}")
        self._setup, self._destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        self._paths, self._request = list(paths), request
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long

    def rate(self, depth: int, records: int) -> float:
        """GB/s over the first `records` records with `depth` reads in flight."""
        length = self._request.length
        memory = mmap.mmap(-1, depth * length)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        context = ctypes.c_ulong(0)
        self._call(self._setup, depth, ctypes.byref(context))
        descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT) for path in self._paths]
        try:
            files = [descriptors[i] for i in self._request.file_index[:records].tolist()]
            offsets = self._request.offsets[:records].tolist()
            blocks = (_Iocb * depth)()
            for i, block in enumerate(blocks):
                block.data, block.opcode, block.buffer, block.nbytes = i, _PREAD, address + i * length, length
            events, free = (_Event * depth)(), list(range(depth))
            submitted = finished = 0
            start = time.perf_counter()
            while finished < records:
                batch = free[: records - submitted]
                pointers = (ctypes.c_void_p * max(len(batch), 1))()
                for place, i in enumerate(batch):
                    blocks[i].descriptor, blocks[i].offset = files[submitted + place], offsets[submitted + place]
                    pointers[place] = ctypes.addressof(blocks[i])
                if batch:
                    taken = self._call(self._submit, context, len(batch), pointers)
                    free, submitted = free[taken:], submitted + taken
                count = self._call(self._getevents, context, 1, depth, events, None)
                for event in events[:count]:
                    if event.result != length:
                        raise BenchError(f"an O_DIRECT read of {length} bytes returned {event.result}")
                    free.append(int(event.data))
                finished += count
            return records * length / (time.perf_counter() - start) / 1e9
        finally:
            self._libc.syscall(ctypes.c_long(self._destroy), context)
            for descriptor in descriptors:
                os.close(descriptor)

    def _call(self, number: int, *arguments: object) -> int:
        plain = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
        result = int(self._libc.syscall(ctypes.c_long(number), *plain))
        if result < 0:
            code = ctypes.get_errno()
            raise BenchError(f"kernel AIO failed: {os.strerror(code)}")
        return result
