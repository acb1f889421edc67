"""The loaders that can be measured, by kind. Nothing is imported until one is built."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from bench.config import BenchConfigError, from_mapping, nearest
from bench.loaders.base import Loader

#: kind in the configuration -> module and class
KINDS = {
    "gdsstream": ("bench.loaders.gdsstream", "LoadFile"),
    "gdsstream_devices": ("bench.loaders.gdsstream_devices", "Devices"),
    "gdsstream_handle": ("bench.loaders.gdsstream_handle", "Handle"),
    "gdsstream_layers": ("bench.loaders.gdsstream_layers", "Layers"),
    "safetensors": ("bench.loaders.safetensors", "Safetensors"),
    "fastsafetensors": ("bench.loaders.fastsafetensors", "Fastsafetensors"),
    "instanttensor": ("bench.loaders.instanttensor", "InstantTensor"),
    "runai_streamer": ("bench.loaders.runai_streamer", "RunaiStreamer"),
    "kvikio": ("bench.loaders.kvikio", "Kvikio"),
    "pinned_copies": ("bench.loaders.pinned_copies", "PinnedCopies"),
    "shard_loader": ("bench.loaders.shard_loader", "Shards"),
    "torch_dataloader": ("bench.loaders.torch_dataloader", "TorchDataLoader"),
    "webdataset": ("bench.loaders.webdataset", "WebDataset"),
    "litdata": ("bench.loaders.litdata", "LitData"),
    "mosaic_streaming": ("bench.loaders.mosaic_streaming", "MosaicStreaming"),
    "dali": ("bench.loaders.dali", "Dali"),
    "gdsstream_save": ("bench.loaders.gdsstream_save", "SaveFile"),
    "safetensors_save": ("bench.loaders.safetensors_save", "SafetensorsSave"),
    "torch_save": ("bench.loaders.torch_save", "TorchSave"),
    "torch_dcp": ("bench.loaders.torch_dcp", "TorchDcp"),
    "torch_gds": ("bench.loaders.torch_gds", "TorchGds"),
    "pread": ("bench.loaders.pread", "Pread"),
    "transfer_posix": ("bench.loaders.transfer_posix", "Posix"),
    "transfer_aio": ("bench.loaders.transfer_aio", "KernelAio"),
    "transfer_fio": ("bench.loaders.transfer_fio", "Fio"),
    "transfer_bounce": ("bench.loaders.transfer_bounce", "Bounce"),
    "transfer_engine": ("bench.loaders.transfer_engine", "EngineReads"),
    "transfer_kvikio": ("bench.loaders.transfer_kvikio", "KvikioIos"),
    "transfer_kvikio_stream": ("bench.loaders.transfer_kvikio_stream", "KvikioStreams"),
    "transfer_cufile_batch": ("bench.loaders.transfer_cufile_batch", "CuFileBatch"),
    "transfer_cufile_stream": ("bench.loaders.transfer_cufile_stream", "CuFileBatchStream"),
}


def option_names(kind: str) -> list[str]:
    """What a loader of this kind may be given. Raises BenchConfigError for an unknown kind."""
    return [item.name for item in dataclasses.fields(_class(kind, "kind")) if item.init]


def build(name: str, options: Mapping[str, Any]) -> Loader:
    """The loader of the row `name`. Raises BenchConfigError for an unknown kind or option."""
    cls = _class(options.get("kind"), f"loaders.{name}.kind")
    arguments = {key: value for key, value in options.items() if key != "kind"}
    loader: Loader = from_mapping(cls, arguments, f"loaders.{name}")
    return loader


def _class(kind: object, where: str) -> type[Any]:
    if kind not in KINDS:
        raise BenchConfigError(f"'{where}' is {kind!r}; {nearest(str(kind), KINDS)}")
    module, name = KINDS[str(kind)]
    cls: type[Any] = getattr(importlib.import_module(module), name)
    return cls
