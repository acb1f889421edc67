"""The baseline and the oracle in tests: page cache -> pageable memory -> device, one piece after the other.

This is what loading through `mmap` and `tensor.to(device)` does, with the same number of copies: the kernel's page
cache, a fresh pageable tensor, the destination. The bytes are taken with `preadv` instead of through a mapping,
because a file that is truncated while its mapping is read kills the process with SIGBUS; a short read is an error
that can be raised.

There is no thread and no overlap: `submit` does all the work and returns a transfer that is complete, so that Ctrl-C
and tracebacks are those of plain Python.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from gdsstream.engine.base import (
    Engine,
    Extents,
    SourceFile,
    Transfer,
    check_group,
    check_process,
    check_unchanged,
    raise_read_error,
)
from gdsstream.errors import ConfigError, ReadError, ShortReadError
from gdsstream.stats_registry import keep_book, open_book

# Bounds the pageable copy of a large extent; far above the size from which a copy's fixed cost matters.
PIECE_BYTES = 64 << 20


class TraditionalTransfer(Transfer):
    """A transfer that was over when it was made; `wait` raises what went wrong."""

    def __init__(self, num_groups: int, error: ReadError | None) -> None:
        self._num_groups = num_groups
        self._error = error
        self._pid = os.getpid()

    def wait(self, group: int | None = None, timeout_s: float | None = None) -> None:
        check_process(self._pid, "transfer")
        check_group(group, self._num_groups)
        if self._error is not None:
            raise self._error

    def done(self, group: int | None = None) -> bool:
        check_group(group, self._num_groups)
        return True

    def cancel(self) -> None:
        """Nothing is left to cancel."""

    def drained(self) -> bool:
        return True


class TraditionalEngine(Engine):
    """Synchronous reads through pageable memory; any device torch can copy to.

    Args:
        device: where the buffers are.
        piece_bytes: the largest read and copy, in bytes.
        stats: see StreamConfig.
    """

    name = "traditional"

    def __init__(
        self, device: torch.device | str | int = "cpu", *, piece_bytes: int = PIECE_BYTES, stats: int = 0
    ) -> None:
        if piece_bytes <= 0:
            raise ConfigError(f"piece_bytes must be positive, got {piece_bytes}")
        super().__init__(device)
        self._piece_bytes = piece_bytes
        self._counts: dict[str, int | float] = {"transfers": 0, "reads": 0, "bytes": 0, "read_s": 0.0, "copy_s": 0.0}
        self._book = open_book(stats, self.name, str(self.device), ("traditional",))
        keep_book(self._book, self)

    @property
    def route(self) -> str:
        return f"preadv (page cache) -> pageable memory -> {'CPU' if self.device.type == 'cpu' else 'GPU'}"

    def submit(self, files: Sequence[SourceFile], plan: Extents, buffers: Sequence[torch.Tensor]) -> Transfer:
        self.check_submit(files, plan, buffers)
        error: ReadError | None = None
        activity = self._book.activity if self._book else None
        if activity is not None:
            activity.begin()
        try:
            self._read_all(files, plan, buffers)
        except ReadError as failure:
            error = failure
            if self._book is not None:
                self._book.ledgers["traditional"].fail()
        finally:
            if activity is not None:
                activity.end()
        self._counts["transfers"] += 1
        return TraditionalTransfer(plan.num_groups, error)

    def close(self) -> None:
        self._closed = True

    def stats(self) -> dict[str, int | float]:
        """`transfers`, `reads` (pieces), `bytes`, and the seconds spent in reads (`read_s`) and copies (`copy_s`)."""
        return dict(self._counts)

    def _read_all(self, files: Sequence[SourceFile], plan: Extents, buffers: Sequence[torch.Tensor]) -> None:
        with ExitStack() as stack:
            open_files: dict[int, int] = {}
            extents = zip(
                plan.file.tolist(),
                plan.file_offset.tolist(),
                plan.nbytes.tolist(),
                plan.buffer.tolist(),
                plan.buffer_offset.tolist(),
                strict=True,
            )
            for file, offset, nbytes, buffer, buffer_offset in extents:
                if file not in open_files:
                    open_files[file] = _open(files[file])
                    stack.callback(os.close, open_files[file])
                destination = buffers[buffer][buffer_offset : buffer_offset + nbytes]
                self._read_extent(files[file], open_files[file], offset, destination)
            for file, fd in open_files.items():
                check_unchanged(files[file], fd)

    def _read_extent(self, source: SourceFile, fd: int, offset: int, destination: torch.Tensor) -> None:
        for start in range(0, destination.numel(), self._piece_bytes):
            target = destination[start : start + self._piece_bytes]
            check_unchanged(source, fd)
            began = time.perf_counter()
            pageable = torch.empty(target.numel(), dtype=torch.uint8)
            _read_piece(source, fd, offset + start, pageable)
            read = time.perf_counter()
            # From pageable memory torch waits for the copy, so that nothing is left to order for a later stream.
            target.copy_(pageable)
            self._counts["copy_s"] += time.perf_counter() - read
            self._counts["read_s"] += read - began
            self._counts["reads"] += 1
            self._counts["bytes"] += target.numel()
            if self._book is not None:
                self._book.ledgers["traditional"].record(target.numel(), int((read - began) * 1e9))


def _open(source: SourceFile) -> int:
    try:
        return os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(f"{source.path} cannot be opened: {error.strerror}; check the path", error.errno) from error


def _read_piece(source: SourceFile, fd: int, offset: int, piece: torch.Tensor) -> None:
    """Fill `piece`; a read may come back with a part, the end of the file comes back with nothing."""
    view = piece.numpy().data
    got = 0
    while got < len(view):
        try:
            count = os.preadv(fd, [view[got:]], offset + got)
        except OSError as error:
            raise_read_error(source, offset + got, len(view) - got, error)
        if count == 0:
            # A file that shrank has changed, which says more than where the bytes ran out.
            check_unchanged(source, fd)
            raise ShortReadError(
                f"{source.path} ends early: {len(view)} bytes wanted at offset {offset}, got {got}; "
                "the file is truncated or the plan is not this file's"
            )
        got += count


__all__ = ["PIECE_BYTES", "TraditionalEngine", "TraditionalTransfer"]
