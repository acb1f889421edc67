"""The stand-in driver from a test's side: its controls and counters, and streams like those of a consumer.

Its device memory is host memory. What gdsstream allocates there goes to others in the order of its stream, as torch's
allocator has it (device_memory.py); a tensor of a test's own is free for others as soon as it is dropped, so a test
keeps what it waited for until it has synchronised.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NOW = ("streams", "events", "registrations", "primary_contexts", "in_flight_copies", "in_flight_operations")
MISUSE = ("unregister_in_use", "unregister_unmapped", "pageable_async_copies", "invalid_handles")

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
NOT_SUPPORTED = 801
UNKNOWN = 999

_SIGNATURES = {
    "fake_cuda_counter": (ctypes.c_ulong, [ctypes.c_char_p]),
    "fake_cuda_fail": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "fake_cuda_clear_faults": (None, []),
    "fake_cuda_allocation": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_uint64]),
    "fake_cuda_place": (ctypes.c_ulong, [ctypes.c_ulong]),
    "fake_cuda_reached": (ctypes.c_int, [ctypes.c_ulong]),
    "fake_cuda_set_delay_us": (None, [ctypes.c_uint]),
    "fake_cuda_pause": (None, [ctypes.c_int]),
    "fake_cuda_drain": (ctypes.c_int, []),
    "cuInit": (ctypes.c_int, [ctypes.c_uint]),
    "cuDevicePrimaryCtxRetain": (ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int, [ctypes.c_int]),
    "cuCtxPushCurrent_v2": (ctypes.c_int, [ctypes.c_void_p]),
    "cuCtxPopCurrent_v2": (ctypes.c_int, [ctypes.c_void_p]),
    "cuStreamCreate": (ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]),
    "cuStreamDestroy_v2": (ctypes.c_int, [ctypes.c_void_p]),
    "cuMemHostRegister_v2": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]),
    "cuMemHostUnregister": (ctypes.c_int, [ctypes.c_void_p]),
    "cuStreamSynchronize": (ctypes.c_int, [ctypes.c_void_p]),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]),
}


class StandIn:
    """The library that GDSSTREAM_LIBCUDA names, which is the one the engine loads."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["GDSSTREAM_LIBCUDA"])
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def count(self, name: str) -> int:
        """A counter of fake_cuda.h, or how often a driver function was called."""
        return int(self._library.fake_cuda_counter(name.encode()))

    def fail(self, symbol: str, result: int, *, after: int = 0, times: int = 1) -> None:
        assert self._library.fake_cuda_fail(symbol.encode(), result, after, times) == 0

    def clear_faults(self) -> None:
        self._library.fake_cuda_clear_faults()

    def allocation(self, address: int, nbytes: int) -> None:
        """That memory is a device allocation of its own from now on: no copy may reach from it into another."""
        assert self._library.fake_cuda_allocation(address, nbytes) == 0

    def place(self, stream: int) -> int:
        """How far a stream is filled now; 0 means the default streams of all devices."""
        return int(self._library.fake_cuda_place(stream))

    def reached(self, place: int) -> bool:
        return bool(self._library.fake_cuda_reached(place))

    def set_delay_us(self, limit: int) -> None:
        self._library.fake_cuda_set_delay_us(limit)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, whatever is enqueued on a stream stays there; afterwards it runs."""
        self._library.fake_cuda_pause(1)
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        self._library.fake_cuda_pause(0)

    def drain(self) -> None:
        assert self._library.fake_cuda_drain() == 0

    @contextmanager
    def device(self, ordinal: int = 0) -> Iterator[None]:
        """Within, the device's primary context is current in this thread."""
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", None)
            self._call("cuDevicePrimaryCtxRelease_v2", ordinal)

    @contextmanager
    def registered(self, memory: torch.Tensor) -> Iterator[None]:
        """Within, the driver knows this memory, as it does what a consumer has page-locked."""
        with self.device():
            self._call("cuMemHostRegister_v2", memory.data_ptr(), memory.nbytes, 0)
        try:
            yield
        finally:
            with self.device():
                self._call("cuMemHostUnregister", memory.data_ptr())

    @contextmanager
    def stream(self, ordinal: int = 0) -> Iterator[int]:
        """A stream of the caller's, by its handle; its device's context is current within."""
        with self.device(ordinal):
            handle = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(handle), 1)
            try:
                yield handle.value or 0
            finally:
                self._call("cuStreamDestroy_v2", handle)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        """Enqueue what a kernel of the caller's would do: read `source` and write `target`, when its turn comes."""
        assert target.nbytes == source.nbytes
        self._call("cuMemcpyDtoHAsync_v2", target.data_ptr(), source.data_ptr(), source.nbytes, stream)

    def synchronize(self, stream: int = 0, ordinal: int = 0) -> None:
        """Wait for one stream, by default the one that is torch's current stream here. Other streams go on."""
        with self.device(ordinal):
            self._call("cuStreamSynchronize", stream)

    def _call(self, symbol: str, *arguments: object) -> None:
        result = getattr(self._library, symbol)(*arguments)
        assert result == 0, f"{symbol} returned {result}"
