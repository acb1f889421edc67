"""What tests of saving share: safetensors as the oracle of every byte, and files that a save may not touch."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support import assert_same, random_bytes, reference

import gdsstream
from gdsstream import writer
from gdsstream.dtypes import DTYPES
from gdsstream.save import save_file, save_file_async

MIB = 1 << 20
SHARED_DTYPES = {
    info.name: getattr(torch, info.torch_name)
    for info in DTYPES.values()
    if info.torch_name and hasattr(torch, info.torch_name)
}
Save = Callable[..., None]


def save_and_wait(*arguments: Any, **options: Any) -> None:
    save_file_async(*arguments, **options).wait(60)


@pytest.fixture(params=[save_file, save_and_wait], ids=["sync", "async"])
def save(request: pytest.FixtureRequest) -> Save:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of kilobytes meet the edges of blocks."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", 2 * writer._DIRECT_TAIL)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits; bools are 0 or 1. `shape` is torch's."""
    kind = SHARED_DTYPES[dtype]
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = torch.frombuffer(bytearray(random_bytes(count, seed) + b"\0"), dtype=torch.uint8)[:count].clone()
    if dtype == "BOOL":
        raw &= 1
    return raw.view(kind).reshape(shape)


def parts_of(content: bytes) -> tuple[str, bytes]:
    """The header's text without the blanks at its end, and the data."""
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length].decode().rstrip(" "), content[8 + length :]


def check_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """The file is what safetensors writes, but for blanks; it and this library's loader read the tensors from it."""
    content = path.read_bytes()
    dense = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    header, data = parts_of(content)
    expected_header, expected_data = parts_of(safetensors.torch.save(dense, metadata))
    assert header == expected_header
    assert data == expected_data
    assert (len(content) - len(data)) % 4096 == 0
    assert_same(reference(path), dense)
    assert_same(gdsstream.load_file(path), dense)
    assert not leftovers(path.parent)


def leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".gdsstream-")]


@pytest.fixture
def old_file(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """A saved file; in the end it is as it was, and alone."""
    path = tmp_path / "model.safetensors"
    save_file({"old": torch.arange(1000)}, path)
    content = path.read_bytes()
    yield path, content
    assert path.read_bytes() == content
    assert not leftovers(tmp_path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
