"""NVTX ranges: transfers on the time line of Nsight Systems, and of any other tool that listens to NVTX.

Only with GDSSTREAM_NVTX=1 in the environment when gdsstream is imported. A range lasts from the submit of a transfer
until it was waited for as a whole, or dropped. Torch brings NVTX where it was built with CUDA; elsewhere
libnvToolsExt.so.1 is taken if it is there.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class Sized(Protocol):
    """A transfer of the native engine."""

    @property
    def nbytes(self) -> int: ...


_Begin = Callable[[str], int]
_End = Callable[[int], object]


def _nvtx() -> tuple[_Begin, _End] | None:
    """What begins and ends a range; None, with the reason logged, where there is no NVTX."""
    import torch

    nvtx = torch.cuda.nvtx
    try:
        nvtx.range_end(nvtx.range_start("gdsstream"))
    except (RuntimeError, AttributeError):  # the stand-in of a torch without CUDA lacks some of the names
        try:
            library = ctypes.CDLL("libnvToolsExt.so.1")
        except OSError as error:
            log.warning(
                "GDSSTREAM_NVTX=1 has no effect: torch was built without NVTX, and libnvToolsExt.so.1 cannot be "
                "loaded (%s); install torch with CUDA",
                error,
            )
            return None
        library.nvtxRangeStartA.argtypes, library.nvtxRangeStartA.restype = (ctypes.c_char_p,), ctypes.c_uint64
        library.nvtxRangeEnd.argtypes, library.nvtxRangeEnd.restype = (ctypes.c_uint64,), None
        return (lambda text: int(library.nvtxRangeStartA(text.encode()))), library.nvtxRangeEnd
    return nvtx.range_start, nvtx.range_end


_ranges = _nvtx() if os.environ.get("GDSSTREAM_NVTX", "0") not in ("", "0") else None


def begin_range(engine: str, transfer: Sized) -> int | None:
    """Open a range for a transfer that was just submitted; None where nobody asked for ranges."""
    return None if _ranges is None else _ranges[0](f"gdsstream {engine} {transfer.nbytes} bytes")


def end_range(number: int | None) -> None:
    """Close it; does nothing with None."""
    if number is not None and _ranges is not None:
        _ranges[1](number)


__all__ = ["begin_range", "end_range"]
