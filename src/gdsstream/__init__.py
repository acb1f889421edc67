"""gdsstream: model layers and dataset shards from NVMe straight into GPU tensors.

Names are resolved when first used, so that parts which need no torch (headers, storage, errors) import without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gdsstream import errors as _errors
from gdsstream.errors import *  # noqa: F403

if TYPE_CHECKING:
    from gdsstream.config import StreamConfig
    from gdsstream.engine import Engine, Transfer, open_engine
    from gdsstream.handle import safe_open
    from gdsstream.load import load_file, read_many, release_engines

__version__ = "0.1.0"

_HOME = {
    "Engine": "gdsstream.engine",
    "StreamConfig": "gdsstream.config",
    "Transfer": "gdsstream.engine",
    "load_file": "gdsstream.load",
    "open_engine": "gdsstream.engine",
    "read_many": "gdsstream.load",
    "release_engines": "gdsstream.load",
    "safe_open": "gdsstream.handle",
}

__all__ = [
    "Engine",
    "StreamConfig",
    "Transfer",
    "load_file",
    "open_engine",
    "read_many",
    "release_engines",
    "safe_open",
]
__all__ += _errors.__all__


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gdsstream' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
