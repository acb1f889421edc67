"""Where tensors live: the only file that asks torch about devices, streams and allocations.

With a replaced driver library (`GDSSTREAM_LIBCUDA`, the tests' stand-in for a GPU) the memory of a CUDA device is
whatever that library copies to: ordinary host memory. Everything above this file works the same either way.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gdsstream.errors import BackendUnavailableError, ConfigError, MemoryBudgetError


def driver_replaced() -> bool:
    """Whether another library stands in for the CUDA driver."""
    return bool(os.environ.get("GDSSTREAM_LIBCUDA"))


def parse_device(device: torch.device | str | int) -> torch.device:
    """The device with its index, "cuda" being the current one; an int is a CUDA ordinal, as in safetensors.

    Raises ConfigError for what is neither CPU nor CUDA, and BackendUnavailableError where torch has no CUDA.
    """
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is none that torch knows: {error}") from None
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.type != "cuda":
        raise ConfigError(f'device {str(parsed)!r} is not supported; use "cpu" or "cuda[:N]"')
    if driver_replaced():
        return torch.device("cuda", parsed.index or 0)
    if not torch.cuda.is_available():
        raise BackendUnavailableError(f'device {str(parsed)!r}: torch finds no CUDA device here; use device="cpu"')
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device cuda:{index} does not exist: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def default_device() -> str:
    """What to read to where nobody says: "cuda" where there is a GPU (or a stand-in driver), else "cpu"."""
    return "cuda" if driver_replaced() or torch.cuda.is_available() else "cpu"


def memory_of(device: torch.device) -> torch.device:
    """Where tensors for `device` are allocated: there, unless a stand-in driver copies to host memory."""
    return torch.device("cpu") if device.type == "cuda" and driver_replaced() else device


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor. Raises MemoryBudgetError with the size when the device has no room."""
    return allocate_all([(shape, dtype)], device)[0]


def allocate_all(wanted: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Uninitialised tensors, each with memory of its own. Raises MemoryBudgetError for the first that has no room."""
    memory = memory_of(device)
    empty = torch.empty
    tensors: list[torch.Tensor] = []
    try:
        for shape, dtype in wanted:
            tensors.append(empty(shape, dtype=dtype, device=memory))
    except torch.OutOfMemoryError as error:
        raise _no_room(*wanted[len(tensors)], device, error) from error
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise _no_room(*wanted[len(tensors)], device, error) from error
    return tensors


def _no_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device, error: Exception) -> MemoryBudgetError:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return MemoryBudgetError(
        f"no room on {device} for a tensor of shape {tuple(shape)} and {dtype} ({nbytes} bytes): "
        f"{str(error).splitlines()[0]}; load fewer tensors (names=...) or free some first"
    )


def free_device_bytes(device: torch.device) -> int:
    """What is free of a CUDA device's memory; a stand-in driver has none of its own, and no limit."""
    return sys.maxsize if driver_replaced() else int(torch.cuda.mem_get_info(device)[0])


def device_name(device: torch.device) -> str:
    """What the driver calls a CUDA device, such as "NVIDIA H200"; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return "stand-in driver" if driver_replaced() else str(torch.cuda.get_device_name(device))


def memory_rate(device: torch.device) -> tuple[float, str] | None:
    """Bytes a second of a CUDA device's memory by its clock and width, and that in words; None where untold."""
    if device.type != "cuda" or driver_replaced():
        return None
    properties = torch.cuda.get_device_properties(device)
    khz, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    if not khz or not bits:
        return None
    return 2.0 * khz * 1e3 * bits / 8, f"2 x {khz / 1e6:.2f} GHz x {bits} bit"


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream on `device`; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    if driver_replaced():
        return int(getattr(_replaced, "stream", 0))
    # What torch.cuda.current_stream wraps in an object, at a tenth of its cost.
    return int(torch._C._cuda_getCurrentRawStream(device.index))


_replaced = threading.local()


@contextmanager
def on_stream(device: torch.device, handle: int) -> Iterator[None]:
    """Within, the stream of that handle is the current one of `device` in this thread."""
    if device.type != "cuda":
        yield
    elif driver_replaced():
        before = current_stream(device)
        _replaced.stream = handle
        try:
            yield
        finally:
            _replaced.stream = before
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, device)):  # type: ignore[no-untyped-call]
            yield


__all__ = [
    "allocate",
    "allocate_all",
    "current_stream",
    "default_device",
    "device_name",
    "driver_replaced",
    "free_device_bytes",
    "memory_of",
    "memory_rate",
    "on_stream",
    "parse_device",
]
