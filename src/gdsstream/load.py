"""load_file and read_many: bytes of files as owned tensors, in one call.

Engines are kept: a process has one for each device and configuration, opened by the first call that needs it, so that
threads and pinned memory are paid for once. `release_engines` closes them; in a forked child they are opened anew.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from gdsstream.checkpoint import Checkpoint, headers
from gdsstream.config import StreamConfig
from gdsstream.devices import allocate, allocate_all, memory_of, parse_device
from gdsstream.dtypes import torch_dtype
from gdsstream.engine import Engine, Transfer, merge, open_engine
from gdsstream.engine.base import SourceFile
from gdsstream.engine.native import NativeEngine, check_records
from gdsstream.errors import BackendUnavailableError, ConfigError, ReadError
from gdsstream.header import CheckpointFile, TensorSpec
from gdsstream.notices import say_once
from gdsstream.plan import ReadPlan, plan_separate
from gdsstream.proofs import proven
from gdsstream.regular_files import FileStamp
from gdsstream.sidecar import LoadCheck
from gdsstream.views import map_tensors

log = logging.getLogger(__name__)

Names = Iterable[str] | Callable[[str], bool] | None

# A portion's allocations take about a millisecond at first; by the fourth portion a gigabyte goes in one.
_FIRST_PORTION_BYTES = 16 << 20
_FIRST_PORTION_COUNT = 128
_PORTION_GROWTH = 4

_engines: dict[tuple[torch.device, StreamConfig], Engine] = {}
_engines_pid = os.getpid()
_engines_lock = threading.Lock()


def load_file(
    filename: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    device: torch.device | str | int = "cpu",
    *,
    names: Names = None,
    copy: bool = True,
    verify: bool = False,
    config: StreamConfig | None = None,
    **knobs: Any,
) -> dict[str, torch.Tensor]:
    """Load a checkpoint's tensors: `safetensors.torch.load_file`, close to the speed of the link.

    Args:
        filename: a safetensors file, an index (`*.safetensors.index.json`), a directory, or a list of files.
        device: "cpu", "cuda", "cuda:1", or a CUDA ordinal.
        names: which tensors: their names, or a predicate on the name; only their bytes are read. None means all.
        copy: False, on the CPU only, maps the files instead of reading them, as safetensors itself does: nothing is
            read until it is touched, all tensors of a file share its mapping, and touching them after the file was
            truncated kills the process.
        verify: compare each tensor with the checksum that `gdsstream pack` wrote beside its file, where it is and while
            others are still being read; see `gdsstream.checksum` for what that finds.
        config, **knobs: see StreamConfig; knobs go before config, both before the environment, and that
            before the profile of the files' mount (`gdsstream tune`).

    Returns:
        Tensors by name, in the order of their bytes in the files. Each owns its memory: keeping one keeps no other
        alive. On a GPU they can be used at once on the current stream, which waits for the copies by itself.

    Raises:
        CheckpointError and its kinds for files that are not valid; ReadError and its kinds when the storage fails or
        a file changes meanwhile; ConfigError, BackendUnavailableError, MemoryBudgetError. With `verify`, ChecksumError
        that names each tensor that differs, and CheckpointNotFoundError where there are no checksums.
    """
    target = parse_device(device)
    settings = merge(config, knobs, path=filename if copy else None, device=target)
    if not copy:
        if verify:
            raise ConfigError("copy=False reads nothing that verify=True could look at; leave one of them out")
        if target.type != "cpu" or settings.backend != "auto":
            raise ConfigError('copy=False maps files into CPU memory: it needs device="cpu" and backend="auto"')
        checkpoint = Checkpoint.open(filename)
        return map_tensors(checkpoint.files, checkpoint.select(names))
    with collection_paused():
        loading = _start(filename, target, settings, names, LoadCheck() if verify else None)
    return loading.wait()


def _start(
    filename: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    device: torch.device,
    config: StreamConfig,
    names: Names,
    check: LoadCheck | None,
) -> Loading:
    if names is not None and not callable(names):
        checkpoint = Checkpoint.open(filename)
        loading = Loading(_engine_for(device, config, checkpoint.files[0].path), check)
        loading.add(checkpoint.files, checkpoint.select(names))
        return loading
    # The first file's bytes are under way while the second's header is parsed.
    started: Loading | None = None
    files: list[CheckpointFile] = []
    for file, specs in headers(filename)[1]:
        started = started or Loading(_engine_for(device, config, file.path), check)
        files.append(file)
        started.add(files, specs if names is None else [spec for spec in specs if names(spec.name)])
    assert started is not None, "a checkpoint has at least one file"
    return started


def read_many(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    file_index: ArrayLike,
    offsets: ArrayLike,
    length: int,
    *,
    device: torch.device | str | int = "cpu",
    out: torch.Tensor | None = None,
    config: StreamConfig | None = None,
    **knobs: Any,
) -> torch.Tensor:
    """Gather records of equal length from anywhere in some files into one tensor, in one native call.

    Args:
        paths: the file or files; any format.
        file_index: for each record, which of `paths` holds it; integers [n].
        offsets: for each record, its first byte in the file; integers [n].
        length: bytes of one record.
        device: where the tensor is to be.
        out: the tensor to fill: uint8 [n, length], contiguous, on `device`; None allocates one.
        config, **knobs: see StreamConfig.

    Returns:
        uint8 [n, length]; row i holds record i.

    Raises:
        ConfigError for arrays that do not fit (the first bad record is named) or a wrong `out`; ReadError and its
        kinds when the storage fails.
    """
    target = parse_device(device)
    sources = [_source(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    index = _integers("file_index", file_index, np.int32)
    starts = _integers("offsets", offsets, np.int64)
    check_records(index, starts, length, len(sources))
    if out is None:
        out = allocate((len(index), length), torch.uint8, target)
    else:
        _check_out(out, (len(index), length), target)
    engine = shared_engine(target, merge(config, knobs, path=paths, device=target, native=True))
    if not isinstance(engine, NativeEngine):
        raise ConfigError(f'read_many runs on the native engine only, not on backend={engine.name!r}; use "auto"')
    used = np.unique(index)
    engine.gather([sources[i] for i in used], np.searchsorted(used, index).astype(np.int32), starts, length, out).wait()
    return out


@contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection inside: what a load makes by the hundred thousand is not garbage yet, and looking
    through it again and again doubles the time of a load of many tensors."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Loading:
    """Tensors on their way, each with memory of its own.

    They are submitted in portions that grow, so that reading starts after a few allocations instead of after all:
    thousands of tensors take milliseconds to allocate, in which the link would idle. With a `check`, each portion is
    looked at while later ones are read.
    """

    def __init__(self, engine: Engine, check: LoadCheck | None = None) -> None:
        self._engine = engine
        self._check = check
        self._unchecked: list[tuple[dict[int, str], Sequence[TensorSpec], list[torch.Tensor]]] = []  # a portion each
        self._tensors: dict[str, torch.Tensor] = {}
        self._transfers: list[Transfer] = []
        self._portion_bytes = _FIRST_PORTION_BYTES
        self._portion_count = _FIRST_PORTION_COUNT

    def add(self, files: Sequence[SourceFile], specs: Sequence[TensorSpec]) -> None:
        """Start to read `specs`, whose `file` indexes `files`. Raises as `Engine.submit` and `allocate`."""
        used = sorted({spec.file for spec in specs})
        opened: Sequence[SourceFile] = [files[file] for file in used]
        if self._check is not None:
            for file in opened:
                self._check.expect(file.path)
        if isinstance(self._engine, NativeEngine):
            opened = self._engine.open(opened)
        start = nbytes = 0
        for end, spec in enumerate(specs, 1):
            nbytes += spec.nbytes
            if nbytes >= self._portion_bytes or end - start >= self._portion_count or end == len(specs):
                self._submit(used, opened, specs[start:end])
                start, nbytes = end, 0
                self._portion_bytes *= _PORTION_GROWTH
                self._portion_count *= _PORTION_GROWTH

    def wait(self) -> dict[str, torch.Tensor]:
        """The tensors, when all can be used on the current stream. Raises the first failure, and ChecksumError."""
        for number, transfer in enumerate(self._transfers):
            transfer.wait()
            if self._check is not None:
                self._check.add(*self._unchecked[number])
        if self._check is not None:
            self._check.finish()
        return self._tensors

    def _submit(self, numbers: Sequence[int], files: Sequence[SourceFile], specs: Sequence[TensorSpec]) -> None:
        plan = plan_separate(specs)
        plan = replace(plan, file=np.searchsorted(numbers, plan.file).astype(np.int32))
        tensors = allocate_all([(p.shape, torch_dtype(p.dtype)) for p in plan.placements], self._engine.device)
        if isinstance(self._engine, NativeEngine):
            addresses = np.fromiter((t.data_ptr() for t in tensors), dtype=np.uint64, count=len(tensors))
            self._transfers.append(self._engine.submit_to(files, plan, addresses[plan.buffer], keep=tensors))
        else:
            self._transfers.append(self._engine.submit(files, plan, [as_bytes(tensor) for tensor in tensors]))
        self._tensors.update(zip((spec.name for spec in specs), tensors, strict=True))
        if self._check is not None:
            paths = dict(zip(numbers, (file.path for file in files), strict=True))
            self._unchecked.append((paths, specs, tensors))


def submit_runs(
    engine: Engine, file: SourceFile, start: int, runs: Sequence[tuple[int, int]], out: torch.Tensor
) -> Transfer:
    """Start to read runs (offset, nbytes) of a file, offsets counted from `start`, end to end into `out`."""
    offsets = np.array([offset for offset, _ in runs], dtype=np.int64) + start
    lengths = np.array([nbytes for _, nbytes in runs], dtype=np.int64)
    zeros = np.zeros(len(runs), dtype=np.int32)
    ends = np.cumsum(lengths)
    plan = ReadPlan(
        file=zeros,
        file_offset=offsets,
        nbytes=lengths,
        buffer=zeros,
        buffer_offset=ends - lengths,
        group=zeros,
        buffer_bytes=(int(ends[-1]) if len(runs) else 0,),
        num_groups=1,
        placements=(),
    )
    return engine.submit([file], plan, [as_bytes(out)])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8 [nbytes]."""
    return tensor.reshape(-1).view(torch.uint8)


