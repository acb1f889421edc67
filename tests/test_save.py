"""Saving: safetensors is the oracle for every byte; and what no file can hold is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from save_support import MIB, SHARED_DTYPES, Save, check_file, parts_of, random_tensor
from support import assert_same, need_direct, reference

import gdsstream
from gdsstream import storage, writer
from gdsstream.errors import (
    ConfigError,
    DtypeError,
)
from gdsstream.save import save_file

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
dtypes = st.sampled_from([name for name in SHARED_DTYPES if name != "F4"])
specs = st.dictionaries(texts.filter(lambda name: name != "__metadata__"), st.tuples(dtypes, shapes), max_size=8)


@settings(deadline=None, max_examples=150)
@given(specs=specs, metadata=st.none() | st.dictionaries(texts, texts, min_size=1, max_size=1))
def test_any_tensors_are_saved_as_safetensors_does(
    specs: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    tensors = {name: random_tensor(*spec, seed=seed) for seed, (name, spec) in enumerate(specs.items())}
    save_file(tensors, path, metadata)
    check_file(path, tensors, metadata)
    with gdsstream.safe_open(path) as handle:
        assert handle.metadata() == metadata


@pytest.mark.parametrize("dtype", SHARED_DTYPES)
def test_every_dtype(dtype: str, save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"matrix": random_tensor(dtype, (33, 7)), "empty": random_tensor(dtype, (3, 0))}
    if dtype != "F4":
        tensors["scalar"] = random_tensor(dtype, ())
    save(tensors, path)
    content = path.read_bytes()
    assert parts_of(content) == parts_of(safetensors.torch.save(tensors))
    if dtype not in ("F4", "F8_E8M0"):  # safetensors itself writes these, and does not load them
        assert_same(reference(path), tensors)
    assert_same(gdsstream.load_file(path), tensors)


@pytest.mark.parametrize("direct_io", [False, True], ids=["page cache", "direct"])
def test_tensors_across_blocks(direct_io: bool, save: Save, tmp_path: Path, small_blocks: None) -> None:
    if direct_io:
        need_direct(tmp_path)
    path = tmp_path / "model.safetensors"
    sizes = [1, 3, 100_000, 0, 131_072, 131_071, 700_001, 5, 4096, 262_144]
    tensors = {f"w{i}": random_tensor("U8", (size,), seed=i) for i, size in enumerate(sizes)}
    tensors["wide"] = random_tensor("F64", (300, 700), seed=20)
    tensors["turned"] = random_tensor("F64", (300, 700), seed=21).t()
    save(tensors, path, direct_io=direct_io)
    check_file(path, tensors)


def test_direct_writes_pass_the_page_cache(tmp_path: Path) -> None:
    need_direct(tmp_path)
    path = tmp_path / "model.safetensors"
    for direct_io in (False, True):
        save_file({"w": torch.ones(20 * MIB, dtype=torch.uint8)}, path, direct_io=direct_io)
        assert storage.residency(path) == (0.0 if direct_io else 1.0)


def test_a_file_of_exactly_one_block(tmp_path: Path, small_blocks: None) -> None:
    tensors = {"w": random_tensor("U8", (writer.BLOCK_BYTES - 4096,))}
    save_file(tensors, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", tensors)
    assert (tmp_path / "model.safetensors").stat().st_size == writer.BLOCK_BYTES


def test_blocks_of_ordinary_size(save: Save, tmp_path: Path) -> None:
    tensors = {f"w{i}": random_tensor("F32", (n,), seed=i) for i, n in enumerate((5 * MIB + 1, 3, 6 * MIB))}
    save(tensors, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", tensors)


def test_more_tensors_than_one_system_call_takes(save: Save, tmp_path: Path) -> None:
    tensors = {f"expert.{i}": random_tensor("I16", (i % 7,), seed=i) for i in range(3000)}
    save(tensors, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", tensors)


def test_strides_and_lazy_bits(save: Save, tmp_path: Path) -> None:
    numbers = random_tensor("C64", (6, 5)).nan_to_num()
    tensors = {
        "turned": random_tensor("F32", (6, 5)).t(),
        "every second": random_tensor("BF16", (40, 9))[::2, 1::3],
        "expanded": random_tensor("I32", (1, 5)).expand(4, 5),
        "channels last": random_tensor("F16", (2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "f4": random_tensor("F4", (8, 6)).t(),
        "bool": random_tensor("BOOL", (8, 6)).t(),
        "conjugate": numbers.conj(),
        "negative": numbers.clone().conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, 4)),
        "pinned in a graph": torch.randn(3, requires_grad=True) * 2,
        "column": random_tensor("U64", (5, 5))[:, 2],
    }
    assert tensors["conjugate"].is_conj()
    assert tensors["negative"].is_neg()
    path = tmp_path / "model.safetensors"
    save(tensors, path)
    f4 = tensors.pop("f4")
    loaded = gdsstream.load_file(path)
    assert torch.equal(loaded.pop("f4").view(torch.uint8), f4.view(torch.uint8))
    assert_same(loaded, {name: t.detach().resolve_conj().resolve_neg().contiguous() for name, t in tensors.items()})


def test_nothing_to_save(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({}, path, {})
    assert parts_of(path.read_bytes()) == ('{"__metadata__":{}}', b"")
    assert gdsstream.load_file(path) == safetensors.torch.load_file(path) == {}


def test_what_is_loaded_can_be_saved_in_its_own_place(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": random_tensor("F32", (100, 100)), "b": random_tensor("U8", (5,))}
    save_file(tensors, path)
    mapped = gdsstream.load_file(path, copy=False)
    save_file(mapped, path)
    check_file(path, tensors)


# What is refused


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(function)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), ConfigError, "is sparse .*to_dense"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), ConfigError, "is sparse .*sparse_csr"),
    "meta": (lambda: torch.ones(3, device="meta"), ConfigError, "is on the meta device"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        DtypeError,
        "is torch.qint8.*int_repr",
    ),
    "complex128": (lambda: torch.ones(3, dtype=torch.complex128), DtypeError, "is torch.complex128"),
    "F4 scalar": (lambda: random_tensor("F4", (1,))[0], DtypeError, "is a scalar of F4"),
    "array": (lambda: np.ones(3), ConfigError, "is a ndarray"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), ConfigError, "is a Wrapper without memory .*full_tensor"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_no_file_can_hold(kind: str, save: Save, old_file: tuple[Path, bytes]) -> None:
    make, error, message = REFUSED[kind]
    with pytest.raises(error, match=f"tensor 'bad' {message}"):
        save({"good": torch.ones(3), "bad": make()}, old_file[0])


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({1: torch.ones(1)}, None, "names have to be strings, not 1"),
        ({"__metadata__": torch.ones(1)}, None, "keeps this name for the metadata"),
        ({"\ud800": torch.ones(1)}, None, r"'\\ud800' .*is no character"),
        ({}, {"a": "\udfff"}, r"'\\udfff' .*is no character"),
        ({}, {"step": 3}, "not 'step' to 3; use str"),
        ({}, {3: "step"}, "not 3 to 'step'"),
        ([torch.ones(1)], None, "tensors has to map names to tensors, and is a list"),
    ],
)
def test_names_and_metadata_that_no_file_can_hold(
    tensors: Any, metadata: Any, message: str, save: Save, old_file: tuple[Path, bytes]
) -> None:
    with pytest.raises(ConfigError, match=message):
        save(tensors, old_file[0], metadata)


def test_a_header_too_large_for_the_format(old_file: tuple[Path, bytes]) -> None:
    with pytest.raises(ConfigError, match="the format allows 100000000"):
        save_file({"a": torch.ones(1)}, old_file[0], {"blob": "x" * 100_000_000})


@pytest.mark.parametrize(
    "tie",
    [
        lambda w: (w, w),
        lambda w: (w, w.t()),
        lambda w: (w[:6], w[5:]),
        lambda w: (w[:6], w.view(-1)[59:]),
        lambda w: (w, w[3, 2:5]),
        lambda w: (w.view(torch.int32), w),
        lambda w: (w, torch.from_numpy(w.numpy()[2:])),
    ],
    ids=["itself", "turned", "overlapping", "one element", "inside", "other dtype", "other storage"],
)
def test_two_names_for_the_same_memory(tie: Callable[..., Any], save: Save, old_file: tuple[Path, bytes]) -> None:
    first, second = tie(torch.randn(10, 10))
    with pytest.raises(ConfigError, match=r"'(head|embed)' and '(head|embed)' share memory .*clone\(\)"):
        save({"embed": first, "other": torch.ones(3), "head": second}, old_file[0])


def test_parts_of_one_storage_that_do_not_overlap(tmp_path: Path) -> None:
    w = torch.randn(10, 10)
    tensors = {"a": w[:5], "b": w[5:], "c": torch.randn(3)}
    assert safetensors.torch.save(tensors)
    save_file({**tensors, "none of it": w[3:3]}, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", {**tensors, "none of it": w[3:3]})


def test_names_that_no_file_can_have(save: Save) -> None:
    with pytest.raises(ConfigError, match="cannot be a file name"):
        save({"a": torch.ones(1)}, "a\0b")
