"""Where each layer is read from: storage, or the host tier of registered pages, and how a read of it is submitted.

The host tier is windows of the checkpoint's own files, kept in memory and registered with the driver (or pinned copies
where a mapping cannot be registered), one set of windows for each layer, so that layers of one file come and go on
their own. It is filled when the streamer is opened, never inside the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from gdsstream.checkpoint import Checkpoint
from gdsstream.config import StreamConfig
from gdsstream.devices import on_stream
from gdsstream.engine import Engine, Transfer, open_engine
from gdsstream.engine.base import SourceFile
from gdsstream.engine.native import NativeEngine, Request
from gdsstream.errors import ConfigError, MemoryBudgetError
from gdsstream.layout import LayerLayout
from gdsstream.plan import ReadPlan
from gdsstream.proofs import proven

# A gap between two of a layer's runs that is cheaper to register than to part the window for.
_WINDOW_GAP_BYTES = 1 << 20


class _Source(NamedTuple):
    files: Sequence[SourceFile]
    numbers: tuple[int, ...]  # of the checkpoint's files, in the order of `files`
    host: bool


class LayerSources:
    """The engine of one streamer, and the files of its layers."""

    def __init__(
        self, checkpoint: Checkpoint, layouts: Sequence[LayerLayout], device: torch.device, config: StreamConfig
    ):
        self._layouts = layouts
        self._all_host = config.backend == "mapped"
        self._budget = config.host_cache_bytes
        self.engine = _open(checkpoint, device, config)
        self._plans: dict[int, ReadPlan] = {}
        self._nbytes: dict[int, int] = {}
        # By layer and by the slot's address: nothing is worked out twice in the loop.
        self._requests: dict[tuple[int, int], Request] = {}
        self._sources: list[_Source] = []
        try:
            files: Sequence[SourceFile] = checkpoint.files
            if isinstance(self.engine, NativeEngine):
                files = self.engine.open(checkpoint.files)
            elif config.host_cache_bytes:
                raise ConfigError(
                    f"host_cache_bytes={config.host_cache_bytes} needs the native engine, not "
                    f'backend={self.engine.name!r}; use backend="auto", or host_cache_bytes=0'
                )
            for layout in layouts:
                numbers = tuple(sorted({spec.file for spec in layout.stored.values()}))
                self._sources.append(_Source([files[n] for n in numbers], numbers, host=False))
        except BaseException:
            self.engine.close()
            raise

    @property
    def host_budget_bytes(self) -> int:
        """How many bytes of layers may be kept in host memory: all of them for backend="mapped"."""
        return sum(layout.plan.total_bytes for layout in self._layouts) if self._all_host else self._budget

    @property
    def host_layers(self) -> tuple[int, ...]:
        return tuple(index for index, source in enumerate(self._sources) if source.host)

    def in_host_memory(self, layer: int) -> bool:
        return self._sources[layer].host

    def keep_in_host_memory(self, layers: Sequence[int]) -> None:
        """Bring layers into memory and register them. Raises MemoryBudgetError, ReadError and its kinds."""
        if not layers:
            return
        if not isinstance(self.engine, NativeEngine):
            raise ConfigError(f'the {self.engine.name} engine has no host tier; use backend="auto"')
        for layer in layers:
            source, layout = self._sources[layer], self._layouts[layer]
            if source.host:
                continue
            opened = []
            for number, file in zip(source.numbers, source.files, strict=True):
                try:
                    opened.append(self.engine.open_windows(file, _windows(layout, number)))
                except MemoryBudgetError as error:
                    raise MemoryBudgetError(f"layer {layer} does not fit into the host tier: {error}") from error
            self._sources[layer] = _Source(opened, source.numbers, host=True)

    def nbytes(self, layer: int, experts: frozenset[int] | None = None) -> int:
        """Bytes that reading the layer moves."""
        if experts is not None:
            return self._plan(layer, experts).total_bytes
        found = self._nbytes.get(layer)
        if found is None:
            found = self._nbytes[layer] = self._plan(layer, None).total_bytes
        return found

    def submit(self, layer: int, experts: frozenset[int] | None, memory: torch.Tensor, stream: int | None) -> Transfer:
        """Start to read a layer into `memory`, behind `stream` (a handle; None on the CPU). Raises as Engine.submit."""
        engine = self.engine
        if isinstance(engine, NativeEngine):
            key = (layer, memory.data_ptr())
            request = self._requests.get(key) if experts is None else None
            if request is None:
                plan = self._plan(layer, experts)
                targets = plan.buffer_offset.astype(np.uint64) + np.uint64(key[1])
                request = engine.request(self._sources[layer].files, plan, targets)
                if experts is None:
                    self._requests[key] = request
            return engine.submit_request(request, (memory,), stream)
        plan, files = self._plan(layer, experts), self._sources[layer].files
        if stream is None:
            return engine.submit(files, plan, [memory])
        with on_stream(engine.device, stream):
            return engine.submit(files, plan, [memory])

    def close(self) -> None:
        """Close the engine, and with it the host tier."""
        self.engine.close()
        self._sources.clear()
        self._requests.clear()

    def _plan(self, layer: int, experts: frozenset[int] | None) -> ReadPlan:
        # Of subsets there are too many to keep.
        plan = self._plans.get(layer) if experts is None else None
        if plan is None:
            layout = self._layouts[layer]
            plan = layout.plan if experts is None else layout.plan_experts(experts)
            numbers = np.array(self._sources[layer].numbers, dtype=np.int32)
            plan = replace(plan, file=np.searchsorted(numbers, plan.file).astype(np.int32))
            if experts is None:
                self._plans[layer] = plan
        return plan


def _open(checkpoint: Checkpoint, device: torch.device, config: StreamConfig) -> Engine:
    # Windows are registered layer by layer here, so that the engine itself maps no whole files.
    backend = {"auto": "staged", "mapped": "staged"}.get(config.backend, config.backend)
    proof = None
    if config.backend == "auto" and device.type == "cuda" and not config.host_cache_bytes:
        proof = proven([file.path for file in checkpoint.files])
    if proof is not None:
        backend = "cufile"
    return open_engine(device=device, config=replace(config, backend=backend, host_cache_bytes=0))


def _windows(layout: LayerLayout, file: int) -> list[tuple[int, int]]:
    """The ranges (offset, nbytes) of a file that hold a layer's bytes, near ones joined."""
    windows: list[tuple[int, int]] = []
    for offset, nbytes in sorted((s.offset, s.nbytes) for s in layout.stored.values() if s.file == file and s.nbytes):
        if windows and offset - sum(windows[-1]) <= _WINDOW_GAP_BYTES:
            windows[-1] = (windows[-1][0], offset + nbytes - windows[-1][0])
        else:
            windows.append((offset, nbytes))
    return windows


__all__ = ["LayerSources"]