def shared_engine(device: torch.device, config: StreamConfig) -> Engine:
    """The process's engine for a device and a configuration; opened when first asked for."""
    global _engines_pid
    with _engines_lock:
        if _engines_pid != os.getpid():
            # The parent's engines cannot be used or closed here; forgetting them frees nothing of the parent's.
            log.info("forked child %d opens engines of its own (the parent's cannot be used)", os.getpid())
            _engines.clear()
            _engines_pid = os.getpid()
        engine = _engines.get((device, config))
        if engine is None:
            engine = open_engine(device=device, config=config)
            _engines[device, config] = engine
        return engine


def _engine_for(device: torch.device, config: StreamConfig, path: str) -> Engine:
    """The engine for a checkpoint whose first file is `path`: "auto" is "cufile" where a stored proof says that reads
    from that mount went straight to a GPU."""
    if config.backend == "auto" and device.type == "cuda" and not config.host_cache_bytes:
        proof = proven([path])
        if proof is not None:
            try:
                engine = shared_engine(device, replace(config, backend="cufile"))
            except (BackendUnavailableError, ConfigError) as error:
                say_once(
                    log, f"{proof.mount_point} has a proof of GPUDirect Storage, but cufile cannot be used: {error}"
                )
            else:
                say_once(
                    log, f"backend auto on {device}: cufile, because {proof.mount_point} has a proof ({proof.evidence})"
                )
                return engine
    return shared_engine(device, config)


