"""Transfers of the cufile engine: kvikio's futures, and what has to stay alive until they are done.

A future cannot be called back. Every submission is therefore parked in a list of this module, with its buffers and file
handles, until kvikio has no part left to write, whatever becomes of the transfer or of the engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gdsstream.engine.base import SourceFile, Transfer, check_group, check_process, check_unchanged, raise_read_error
from gdsstream.engine.kvikio_process import Registrations
from gdsstream.errors import ShortReadError, TransferCancelledError


class Owner(Protocol):
    """The engine of a submission."""

    def submission_ended(self) -> None:
        """Nothing of one of its submissions is under way any more."""


@dataclass(slots=True, eq=False)
class Read:
    """One extent under way; `future` is None once its result was taken, since it can be asked only once."""

    source: SourceFile
    handle: Any
    offset: int
    nbytes: int
    group: int
    future: Any
    started_ns: int = 0


@dataclass(slots=True, eq=False)
class Parked:
    """Everything that kvikio may still use for one submission; kept here until it is through."""

    owner: Owner
    buffers: tuple[torch.Tensor, ...]
    handles: list[Any] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    arriving: list[Any] = field(default_factory=list)  # futures of reads that were just begun
    registered: list[int] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)

    def finished(self) -> bool:
        while self.reads and (self.reads[-1].future is None or self.reads[-1].future.done()):
            self.reads.pop()
        while self.arriving and self.arriving[-1].done():
            self.arriving.pop()
        return not (self.reads or self.arriving)


# Guards the list and every future in it: taking a result and asking whether it is there must not meet.
LOCK = threading.RLock()
PARKED: list[Parked] = []
REGISTRATIONS = Registrations()


def sweep() -> None:
    """Let go of the submissions, of whatever engine, that kvikio is through with."""
    with LOCK:
        for parked in [entry for entry in PARKED if entry.pid == os.getpid() and entry.finished()]:
            PARKED.remove(parked)
            parked.owner.submission_ended()
            for base in parked.registered:
                REGISTRATIONS.remove(base)


class CuFileTransfer(Transfer):
    """Futures of kvikio, collected extent by extent by whoever waits."""

    def __init__(self, num_groups: int, buffers: Sequence[torch.Tensor], on_read: Callable[[Read, bool], None]) -> None:
        self._pid = os.getpid()
        # kvikio defers small reads to `get`, which writes long after the submission looks finished.
        self._buffers = tuple(buffers)
        self._queues: list[deque[Read]] = [deque() for _ in range(num_groups)]
        self._used: list[dict[str, Read]] = [{} for _ in range(num_groups)]
        self._left = set(range(num_groups))
        self._error: Exception | None = None
        self._on_read = on_read
        self._futures: list[Any] = []

    def add(self, read: Read) -> None:
        """Take on one more extent; `submit` only."""
        self._queues[read.group].append(read)
        self._futures.append(read.future)
        self._used[read.group][read.source.path] = read

    def fail(self, error: Exception) -> None:
        """End the transfer with `error`, unless it has one."""
        self._error = self._error or error
        self._drop()

    def wait(self, group: int | None = None, timeout_s: float | None = None) -> None:
        check_process(self._pid, "transfer")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not poll(lambda: self.done(group), deadline):
            what = "transfer" if group is None else f"group {group}"
            raise TimeoutError(f"the {what} is not complete after {timeout_s} s; it goes on, wait again or cancel it")
        if self._error is not None:
            raise self._error

    def done(self, group: int | None = None) -> bool:
        """As `Transfer.done`; a read below kvikio's GDS threshold may run here, since kvikio defers it to `get`."""
        check_process(self._pid, "transfer")
        check_group(group, len(self._queues))
        with LOCK:
            groups = sorted(self._left) if group is None else sorted(self._left & {group})
            try:
                # In order, and no further than the first that is not there: the threads work in this order too.
                return self._error is not None or all(self._collect(one) for one in groups)
            except Exception as error:
                self.fail(error)
                return True

    def cancel(self) -> None:
        with LOCK:
            if self._left and self._error is None:
                self.fail(TransferCancelledError("the transfer was cancelled; submit its plan again to get the bytes"))

    def drained(self) -> bool:
        if self._pid != os.getpid():
            return True
        with LOCK:
            self._futures = [future for future in self._futures if not future.done()]
            return not self._futures

    def _collect(self, group: int) -> bool:
        """Take in what has landed of a group; True when that is all of it and its files are still the same."""
        queue = self._queues[group]
        while queue:
            read = queue[0]
            if not read.future.done():
                return False
            queue.popleft()
            self._take(read)
        for read in self._used[group].values():
            check_unchanged(read.source, read.handle.fileno())
        self._left.discard(group)
        if not self._left:
            self._drop()
        return True

    def _take(self, read: Read) -> None:
        try:
            got = read.future.get()
        except Exception as error:
            self._on_read(read, False)
            # kvikio reports a truncated file as a failed read; that it changed is the better reason.
            check_unchanged(read.source, read.handle.fileno())
            if "EOF" in str(error):
                raise _short(read, "fewer") from error
            raise_read_error(read.source, read.offset, read.nbytes, error)
        finally:
            read.future = None
        if got != read.nbytes:
            self._on_read(read, False)
            check_unchanged(read.source, read.handle.fileno())
            raise _short(read, str(got))
        self._on_read(read, True)

    def _drop(self) -> None:
        for queue in self._queues:
            queue.clear()
        for used in self._used:
            used.clear()
        self._buffers = ()
        sweep()


def _short(read: Read, got: str) -> ShortReadError:
    return ShortReadError(
        f"{read.source.path} ends early: {read.nbytes} bytes wanted at offset {read.offset}, got {got}; "
        "the file is truncated or the plan is not this file's"
    )


def poll(ready: Callable[[], bool], deadline: float | None = None) -> bool:
    """Sleep until `ready` or the deadline; in short naps, since only between them can a signal be handled."""
    nap = 20e-6
    while not ready():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, 500e-6)
    return True


__all__ = ["LOCK", "PARKED", "REGISTRATIONS", "CuFileTransfer", "Owner", "Parked", "Read", "poll", "sweep"]
