"""torch.distributed.checkpoint in a single process, without a process group: its own files, which it fsyncs itself.

It does not fsync the folder that their names are in; that is done here, as for every saver. What it raises is no
Exception, and its threads go on writing meanwhile: both are mended here, so that a full disk is a row of the table.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench import fsyncs
from bench.loaders.base import Done, Job, Loader, Saving, Unavailable, need

if TYPE_CHECKING:
    import torch

#: How long threads are waited for after a failure; one that hangs must not hold up the other rows.
_JOIN_S = 30.0


@dataclass
class TorchDcp(Loader):
    """`num_threads` write a file each, or as many as there are tensors; `background` is `async_save`."""

    num_threads: int = 4
    background: bool = False

    verbs: ClassVar[frozenset[str]] = frozenset({"write"})

    _library: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        del job
        if self.num_threads < 1:
            raise Unavailable("num_threads has to be at least 1")

    def prepare(self, job: Job) -> None:
        self._library = need("torch.distributed.checkpoint", "torch")
        if not hasattr(self._library, "FileSystemWriter"):
            raise Unavailable("this torch was built without distributed checkpoints")
        # For the process, since its threads would undo a filter that is put back.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self._job = job

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        tensors = {name: tensor for group in shards.values() for name, tensor in group.items()}
        # One file a thread, which is what it makes of one file a rank.
        writer = self._library.FileSystemWriter(folder, thread_count=self.num_threads, sync_files=True)
        with _plain_errors():
            if self.background:
                return _Pending(self._library.async_save(tensors, storage_writer=writer, no_dist=True), folder)
            self._library.save(tensors, storage_writer=writer, no_dist=True)
        fsyncs.directory(folder)
        return Done()

    def restore(self, folder: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
        import torch

        assert self._job is not None
        dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
        found = {
            name: torch.empty(shape, dtype=dtypes[dtype], device=self._job.device)
            for name, (shape, dtype) in tensors.items()
        }
        with _plain_errors():
            self._library.load(found, storage_reader=self._library.FileSystemReader(folder), no_dist=True)
        return found

    def route(self) -> str | None:
        assert self._job is not None
        source = "GPU -> " if self._job.cuda else ""
        staged = "copy in pageable memory -> " if self.background else ""
        return f"{source}{staged}page cache and fsync, {self.num_threads} threads{', later' if self.background else ''}"


class _Pending(Saving):
    """Of async_save, which has copied the tensors to the CPU when it returns and cannot be cancelled."""

    def __init__(self, future: Any, folder: Path) -> None:
        self._future, self._folder = future, folder

    def wait(self) -> None:
        try:
            with _plain_errors():
                self._future.result()
        except BaseException:
            self._future.exception()  # an interrupt ends the wait, not the thread that writes
            raise
        fsyncs.directory(self._folder)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Waits for the threads that were begun inside where it fails, and raises RuntimeError with the first cause."""
    before = set(threading.enumerate())
    try:
        yield
    except BaseException as error:
        for thread in set(threading.enumerate()) - before:
            thread.join(_JOIN_S)
        failures = getattr(error, "failures", None)
        if not failures:
            raise
        cause: BaseException = next(iter(failures.values()))[0]
        while cause.__context__ is not None:
            cause = cause.__context__
        raise RuntimeError(f"{type(error).__name__}: {cause}") from error
