"""The floor: Python threads, os.preadv and nothing else.

On the CPU they read straight into the destination. On a GPU each thread owns two pinned slots: it reads into one while
the other is being copied, on a stream of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Barrier, local
from typing import TYPE_CHECKING, Any, ClassVar

from bench.full_io import move_full
from bench.loaders import headers
from bench.loaders.base import Job, Loader, Unavailable

if TYPE_CHECKING:
    import torch


class _Slots(local):
    """Pinned memory and the stream of one thread."""

    slots: list[Any] | None = None
    stream: Any = None
    turn: int = 0


@dataclass
class Pread(Loader):
    """`num_threads` 0: as many as the process may use cores. `block_bytes` is the size of one read."""

    num_threads: int = 0
    block_bytes: int = 8 << 20

    verbs: ClassVar[frozenset[str]] = frozenset({"read", "gather"})

    _job: Job | None = field(default=None, init=False, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    _local: _Slots = field(default_factory=_Slots, init=False, repr=False)
    _threads: int = field(default=0, init=False, repr=False)

    def check(self, job: Job) -> None:
        if self.num_threads < 0 or self.block_bytes < 1:
            raise Unavailable("num_threads has to be 0 or more, and block_bytes at least 1")

    def prepare(self, job: Job) -> None:
        import torch

        self._job = job
        self._threads = self.num_threads or len(os.sched_getaffinity(0))
        cuda: Any = torch.cuda  # parts of it are untyped

        def start_thread() -> None:
            if job.cuda:
                self._local.stream = cuda.Stream(job.device)
                buffers = [torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                self._local.slots = [(buffer, buffer.numpy().data, cuda.Event()) for buffer in buffers]

        self._pool = ThreadPoolExecutor(self._threads, initializer=start_thread)
        # Threads start on demand; a task each that waits for the others makes all of them set up their slots now.
        barrier = Barrier(self._threads)
        list(self._pool.map(lambda _: barrier.wait(), range(self._threads)))

    def load(self) -> dict[str, torch.Tensor]:
        import torch

        assert self._job is not None
        tensors: dict[str, torch.Tensor] = {}
        descriptors: list[int] = []
        tasks: list[tuple[int, int, torch.Tensor]] = []
        try:
            for path in self._job.paths:
                header = headers.read(path)
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                descriptors.append(descriptor)
                data = torch.empty(header.data_bytes, dtype=torch.uint8, device=self._job.device)
                for start in range(0, header.data_bytes, self.block_bytes):
                    piece = data[start : start + self.block_bytes]
                    tasks.append((descriptor, header.data_start + start, piece))
                tensors.update(headers.views(header, data))
            self._each(self._read_piece, tasks)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return tensors

    def gather(self) -> torch.Tensor:
        import torch

        assert self._job is not None
        assert self._job.request is not None
        request = self._job.request
        shape = (len(request.offsets), request.length)
        records = torch.empty(shape, dtype=torch.uint8, pin_memory=self._job.cuda)
        rows = records.numpy().data.cast("B")
        descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._job.paths]
        files, offsets, length = request.file_index.tolist(), request.offsets.tolist(), request.length

        def read_share(share: range) -> None:
            for i in share:
                move_full(descriptors[files[i]], rows[i * length : (i + 1) * length], offsets[i], write=False)

        try:
            step = -(-len(offsets) // self._threads)
            self._each(read_share, [(range(i, min(i + step, len(offsets))),) for i in range(0, len(offsets), step)])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return records.to(self._job.device, non_blocking=True) if self._job.cuda else records

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def route(self) -> str | None:
        assert self._job is not None
        target = "pinned slots -> GPU" if self._job.cuda else "destination"
        return f"{self._threads} Python threads, pread -> {target}"

    def pinned_bytes(self) -> int | None:
        return 2 * self._threads * self.block_bytes if self._job is not None and self._job.cuda else 0

    def _each(self, work: Callable[..., None], tasks: Sequence[tuple[Any, ...]]) -> None:
        assert self._pool is not None
        futures = [self._pool.submit(work, *arguments) for arguments in tasks]
        wait(futures)  # all of them: the caller closes the files next, also after an error
        for future in futures:
            future.result()

    def _read_piece(self, descriptor: int, offset: int, piece: torch.Tensor) -> None:
        import torch

        slots = self._local.slots
        if slots is None:
            move_full(descriptor, piece.numpy().data, offset, write=False)
            return
        self._local.turn ^= 1
        buffer, memory, free = slots[self._local.turn]
        free.synchronize()
        move_full(descriptor, memory[: piece.numel()], offset, write=False)
        with torch.cuda.stream(self._local.stream):
            piece.copy_(buffer[: piece.numel()], non_blocking=True)
            free.record()
