"""Ordinary memory that ios of the bench land in and come from."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

import numpy as np

_PIECE_BYTES = 16 << 20
_HUGE_BYTES = 2 << 20
#: Linux 6.1: make huge pages of the small ones that are there, at once. Python has no name for it.
_MADV_COLLAPSE = 25


def used_memory(nbytes: int) -> mmap.mmap:
    """Private memory that was written to, page-aligned, of huge pages where there are any. Not with zeros, which some
    file systems and disks do not store; the bytes come again after 16 MiB."""
    # Whole huge pages are what the kernel puts at a huge page's boundary.
    rounded = -(-nbytes // _HUGE_BYTES) * _HUGE_BYTES if nbytes >= _HUGE_BYTES else nbytes
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A loader's workers would share it: the next io into it then copies each page, and huge ones fall to pieces.
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    piece = np.random.default_rng(0).integers(0, 256, min(nbytes, _PIECE_BYTES), dtype=np.uint8)
    view = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
    for at in range(0, nbytes, len(piece)):
        view[at : at + len(piece)] = piece[: nbytes - at]
    if nbytes >= _HUGE_BYTES:
        with suppress(OSError):  # an older kernel, or memory that is in too many pieces
            memory.madvise(_MADV_COLLAPSE)
    return memory


def small_pages(address: int, nbytes: int) -> int:
    """How many of the bytes from a huge page's boundary on are not in huge pages, by /proc/self/smaps: a virtual disk
    can be half as fast into them. 0 for less than a huge page."""
    found, huge = 0, 0
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if "-" in name.partition(" ")[0] and " " in name:
            begin, end = (int(part, 16) for part in name.partition(" ")[0].split("-"))
            inside = begin <= address < end
            found = end - address if inside else found
        elif inside and name == "AnonHugePages":
            huge = int(value.split()[0]) * 1024
    whole = min(nbytes, found) // _HUGE_BYTES * _HUGE_BYTES
    return max(0, whole - huge)
