"""safe_open: a checkpoint as a handle that reads tensor by tensor, slice by slice, again and again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from gdsstream.checkpoint import Checkpoint, TensorSpec
from gdsstream.config import StreamConfig
from gdsstream.devices import allocate, parse_device
from gdsstream.engine import Engine, merge, open_engine
from gdsstream.engine.base import SourceFile
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import ConfigError, EngineClosedError
from gdsstream.load import Loading, Names, as_bytes, collection_paused, shared_engine, submit_runs
from gdsstream.sidecar import FileRecord, LoadCheck
from gdsstream.slices import Selection, select

_FRAMEWORKS = ("pt", "torch", "pytorch")


class safe_open:
    """Open a checkpoint for reading single tensors: `safetensors.safe_open`, on files, indices and directories.

    Args:
        filename: as for load_file.
        framework: "pt"; this library returns torch tensors only.
        device: "cpu", "cuda", "cuda:1", or a CUDA ordinal.
        host_cache_bytes: how many bytes of files to map and register now, so that every read from then on is one DMA
            at the link's limit. Registered pages cannot be evicted. 0 reads through the staging ring.
        verify: compare each tensor with its checksum whenever it is read, as load_file does. All of a tensor is read
            then, even for a slice of it.
        config, **knobs: see StreamConfig.

    A context manager. Tensors are owned by the caller and stay valid after the handle is closed. Raises what
    load_file raises; after `close`, EngineClosedError.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        framework: str = "pt",
        device: torch.device | str | int = "cpu",
        *,
        host_cache_bytes: int | None = None,
        verify: bool = False,
        config: StreamConfig | None = None,
        **knobs: Any,
    ) -> None:
        if framework not in _FRAMEWORKS:
            raise ConfigError(f'framework {framework!r} is not supported; tensors are torch\'s: use "pt"')
        self._engine: Engine | None = None
        target = parse_device(device)
        settings = merge(config, {**knobs, "host_cache_bytes": host_cache_bytes}, path=filename, device=target)
        with collection_paused():
            self._checkpoint = Checkpoint.open(filename)
        # Registered pages belong to one handle: its engine goes with it. Threads and ring are shared otherwise.
        self._own_engine = settings.host_cache_bytes > 0 or settings.backend == "mapped"
        self._engine = open_engine(device=target, config=settings) if self._own_engine else None
        self._files: list[SourceFile] = list(self._checkpoint.files)
        self._settings = settings
        self._device = target
        self._closed = False
        self._verify = verify
        self._sidecars: dict[str, dict[str, FileRecord]] = {}
        if verify:
            check = LoadCheck(self._sidecars)
            for file in self._files:
                check.expect(file.path)
        if self._own_engine:
            try:
                for index in range(len(self._files)):
                    self._open_file(index)
            except BaseException:
                self.close()
                raise

    def keys(self) -> list[str]:
        """The tensors' names in alphabetical order."""
        return self._checkpoint.keys()

    def offset_keys(self) -> list[str]:
        """The tensors' names in the order of their bytes: the fastest order to read them in."""
        return self._checkpoint.offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` of the files, or None."""
        return self._checkpoint.metadata()

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor. Raises TensorNotFoundError."""
        return self._read([self._checkpoint.spec(name)])[name]

    def tensors(self, names: Names = None) -> dict[str, torch.Tensor]:
        """Many tensors at once: those of `names`, those a predicate accepts, or all."""
        return self._read(self._checkpoint.select(names))

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed before it is read. Raises TensorNotFoundError."""
        return TensorSlice(self, self._checkpoint.spec(name))

    def close(self) -> None:
        """Give up files, registered pages and, where it is the handle's own, the engine. Idempotent."""
        self._closed = True
        self._files = []
        if self._own_engine and self._engine is not None:
            self._engine.close()
        self._engine = None

    @property
    def route(self) -> str:
        """What moves the bytes, as the engine reports it."""
        return self._use().route

    def __enter__(self) -> Self:
        self._use()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _use(self) -> Engine:
        if self._closed:
            raise EngineClosedError(f"the handle of {self._checkpoint.path} is closed; open it again")
        if self._own_engine:
            assert self._engine is not None
            self._engine.check_usable()
            return self._engine
        engine = shared_engine(self._device, self._settings)
        if engine is not self._engine:
            self._engine = engine
            self._files = list(self._checkpoint.files)
        return engine

    def _open_file(self, index: int) -> SourceFile:
        # Once for a handle: the descriptor is kept, and with it the decision which lane reads the file.
        if isinstance(self._engine, NativeEngine):
            self._files[index] = self._engine.open([self._files[index]])[0]
        return self._files[index]

    def _read(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        engine = self._use()
        for index in {spec.file for spec in specs}:
            self._open_file(index)
        loading = Loading(engine, LoadCheck(self._sidecars) if self._verify else None)
        with collection_paused():
            loading.add(self._files, specs)
        return loading.wait()

    def read_selection(self, spec: TensorSpec, selection: Selection) -> torch.Tensor:
        """The bytes of a selection as one tensor of its shape."""
        if self._verify:
            raw = as_bytes(self._read([spec])[spec.name])
            parts = [raw[offset : offset + nbytes] for offset, nbytes in selection.runs]
            out = torch.cat([raw[:0], *parts]).view(spec.torch_dtype).reshape(selection.shape)
            return out if selection.then is None else out[selection.then].clone()
        engine = self._use()
        out = allocate(selection.shape, spec.torch_dtype, self._device)
        submit_runs(engine, self._open_file(spec.file), spec.offset, selection.runs, out).wait()
        # Owned: an index alone would keep the covering rows alive.
        return out if selection.then is None else out[selection.then].clone()


class TensorSlice:
    """A stored tensor; indexing it reads what the index selects."""

    def __init__(self, handle: safe_open, spec: TensorSpec) -> None:
        self._handle = handle
        self._spec = spec

    def get_shape(self) -> list[int]:
        """The stored shape, in elements of the stored dtype."""
        return list(self._spec.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return self._spec.dtype

    def __getitem__(self, index: object) -> torch.Tensor:
        """Read a part: ints, slices with positive steps and one Ellipsis. Raises ConfigError and IndexError."""
        shape = self._spec.torch_shape
        return self._handle.read_selection(self._spec, select(shape, self._spec.torch_dtype.itemsize, index))


__all__ = ["TensorSlice", "safe_open"]
