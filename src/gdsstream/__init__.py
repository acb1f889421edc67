"""gdsstream: model layers and dataset shards from NVMe straight into GPU tensors.

Names are resolved when first used, so that parts which need no torch (headers, storage, errors) import without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gdsstream import errors as _errors
from gdsstream.errors import *  # noqa: F403

if TYPE_CHECKING:
    from gdsstream.accumulate import LayerwiseAccumulation
    from gdsstream.batches import Jagged
    from gdsstream.config import StreamConfig
    from gdsstream.engine import Engine, Transfer, open_engine
    from gdsstream.handle import safe_open
    from gdsstream.layers import LayerStreamer
    from gdsstream.lease import Lease
    from gdsstream.load import load_file, read_many, release_engines
    from gdsstream.loader import ShardLoader
    from gdsstream.loader_stats import LoaderStats
    from gdsstream.nf4 import dequantize_nf4
    from gdsstream.offloading import OffloadHandle, offload
    from gdsstream.save import PendingSave, save_file, save_file_async
    from gdsstream.schedule import Order
    from gdsstream.shards import ShardDataset
    from gdsstream.telemetry import StreamStats

__version__ = "0.1.0"

_HOME = {
    "Engine": "gdsstream.engine",
    "Jagged": "gdsstream.batches",
    "LayerStreamer": "gdsstream.layers",
    "LayerwiseAccumulation": "gdsstream.accumulate",
    "Lease": "gdsstream.lease",
    "LoaderStats": "gdsstream.loader_stats",
    "OffloadHandle": "gdsstream.offloading",
    "Order": "gdsstream.schedule",
    "PendingSave": "gdsstream.save",
    "ShardDataset": "gdsstream.shards",
    "ShardLoader": "gdsstream.loader",
    "StreamConfig": "gdsstream.config",
    "StreamStats": "gdsstream.telemetry",
    "Transfer": "gdsstream.engine",
    "dequantize_nf4": "gdsstream.nf4",
    "load_file": "gdsstream.load",
    "offload": "gdsstream.offloading",
    "open_engine": "gdsstream.engine",
    "read_many": "gdsstream.load",
    "release_engines": "gdsstream.load",
    "safe_open": "gdsstream.handle",
    "save_file": "gdsstream.save",
    "save_file_async": "gdsstream.save",
}

__all__ = [
    "Engine",
    "Jagged",
    "LayerStreamer",
    "LayerwiseAccumulation",
    "Lease",
    "LoaderStats",
    "OffloadHandle",
    "Order",
    "PendingSave",
    "ShardDataset",
    "ShardLoader",
    "StreamConfig",
    "StreamStats",
    "Transfer",
    "dequantize_nf4",
    "load_file",
    "offload",
    "open_engine",
    "read_many",
    "release_engines",
    "safe_open",
    "save_file",
    "save_file_async",
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
