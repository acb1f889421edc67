"""safe_open beside safetensors.safe_open: the same answers, through the ring and from registered pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import as_bytes, assert_same, need_reader, random_raw, reference, write_checkpoint

import gdsstream
from gdsstream.dtypes import DTYPES, torch_shape
from gdsstream.errors import (
    ConfigError,
    EngineClosedError,
    FileChangedError,
    MemoryBudgetError,
    TensorNotFoundError,
)

MIB = 1 << 20
HANDLES: dict[str, dict[str, Any]] = {
    "ring": {},
    "pread": {"backend": "staged", "reader": "pread", "direct_io": False},
    "io_uring O_DIRECT": {"backend": "staged", "reader": "io_uring", "direct_io": True},
    "cached": {"host_cache_bytes": 64 * MIB},
    "mapped": {"backend": "mapped", "host_cache_bytes": 64 * MIB},
    "traditional": {"backend": "traditional"},
}


@pytest.fixture(params=HANDLES)
def knobs(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    chosen = HANDLES[request.param]
    need_reader(chosen, tmp_path)
    return {"chunk_size": 64 * 1024, "staging_bytes": MIB, **chosen}


def test_everything_safetensors_says(checkpoint: Path, knobs: dict[str, Any], no_leaks: None):
    with safetensors.safe_open(checkpoint, "pt") as theirs, gdsstream.safe_open(checkpoint, **knobs) as ours:
        assert ours.keys() == sorted(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():  # noqa: SIM118
            wanted = theirs.get_tensor(name).clone()
            assert_same({name: ours.get_tensor(name)}, {name: wanted})
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            if wanted.dim():
                assert_same({name: ours.get_slice(name)[:]}, {name: wanted})


def test_many_at_once(checkpoint: Path, knobs: dict[str, Any]):
    expected = reference(checkpoint)
    with gdsstream.safe_open(str(checkpoint), framework="pt", device="cpu", **knobs) as handle:
        assert_same(handle.tensors(), expected)
        assert list(handle.tensors()) == handle.offset_keys()
        chosen = ["layer.7.weight", "layer.3.weight"]
        got = handle.tensors(chosen)
        assert list(got) == chosen
        assert_same(got, {name: expected[name] for name in chosen})
        some = handle.tensors(lambda name: "1" in name)
        assert_same(some, {name: tensor for name, tensor in expected.items() if "1" in name})
        assert handle.tensors([]) == {}
    for name, tensor in got.items():  # owned: good beyond the handle
        assert as_bytes(tensor) == as_bytes(expected[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {
        "cube": random_raw("F32", (7, 11, 13), 1),
        "tall": random_raw("I16", (900, 5), 2),
        "row": random_raw("U8", (70_001,), 3),
    }
    return write_checkpoint(tmp_path_factory.mktemp("slices") / "model.safetensors", raw, padding=1)


positive = st.builds(
    slice, st.none() | st.integers(-900, 900), st.none() | st.integers(-900, 900), st.none() | st.integers(1, 7)
)


@pytest.mark.parametrize("name", HANDLES)
def test_slices_are_torchs(matrices: Path, name: str):
    options: dict[str, Any] = HANDLES[name]
    need_reader(options, matrices)
    expected = reference(matrices)

    with gdsstream.safe_open(matrices, **options) as handle:

        @settings(max_examples=60, deadline=None)
        @given(
            which=st.sampled_from(sorted(expected)),
            index=st.lists(positive | st.integers(-13, 12) | st.just(...), max_size=3).map(tuple) | positive,
        )
        def check(which: str, index: Any) -> None:
            try:
                wanted = expected[which][index].clone()
            except IndexError:
                with pytest.raises((IndexError, ConfigError)):
                    handle.get_slice(which)[index]
                return
            if isinstance(index, tuple) and index.count(...) > 1:
                with pytest.raises(ConfigError, match="at most one Ellipsis"):
                    handle.get_slice(which)[index]
                return
            got = handle.get_slice(which)[index]
            assert_same({"": got}, {"": wanted})
            assert got.untyped_storage().nbytes() == got.nbytes  # no rows kept alive behind it

        check()


@pytest.mark.parametrize("dtype", [name for name, info in DTYPES.items() if info.torch_name])
def test_slices_of_every_dtype(tmp_path: Path, dtype: str):
    raw = random_raw(dtype, (300, 8))
    path = write_checkpoint(tmp_path / "model.safetensors", {"a": raw})
    shape = torch_shape(dtype, (300, 8))
    rows = np.frombuffer(raw[2], dtype=np.uint8).reshape(*shape, -1)
    with gdsstream.safe_open(path) as handle:
        stored = handle.get_slice("a")
        assert stored.get_dtype() == dtype
        assert stored.get_shape() == [300, 8]
        assert as_bytes(stored[5:9]) == rows[5:9].tobytes()
        assert as_bytes(stored[7, 1:3]) == rows[7, 1:3].tobytes()
        assert as_bytes(stored[::2, 3]) == rows[::2, 3].tobytes()  # reads the covering rows
        assert as_bytes(handle.get_tensor("a")) == raw[2]


def test_only_a_slices_bytes_are_read(matrices: Path, no_leaks: None):
    with gdsstream.safe_open(matrices, backend="staged", direct_io=False) as handle:
        engine = handle._use()
        handle.get_slice("row")[10_000:10_100]
        assert engine.stats()["read_bytes"] == 100
        handle.get_slice("cube")[2:4, 3]
        assert engine.stats()["read_bytes"] == 100 + 2 * 13 * 4
        handle.get_slice("row")[5:5]
        assert engine.stats()["read_bytes"] == 100 + 2 * 13 * 4


def test_a_sharded_checkpoint_is_one_handle(tmp_path: Path, knobs: dict[str, Any]):
    everything = {}
    for shard in range(3):
        raw = {f"t.{shard}.{i}": random_raw("BF16", (40, i + 1), seed=10 * shard + i) for i in range(3)}
        everything.update(reference(write_checkpoint(tmp_path / f"part-{shard}.safetensors", raw)))
    with gdsstream.safe_open(tmp_path, **knobs) as handle:
        assert_same(handle.tensors(), everything)
        assert_same({"t.2.1": handle.get_tensor("t.2.1")}, {"t.2.1": everything["t.2.1"]})
        assert torch.equal(handle.get_slice("t.1.2")[3:5], everything["t.1.2"][3:5])


# --- registered pages -------------------------------------------------------------------------------------------------


def test_cached_files_are_mapped_while_the_handle_is_open(checkpoint: Path, no_leaks: None):
    size = os.path.getsize(checkpoint)
    handle = gdsstream.safe_open(checkpoint, host_cache_bytes=size)
    assert str(checkpoint) in Path("/proc/self/maps").read_text()
    assert handle._use().stats()["mapped_bytes"] == size
    handle.tensors()
    assert "registered page cache" in handle.route
    handle.close()
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()
    handle.close()


def test_a_budget_that_does_not_suffice(checkpoint: Path, make_checkpoint: Callable[..., Path], no_leaks: None):
    size = os.path.getsize(checkpoint)
    for budget in (0, size - 1):
        with pytest.raises(MemoryBudgetError, match=rf"takes {size} bytes, .*host_cache_bytes={budget}.*staged"):
            gdsstream.safe_open(checkpoint, backend="mapped", host_cache_bytes=budget)
    with gdsstream.safe_open(checkpoint, host_cache_bytes=size - 1) as handle:  # auto: the rest goes staged
        assert_same(handle.tensors(), reference(checkpoint))
        assert handle._use().stats()["mapped_bytes"] == 0
        assert "registered" not in handle.route
    second = make_checkpoint("second.safetensors", {"other": random_raw("U8", (size,))})
    with gdsstream.safe_open([checkpoint, second], host_cache_bytes=size + 100) as handle:
        assert_same(handle.tensors(), {**reference(checkpoint), **reference(second)})
        assert handle._use().stats()["mapped_bytes"] == size
        assert "registered page cache" in handle.route
        assert "page cache by" in handle.route
    with pytest.raises(MemoryBudgetError, match="second"):
        gdsstream.safe_open([checkpoint, second], backend="mapped", host_cache_bytes=size + 100)


@pytest.mark.parametrize("knobs_", [{}, {"host_cache_bytes": 64 * MIB}], ids=["ring", "cached"])
def test_a_file_that_changes_under_a_handle(checkpoint: Path, knobs_: dict[str, Any], no_leaks: None):
    with gdsstream.safe_open(checkpoint, **knobs_) as handle:
        handle.get_tensor("layer.2.weight")
        with checkpoint.open("r+b") as file:
            file.truncate(checkpoint.stat().st_size - 1)
        with pytest.raises(FileChangedError, match="truncated"):
            handle.get_tensor("layer.0.weight")
        with pytest.raises(FileChangedError, match="truncated"):
            handle.get_slice("layer.9.weight")[0:100]


# --- life of a handle -------------------------------------------------------------------------------------------------


def test_a_closed_handle_says_so(checkpoint: Path, knobs: dict[str, Any]):
    with gdsstream.safe_open(checkpoint, **knobs) as handle:
        stored = handle.get_slice("layer.0.weight")
    for use in (
        lambda: handle.get_tensor("layer.0.weight"),
        handle.tensors,
        lambda: stored[0:1],
        handle.__enter__,
        lambda: handle.route,
    ):
        with pytest.raises(EngineClosedError, match=r"model\.safetensors is closed"):
            use()
    assert handle.keys()  # what is known needs no file
    handle.close()


def test_engines_that_were_released_are_opened_again(checkpoint: Path, no_leaks: None):
    expected = reference(checkpoint)
    handle = gdsstream.safe_open(checkpoint)
    assert_same(handle.tensors(), expected)
    gdsstream.release_engines()
    assert_same(handle.tensors(), expected)
    with gdsstream.safe_open(checkpoint, host_cache_bytes=64 * MIB) as own:
        gdsstream.release_engines()
        assert_same(own.tensors(), expected)  # not among those that are shared
    handle.close()


def test_what_is_not_there(checkpoint: Path):
    with gdsstream.safe_open(checkpoint) as handle:
        for ask in (handle.get_tensor, handle.get_slice, lambda name: handle.tensors([name])):
            with pytest.raises(TensorNotFoundError, match=r"layer\.0\.weight"):
                ask("layer.0.weigh")
        with pytest.raises(IndexError, match="out of range"):
            handle.get_slice("layer.0.weight")[64]
        with pytest.raises(ConfigError, match="get_tensor"):
            handle.get_slice("layer.0.weight")[[0, 1]]
    with pytest.raises(ConfigError, match="framework 'np'"):
        gdsstream.safe_open(checkpoint, "np")
    with pytest.raises(ConfigError, match="did you mean 'host_cache_bytes'"):
        gdsstream.safe_open(checkpoint, host_cache_byte=3)


def test_a_failed_open_leaves_nothing(tmp_path: Path, no_leaks: None):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    for options in ({}, {"host_cache_bytes": MIB}):
        with pytest.raises(gdsstream.HeaderError):
            gdsstream.safe_open(path, **options)
