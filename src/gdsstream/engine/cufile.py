"""storage -> GPU through kvikio: native GPUDirect Storage where the machine has it, kvikio's POSIX path where not.

Facts about kvikio that shape this file:

- Its settings and cuFile's registered buffers belong to the process: `kvikio_process` shares them among engines.
- A future cannot be called back: cufile_transfer parks every submission until kvikio is through with it.
- Its copies run on streams of its own, which know nothing of torch's: the destination's stream is drained by the host
  before the first read, and a read whose future is done has landed in device memory, so `wait` has no event to issue.
- Which path a read takes is decided anew for each file (and, below kvikio's GDS threshold of 1 MiB, each read), and
  cuFile below it can fall back to POSIX by itself. `route` says what kvikio counted and what cuFile's own counters
  prove; "unproven" where they are silent.
"""

from __future__ import annotations

import operator
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import starmap
from typing import Any

import torch

from gdsstream.devices import driver_replaced
from gdsstream.engine.base import (
    Engine,
    Extents,
    SourceFile,
    Stamp,
    Transfer,
    check_unchanged,
    raise_read_error,
)
from gdsstream.engine.cufile_transfer import LOCK, PARKED, REGISTRATIONS, CuFileTransfer, Parked, Read, poll, sweep
from gdsstream.engine.kvikio_process import Counters, CuFileSettings, ProcessSettings, load_kvikio
from gdsstream.errors import (
    BackendUnavailableError,
    CudaError,
    ReadError,
)
from gdsstream.stats_registry import keep_book, open_book

_MAX_OPEN_FILES = 256
_SETTINGS = ProcessSettings()

# A file's `pread` and its arguments.
Call = tuple[Any, ...]


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
        sweep()  # a dropped engine lives on, and holds its settings, as long as it has something parked
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
        sweep()
        self._drain_stream()
        transfer = CuFileTransfer(plan.num_groups, buffers, self._count_read)
        try:
            # A handle and a registration go to the current device's context.
            with torch.cuda.device(self.device):
                handles = {index: self._open(files[index]) for index in dict.fromkeys(plan.file.tolist())}
                self._start(files, handles, plan, buffers, transfer)
        except ReadError as error:
            transfer.fail(error)
        return transfer

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        # Each step can be repeated, so that a close that Ctrl-C ended can be called again.
        self._closed = True
        poll(lambda: not self._in_flight())
        self._handles.clear()
        if self._monitor is not None:
            self._monitor.stop()
        _SETTINGS.release(self, self._kvikio)

    def submission_ended(self) -> None:
        """For cufile_transfer: kvikio is through with one of this engine's submissions."""
        if self._book is not None:
            self._book.activity.end()

    def stats(self) -> dict[str, int | float]:
        """`transfers`, `reads` (extents) and `bytes` that were collected; `in_flight` submissions; `open_files`;
        `registered_bytes` of buffers that cuFile knows of, whichever engine asked for it."""
        return {
            **self._counts,
            "in_flight": self._in_flight(),
            "open_files": len(self._handles),
            "registered_bytes": REGISTRATIONS.nbytes(),
        }

    def _start(
        self,
        files: Sequence[SourceFile],
        handles: dict[int, Any],
        plan: Extents,
        buffers: Sequence[torch.Tensor],
        transfer: CuFileTransfer,
    ) -> None:
        if not self._compat and self._counters is None:
            # Not earlier: cuFile has no statistics before kvikio opened its driver with the first file.
            self._counters = Counters()
        reads, calls = self._list_reads(files, handles, plan, buffers)
        parked = Parked(self, tuple(buffers), list(handles.values()))
        # Until every read has begun, nobody may take the submission for one that is over.
        with LOCK:
            PARKED.append(parked)
            if self._book is not None:
                self._book.activity.begin()
            self._counts["transfers"] += 1
            if self._settings.register_buffers:
                self._register(buffers, parked)
            self._issue(reads, calls, parked, transfer)

    def _list_reads(
        self, files: Sequence[SourceFile], handles: dict[int, Any], plan: Extents, buffers: Sequence[torch.Tensor]
    ) -> tuple[list[Read], list[Call]]:
        """The reads of a plan, and the calls that begin them; no other thread's `wait` or sweep stands behind this."""
        reads: list[Read] = []
        calls: list[Call] = []
        columns = (plan.file, plan.file_offset, plan.nbytes, plan.buffer, plan.buffer_offset, plan.group)
        for index, offset, nbytes, buffer, start, group in zip(*(column.tolist() for column in columns), strict=True):
            if nbytes:
                reads.append(Read(files[index], handles[index], offset, nbytes, group, None))
                view = buffers[buffer][start : start + nbytes]
                calls.append((handles[index].pread, view, nbytes, offset, self._settings.task_size_bytes))
        return reads, calls

    def _issue(self, reads: Sequence[Read], calls: Sequence[Call], parked: Parked, transfer: CuFileTransfer) -> None:
        """Begin the reads, under the lock."""
        failure: Exception | None = None
        started_ns = time.monotonic_ns()
        try:
            # Without a step of the interpreter between them: Ctrl-C between the begin of a read and keeping its future
            # would free the buffer under it.
            parked.arriving.extend(starmap(operator.call, calls))
        except Exception as error:
            failure = error
        for read, future in zip(reads, parked.arriving, strict=False):
            read.future, read.started_ns = future, started_ns
            parked.reads.append(read)
            transfer.add(read)
        if failure is not None:
            refused = reads[len(parked.arriving)]
            raise_read_error(refused.source, refused.offset, refused.nbytes, failure)
        parked.arriving.clear()

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
        poll(event.query)

    def _register(self, buffers: Sequence[torch.Tensor], parked: Parked) -> None:
        for index, buffer in enumerate(buffers):
            if not buffer.numel():
                continue
            try:
                parked.registered.append(REGISTRATIONS.add(self._kvikio, buffer))
            except Exception as error:
                raise CudaError(
                    f"cuFile cannot register buffer {index} ({buffer.numel()} bytes): {error}; "
                    "try register_buffers=False"
                ) from error

    def idle(self) -> bool:
        return self._in_flight() == 0

    def _in_flight(self) -> int:
        sweep()
        with LOCK:
            return sum(parked.owner is self for parked in PARKED)

    def _count_read(self, read: Read, landed: bool) -> None:
        if landed:
            self._counts["reads"] += 1
            self._counts["bytes"] += read.nbytes
        if self._book is not None:
            if landed:
                self._book.ledgers["cufile"].record(read.nbytes, time.monotonic_ns() - read.started_ns)
            else:
                self._book.ledgers["cufile"].fail()


__all__ = ["CuFileEngine", "CuFileTransfer"]
