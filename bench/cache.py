"""The page cache, put into a known state and verified.

`posix_fadvise(DONTNEED)` is a request: dirty, mapped or registered pages stay. So a sample counts as cold only when
mincore(2), asked right before it, finds no page of the files in memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

_PAGE = mmap.PAGESIZE
_READ_BLOCK = 4 << 20


def resident_bytes(path: str) -> int:
    """Bytes of the file that are in the page cache, in whole pages. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return _resident_pages(descriptor, size) * _PAGE if size else 0
    finally:
        os.close(descriptor)


def evict(paths: Sequence[str], attempts: int = 3) -> int:
    """Ask the kernel to drop the files from the page cache; returns the bytes that stayed nevertheless."""
    left = 0
    for _ in range(attempts):
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)  # a dirty page cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        left = sum(map(_stayed, paths))
        if left == 0:
            break
    return left


def refuses_direct(path: str) -> str | None:
    """What says that the file cannot be read with O_DIRECT, found by reading a page; None where it can."""
    with mmap.mmap(-1, _PAGE) as memory:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            try:
                os.preadv(descriptor, [memory], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            return f"O_DIRECT is refused here ({error.strerror})"
    return None


def warm(paths: Sequence[str]) -> int:
    """Read what is missing into the page cache; returns the bytes that are still missing (memory is too small, or the
    file system does not say)."""
    missing = 0
    scratch = bytearray(_READ_BLOCK)
    for path in paths:
        size = os.path.getsize(path)
        if size - _stayed(path, unknown=0) > 0:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset in range(0, size, _READ_BLOCK):
                    os.preadv(descriptor, [scratch], offset)
            finally:
                os.close(descriptor)
        missing += max(0, size - _stayed(path, unknown=0))
    return missing


def _stayed(path: str, unknown: int | None = None) -> int:
    """resident_bytes; `unknown` (None: the whole file) where the file system lets nobody look, as some of a network or
    in user space do. So what cannot be verified counts as neither cold nor warm."""
    try:
        return resident_bytes(path)
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return max(os.path.getsize(path), 1) if unknown is None else unknown


def _resident_pages(descriptor: int, size: int) -> int:
    # The mmap module hides the address of a read-only mapping, which mincore needs.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap for mincore failed")
    try:
        vector = (ctypes.c_ubyte * ((size + _PAGE - 1) // _PAGE))()
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) != 0:
            raise OSError(ctypes.get_errno() or errno.EIO, "mincore failed")
        # Only the lowest bit is defined; a page in memory has it set.
        return bytes(vector).translate(_LOW_BIT).count(1)
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


_LOW_BIT = bytes(value & 1 for value in range(256))
