"""The native engine behind the contract of base.py: what the staged and the mapped route share.

A native engine has lanes (threads with one kind of reader each); which lane reads a file is all that the routes
decide. Python hands over raw addresses and waits; it never touches the bytes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsstream import _native, virtual_disks
from gdsstream.config import StreamConfig
from gdsstream.devices import current_stream, driver_replaced, memory_of
from gdsstream.engine.base import (
    Engine,
    Extents,
    SourceFile,
    Stamp,
    Transfer,
    check_buffers,
    check_group,
    check_plan,
    check_process,
)
from gdsstream.engine.budget import free_bytes
from gdsstream.engine.lanes import HOST_COPY, MAPPED, PAGE_CACHE, ROUTES, make_lanes
from gdsstream.errors import ConfigError, MemoryBudgetError
from gdsstream.ranges import begin_range, end_range
from gdsstream.stats_registry import keep_book, open_book
from gdsstream.topology import gpu_numa_node, node_cpus

log = logging.getLogger(__name__)

# Longer than a wake-up costs, shorter than a person notices: after each the interpreter handles signals.
_POLL_S = 0.05


class OpenFile(NamedTuple):
    """A file that a native engine has open, and the lane that reads it."""

    path: str
    stamp: Stamp
    native: _native.File
    lane: int


class Request(NamedTuple):
    """What `submit_request` reads, made ready once: files that are open, and addresses that somebody vouches for."""

    native: _native.Request
    lanes: frozenset[int]
    groups: int


class NativeTransfer(Transfer):
    """A transfer of the native engine; see base.Transfer."""

    _range: int | None = None

    def __init__(self, engine: NativeEngine, native: _native.Transfer, groups: int) -> None:
        self._engine = engine
        self._native = native
        self._groups = groups
        self._pid = os.getpid()
        self._range = begin_range(engine.name, native)

    def wait(self, group: int | None = None, timeout_s: float | None = None) -> None:
        check_process(self._pid, "transfer")
        check_group(group, self._groups)
        number = -1 if group is None else group
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _POLL_S if deadline is None else max(0.0, min(_POLL_S, deadline - time.monotonic()))
            if self._native.wait(number, left):
                break
            if deadline is not None and time.monotonic() >= deadline:
                what = "transfer" if group is None else f"group {group}"
                raise TimeoutError(f"the {what} is not complete after {timeout_s} s; wait again, or cancel it")
        self._native.order_before(number, current_stream(self._engine.device))
        if group is None:
            self._native.complete()
            end_range(self._range)
            self._range = None
        self._engine.report_notes()

    def done(self, group: int | None = None) -> bool:
        check_process(self._pid, "transfer")
        check_group(group, self._groups)
        try:
            return self._native.wait(-1 if group is None else group, 0.0)
        except Exception:
            return True

    def cancel(self) -> None:
        if self._pid == os.getpid():
            self._native.cancel()

    def drained(self) -> bool:
        return self._pid != os.getpid() or self._native.drained()

    def __del__(self) -> None:
        end_range(self._range)


class NativeEngine(Engine):
    """A native engine on one device. Subclasses decide which lane reads a file (`lane_of`)."""

    def __init__(self, device: torch.device, config: StreamConfig) -> None:
        super().__init__(device)
        self.config = config
        self._lanes_used: set[int] = set()
        book = open_book(config.stats, self.name, str(device), ROUTES)
        self._lanes, self._lane_names = make_lanes(
            config, [book.ledgers[route] for route in ROUTES] if book else [None] * 3, gpu=device.type == "cuda"
        )
        node = gpu_numa_node(_native.pci_bus_id(device.index)) if device.type == "cuda" and config.numa else -1
        self._native = _native.Engine(
            device=device.index if device.type == "cuda" else -1,
            slot_bytes=config.slot_bytes,
            staging_bytes=config.staging_bytes,
            numa_node=node,
            cpus=node_cpus(node),
            lanes=self._lanes,
            process=book.activity if book else None,
        )
        keep_book(book, self)

    def lane_of(self, file: SourceFile, native: _native.File) -> int:
        """Which lane reads `file`; may prepare it (map it). Raises as `open` does."""
        raise NotImplementedError

    def open(self, files: Sequence[SourceFile]) -> list[OpenFile]:
        """Open files for repeated submits: descriptors are kept, and the lane is decided once.

        Raises ReadError for a file that cannot be opened, FileChangedError for one that is no longer what its stamp
        says.
        """
        self.check_usable()
        opened = []
        for file in files:
            if isinstance(file, OpenFile):
                opened.append(file)
                continue
            native = _open(file)
            opened.append(OpenFile(file.path, file.stamp, native, self.lane_of(file, native)))
        return opened

    def open_windows(
        self, file: SourceFile, windows: Sequence[tuple[int, int]], *, allow_copy: bool = True
    ) -> OpenFile:
        """Hold parts of a file in host memory, and open it for reads from there: to a GPU one DMA, without a CPU copy.

        `windows` are (offset, nbytes) in bytes of the file; they are widened to pages. Each call holds its own, so that
        several of one file can come and go. They go with the last reference to the OpenFile and to transfers that read
        from it; `OpenFile.native.mapped_bytes` says how much that is. It can be submitted like any other; an extent
        outside of the windows is a ConfigError then.

        Where the driver refuses to register a file's own pages, and `allow_copy` is true, they are copied into pinned
        memory instead: logged once, and told by `OpenFile.native.host_copy`. `host_cache_bytes` is not looked at:
        the caller keeps that budget.

        Raises:
            ConfigError: a window is not in the file.
            MemoryBudgetError: the machine has no room for them.
            BackendUnavailableError: the pages cannot be registered, and a copy is not allowed.
            ReadError, FileChangedError: as `open`; also where the file fails or changes while it is brought in.
        """
        self.check_usable()
        ranges = [(int(offset), int(nbytes)) for offset, nbytes in windows]
        for offset, nbytes in ranges:
            if offset < 0 or nbytes < 0:
                raise ConfigError(f"{file.path}: no window can have {nbytes} bytes at offset {offset}")
        # Overlaps count once, so that the whole file bounds the sum.
        wanted = min(sum(nbytes for _, nbytes in ranges), file.stamp.size)
        room = free_bytes()
        if wanted > room:
            raise MemoryBudgetError(
                f"{file.path}: holding {wanted} bytes of it in host memory is too much, {room} can be spared here "
                f"({self.mapped_bytes} are held by this engine); hold less (host_cache_bytes)"
            )
        native = _open(file)
        self._native.map(native, ranges, allow_copy=allow_copy)
        self.report_notes()
        return OpenFile(file.path, file.stamp, native, MAPPED)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of files that this engine holds in host memory now, by open windows and by transfers under way."""
        return int(self._native.counters()["mapped_bytes"])

    def prepare(self) -> None:
        """Pay now for what the first transfer would pay: reader threads, and pinning the whole staging ring.

        Raises MemoryBudgetError where not even a part of the ring can be had.
        """
        self.check_usable()
        self._native.prepare(PAGE_CACHE)
        self.report_notes()

    def submit(self, files: Sequence[SourceFile], plan: Extents, buffers: Sequence[torch.Tensor]) -> NativeTransfer:
        self.check_usable()
        check_plan(plan, len(files))
        check_buffers(buffers, plan.buffer_bytes, memory_of(self.device))
        bases = np.fromiter((buffer.data_ptr() for buffer in buffers), dtype=np.uint64, count=len(buffers))
        targets = bases[plan.buffer] + plan.buffer_offset.astype(np.uint64) if len(plan.file) else bases[:0]
        return self.submit_to(files, plan, targets, keep=buffers)

    def submit_to(
        self,
        files: Sequence[SourceFile],
        plan: Extents,
        targets: NDArray[np.uint64],
        keep: Sequence[object],
        stream: int | None = None,
    ) -> NativeTransfer:
        """As `submit`, to addresses that the caller vouches for; `keep` owns them. Bytes are written after what is now
        queued on `stream`, a handle; None is the current stream."""
        return self.submit_request(self.request(files, plan, targets), keep, stream)

    def request(self, files: Sequence[SourceFile], plan: Extents, targets: NDArray[np.uint64]) -> Request:
        """Make ready what `submit_to` takes, for those who submit it again and again. Raises as `open` does."""
        opened = self.open(files)
        native = _native.Request(
            [file.native for file in opened],
            [file.lane for file in opened],
            plan.file,
            plan.file_offset,
            plan.nbytes,
            targets,
            plan.group,
            plan.num_groups,
        )
        return Request(native, _lanes_of(opened), plan.num_groups)

    def submit_request(self, request: Request, keep: Sequence[object], stream: int | None = None) -> NativeTransfer:
        """As `submit_to`."""
        self.check_usable()
        stream = current_stream(self.device) if stream is None else stream
        native = self._native.submit(request.native, stream, tuple(keep))
        return self._started(native, request.groups, request.lanes)

    def gather(
        self,
        files: Sequence[SourceFile],
        file_index: NDArray[np.int32],
        offsets: NDArray[np.int64],
        record_bytes: int,
        out: torch.Tensor,
    ) -> NativeTransfer:
        """Read records of `record_bytes` bytes at (file_index[i], offsets[i]) into row i of `out`.

        `out` is a contiguous uint8 tensor [n, record_bytes] on the engine's device.
        """
        opened = self.open(files)
        native = self._native.gather(
            [file.native for file in opened],
            [file.lane for file in opened],
            file_index,
            offsets,
            record_bytes,
            out.data_ptr(),
            current_stream(self.device),
            out,
        )
        return self._started(native, 1, _lanes_of(opened))

    def _started(self, native: _native.Transfer, groups: int, lanes: frozenset[int]) -> NativeTransfer:
        self._lanes_used |= lanes
        return NativeTransfer(self, native, groups)

    @property
    def route(self) -> str:
        used = sorted(self._lanes_used)
        if not used:
            return "nothing read yet"
        end = "CPU memory" if self.device.type == "cpu" else str(self.device)
        if driver_replaced():
            end += " (stand-in driver)"
        return " + ".join(f"{self._lane_names[lane]} -> {end}" for lane in used)

    def stats(self) -> dict[str, int | float]:
        """Counters since the engine was opened, and its present size: `transfers`, `reads`, `read_bytes`, `bytes`
        (delivered), `copies`, `copied_bytes`, `tasks`, `failed_tasks`, `threads`, `staging_bytes`, `staging_slots`,
        `staging_slots_held`, `mapped_bytes` (of files, held in host memory), `quarantined` (transfers given up whose
        memory may still be written to).

        What reads waited for, in microseconds of wall time: `active_us`, in which any transfer had bytes to read, and
        `ring_wait_us`, in which a lane could not begin to read because every staging slot was taken and a copy out of
        one had not ended. A share near 1 means that the link, or the work that a copy's destination waits for, held
        the readers up; near 0 that storage did. Each lane counts for itself, so that two at once can add up to more.
        """
        check_process(self._pid, f"{self.name} engine")
        counters: dict[str, int | float] = dict(self._native.counters())
        counters["bytes"] = counters["copied_bytes"] or counters["read_bytes"]
        return {**counters, "quarantined": self._native.quarantined()}

    def idle(self) -> bool:
        return self._native.idle()

    def ring_wait_us(self) -> int:
        return self._native.ring_wait_us()

    def report_notes(self) -> None:
        """Log once what did not go as asked but works: a smaller ring, no fixed buffers."""
        for note in self._native.take_notes():
            log.warning("%s engine on %s: %s", self.name, self.device, note)

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        self._closed = True
        self._native.close()
        self.report_notes()


