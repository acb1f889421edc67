"""Bytes of tensors to a file that is there complete or not at all: the writing half of `save`.

They go to a temporary file in the target's directory; then come fsync, rename, and fsync of the directory. Until the
rename the file that was there is untouched, and after it the new one survives a loss of power. Space is asked for
before the first byte is written, so that a full disk is found at once and not after minutes. Every failure removes the
temporary file (`.gdsstream-PID-RANDOM.tmp`); only a process that is killed leaves it behind.

The file is written in blocks of 16 MiB. Tensors in CPU memory are written from where they lie. Tensors of a GPU, and
all tensors where O_DIRECT is asked for, pass through two buffers, of which one is filled while the other is written.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from typing import NoReturn

import torch

from gdsstream.errors import GdsStreamError, MemoryBudgetError, WriteError
from gdsstream.load import as_bytes
from gdsstream.stats_registry import writer_book

BLOCK_BYTES = 16 << 20  # one write; copies of this size from a GPU reach 0.99 of the link

_DIRECT_ALIGNMENT = 4096  # bytes, of addresses
_DIRECT_TAIL = 64 << 10  # bytes; a file's last write is rounded up to it, which is more than any disk asks for
_MAX_VIEWS = 1024  # in one pwritev (IOV_MAX)
_SYNC_FILE_RANGE_WRITE = 2

_ADVICE = {
    errno.EACCES: "change the mode or owner of the file or its directory, or save elsewhere",
    errno.EDQUOT: "free some of the quota, or save elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or save to several files",
    errno.EINVAL: "leave direct_io out if the filesystem has no O_DIRECT",
    errno.EIO: "the storage failed, and the kernel's log may say how; save elsewhere",
    errno.EISDIR: "name a file in it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "make the directory first",
    errno.ENOSPC: "free some space, or save elsewhere",
    errno.ENOTDIR: "choose a path that leads through directories",
    errno.EPERM: "change the mode or owner of the file or its directory, or save elsewhere",
    errno.EROFS: "mount the filesystem writable, or save elsewhere",
}


def write_file(
    path: str,
    pieces: Iterable[torch.Tensor],
    ready: Mapping[torch.device, torch.cuda.Event],
    direct_io: bool,
    fsync: bool,
    check: Callable[[], None],
    nbytes: int | None = None,
) -> None:
    """Make or replace `path` with the bytes of `pieces`, end to end.

    Args:
        path: absolute, links resolved.
        pieces: tensors of integers on any devices, of any strides. Of an iterator, whose `nbytes` have to be given,
            one in CPU memory is in use until so many pieces have been taken behind it that they hold 2 BLOCK_BYTES.
        ready: for each GPU of a piece, an event after which its pieces hold their bytes.
        direct_io: write by O_DIRECT instead of through the page cache.
        fsync: wait until the storage has it.
        check: called between blocks; what it raises ends the write.
        nbytes: how many bytes the pieces have; None counts a sequence.

    Raises WriteError, MemoryBudgetError where there is no room for the buffers, and what the pieces' iterator raises.
    """
    if nbytes is None:
        pieces = list(pieces)
        nbytes = sum(piece.nbytes for piece in pieces)
    try:
        with _replacement(path, direct_io, fsync) as file:
            _reserve(file.fileno(), nbytes)
            _write_pieces(file.fileno(), pieces, _Staging(ready, direct_io), fsync and not direct_io, check)
            if direct_io:
                file.truncate(nbytes)
            if fsync:
                os.fsync(file.fileno())
            check()
    except GdsStreamError:  # some of them are OSErrors
        raise
    except OSError as error:
        _raise_write_error(path, nbytes, error)


@contextmanager
def _replacement(path: str, direct_io: bool, fsync: bool) -> Iterator[io.FileIO]:
    """A new file that takes the place of `path` when all went well, and is removed when not."""
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, f".gdsstream-{os.getpid()}-{secrets.token_hex(8)}.tmp")
    mode = _replaced_mode(path)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # An object, not a bare descriptor: it is closed even if an interrupt comes before it has a name here.
        with io.FileIO(temporary, "xb", opener=_open_direct if direct_io else None) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
        os.rename(temporary, path)
        if fsync:
            _fsync_directory(folder, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(folder)


def _replaced_mode(path: str) -> int | None:
    """The mode of the file that is to be replaced, None where there is none. Refuses what must not be replaced."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise WriteError(f"{path} is no regular file, and is not replaced by one; save under another name")
    # A rename would replace what its owner protected, too.
    os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    return mode & 0o777


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT, 0o666)


def _fsync_directory(folder: int, path: str) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some filesystems cannot do it, and keep renames in order without
            raise WriteError(
                f"{path} is in its place, but may be gone after a loss of power, for fsync of its directory failed: "
                f"{error.strerror}; look at the storage and save again",
                error.errno,
            ) from error


