"""storage -> GPU through kvikio: native GPUDirect Storage where the machine has it, kvikio's POSIX path where not.

Facts about kvikio that shape this file:

- Its settings and cuFile's registered buffers belong to the process: `kvikio_process` shares them among engines.
- A future cannot be called back. Every submission is therefore parked in a list of this module, with its buffers and
  file handles, until kvikio has no part left to write, whatever becomes of the transfer or of the engine.
- Its copies run on streams of its own, which know nothing of torch's: the destination's stream is drained by the host
  before the first read, and a read whose future is done has landed in device memory, so `wait` has no event to issue.
- Which path a read takes is decided anew for each file (and, below kvikio's GDS threshold of 1 MiB, each read), and
  cuFile below it can fall back to POSIX by itself. `route` says what kvikio counted and what cuFile's own counters
  prove; "unproven" where they are silent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gdsstream.devices import driver_replaced
from gdsstream.engine.base import (
    Engine,
    Extents,
    SourceFile,
    Stamp,
    Transfer,
    check_group,
    check_process,
    check_unchanged,
    raise_read_error,
)
from gdsstream.engine.kvikio_process import Counters, CuFileSettings, ProcessSettings, Registrations, load_kvikio
from gdsstream.errors import (
    BackendUnavailableError,
    CudaError,
    ReadError,
    ShortReadError,
    TransferCancelledError,
)
from gdsstream.stats_registry import keep_book, open_book

_MAX_OPEN_FILES = 256


@dataclass(slots=True, eq=False)
class _Read:
    """One extent under way; `future` is None once its result was taken, since it can be asked only once."""

    source: SourceFile
    handle: Any
    offset: int
    nbytes: int
    group: int
    future: Any
    started_ns: int = 0


@dataclass(slots=True, eq=False)
class _Parked:
    """Everything that kvikio may still use for one submission; kept here until it is through."""

    owner: CuFileEngine
    buffers: tuple[torch.Tensor, ...]
    handles: list[Any] = field(default_factory=list)
    reads: list[_Read] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    submitting: bool = True
    pid: int = field(default_factory=os.getpid)

    def finished(self) -> bool:
        while self.reads and (self.reads[-1].future is None or self.reads[-1].future.done()):
            self.reads.pop()
        return not self.submitting and not self.reads


# Guards the list and every future in it: taking a result and asking whether it is there must not meet.
_LOCK = threading.RLock()
_PARKED: list[_Parked] = []
_SETTINGS = ProcessSettings()
_REGISTRATIONS = Registrations()


def _sweep() -> None:
    """Let go of the submissions, of whatever engine, that kvikio is through with."""
    with _LOCK:
        for parked in [entry for entry in _PARKED if entry.pid == os.getpid() and entry.finished()]:
            _PARKED.remove(parked)
            if parked.owner._book is not None:
                parked.owner._book.activity.end()
            for base in parked.registered:
                _REGISTRATIONS.remove(base)


class CuFileTransfer(Transfer):
    """Futures of kvikio, collected extent by extent by whoever waits."""

    def __init__(
        self, num_groups: int, buffers: Sequence[torch.Tensor], on_read: Callable[[_Read, bool], None]
    ) -> None:
        self._pid = os.getpid()
        # kvikio defers small reads to `get`, which writes long after the submission looks finished.
        self._buffers = tuple(buffers)
        self._queues: list[deque[_Read]] = [deque() for _ in range(num_groups)]
        self._used: list[dict[str, _Read]] = [{} for _ in range(num_groups)]
        self._left = set(range(num_groups))
        self._error: Exception | None = None
        self._on_read = on_read
        self._futures: list[Any] = []

    def add(self, read: _Read) -> None:
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
        if not _poll(lambda: self.done(group), deadline):
            what = "transfer" if group is None else f"group {group}"
            raise TimeoutError(f"the {what} is not complete after {timeout_s} s; it goes on, wait again or cancel it")
        if self._error is not None:
            raise self._error

    def done(self, group: int | None = None) -> bool:
        """As `Transfer.done`; a read below kvikio's GDS threshold may run here, since kvikio defers it to `get`."""
        check_process(self._pid, "transfer")
        check_group(group, len(self._queues))
        with _LOCK:
            groups = sorted(self._left) if group is None else sorted(self._left & {group})
            try:
                # In order, and no further than the first that is not there: the threads work in this order too.
                return self._error is not None or all(self._collect(one) for one in groups)
            except Exception as error:
                self.fail(error)
                return True

    def cancel(self) -> None:
        with _LOCK:
            if self._left and self._error is None:
                self.fail(TransferCancelledError("the transfer was cancelled; submit its plan again to get the bytes"))

    def drained(self) -> bool:
        if self._pid != os.getpid():
            return True
        with _LOCK:
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

    def _take(self, read: _Read) -> None:
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
        _sweep()


