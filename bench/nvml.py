"""The few calls of NVIDIA's management library that the bench makes, without a package of its own.

libnvidia-ml comes with the driver. It is asked for one GPU, the first that this process may use; asking neither starts
CUDA nor takes any memory of the GPU. What the library or the driver does not offer is an NvmlError that says so.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_UNKNOWN = (1 << 64) - 1  # memory of a process that the driver does not tell
_RECEIVED = 198  # NVML_FI_DEV_PCIE_COUNT_RX_BYTES
_DEVICE_V2 = 2
#: Where the counter of received bytes begins anew: an H200 has 32 bits of it, whatever the field's type.
COUNTER = 1 << 32


class NvmlError(Exception):
    """Something cannot be found out; the message says why."""


class Process(NamedTuple):
    """A process that computes on the GPU, and its memory there where that is known."""

    pid: int
    nbytes: int | None


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),  # a union; the counters asked for are unsigned
    )


class Device:
    """One GPU."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def processes(self) -> list[Process]:
        """Those that compute on it. Raises NvmlError."""
        count = ctypes.c_uint(64)
        for _ in range(3):
            found = (_ProcessInfo * count.value)()
            status = self._call("nvmlDeviceGetComputeRunningProcesses_v3", ctypes.byref(count), found, but=_TOO_SMALL)
            if status == 0:
                return [Process(each.pid, _known(each.used)) for each in found[: count.value]]
            count.value += 16
        raise NvmlError("processes come and go faster than they can be listed")

    def used_bytes(self) -> int:
        """Memory in use by anybody, without what the driver keeps for itself. Raises NvmlError."""
        return int(self._memory().used)

    def free_bytes(self) -> int:
        """Memory in use by nobody. Raises NvmlError."""
        return int(self._memory().free)

    def _memory(self) -> _Memory:
        found = _Memory(version=ctypes.sizeof(_Memory) | _DEVICE_V2 << 24)
        self._call("nvmlDeviceGetMemoryInfo_v2", ctypes.byref(found))
        return found

    def received_bytes(self) -> int:
        """What came over PCIe, headers included, modulo COUNTER. Raises NvmlError where that is not counted."""
        found = _FieldValue(field=_RECEIVED)
        self._call("nvmlDeviceGetFieldValues", 1, ctypes.byref(found))
        if found.status != 0:
            raise NvmlError(f"the driver has no counter of received bytes ({_text(self._library, found.status)})")
        return int(found.value) % COUNTER

    def _call(self, name: str, *arguments: Any, but: int = 0) -> int:
        return _call(self._library, name, self._handle, *arguments, but=but)


def count() -> int:
    """How many GPUs the driver shows. Raises NvmlError."""
    found = ctypes.c_uint(0)
    _call(_open(), "nvmlDeviceGetCount_v2", ctypes.byref(found))
    return int(found.value)


def open_device(number: int | None = None) -> Device:
    """The GPU of that number, as nvidia-smi counts, or else the first that CUDA_VISIBLE_DEVICES leaves to this process.
    Raises NvmlError."""
    library = _open()
    handle = ctypes.c_void_p()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() if number is None else str(number)
    if first.startswith(("GPU-", "MIG-")):
        _call(library, "nvmlDeviceGetHandleByUUID", first.encode(), ctypes.byref(handle))
    else:
        # The numbers are CUDA's own unless CUDA_DEVICE_ORDER says PCI_BUS_ID; equal GPUs have the same order in both.
        index = int(first) if first.isdigit() else 0
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return Device(library, handle)


def _open() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NvmlError(f"{_LIBRARY} cannot be opened ({error})") from error
    _call(library, "nvmlInit_v2")
    return library


def _call(library: Any, name: str, *arguments: Any, but: int = 0) -> int:
    function = getattr(library, name, None)
    if function is None:
        raise NvmlError(f"the driver is too old for {name}")
    status = int(function(*arguments))
    if status not in (0, but):
        raise NvmlError(f"{name}: {_text(library, status)}")
    return status


def _text(library: Any, status: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    return str(library.nvmlErrorString(status).decode())


def _known(nbytes: int) -> int | None:
    return None if nbytes == _UNKNOWN else int(nbytes)
