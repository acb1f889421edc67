"""A loader's engine and the shards it has open: there from the first iterator to the loader's end, in one process."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

import torch

from gdsstream.config import StreamConfig
from gdsstream.devices import parse_device
from gdsstream.engine import open_engine
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import ConfigError, ForkedProcessError
from gdsstream.open_files import OpenFiles
from gdsstream.shards import ShardDataset


class LoaderEngine:
    """Opens an engine on `device` when it is first asked for: "cuda" is whichever device is current then."""

    def __init__(self, dataset: ShardDataset, device: torch.device | str | int, config: StreamConfig) -> None:
        self._dataset = dataset
        self._device = device
        self._config = config
        self._pid = os.getpid()
        self._opened: tuple[NativeEngine, OpenFiles] | None = None

    @property
    def device(self) -> torch.device:
        """The engine's, or what it would be now."""
        return self._opened[0].device if self._opened else parse_device(self._device)

    @property
    def route(self) -> str:
        """What moved the bytes, as the engine reports it."""
        return self._opened[0].route if self._opened else "nothing read yet"

    @property
    def foreign(self) -> bool:
        """Whether it belongs to another process than this one."""
        return self._pid != os.getpid()

    def open(self) -> tuple[NativeEngine, OpenFiles]:
        """The engine and its files. Raises as open_engine, and ConfigError for backends that are not native."""
        if self._opened is None:
            engine = open_engine(device=parse_device(self._device), config=self._config)
            if not isinstance(engine, NativeEngine):
                engine.close()
                raise ConfigError(f'ShardLoader reads natively only, not with backend={engine.name!r}; use "auto"')
            self._opened = engine, OpenFiles(engine, self._dataset.sources, len(self._dataset.paths))
        return self._opened

    def adopt(self) -> None:
        """In a forked child: forget what the parent opened, which is not ours to close. Raises ForkedProcessError where
        that was on a GPU."""
        if self._opened is not None and self._opened[0].device.type == "cuda":
            raise ForkedProcessError(
                f"this loader reads to {self._opened[0].device} in process {self._pid} and cannot be used in its child "
                f"{os.getpid()}: a GPU does not survive a fork; make the loader in the child, or spawn it"
            )
        self._opened, self._pid = None, os.getpid()

    def close(self) -> None:
        """Wait for what is under way, and give everything up. Nothing in another process. Idempotent."""
        if self._opened is not None and not self.foreign:
            engine, files = self._opened
            self._opened = None
            files.clear()
            engine.close()


class _Closes(Protocol):
    def close(self) -> None: ...


_living: weakref.WeakSet[_Closes] = weakref.WeakSet()


def close_at_exit(loader: _Closes) -> None:
    """Close it before the interpreter goes to pieces, where it still lives then: reads may be under way."""
    _living.add(loader)


@atexit.register
def _close_all() -> None:
    for loader in list(_living):
        loader.close()


__all__ = ["LoaderEngine", "close_at_exit"]
