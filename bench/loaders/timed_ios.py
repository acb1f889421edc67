"""Blocking ios by native threads, each timed: what the routes through the CPU are made of.

Threads of Python would bound small ios, all together at some 100,000 a second and far less with a copy each, and what
is compared here would be an interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.config_base import BenchError
from bench.loaders.base import need

if TYPE_CHECKING:
    import torch

    from bench.transfer_ops import Ops

_POLL_S = 0.1


class TimedIos:
    """`threads` with an io under way each. With `buffers`, uint8 [threads, buffers, bytes of the largest io] in host
    memory, ios go through them, and reads overlap with the copies of those before where there are several; on `device`
    the driver copies. Raises Unavailable and BenchError."""

    def __init__(self, threads: int, *, buffers: torch.Tensor | None = None, device: str = "cpu") -> None:
        native = need("gdsstream._native", "gdsstream")
        self._errors = need("gdsstream", "gdsstream").GdsStreamError
        through = {}
        if buffers is not None:
            _, count, size = buffers.shape
            through = {"memory": buffers.data_ptr(), "buffers": count, "buffer_bytes": size}
            if device.startswith("cuda"):
                through["device"] = int(device.partition(":")[2] or 0)
        self._buffers = buffers
        try:
            self._native = native.TimedIos(threads, **through)
        except self._errors as error:
            raise BenchError(str(error)) from error

    def move(self, descriptors: Sequence[int], ops: Ops, memory: torch.Tensor) -> npt.NDArray[np.float64]:
        """Make the ios, each at its place in `memory`; the seconds of each. Raises BenchError for one that fails."""
        files = np.asarray(descriptors, dtype=np.int32)[ops.file]
        places = (memory.data_ptr() + ops.place).astype(np.uint64)
        taken = np.zeros(len(ops))
        try:
            self._native.begin(files, ops.offset, ops.nbytes, places, write=ops.write)
            while not self._native.wait(_POLL_S):
                pass  # back in the interpreter, where Ctrl-C is noticed
        except self._errors as error:
            raise BenchError(str(error)) from error
        self._native.seconds(taken)
        return taken

    def close(self) -> None:
        """Returns behind the ios that are under way; the memory may go then."""
        self._native.close()
