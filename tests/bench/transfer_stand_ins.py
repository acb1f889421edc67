"""Stand-ins for kvikio and for cuda.bindings.cufile, over CPU memory."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Kvikio:
    """As much of kvikio as the routes use, over CPU tensors."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {"num_threads": 1, "task_size": 4 << 20}
        self.defaults = SimpleNamespace(
            get=self.values.__getitem__, set=self.values.update, is_compat_mode_preferred=lambda: True
        )
        self.tasks: list[tuple[int, int]] = []
        self.short_by = 0
        fake = self

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                self.descriptor = os.open(path, os.O_RDWR if flags == "r+" else os.O_RDONLY)

            def close(self) -> None:
                os.close(self.descriptor)

            def _moved(self, call: Any, view: torch.Tensor, offset: int) -> Any:
                count = call(self.descriptor, [view.numpy().data], offset) - fake.short_by
                return SimpleNamespace(get=lambda: count, check_bytes_done=lambda: count)

            def pread(self, buf: torch.Tensor, size: int, file_offset: int, task_size: int) -> Any:
                fake.tasks.append((size, task_size))
                return self._moved(os.preadv, buf[:size], file_offset)

            def pwrite(self, buf: torch.Tensor, size: int, file_offset: int, task_size: int) -> Any:
                return self._moved(os.pwritev, buf[:size], file_offset)

            def raw_read_async(self, buf: torch.Tensor, stream: int, size: int, file_offset: int, place: int) -> Any:
                assert stream == 7
                return self._moved(os.preadv, buf[place : place + size], file_offset)

            def raw_write_async(self, buf: torch.Tensor, stream: int, size: int, file_offset: int, place: int) -> Any:
                return self._moved(os.pwritev, buf[place : place + size], file_offset)

        self.CuFile = CuFile


class CuFileApi:
    """cuda.bindings.cufile, over addresses in CPU memory; batches end in two pieces and in reverse order."""

    FileHandleType = SimpleNamespace(OPAQUE_FD=1)
    Opcode = SimpleNamespace(READ=0, WRITE=1)
    BatchMode = SimpleNamespace(BATCH=1)
    Status = SimpleNamespace(COMPLETE=16)
    io_params_dtype = np.dtype(
        {
            "names": ["mode", "u", "fh", "opcode", "cookie"],
            "formats": ["<i4", [("batch", [("dev_ptr_base", "<i8"), ("file_offset", "<i8"), ("dev_ptr_offset", "<i8"),
                                           ("size_", "<u8")])], "<i8", "<i4", "<i8"],
            "offsets": [0, 8, 40, 48, 56],
            "itemsize": 64,
        }
    )  # fmt: skip
    io_events_dtype = np.dtype(
        {"names": ["cookie", "status", "ret"], "formats": ["<i8", "<i4", "<u8"], "offsets": [0, 8, 16], "itemsize": 24}
    )

    def __init__(self) -> None:
        self.opened, self.streams, self.batches = 0, 0, 0
        self.pending: dict[int, list[tuple[int, int]]] = {}
        self.status = 16

    def driver_open(self) -> None: ...

    def Descr(self) -> Any:
        made = SimpleNamespace(handle=SimpleNamespace(fd=-1), type=0, fs_ops=0)
        made.ptr = made  # the real one is an address
        return made

    def handle_register(self, told: Any) -> int:
        self.opened += 1
        return int(told.handle.fd)

    def handle_deregister(self, handle: int) -> None:
        self.opened -= 1

    def batch_io_set_up(self, count: int) -> int:
        self.batches += 1
        self.pending[self.batches] = []
        return self.batches

    def batch_io_destroy(self, batch: int) -> None:
        del self.pending[batch]

    def _move(self, write: bool, descriptor: int, address: int, nbytes: int, offset: int) -> int:
        view = (ctypes.c_char * nbytes).from_address(address)
        return (os.pwritev if write else os.preadv)(descriptor, [view], offset)

    def batch_io_submit(self, batch: int, count: int, address: int, flags: int) -> None:
        raw = (ctypes.c_char * (64 * count)).from_address(address)
        for io_ in np.frombuffer(raw, dtype=self.io_params_dtype, count=count):
            inner = io_["u"]["batch"]
            place = int(inner["dev_ptr_base"]) + int(inner["dev_ptr_offset"])
            size, offset = int(inner["size_"]), int(inner["file_offset"])
            done = self._move(bool(io_["opcode"]), int(io_["fh"]), place, size, offset)
            self.pending[batch].append((int(io_["cookie"]), done))

    def batch_io_get_status(self, batch: int, least: int, number: int, address: int, timeout: int) -> None:
        wanted = ctypes.c_uint.from_address(number)
        events = np.frombuffer((ctypes.c_char * (24 * wanted.value)).from_address(address), dtype=self.io_events_dtype)
        taken = max(1, wanted.value // 2)
        for event in events[:taken]:
            event["cookie"], event["ret"] = self.pending[batch].pop()
            event["status"] = self.status
        wanted.value = taken

    def stream_register(self, stream: int, flags: int) -> None:
        self.streams += 1

    def stream_deregister(self, stream: int) -> None:
        self.streams -= 1

    def _async(self, write: bool, handle: int, base: int, size: int, offset: int, place: int, done: int) -> None:
        count, begin, at = (ctypes.c_int64.from_address(each).value for each in (size, offset, place))
        ctypes.c_ssize_t.from_address(done).value = self._move(write, handle, base + at, count, begin)

    def read_async(self, handle: int, base: int, *rest: int) -> None:
        self._async(False, handle, base, *rest[:4])

    def write_async(self, handle: int, base: int, *rest: int) -> None:
        self._async(True, handle, base, *rest[:4])


class Stream:
    cuda_stream = 7

    def synchronize(self) -> None: ...