def _raise_write_error(path: str, nbytes: int, error: OSError) -> NoReturn:
    wanted = f"{nbytes} bytes wanted"
    with suppress(OSError):
        space = os.statvfs(os.path.dirname(path))
        wanted += f", {space.f_bavail * space.f_frsize} available"
    advice = _ADVICE.get(error.errno or 0, "look at the storage, or save elsewhere")
    reason = error.strerror or str(error)
    raise WriteError(f"{path} cannot be written ({wanted}): {reason}; {advice}", error.errno) from error


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return libc


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take the space, where the filesystem can give it beforehand. Raises OSError where it has not enough."""
    # Not posix_fallocate: where the filesystem cannot do it, glibc writes into every block, which takes a second pass.
    if _libc().fallocate(descriptor, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))


def _write_pieces(
    descriptor: int,
    pieces: Iterable[torch.Tensor],
    staging: _Staging,
    start_writeback: bool,
    check: Callable[[], None],
) -> None:
    offset = 0
    try:
        for views, events in _one_late(map(staging.fill, _blocks(map(staging.flat, pieces)))):
            check()
            for event in events:
                event.synchronize()
            begin = offset
            offset = _write_all(descriptor, views, offset)
            if start_writeback:
                # The disk works on this block while the next is written. Only a hint: fsync tells what went wrong.
                _libc().sync_file_range(descriptor, begin, offset - begin, _SYNC_FILE_RANGE_WRITE)
    finally:
        staging.drain()


def _write_all(descriptor: int, views: list[memoryview], offset: int) -> int:
    """Write the views end to end at `offset`; returns where they end. Raises OSError."""
    edges = list(accumulate(map(len, views), initial=offset))
    index = 0
    while index < len(views):
        # A write may end anywhere; the next one goes on there.
        rest = views[index][offset - edges[index] :]
        count = _write(descriptor, [rest, *views[index + 1 : index + _MAX_VIEWS]], offset)
        if not count:
            raise OSError(errno.EIO, f"nothing was written at byte {offset}")
        offset += count
        while index < len(views) and edges[index + 1] <= offset:
            index += 1
    return offset


def _write(descriptor: int, views: list[memoryview], offset: int) -> int:
    """`os.pwritev`, counted where somebody wants to know (GDSSTREAM_STATS)."""
    book = writer_book()
    if book is None:
        return os.pwritev(descriptor, views, offset)
    book.activity.begin()
    started = time.monotonic_ns()
    try:
        count = os.pwritev(descriptor, views, offset)
        book.ledgers["save"].record(count, time.monotonic_ns() - started)
        return count
    except OSError:
        book.ledgers["save"].fail()
        raise
    finally:
        book.activity.end()


def _blocks(flats: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat tensors end to end, cut into blocks of BLOCK_BYTES; only the last is shorter."""
    block: list[torch.Tensor] = []
    room = BLOCK_BYTES
    for flat in flats:
        start = 0
        while start < flat.numel():
            part = flat[start : start + room]
            block.append(part)
            start += part.numel()
            room -= part.numel()
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


_Filled = tuple[list[memoryview], list[torch.cuda.Event]]


def _one_late(items: Iterator[_Filled]) -> Iterator[_Filled]:
    """Each item only when the next was made, too: its copies are under way while this one is written."""
    late = None
    for item in items:
        if late is not None:
            yield late
        late = item
    if late is not None:
        yield late


class _Staging:
    """Where a block waits to be written: in place, or in one of two buffers, pinned where GPUs fill them."""

    def __init__(self, ready: Mapping[torch.device, torch.cuda.Event], direct_io: bool) -> None:
        self._direct_io = direct_io
        self._buffers: list[torch.Tensor] = []
        # Streams of their own, so that what the caller queues next neither waits for the copies nor holds them up.
        self._streams = {device: torch.cuda.Stream(device) for device in ready}  # type: ignore[no-untyped-call]
        for device, stream in self._streams.items():
            stream.wait_event(ready[device])

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its bytes, uint8 [nbytes]; in stream order if it has to be made contiguous for that."""
        if not tensor.is_contiguous():
            with torch.cuda.stream(self._streams.get(tensor.device)):
                tensor = tensor.contiguous()
        return as_bytes(tensor)

    def fill(self, block: list[torch.Tensor]) -> _Filled:
        """The block's bytes, and the events after which they are there. Good until the call after the next."""
        if not self._direct_io and all(part.device.type == "cpu" for part in block):
            return [part.numpy().data for part in block], []
        buffer = self._next_buffer()
        end = 0
        for part in block:
            with torch.cuda.stream(self._streams.get(part.device)):
                buffer[end : end + part.numel()].copy_(part, non_blocking=True)
            end += part.numel()
        if self._direct_io:
            end += -end % _DIRECT_TAIL  # what is too much is cut off in the end
        used = {part.device for part in block} & self._streams.keys()
        # Blocking: waiting for the work before the save must not keep a core busy.
        events = [self._streams[device].record_event(torch.cuda.Event(blocking=True)) for device in used]  # type: ignore[no-untyped-call]
        return [buffer[:end].numpy().data], events

    def drain(self) -> None:
        """Wait for the copies under way: after a failure, their sources and buffers are about to be freed."""
        for stream in self._streams.values():
            stream.synchronize()

    def _next_buffer(self) -> torch.Tensor:
        if len(self._buffers) < 2:
            self._buffers.append(self._new_buffer())
        else:
            self._buffers.reverse()
        return self._buffers[-1]

    def _new_buffer(self) -> torch.Tensor:
        pinned = bool(self._streams)
        try:
            buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
            if self._direct_io and buffer.data_ptr() % _DIRECT_ALIGNMENT:
                buffer = torch.empty(BLOCK_BYTES + _DIRECT_ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
                buffer = buffer[-buffer.data_ptr() % _DIRECT_ALIGNMENT :][:BLOCK_BYTES]
        except RuntimeError as error:
            raise MemoryBudgetError(
                f"no room for a buffer of {BLOCK_BYTES} bytes{' of pinned memory' if pinned else ''} to save through: "
                f"{str(error).splitlines()[0]}; free some memory first"
            ) from error
        return buffer


__all__ = ["BLOCK_BYTES", "write_file"]
