"""What `tuning` measures with: reads of a path's files by an engine that is opened for it.

A trial opens an engine, lets it start its threads and pin its memory, and times nothing but one transfer: from the
submit until the bytes can be used. Where the path is on a disk, its files are dropped from the page cache before each
trial, so that what is measured is the storage; in memory there is nothing to drop.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gdsstream import _native, storage
from gdsstream.config import StreamConfig
from gdsstream.devices import allocate, driver_replaced, free_device_bytes
from gdsstream.engine import Engine, open_engine
from gdsstream.engine.base import SourceFile
from gdsstream.engine.budget import free_bytes
from gdsstream.engine.kvikio_process import load_kvikio
from gdsstream.engine.native import NativeEngine
from gdsstream.engine.staged import direct_possible
from gdsstream.errors import BackendUnavailableError, ConfigError
from gdsstream.plan import build_plan
from gdsstream.proofs import proven
from gdsstream.sample_files import Piece, SampleFiles, drop_cached
from gdsstream.tuning import Knobs
from gdsstream.tuning_space import Place

_MOST_BYTES = 2 << 30
_MEMORY_SHARE = 0.25
_CACHED = 0.05


class Trials:
    """Reads of the files at a path into memory on `device`. Close it: it holds the memory.

    Attributes:
        sample: what is read.
        info: what it sits on.
        most_bytes: the longest read: at most 2 GiB, all there is, and a quarter of the memory that is free.
        place: for `tuning_space`.
        cold: whether the page cache is emptied of the files before each read.
        without: what had to be left out of the choice, and why.
    """

    def __init__(self, sample: SampleFiles, device: torch.device) -> None:
        self.sample, self.device = sample, device
        first = sample.files[0][0]
        self.info = storage.describe(first)
        free = free_bytes() if device.type == "cpu" else min(free_bytes(), free_device_bytes(device))
        self.most_bytes = min(_MOST_BYTES, sample.nbytes, int(free * _MEMORY_SHARE))
        self.cold = not self.info.is_memory
        self.without: list[str] = []
        self._routes: dict[StreamConfig, str] = {}
        self._proven = device.type == "cuda" and proven([path for path, _ in sample.files]) is not None
        self._kept = 0.0
        self._memory: torch.Tensor | None = None
        direct = self.cold and direct_possible(first, os.stat(first).st_dev)
        if self.cold and not direct:
            self.without.append(f"O_DIRECT, which {self.info.filesystem} on {self.info.mount_point} does not take")
        uring = _native.io_uring_reason()
        if direct and uring:
            self.without.append(f"io_uring: {uring}")
        self.place = Place(
            cores=len(os.sched_getaffinity(0)),
            gpu=device.type == "cuda",
            direct=direct,
            prefers_direct=direct and not self.info.is_network,
            io_uring=not uring,
            cufile=self._cufile(),
        )

    @property
    def default_backend(self) -> str:
        """What backend="auto" is for this path and device."""
        return "cufile" if self._proven else "staged"

    def measure(self, knobs: Knobs, nbytes: int) -> float:
        """GB/s of one read with those knobs over the built-in ones; the environment and profiles count for nothing.

        Raises what opening an engine and reading raise.
        """
        config = self._config(knobs)
        pieces = self.sample.window(nbytes)
        if self.cold:
            self._kept = max(self._kept, drop_cached(pieces))
        target = self._target(sum(piece.nbytes for piece in pieces))
        with _quiet(), open_engine(device=self.device, config=config) as engine:
            if isinstance(engine, NativeEngine):
                engine.prepare()
            seconds = self._read(engine, pieces, target)
            self._routes[config] = engine.route
        return target.numel() / seconds / 1e9

    def route(self, knobs: Knobs) -> str:
        """What moved the bytes with those knobs, as the engine said; empty before there was a read."""
        return self._routes.get(self._config(knobs), "")

    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
        found = [f"left out: {one}" for one in self.without]
        if self._kept > _CACHED:
            found.append(f"up to {self._kept:.0%} of a read stayed in the page cache: somebody else has the files open")
        if self.sample.sparse:
            names = ", ".join(os.path.basename(name) for name in self.sample.sparse[:3])
            found.append(f"{names}: has fewer blocks than bytes (holes, or compressed), which reads faster")
        if self.info.is_memory:
            found.append(f"{self.info.filesystem} is in memory: these settings are none for a disk")
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory = None

    def _config(self, knobs: Knobs) -> StreamConfig:
        config = StreamConfig(**knobs)
        return replace(config, backend=self.default_backend) if config.backend == "auto" else config

    def _target(self, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = allocate((self.most_bytes,), torch.uint8, self.device)
            self._memory.zero_()  # its pages are there before anything is timed
        return self._memory[:nbytes]

    def _read(self, engine: Engine, pieces: list[Piece], target: torch.Tensor) -> float:
        rows, filled = [], 0
        for index, piece in enumerate(pieces):
            rows.append((index, piece.offset, piece.nbytes, 0, filled, 0))
            filled += piece.nbytes
        plan = build_plan(rows, (filled,), ())
        files: Sequence[SourceFile] = engine.open(pieces) if isinstance(engine, NativeEngine) else pieces
        self._synchronise()
        began = time.perf_counter()
        engine.submit(files, plan, [target]).wait()
        self._synchronise()
        return time.perf_counter() - began

    def _synchronise(self) -> None:
        if self.device.type == "cuda" and not driver_replaced():
            torch.cuda.synchronize(self.device)

    def _cufile(self) -> bool:
        if self.device.type != "cuda":
            return False
        try:
            load_kvikio()
        except (BackendUnavailableError, ConfigError) as error:
            self.without.append(str(error))
            return False
        return True


@contextmanager
def _quiet() -> Iterator[None]:
    """A trial of settings nobody chose is no reason to warn of what they lead to."""
    log: Any = logging.getLogger("gdsstream")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


__all__ = ["Trials"]
