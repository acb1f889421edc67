"""Tensors that are views of a mapped file: nothing is read until it is touched. CPU only.

This is what safetensors' own loader does on the CPU, and no loader that copies can be as fast on warm files. The price
is that the file must stay as it is: the mapping is private (writes to a tensor never reach the file), but a file that
is rewritten in place changes tensors that were not written to, and touching one after the file was truncated is SIGBUS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdsstream.checkpoint import CheckpointFile, FileStamp, TensorSpec
from gdsstream.dtypes import torch_dtype, torch_shape
from gdsstream.errors import FileChangedError


def map_tensors(files: Sequence[CheckpointFile], specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors of `specs` over private mappings of their files, one mapping a file, which lives as long as any of
    its tensors. A tensor that is not aligned to its dtype in the file, which torch cannot view, is copied.

    Raises FileChangedError for a file that is no longer what its stamp says, DtypeError for dtypes torch lacks.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[str, torch.Tensor] = {}
    for spec in specs:
        dtype = torch_dtype(spec.dtype)
        shape = torch_shape(spec.dtype, spec.shape)
        if not spec.nbytes:
            tensors[spec.name] = torch.empty(shape, dtype=dtype)
            continue
        storage = storages.get(spec.file)
        if storage is None:
            storage = storages[spec.file] = _map(files[spec.file])
        if spec.offset % dtype.itemsize:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, spec.offset, (spec.nbytes,), (1,))
            tensors[spec.name] = raw.clone().view(dtype).view(shape)
        else:
            start = spec.offset // dtype.itemsize
            tensors[spec.name] = torch.empty(0, dtype=dtype).set_(storage, start, shape, _strides(shape))
    return tensors


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def _map(file: CheckpointFile) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.UntypedStorage.from_file(file.path, False, file.stamp.size)  # type: ignore[assignment]
    # It opened the file by its path: what it found there has to be what the header was read from.
    if FileStamp.of(file.path) != file.stamp:
        raise FileChangedError(f"{file.path} changed since its header was read; open it again")
    return storage


__all__ = ["map_tensors"]
