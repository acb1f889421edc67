"""What tests are made with: checkpoints written byte by byte, plans by hand, cold files, and other processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch

import gdsstream
from gdsstream import _native
from gdsstream.checkpoint import DTYPES, FileStamp
from gdsstream.header import CheckpointFile

SOURCE = str(Path(gdsstream.__file__).parent.parent)

# (dtype in safetensors' terms, shape, bytes)
Raw = tuple[str, Sequence[int], bytes]


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def random_raw(dtype: str, shape: Sequence[int], seed: int = 0) -> Raw:
    """A tensor of random bits; bools are 0 or 1."""
    count = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].bits // 8
    data = random_bytes(count, seed)
    return dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, Raw],
    metadata: Mapping[str, str] | None = None,
    *,
    header_order: Iterable[str] | None = None,
    padding: int = 0,
) -> Path:
    """A safetensors file with the tensors' bytes in the given order, wherever that puts them.

    `header_order` is the order of the header's entries; `padding` blanks end the header, so that data can start
    anywhere.
    """
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    header.update((name, entries[name]) for name in (entries if header_order is None else header_order))
    text = json.dumps(header).encode() + b" " * padding
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)
    return path


def as_bytes(tensor: torch.Tensor) -> bytes:
    # No copy by torch where none is needed: its thread pool hangs in forked children.
    dense = tensor.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and every bit are equal."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert as_bytes(got[name]) == as_bytes(tensor), name


def reference(path: Path) -> dict[str, torch.Tensor]:
    """What safetensors loads, free of its mapping of the file."""
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}


def source_of(path: Path) -> CheckpointFile:
    return CheckpointFile(str(path), FileStamp.of(path), 0, None)


def evict(path: Path) -> None:
    """Take a file out of the page cache; skips where the kernel keeps it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _native.resident_bytes(str(path), 0, path.stat().st_size):
        pytest.skip("the page cache keeps the file: O_DIRECT would not be chosen for it")


def need_uring() -> None:
    if reason := _native.io_uring_reason():
        pytest.skip(f"no io_uring: {reason}")


def need_direct(path: Path) -> None:
    """Skips unless O_DIRECT works, in blocks of a page, where `path` is."""
    probe = path if path.is_file() else path / "direct-io-probe"
    if not probe.exists():
        probe.write_bytes(bytes(8192))
    if max(_native.file_alignment(str(probe))) > 4096 or not _native.direct_io_works(str(probe)):
        pytest.skip(f"no O_DIRECT in blocks of 4096 bytes on {path}")


def need_reader(knobs: Mapping[str, Any], path: Path) -> None:
    """Skips where what the knobs ask for by name cannot run on the file system of `path`."""
    if knobs.get("reader") == "io_uring":
        need_uring()
    if knobs.get("direct_io"):
        need_direct(path)


def build_library(target: Path, sources: Iterable[Path]) -> Path:
    """A shared library of C++ sources; skips where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip(f"no C++ compiler (g++, or CXX) to build {target.name} with")
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-pthread"]
    command = [*compiler.split(), *flags, "-o", str(target), *map(str, sources)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, f"{target.name} does not build:\n{built.stderr}"
    return target


def start_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A fresh interpreter that runs `code` with our sources and this folder importable."""
    paths = os.pathsep.join([SOURCE, str(Path(__file__).resolve().parent)])
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_python(code: str, *arguments: object, timeout_s: float = 60, **environment: str) -> tuple[str, str]:
    """Its (stdout, stderr); fails unless it exits with 0."""
    process = start_python(code, *arguments, **environment)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its forked children hold the pipes, too
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout_s} s\n{out}\n{err}")
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    return out, err


class Source(NamedTuple):
    path: str
    stamp: FileStamp

    @classmethod
    def at(cls, path: Path) -> Source:
        return cls(str(path), FileStamp.of(path))


def make_plan(
    extents: Sequence[tuple[int, int, int, int, int, int]], buffer_bytes: tuple[int, ...], num_groups: int = 1
) -> Any:
    """(file, file_offset, nbytes, buffer, buffer_offset, group) each."""
    table = np.array(extents, dtype=np.int64).reshape(-1, 6)
    return SimpleNamespace(
        file=table[:, 0].astype(np.int32),
        file_offset=table[:, 1].copy(),
        nbytes=table[:, 2].copy(),
        buffer=table[:, 3].astype(np.int32),
        buffer_offset=table[:, 4].copy(),
        group=table[:, 5].astype(np.int32),
        buffer_bytes=buffer_bytes,
        num_groups=num_groups,
    )


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line or return event of some modules."""

    def __init__(self, n: int, *modules: Any) -> None:
        self.left = n
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        # What the outermost call returns is the caller's to lose.
        if event == "line" or (event == "return" and frame.f_back and frame.f_back.f_code.co_filename in self._files):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], object]) -> bool:
        """Whether there were so many events."""
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return self.left <= 0