def _lanes_of(opened: Sequence[OpenFile]) -> frozenset[int]:
    return frozenset(HOST_COPY if file.native.host_copy else file.lane for file in opened)


def _open(file: SourceFile) -> _native.File:
    stamp = file.stamp
    numbers = (stamp.device, stamp.inode, stamp.size, stamp.mtime_ns, stamp.ctime_ns)
    return _native.File(file.path, numbers, interrupt_cpu=virtual_disks.interrupt_cpu(stamp.device))


def check_records(file_index: NDArray[np.int32], offsets: NDArray[np.int64], record_bytes: int, num_files: int) -> None:
    """Raise ConfigError, naming the first bad record, unless indices and offsets can be read."""
    if file_index.shape != offsets.shape or file_index.ndim != 1:
        raise ConfigError(f"file_index {file_index.shape} and offsets {offsets.shape} have to be equally long vectors")
    if not isinstance(record_bytes, int) or record_bytes <= 0:
        raise ConfigError(f"records have {record_bytes!r} bytes; it has to be a whole number, at least 1")
    bad = (file_index < 0) | (file_index >= num_files)
    if bad.any():
        at = int(bad.argmax())
        raise ConfigError(f"record {at} names file {int(file_index[at])}; there are {num_files}, counted from 0")
    if (offsets < 0).any():
        at = int((offsets < 0).argmax())
        raise ConfigError(f"record {at} has the negative offset {int(offsets[at])}")