def release_engines() -> None:
    """Close the engines that load_file, read_many and safe_open keep: their threads, pinned memory and contexts.

    The next call opens new ones. Runs by itself when the interpreter exits.
    """
    with _engines_lock:
        engines = list(_engines.values()) if _engines_pid == os.getpid() else []
        _engines.clear()
    for engine in engines:
        engine.close()


def _after_fork_in_child() -> None:
    # The lock may have been held by another thread when the process forked.
    global _engines_lock
    _engines_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(release_engines)


def _source(path: str | os.PathLike[str]) -> CheckpointFile:
    name = os.fspath(path)
    try:
        return CheckpointFile(name, FileStamp.of(name), 0, None)
    except OSError as error:
        raise ReadError(f"{name} cannot be read: {error.strerror}; check the path", error.errno) from error


def _integers(name: str, values: ArrayLike, dtype: type[np.signedinteger[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    array = np.asarray(values.cpu().numpy() if isinstance(values, torch.Tensor) else values)
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(f"{name} has dtype {array.dtype}; it has to hold integers")
    if array.size and (int(array.max()) > np.iinfo(dtype).max or int(array.min()) < np.iinfo(dtype).min):
        raise ConfigError(f"{name} holds values beyond {np.dtype(dtype).name}")
    return np.ascontiguousarray(array, dtype=dtype)


def _check_out(out: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    wanted = f"a contiguous torch.uint8 tensor of shape {shape} on {device}"
    where = memory_of(device)
    same_device = out.device.type == where.type and (where.type == "cpu" or out.device.index == where.index)
    if out.dtype != torch.uint8 or tuple(out.shape) != shape or not out.is_contiguous() or not same_device:
        raise ConfigError(
            f"out is {tuple(out.shape)}, {out.dtype} on {out.device}"
            f"{'' if out.is_contiguous() else ', not contiguous'}; it has to be {wanted}"
        )


__all__ = ["load_file", "read_many", "release_engines"]
