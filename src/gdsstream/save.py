"""save_file and save_file_async: tensors to a safetensors file, which is there complete or not at all.

The layout is safetensors' own (descending alignment of the dtypes, then names), but for the blanks that end the header:
they make the data begin at a multiple of 4096 bytes instead of 8, because copies out of registered page cache are
faster from a page's beginning. Nothing inside the data is aligned: the format forbids holes.

What is the caller's mistake is refused here, at once; `writer` does the rest, in this thread or in one of its own.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from gdsstream.devices import allocate
from gdsstream.dtypes import DTYPES, DtypeInfo
from gdsstream.errors import (
    ConfigError,
    DtypeError,
    EngineError,
    ForkedProcessError,
    MemoryBudgetError,
    TransferCancelledError,
)
from gdsstream.header import MAX_HEADER_BYTES
from gdsstream.regular_files import PathLike, quote
from gdsstream.writer import write_file

log = logging.getLogger(__name__)

DATA_ALIGNMENT = 4096

# Any type of the same size holds the same bits, and torch can copy these of any strides.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# All the work of one save. The argument is called between blocks, and raises to end it.
_Job = Callable[[Callable[[], None]], None]


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    direct_io: bool = False,
    fsync: bool = True,
) -> None:
    """Save tensors as a safetensors file, atomically: `safetensors.torch.save_file` for tensors on any device.

    Args:
        tensors: dense tensors by name, on the CPU or on GPUs. One that is not contiguous is saved as if it were. No two
            may share memory, as in safetensors. They must not be changed by another thread or stream meanwhile.
        filename: the file to make or replace. A link is followed, and the file that it leads to is replaced. The mode
            of a file that is replaced is kept; a new file's follows the umask. Its owner is the caller, and other
            hard links keep the old bytes.
        metadata: strings to keep with the tensors.
        direct_io: write past the page cache (O_DIRECT), so that what is cached stays cached. Slower on most disks.
        fsync: False returns without waiting for the storage: atomic still, but not safe from a loss of power.

    Raises:
        ConfigError: a tensor, name or metadata the format cannot hold, or two names for the same memory.
        DtypeError: a tensor's dtype is none of safetensors'.
        WriteError: the storage refused (`errno` says why); the file that was there is unchanged, unless it was only
            the last fsync, of the directory, that failed.
        MemoryBudgetError: no memory for the two buffers of 16 MiB that tensors of a GPU and `direct_io` need.
    """
    _, job = _prepare(tensors, filename, metadata, direct_io, fsync, snapshot=False)
    job(_go_on)


def save_file_async(
    tensors: Mapping[str, torch.Tensor],
    filename: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    direct_io: bool = False,
    fsync: bool = True,
) -> PendingSave:
    """`save_file` in a thread of its own: what is saved is what the tensors hold now.

    Before this returns, the tensors are copied where they are: those in CPU memory at its speed, those of a GPU on its
    current stream, without waiting for it. So they can be changed right away, and until the save is over it takes as
    much memory again, on each device. A program that ends waits for its saves.

    Arguments are those of `save_file`.

    Returns:
        The save under way. Its `wait` raises WriteError and what else goes wrong in the thread; an error that nobody
        waits for is logged.

    Raises:
        ConfigError, DtypeError: as `save_file`, at once.
        MemoryBudgetError: no room for the copies; `save_file` needs none.
        EngineError: the system starts no more threads.
    """
    path, job = _prepare(tensors, filename, metadata, direct_io, fsync, snapshot=True)
    return PendingSave(path, job)


class PendingSave:
    """A save under way in a thread. Dropping it does not end it.

    Attributes:
        path: the file that will be made or replaced: absolute, links resolved.
    """

    def __init__(self, path: str, job: _Job) -> None:
        self.path = path
        self._pid = os.getpid()
        self._outcome = _Outcome(path)
        # Not a daemon: an interpreter that exits waits for it. It must not know `self`, or nobody could drop that.
        thread = threading.Thread(target=self._outcome.run, args=(job,), name="gdsstream-save", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            raise EngineError(f"no thread can be started to save {path}: {error}; use save_file") from error
        self._unheard = weakref.finalize(self, self._outcome.abandon)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the file is in its place. Ctrl-C ends the wait, and the save goes on. Can be called again.

        Raises:
            WriteError: the storage refused; as for `save_file`.
            TransferCancelledError: `cancel` was called in time; the file that was there is unchanged.
            TimeoutError: not complete after `timeout_s` seconds; the save goes on and can be waited for again.
            ForkedProcessError: called in a child of the process that saves.
        """
        self._check_process()
        if not self._outcome.over.wait(timeout_s):
            raise TimeoutError(f"{self.path} is not written after {timeout_s} s; wait again, or cancel the save")
        self._unheard.detach()
        if self._outcome.error is not None:
            raise self._outcome.error

    def done(self) -> bool:
        """Whether `wait` would come back at once, be it by returning or by raising."""
        self._check_process()
        return self._outcome.over.is_set()

    def cancel(self) -> None:
        """Give the save up, at once; the thread notices between two blocks. Too late once everything is written:
        `wait` tells which it was."""
        self._check_process()
        self._outcome.cancelled.set()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedProcessError(
                f"{self.path} is being saved by process {self._pid}, which its child {os.getpid()} cannot wait for or "
                "cancel; do so in the parent, or save again here"
            )


