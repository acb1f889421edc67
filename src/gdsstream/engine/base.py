"""What every engine promises: `Engine.submit` moves the bytes of a plan into buffers, a `Transfer` is the promise.

An engine belongs to one process and one device. `submit` checks its arguments (ConfigError) and returns a transfer;
whatever goes wrong with the storage afterwards is raised by `Transfer.wait`, never by `submit`. The engine, not the
caller, keeps buffers and files alive until nothing can write to them any more: a transfer that is cancelled or
dropped is safe.

Groups: each extent of a plan belongs to a group `0 <= g < plan.num_groups`, and a group can be waited for on its own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, NoReturn, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gdsstream.devices import memory_of, parse_device
from gdsstream.errors import ConfigError, EngineClosedError, FileChangedError, ForkedProcessError, ReadError


class Stamp(Protocol):
    """Identity of a file's contents when it was opened (`checkpoint.FileStamp`)."""

    @property
    def device(self) -> int: ...
    @property
    def inode(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...
    @property
    def ctime_ns(self) -> int: ...


class SourceFile(Protocol):
    """A file to read from: its path, and the stamp it had when its header was read."""

    @property
    def path(self) -> str: ...
    @property
    def stamp(self) -> Stamp: ...


class Extents(Protocol):
    """The arrays of a `plan.ReadPlan`, one entry an extent; offsets and lengths in bytes."""

    @property
    def file(self) -> NDArray[np.int32]: ...
    @property
    def file_offset(self) -> NDArray[np.int64]: ...
    @property
    def nbytes(self) -> NDArray[np.int64]: ...
    @property
    def buffer(self) -> NDArray[np.int32]: ...
    @property
    def buffer_offset(self) -> NDArray[np.int64]: ...
    @property
    def group(self) -> NDArray[np.int32]: ...
    @property
    def buffer_bytes(self) -> tuple[int, ...]: ...
    @property
    def num_groups(self) -> int: ...


class Transfer(ABC):
    """The bytes of one submitted plan, on their way."""

    @abstractmethod
    def wait(self, group: int | None = None, timeout_s: float | None = None) -> None:
        """Return when the bytes of `group` (None: of the whole plan) can be used on the current stream.

        That is: every read of the group has landed, every copy is enqueued, and the current torch stream of the
        destination's device has been made to wait for those copies. The calling thread does not wait for the GPU
        and holds no lock that other threads need; Ctrl-C ends the wait, and the transfer goes on.

        The first read that fails fails the whole transfer: every later `wait` raises that error, for the transfer and
        for any group that had not landed by then. A group that had landed keeps its bytes. Can be called again, and
        from several threads.

        Raises:
            TimeoutError: not there after `timeout_s` seconds; the transfer goes on and can be waited for again.
            ReadError, ShortReadError, FileChangedError: the storage failed, or the file is no longer the same.
            TransferCancelledError: `cancel` was called before the transfer was complete.
            ConfigError: the plan has no such group.
            ForkedProcessError: called in a child of the process that submitted.
        """

    @abstractmethod
    def done(self, group: int | None = None) -> bool:
        """Whether `wait(group)` would come back at once, be it by returning or by raising. Never blocks on storage."""

    @abstractmethod
    def cancel(self) -> None:
        """Give the transfer up, at once; the contents of its buffers are undefined from here on.

        Reads that cannot be called back run to their end, and the engine keeps their buffers and files until then:
        the caller may drop its own references, but must not reuse the buffers for anything else while the engine is
        open. Has no effect on a transfer that is complete or has failed. Never raises.
        """

    @abstractmethod
    def drained(self) -> bool:
        """Whether nothing writes to the buffers any more: also after a failure or a cancel. Never blocks or raises."""


class Engine(ABC):
    """One route from storage into buffers on `device`; a context manager that closes itself."""

    name: ClassVar[str]
    device: torch.device

    def __init__(self, device: torch.device | str | int) -> None:
        self.device = parse_device(device)
        self._pid = os.getpid()
        self._closed = False

    @property
    @abstractmethod
    def route(self) -> str:
        """What really moves the bytes, station by station: reported by what does the work, never guessed."""

    @abstractmethod
    def submit(self, files: Sequence[SourceFile], plan: Extents, buffers: Sequence[torch.Tensor]) -> Transfer:
        """Start to read every extent of `plan` from `files` into `buffers` and return its transfer.

        `plan.file` indexes `files`, `plan.buffer` indexes `buffers`. A buffer is a contiguous 1-D uint8 tensor on
        the engine's device with at least `plan.buffer_bytes[i]` bytes; its bytes are written after the work that is
        now queued on the current stream. A buffer must not be used until the transfer is complete.

        Raises:
            ConfigError: buffers or plan do not fit; nothing was started.
            EngineClosedError, ForkedProcessError: this engine cannot be used (any more, here).
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight and release everything. Idempotent; in a forked child it does nothing."""

    @abstractmethod
    def stats(self) -> dict[str, int | float]:
        """Counters since the engine was opened: at least `transfers`, `reads` and `bytes` (that have landed)."""

    def idle(self) -> bool:
        """Whether nothing that was submitted can still write to a buffer. Never blocks; true for engines that read
        while they submit."""
        return True

    def ring_wait_us(self) -> int:
        """How long reads have waited for staging slots so far, in microseconds; 0 for engines that cannot tell.
        As in `stats`, and cheap enough to be asked for each layer."""
        return 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> Self:
        self.check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def check_usable(self) -> None:
        """Raise unless the engine is open and belongs to this process."""
        check_process(self._pid, f"{self.name} engine")
        if self._closed:
            raise EngineClosedError(f"the {self.name} engine was closed; open a new one with open_engine()")

    def check_submit(self, files: Sequence[SourceFile], plan: Extents, buffers: Sequence[torch.Tensor]) -> None:
        """All that `submit` promises to refuse, in one call: every engine's first line."""
        self.check_usable()
        check_plan(plan, len(files))
        check_buffers(buffers, plan.buffer_bytes, memory_of(self.device))


def check_process(pid: int, what: str) -> None:
    """Raise ForkedProcessError in any process but the one that made `what`: threads and GPU state do not survive."""
    if pid != os.getpid():
        raise ForkedProcessError(
            f"this {what} belongs to process {pid} and cannot be used in its child {os.getpid()}; "
            "open a new engine in the child"
        )


def check_group(group: int | None, num_groups: int) -> None:
    """Raise ConfigError unless `group` is None or one of the plan's."""
    if group is not None and not 0 <= group < num_groups:
        raise ConfigError(f"no group {group} in this transfer; its plan has {num_groups} group(s), counted from 0")


def check_buffers(buffers: Sequence[torch.Tensor], buffer_bytes: Sequence[int], device: torch.device) -> None:
    """Raise ConfigError unless `buffers` can take a plan's bytes; engines pass raw pointers on after this."""
    if len(buffers) != len(buffer_bytes):
        raise ConfigError(f"the plan fills {len(buffer_bytes)} buffer(s), {len(buffers)} given; pass one for each")
    for index, (buffer, wanted) in enumerate(zip(buffers, buffer_bytes, strict=True)):
        where = f"buffer {index}"
        if buffer.dtype != torch.uint8:
            raise ConfigError(f"{where} is {buffer.dtype}; pass a torch.uint8 tensor (or a view of that dtype)")
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ConfigError(
                f"{where} has shape {tuple(buffer.shape)} and strides {buffer.stride()}; pass a contiguous 1-D tensor"
            )
        if buffer.device != device:
            raise ConfigError(f"{where} is on {buffer.device}, the engine reads to {device}; allocate it there")
        if buffer.numel() < wanted:
            raise ConfigError(
                f"{where} holds {buffer.numel()} bytes, the plan needs {wanted}: {wanted - buffer.numel()} bytes short"
            )


def check_plan(plan: Extents, num_files: int) -> None:
    """Raise ConfigError, naming the first bad extent, unless all of them lie inside files, buffers and groups."""
    capacity = np.asarray(plan.buffer_bytes, dtype=np.int64)
    if len(plan.file) == 0:
        return
    _refuse((plan.file < 0) | (plan.file >= num_files), plan.file, f"names a file that is not among the {num_files}")
    _refuse((plan.file_offset < 0) | (plan.nbytes < 0), plan.file_offset, "has a negative offset or length")
    _refuse((plan.group < 0) | (plan.group >= plan.num_groups), plan.group, f"is in none of {plan.num_groups} groups")
    _refuse((plan.buffer < 0) | (plan.buffer >= len(capacity)), plan.buffer, "names a buffer that the plan lacks")
    # Subtracting keeps a huge offset from wrapping round.
    room = capacity[plan.buffer] - plan.nbytes
    _refuse((plan.buffer_offset < 0) | (plan.buffer_offset > room), plan.buffer_offset, "ends outside its buffer")


def _refuse(bad: NDArray[np.bool_], values: NDArray[np.int32] | NDArray[np.int64], why: str) -> None:
    if bad.any():
        index = int(bad.argmax())
        raise ConfigError(f"extent {index} of the plan {why} (value {int(values[index])}); rebuild the plan")


def check_unchanged(source: SourceFile, fd: int) -> None:
    """Raise FileChangedError unless the open file `fd` still is what `source.stamp` says."""
    now = os.fstat(fd)
    pairs = {
        "device": (source.stamp.device, now.st_dev),
        "inode": (source.stamp.inode, now.st_ino),
        "size": (source.stamp.size, now.st_size),
        "mtime_ns": (source.stamp.mtime_ns, now.st_mtime_ns),
        "ctime_ns": (source.stamp.ctime_ns, now.st_ctime_ns),
    }
    changed = [f"{field} {old} -> {new}" for field, (old, new) in pairs.items() if old != new]
    if changed:
        raise FileChangedError(
            f"{source.path} changed since it was opened ({', '.join(changed)}); "
            "open the checkpoint again, and do not write to files that are being read"
        )


def raise_read_error(source: SourceFile, offset: int, nbytes: int, error: Exception) -> NoReturn:
    """Raise `error` as a ReadError that names file and offset, with the system's errno where there is one."""
    number = error.errno if isinstance(error, OSError) else None
    raise ReadError(
        f"reading {nbytes} bytes at offset {offset} of {source.path} failed: {error}; check the storage and retry",
        number,
    ) from error


__all__ = [
    "Engine",
    "Extents",
    "SourceFile",
    "Stamp",
    "Transfer",
    "check_buffers",
    "check_group",
    "check_plan",
    "check_process",
    "check_unchanged",
    "raise_read_error",
]
