"""Ordinary memory that ios of the bench land in and come from."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

_PIECE_BYTES = 16 << 20


def used_memory(nbytes: int) -> mmap.mmap:
    """Private memory that was written to, page-aligned, of huge pages where there are any. Not with zeros, which some
    file systems and disks do not store; the bytes come again after 16 MiB."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    piece = np.random.default_rng(0).integers(0, 256, min(nbytes, _PIECE_BYTES), dtype=np.uint8)
    view = np.frombuffer(memory, dtype=np.uint8)
    for at in range(0, nbytes, len(piece)):
        view[at : at + len(piece)] = piece[: nbytes - at]
    return memory
