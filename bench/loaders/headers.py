"""The headers of safetensors files, read as plainly as possible, for the loaders that bring none of their own."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Entry(NamedTuple):
    """One tensor; `start` is relative to the file's data section."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    stop: int


class Header(NamedTuple):
    """One file: where its data section lies, in bytes, and what is in it."""

    path: str
    data_start: int
    data_bytes: int
    entries: list[Entry]


def read(path: str) -> Header:
    """Read one header. Trusts the file: these are the bench's own."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length))
        size = os.fstat(file.fileno()).st_size
    table.pop("__metadata__", None)
    entries = [Entry(name, item["dtype"], item["shape"], *item["data_offsets"]) for name, item in table.items()]
    return Header(path, 8 + length, size - 8 - length, entries)


def views(header: Header, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The file's tensors as views into `data`, its data section as uint8. They keep it alive: memory is owned."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
    return {
        entry.name: data[entry.start : entry.stop].view(dtypes[entry.dtype]).view(entry.shape)
        for entry in header.entries
    }