class _Outcome:
    """What a save's thread and its PendingSave share."""

    def __init__(self, path: str) -> None:
        self.over = threading.Event()
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self._path = path
        self._pid = os.getpid()
        self._abandoned = False
        self._logged = False
        self._lock = threading.RLock()  # garbage may be collected, and `abandon` run, while this thread holds it

    def run(self, job: _Job) -> None:
        error: BaseException | None = None
        try:
            job(self._raise_if_cancelled)
        except BaseException as failure:  # handed to `wait`, whatever it is
            _forget_locals(failure)
            error = failure
        del job  # the traceback has this frame, too
        with self._lock:
            self.error = error
            self.over.set()
            if self._abandoned:
                self._log_error()

    def abandon(self) -> None:
        """Nobody has waited to the end, and nobody can any more."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._abandoned = True
            if self.over.is_set():
                self._log_error()

    def _log_error(self) -> None:
        if self.error is None or self._logged or isinstance(self.error, TransferCancelledError):
            return
        self._logged = True
        log.error("%s was not saved, and nobody waited for it: %s", self._path, self.error, exc_info=self.error)

    def _raise_if_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise TransferCancelledError(f"saving {self._path} was cancelled; what was there before is unchanged")


def _forget_locals(error: BaseException) -> None:
    """An error that is kept would keep the copies of the tensors, in the frames of its traceback."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _go_on() -> None:
    """Nobody can cancel."""


# What the file is to hold


class _Tensor(NamedTuple):
    name: str
    dtype: str  # safetensors' name
    rank: int  # of the dtype: those of larger alignment have a higher one
    shape: tuple[int, ...]  # as in the file, in elements of `dtype`
    bits: torch.Tensor  # integers of the same size, of any strides


def _prepare(
    tensors: Mapping[str, torch.Tensor],
    filename: PathLike,
    metadata: Mapping[str, str] | None,
    direct_io: bool,
    fsync: bool,
    *,
    snapshot: bool,
) -> tuple[str, _Job]:
    """The real path, and what writes it. Refuses what is the caller's mistake."""
    try:
        path = os.path.realpath(os.fsdecode(filename))
    except ValueError as error:  # a NUL, or a lone surrogate
        raise ConfigError(f"{filename!r} cannot be a file name: {error}") from None
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"tensors has to map names to tensors, and is a {type(tensors).__name__}")
    found = [_checked(name, tensor) for name, tensor in tensors.items()]
    _refuse_shared(found)
    found.sort(key=lambda tensor: (-tensor.rank, tensor.name))
    header = torch.frombuffer(bytearray(build_header(_entries(found), metadata)), dtype=torch.uint8)
    pieces = [header, *(_copies(path, found) if snapshot else (tensor.bits for tensor in found))]
    # What fills the tensors, or their copies, is queued on the current streams.
    devices = {piece.device for piece in pieces if piece.device.type == "cuda"}
    ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
    return path, partial(write_file, path, pieces, ready, direct_io, fsync)