def _short(read: _Read, got: str) -> ShortReadError:
    return ShortReadError(
        f"{read.source.path} ends early: {read.nbytes} bytes wanted at offset {read.offset}, got {got}; "
        "the file is truncated or the plan is not this file's"
    )


def _poll(ready: Callable[[], bool], deadline: float | None = None) -> bool:
    """Sleep until `ready` or the deadline; in short naps, since only between them can a signal be handled."""
    nap = 20e-6
    while not ready():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, 500e-6)
    return True


class CuFileEngine(Engine):
    """kvikio behind the engine contract; CUDA devices only.

    Args:
        device: a CUDA device.
        settings: kvikio's settings; see `CuFileSettings`.
        stats: see StreamConfig.

    Raises:
        BackendUnavailableError: no CUDA device, no kvikio, or a library that kvikio needs is missing.
        ConfigError: another open engine has other settings.
        CudaError: from `submit`, when `register_buffers` is set and cuFile refuses one.
    """

    name = "cufile"

    def __init__(
        self,
        device: torch.device | str | int = "cuda",
        settings: CuFileSettings | None = None,
        *,
        stats: int = 0,
    ) -> None:
        self._settings = settings or CuFileSettings()
        super().__init__(device)
        self._require_cuda()
        self._kvikio = load_kvikio()
        self._handles: OrderedDict[str, tuple[Stamp, Any]] = OrderedDict()
        self._counts = {"transfers": 0, "reads": 0, "bytes": 0}
        self._counters: Counters | None = None
        _sweep()  # a dropped engine lives on, and holds its settings, as long as it has something parked
        _SETTINGS.claim(self, self._settings, self._kvikio)
        self._compat = bool(self._kvikio.defaults.is_compat_mode_preferred())
        # Newer versions count for each read which backend took it. Process-wide: other users of kvikio count too.
        monitored = not self._compat and hasattr(self._kvikio, "SummaryMonitor")
        self._monitor: Any = self._kvikio.SummaryMonitor() if monitored else None
        self._book = open_book(stats, self.name, str(self.device), ("cufile",))
        keep_book(self._book, self)

    def _require_cuda(self) -> None:
        """Refuse before kvikio is touched: without a driver its reads raise, and with compat_mode "off" they spin."""
        if self.device.type != "cuda":
            reason = f"it reads to CUDA devices only, not to {self.device}: kvikio needs libcuda even for host memory"
        elif driver_replaced():
            reason = "GDSSTREAM_LIBCUDA replaces the CUDA driver, and kvikio uses the real one"
        else:
            return
        raise BackendUnavailableError(
            f"the cufile backend cannot run: {reason}; use backend='auto', 'staged' or 'traditional'"
        )

    @property
    def route(self) -> str:
        mode = "O_DIRECT asked for" if self._settings.direct_io else "page cache"
        posix = f"kvikio POSIX path: pread ({mode}) -> pinned bounce buffer -> GPU"
        if self._compat:
            return posix
        if not self._counts["reads"]:
            return "kvikio -> cuFile asked for; unproven: nothing was read yet"
        verdict = self._counters.verdict() if self._counters else "unproven"
        if self._monitor is None:
            return f"kvikio -> cuFile -> GPU ({verdict})"
        totals = self._monitor.get().by_backend
        direct, fallback = (totals[backend]["bytes_transferred"] for backend in ("GDS", "POSIX"))
        if not direct:
            return posix
        mixed = f"; {fallback} bytes took the {posix}" if fallback else ""
        return f"kvikio -> cuFile -> GPU for {direct} bytes ({verdict}){mixed}"

    def counted(self) -> dict[str, int]:
        """Reads by their way, as cuFile's own counters (else nvidia-fs's) saw them since the first submit; all but
        "posix" went by DMA. Empty where nothing counts, and on kvikio's POSIX path."""
        return self._counters.delta() if self._counters else {}

    def submit(self, files: Sequence[SourceFile], plan: Extents, buffers: Sequence[torch.Tensor]) -> Transfer:
        self.check_submit(files, plan, buffers)
        _sweep()
        self._drain_stream()
        parked = _Parked(self, tuple(buffers))
        transfer = CuFileTransfer(plan.num_groups, buffers, self._count_read)
        with _LOCK:
            _PARKED.append(parked)
        if self._book is not None:
            self._book.activity.begin()
        self._counts["transfers"] += 1
        try:
            # A handle and a registration go to the current device's context.
            with torch.cuda.device(self.device):
                self._start(files, plan, buffers, parked, transfer)
        except ReadError as error:
            transfer.fail(error)
        finally:
            parked.submitting = False
        return transfer

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        # Each step can be repeated, so that a close that Ctrl-C ended can be called again.
        self._closed = True
        _poll(lambda: not self._in_flight())
        self._handles.clear()
        if self._monitor is not None:
            self._monitor.stop()
        _SETTINGS.release(self, self._kvikio)

    def stats(self) -> dict[str, int | float]:
        """`transfers`, `reads` (extents) and `bytes` that were collected; `in_flight` submissions; `open_files`;
        `registered_bytes` of buffers that cuFile knows of, whichever engine asked for it."""
        return {
            **self._counts,
            "in_flight": self._in_flight(),
            "open_files": len(self._handles),
            "registered_bytes": _REGISTRATIONS.nbytes(),
        }

    def _start(
        self,
        files: Sequence[SourceFile],
        plan: Extents,
        buffers: Sequence[torch.Tensor],
        parked: _Parked,
        transfer: CuFileTransfer,
    ) -> None:
        handles: dict[int, Any] = {}
        for index in dict.fromkeys(plan.file.tolist()):
            handle = self._open(files[index])
            parked.handles.append(handle)
            handles[index] = handle
        if not self._compat and self._counters is None:
            # Not earlier: cuFile has no statistics before kvikio opened its driver with the first file.
            self._counters = Counters()
        if self._settings.register_buffers:
            self._register(buffers, parked)
        columns = (plan.file, plan.file_offset, plan.nbytes, plan.buffer, plan.buffer_offset, plan.group)
        for index, offset, nbytes, buffer, start, group in zip(*(column.tolist() for column in columns), strict=True):
            if not nbytes:
                continue
            view = buffers[buffer][start : start + nbytes]
            try:
                future = handles[index].pread(view, nbytes, offset, self._settings.task_size_bytes)
            except Exception as error:
                raise_read_error(files[index], offset, nbytes, error)
            read = _Read(files[index], handles[index], offset, nbytes, group, future, time.monotonic_ns())
            parked.reads.append(read)
            transfer.add(read)

    def _open(self, source: SourceFile) -> Any:
        """A handle for `source` as it was stamped; kept, since cuFile's registration of a file takes its time."""
        stamp, handle = self._handles.get(source.path, (None, None))
        if handle is None or stamp != source.stamp:
            try:
                os.stat(source.path)  # kvikio's own error lacks the errno
                handle = self._kvikio.CuFile(source.path, "r")
            except OSError as error:
                text = f"{source.path} cannot be opened: {error.strerror}; check the path"
                raise ReadError(text, error.errno) from error
            except Exception as error:
                raise ReadError(f"{source.path} cannot be opened by kvikio: {error}") from error
            self._handles[source.path] = (source.stamp, handle)
        self._handles.move_to_end(source.path)
        # Forgetting a handle closes it, or lets the submissions that still use it do so.
        while len(self._handles) > _MAX_OPEN_FILES:
            self._handles.popitem(last=False)
        check_unchanged(source, handle.fileno())
        return handle

    def _drain_stream(self) -> None:
        """Let the host wait for all that the current stream still does with the buffers' memory.

        The allocator hands out memory whose last kernel may still be running on that stream. kvikio copies on streams
        of its own and takes no event to wait for, so that the order has to be made here. Only this stream is waited
        for, not the device.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        _poll(event.query)

    def _register(self, buffers: Sequence[torch.Tensor], parked: _Parked) -> None:
        for index, buffer in enumerate(buffers):
            if not buffer.numel():
                continue
            try:
                parked.registered.append(_REGISTRATIONS.add(self._kvikio, buffer))
            except Exception as error:
                raise CudaError(
                    f"cuFile cannot register buffer {index} ({buffer.numel()} bytes): {error}; "
                    "try register_buffers=False"
                ) from error

    def _in_flight(self) -> int:
        _sweep()
        with _LOCK:
            return sum(parked.owner is self for parked in _PARKED)

    def _count_read(self, read: _Read, landed: bool) -> None:
        if landed:
            self._counts["reads"] += 1
            self._counts["bytes"] += read.nbytes
        if self._book is not None:
            if landed:
                self._book.ledgers["cufile"].record(read.nbytes, time.monotonic_ns() - read.started_ns)
            else:
                self._book.ledgers["cufile"].fail()


__all__ = ["CuFileEngine", "CuFileTransfer"]
