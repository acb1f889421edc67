"""Fixtures that tests share: checkpoints made on the spot, and the check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fault_support import opened as opened
from fault_support import reader as reader
from save_support import old_file as old_file
from save_support import save as save
from save_support import small_blocks as small_blocks
from stats_support import counting as counting
from support import Raw, build_library, random_raw, write_checkpoint

import gdsstream

# Where a shell started this in the background, Ctrl-C is ignored, and so it would be in the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_knobs_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("GDSSTREAM_") and name != "GDSSTREAM_LIBCUDA"]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")  # and no profiles


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """make_checkpoint(name="model.safetensors", tensors=None, **write_checkpoint's) -> path of a new file."""

    def make(name: str = "model.safetensors", tensors: dict[str, Raw] | None = None, **options: object) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_checkpoint(path, tensors if tensors is not None else mixed_tensors(), **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """Twelve tensors of about 3 MB in all, at odd offsets, a scalar and an empty one among them."""
    return make_checkpoint(metadata={"format": "pt", "made": "for tests"}, padding=3)


def mixed_tensors() -> dict[str, Raw]:
    shapes = [("F32", (64, 1000)), ("BF16", (333, 7)), ("U8", (5,)), ("I64", ()), ("F16", (0, 4)), ("F64", (11, 3))]
    shapes += [("BOOL", (77,)), ("I8", (999_999,)), ("F32", (1,)), ("U8", (1_500_001,)), ("I16", (3, 5)), ("F16", (9,))]
    return {f"layer.{i}.weight": random_raw(dtype, shape, seed=i) for i, (dtype, shape) in enumerate(shapes)}


@pytest.fixture(scope="session")
def refuse_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What LD_PRELOAD names in processes whose reader threads are refused memory; see refusals.py."""
    source = Path(__file__).resolve().parent / "native" / "refuse_memory.cpp"
    return build_library(tmp_path_factory.mktemp("refuse_memory") / "librefusememory.so", [source])


@pytest.fixture(scope="session")
def fail_writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What LD_PRELOAD names in processes whose storage fails."""
    source = Path(__file__).resolve().parent / "native" / "fail_writes.cpp"
    return build_library(tmp_path_factory.mktemp("fail_writes") / "libfailwrites.so", [source])


def _left_behind(directory: Path) -> dict[str, int]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
        except OSError:
            continue  # it ended meanwhile
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(names),
        "reader threads": names.count("gdsstream"),
        "mappings": sum(str(directory) in line for line in maps),
    }


def _more_than(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: count for key, count in after.items() if count > before[key]}


@pytest.fixture
def no_leaks(tmp_path: Path) -> Iterator[None]:
    """Descriptors, threads and mappings of the test's files are as many after the test as before it."""
    gdsstream.release_engines()
    torch.ones(1 << 20).sum()  # torch's own threads come with its first large operation
    gc.collect()
    before = _left_behind(tmp_path)
    yield
    gdsstream.release_engines()
    gc.collect()
    # A thread that was waited for may still be on its way out of the kernel, for seconds on a busy machine.
    end = time.monotonic() + 5
    while (more := _more_than(before, after := _left_behind(tmp_path))) and time.monotonic() < end:
        time.sleep(0.02)
    assert after["reader threads"] == after["mappings"] == 0
    assert more == {}
