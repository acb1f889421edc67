"""The lanes of a native engine: which readers there are, how many threads each has, and what they are called."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from gdsstream import _native, virtual_disks
from gdsstream.config import StreamConfig
from gdsstream.errors import BackendUnavailableError
from gdsstream.notices import say_once

log = logging.getLogger(__name__)

_MAX_AUTO_THREADS = 12
_AUTO_DEPTH = 256
_URING_THREADS = 4
# Where io_uring is not to be had, only many threads keep a disk's queue filled.
_DIRECT_PREAD_THREADS = 32
# Large enough for full bandwidth, small enough that a queue of them spreads over a RAID's members.
_DIRECT_READ_BYTES = 512 << 10

# Small reads keep more than one busy. Each has its share of the least of a pace under way; one that reads alone, all.
_PACED_THREADS = 2
# Under way at such a disk before its rate is known, and at a slow one always. It was slower with 6 MiB, which left the
# caches; 2 and 4 were no faster.
_PACED_BYTES = 3 << 20
# Of a slot that such reads go through: the most of one read, so that a large one waits for no other.
_PACED_SLOT_BYTES = _DIRECT_READ_BYTES
_PACED_RING_BYTES = 32 << 20
# Reads of this on average are made by one thread, on the CPU that takes their disk's interrupts: from 64 KiB up they
# were 5 % faster there, and at 4 KiB, which keep it busy, 3 % slower.
_NEAR_INTERRUPTS_BYTES = 16 << 10

PAGE_CACHE, DIRECT, MAPPED = 0, 1, 2
# What they are called in statistics.
ROUTES = ("page cache", "direct", "mapped")
# What the mapped lane is called where it reads pinned copies.
HOST_COPY = 3


def make_lanes(
    config: StreamConfig, ledgers: Sequence[_native.Ledger | None], *, gpu: bool
) -> tuple[list[_native.Lane], list[str]]:
    """The three lanes, in the order of PAGE_CACHE, DIRECT, MAPPED, and what to call them; they count in `ledgers`.

    `gpu`: what they read goes to one, which copies it itself.
    """
    cores = len(os.sched_getaffinity(0))
    threads = config.num_threads or min(cores, _MAX_AUTO_THREADS)
    reason = _native.io_uring_reason() if config.reader != "pread" else 'reader="pread"'
    if config.reader == "io_uring" and reason:
        raise BackendUnavailableError(f'reader="io_uring" cannot run: {reason}; use reader="auto" or "pread"')
    if config.reader == "auto" and reason:
        say_once(log, f"reads with O_DIRECT use threads instead of io_uring: {reason}")
    buffered = "io_uring" if config.reader == "io_uring" else "pread"
    direct = "pread" if reason else "io_uring"
    # A depth that was asked for is kept.
    requests = virtual_disks.single_queue_requests() if direct == "io_uring" and config.io_depth is None else 0
    usual = _DIRECT_PREAD_THREADS if direct == "pread" else min(cores, _PACED_THREADS if requests else _URING_THREADS)
    direct_threads = config.direct_threads or config.num_threads or usual
    depth = direct_depth = config.io_depth or _AUTO_DEPTH
    if requests:
        # As many as its queue takes and again as many, which are there as soon as it takes more.
        direct_depth = min(depth, max(1, 2 * requests // direct_threads))
    lanes = [
        _native.Lane(
            buffered,
            direct=False,
            threads=threads,
            depth=depth if buffered == "io_uring" else 1,
            read_bytes=config.chunk_bytes,
            faults=config.faults,
            ledger=ledgers[PAGE_CACHE],
        ),
        _native.Lane(
            direct,
            direct=True,
            threads=direct_threads,
            depth=direct_depth if direct == "io_uring" else 1,
            read_bytes=min(config.chunk_bytes, _DIRECT_READ_BYTES),
            fixed_buffers=direct == "io_uring",
            paced_bytes=_PACED_BYTES if requests else 0,
            # Threads that copy as well would wait for each other on one CPU.
            near_interrupts_bytes=_NEAR_INTERRUPTS_BYTES if requests and gpu and config.numa else 0,
            slot_bytes=min(config.slot_bytes, _PACED_SLOT_BYTES) if requests else 0,
            staging_bytes=min(config.staging_bytes, _PACED_RING_BYTES),
            faults=config.faults,
            ledger=ledgers[DIRECT],
        ),
        _native.Lane(
            "mapped",
            direct=False,
            threads=1,
            depth=1,
            read_bytes=config.chunk_bytes,
            faults=config.faults,
            ledger=ledgers[MAPPED],
        ),
    ]
    return lanes, [
        f"page cache by {buffered} x{threads}",
        f"O_DIRECT by {direct} x{direct_threads}"
        + (f" of depth {direct_depth}" if direct == "io_uring" else "")
        + (", paced" if requests else ""),
        "registered page cache",
        "pinned copy in host memory",
    ]


__all__ = ["DIRECT", "HOST_COPY", "MAPPED", "PAGE_CACHE", "ROUTES", "make_lanes"]