def _checked(name: object, tensor: object) -> _Tensor:
    if not isinstance(name, str):
        raise ConfigError(f"tensor names have to be strings, not {quote(name)}")
    what = f"tensor {quote(name)}"
    if name == "__metadata__":
        raise ConfigError(f"{what}: the format keeps this name for the metadata; choose another")
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{what} is a {type(tensor).__name__}; only tensors can be saved")
    if tensor.layout != torch.strided:
        raise ConfigError(f"{what} is sparse ({tensor.layout}), and the format holds dense ones; save its to_dense()")
    if tensor.device.type == "meta":
        raise ConfigError(f"{what} is on the meta device and has no data; save it after it was loaded")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{what} is on {tensor.device}; save its cpu()")
    info, rank = _dtypes().get(tensor.dtype, (None, 0))
    if info is None:
        raise DtypeError(
            f"{what} is {tensor.dtype}, which safetensors lacks; save "
            f"{'its dequantize(), or its int_repr() and scales' if tensor.is_quantized else 'it in another dtype'}"
        )
    shape = tuple(tensor.shape)
    if info.per_element > 1:
        if not shape:
            raise DtypeError(f"{what} is a scalar of {info.name}, which the format cannot hold; give it a dimension")
        shape = (*shape[:-1], shape[-1] * info.per_element)
    if tensor.numel() and not tensor.data_ptr():
        raise ConfigError(
            f"{what} is a {type(tensor).__name__} without memory of its own; save the plain tensors it is made of "
            "(of a DTensor, its to_local() or full_tensor())"
        )
    plain = tensor.detach().as_subclass(torch.Tensor)
    bits = plain.resolve_conj().resolve_neg().view(_BITS[tensor.dtype.itemsize])
    return _Tensor(name, info.name, rank, shape, bits)


def _refuse_shared(tensors: Iterable[_Tensor]) -> None:
    """ConfigError for two tensors whose memory overlaps, from the first byte of each to its last."""
    areas = []
    for tensor in tensors:
        bits = tensor.bits
        if bits.numel():
            last = sum((size - 1) * stride for size, stride in zip(bits.shape, bits.stride(), strict=True))
            start = bits.data_ptr()
            areas.append((str(bits.device), start, start + (last + 1) * bits.itemsize, tensor.name))
    areas.sort()
    device, end, before = "", 0, ""
    for area in areas:
        if area[0] == device and area[1] < end:
            raise ConfigError(
                f"tensors {quote(before)} and {quote(area[3])} share memory ({area[0]}): the file would hold the bytes "
                "twice, and loading it would give two tensors that are not tied; leave one of them out, or save its "
                "clone()"
            )
        device, _, end, before = area


def _copies(path: str, tensors: Iterable[_Tensor]) -> list[torch.Tensor]:
    copies = []
    for tensor in tensors:
        bits = tensor.bits
        try:
            copies.append(allocate(bits.shape, bits.dtype, bits.device).copy_(bits))
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"{path}: no room on {bits.device} to copy tensor {quote(tensor.name)} ({bits.nbytes} bytes), so "
                "that it can change while it is saved; use save_file, which copies nothing"
            ) from error
    return copies


def _entries(tensors: Iterable[_Tensor]) -> Iterator[tuple[str, str, Sequence[int], int]]:
    return ((tensor.name, tensor.dtype, tensor.shape, tensor.bits.nbytes) for tensor in tensors)


def build_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None) -> bytes:
    """All that comes before the data, which begins at a multiple of DATA_ALIGNMENT: for tensors (name, dtype and shape
    as in the file, bytes) that lie end to end. Raises ConfigError for what the format cannot hold."""
    entries: dict[str, object] = {}
    if metadata is not None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ConfigError(f"metadata maps strings to strings, not {quote(key)} to {quote(value)}; use str()")
        entries["__metadata__"] = dict(metadata)
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        end = begin + nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{quote(error.object[error.start])} in a name or in the metadata is no character") from None
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the header has {len(text)} bytes, and the format allows {MAX_HEADER_BYTES}; save to several files"
        )
    return len(text).to_bytes(8, "little") + text


@cache
def _dtypes() -> dict[torch.dtype, tuple[DtypeInfo, int]]:
    """What safetensors calls torch's dtypes, and their ranks: its order of dtypes is the table's."""
    return {
        getattr(torch, info.torch_name): (info, rank)
        for rank, info in enumerate(DTYPES.values())
        if info.torch_name and hasattr(torch, info.torch_name)
    }


__all__ = ["DATA_ALIGNMENT", "PendingSave", "build_header", "save_file", "save_file_async"]
