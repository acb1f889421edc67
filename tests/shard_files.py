"""Small shards of every format, written on the spot, and what is in them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

# What a member of a tar is written from: its bytes, an array (.npy) or tensors (.safetensors).
Content = bytes | np.ndarray[Any, Any] | Mapping[str, torch.Tensor]


def rows(count: int, *shape: int, dtype: torch.dtype = torch.int32, first: int = 0) -> torch.Tensor:
    """[count, *shape] whose elements are all different, so that no record can be taken for another."""
    numel = int(np.prod(shape, dtype=np.int64)) * count
    return (torch.arange(numel, dtype=torch.int64) + first * (numel // max(count, 1))).to(dtype).reshape(count, *shape)


def write_safetensors(path: Path, **fields: torch.Tensor) -> Path:
    """A shard whose tensors have one record a row."""
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in fields.items()}, path)
    return path


def write_ragged(path: Path, fields: Mapping[str, Sequence[torch.Tensor]], **fixed: torch.Tensor) -> Path:
    """A safetensors shard of ragged fields, each given as its records [n_i, *shape], and of fixed ones beside them."""
    tensors = dict(fixed)
    for name, records in fields.items():
        tensors[f"{name}.values"] = torch.cat(list(records))
        lengths = torch.tensor([0, *map(len, records)], dtype=torch.int64)
        tensors[f"{name}.offsets"] = lengths.cumsum(0)
    return write_safetensors(path, **tensors)


def write_npy(path: Path, array: torch.Tensor | np.ndarray[Any, Any]) -> Path:
    np.save(path, array.numpy() if isinstance(array, torch.Tensor) else array)
    return path


def write_tokens(path: Path, tokens: torch.Tensor) -> Path:
    path.write_bytes(tokens.view(torch.uint8).numpy().tobytes())
    return path


def write_tar(path: Path, records: Sequence[Mapping[str, Content]], *, first: int = 0, **options: Any) -> Path:
    """Records as `{extension: content}`, with keys 000000, 000001 and so on from `first`; `options` are tarfile's."""
    members = [
        (f"{number:06d}.{extension}", content)
        for number, record in enumerate(records, first)
        for extension, content in record.items()
    ]
    return write_members(path, members, **options)


def write_members(path: Path, members: Sequence[tuple[str, Content]], **options: Any) -> Path:
    """A tar of members by name, in that order."""
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            data = as_file(content)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def as_file(content: Content) -> bytes:
    """The bytes of a file with that content."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, np.ndarray):
        file = io.BytesIO()
        np.save(file, content)
        return file.getvalue()
    return safetensors.torch.save(dict(content))


def write_dataset(directory: Path, format: str, counts: Sequence[int] = (5, 3, 7)) -> torch.Tensor:
    """Shards with `counts` records int32 [4] in a directory, under one field; all records, in order [sum, 4].

    Token shards are to be opened with dtype="int32", record_length=4.
    """
    directory.mkdir(parents=True, exist_ok=True)
    everything = rows(sum(counts), 4)
    for number, part in enumerate(everything.split(list(counts))):
        stem = directory / f"shard-{number}"
        if format == "safetensors":
            write_safetensors(stem.with_suffix(".safetensors"), data=part)
        elif format == "npy":
            write_npy(stem.with_suffix(".npy"), part)
        elif format == "tokens":
            write_tokens(stem.with_suffix(".bin"), part)
        else:
            write_tar(stem.with_suffix(".tar"), [{"data.npy": row.numpy()} for row in part])
    return everything
