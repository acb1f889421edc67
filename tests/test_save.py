"""Saving: safetensors is the oracle for every byte, and a save that fails or is killed leaves the old file."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import stat
import struct
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, build_library, need_direct, random_bytes, reference, run_python, start_python

import gdsstream
from gdsstream import storage, writer
from gdsstream.dtypes import DTYPES
from gdsstream.errors import (
    ConfigError,
    DtypeError,
    ForkedProcessError,
    MemoryBudgetError,
    TransferCancelledError,
    WriteError,
)
from gdsstream.save import PendingSave, save_file, save_file_async

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


@pytest.fixture(scope="session")
def fail_writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What LD_PRELOAD names in processes whose storage fails."""
    source = Path(__file__).resolve().parent / "native" / "fail_writes.cpp"
    return build_library(tmp_path_factory.mktemp("fail_writes") / "libfailwrites.so", [source])


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
def old(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """A saved file; in the end it is as it was, and alone."""
    path = tmp_path / "model.safetensors"
    save_file({"old": torch.arange(1000)}, path)
    content = path.read_bytes()
    yield path, content
    assert path.read_bytes() == content
    assert not leftovers(tmp_path)


# What is in the file

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
def test_tensors_that_no_file_can_hold(kind: str, save: Save, old: tuple[Path, bytes]) -> None:
    make, error, message = REFUSED[kind]
    with pytest.raises(error, match=f"tensor 'bad' {message}"):
        save({"good": torch.ones(3), "bad": make()}, old[0])


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
    tensors: Any, metadata: Any, message: str, save: Save, old: tuple[Path, bytes]
) -> None:
    with pytest.raises(ConfigError, match=message):
        save(tensors, old[0], metadata)


def test_a_header_too_large_for_the_format(old: tuple[Path, bytes]) -> None:
    with pytest.raises(ConfigError, match="the format allows 100000000"):
        save_file({"a": torch.ones(1)}, old[0], {"blob": "x" * 100_000_000})


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
def test_two_names_for_the_same_memory(tie: Callable[..., Any], save: Save, old: tuple[Path, bytes]) -> None:
    first, second = tie(torch.randn(10, 10))
    with pytest.raises(ConfigError, match=r"'(head|embed)' and '(head|embed)' share memory .*clone\(\)"):
        save({"embed": first, "other": torch.ones(3), "head": second}, old[0])


def test_parts_of_one_storage_that_do_not_overlap(tmp_path: Path) -> None:
    w = torch.randn(10, 10)
    tensors = {"a": w[:5], "b": w[5:], "c": torch.randn(3)}
    assert safetensors.torch.save(tensors)
    save_file({**tensors, "none of it": w[3:3]}, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", {**tensors, "none of it": w[3:3]})


def test_names_that_no_file_can_have(save: Save) -> None:
    with pytest.raises(ConfigError, match="cannot be a file name"):
        save({"a": torch.ones(1)}, "a\0b")


# Where it goes


def test_the_mode_is_kept_or_follows_the_umask(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(0o027)
    try:
        save({"a": torch.ones(1)}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        save({"a": torch.zeros(1)}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)
    check_file(path, {"a": torch.zeros(1)})


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(exists: bool, save: Save, tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / "0123", tmp_path / "snapshots" / "model.safetensors"
    blob.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to("../blobs/0123")
    if exists:
        save_file({"a": torch.ones(1)}, blob)
    save({"a": torch.zeros(2)}, link)
    assert link.is_symlink()
    assert not blob.is_symlink()
    check_file(blob, {"a": torch.zeros(2)})
    assert not leftovers(link.parent)


def test_a_relative_path_is_of_the_directory_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = save_file_async({"a": torch.ones(50 * MIB, dtype=torch.uint8)}, "model.safetensors")
    monkeypatch.chdir(tmp_path / "elsewhere")
    pending.wait(60)
    assert pending.path == str(tmp_path / "model.safetensors")
    assert os.listdir(tmp_path / "elsewhere") == []
    assert (tmp_path / "model.safetensors").stat().st_size == 50 * MIB + 4096


@pytest.mark.parametrize(
    ("name", "code", "advice"),
    [
        ("missing/model.safetensors", errno.ENOENT, "make the directory first"),
        ("model.safetensors/model.safetensors", errno.ENOTDIR, "choose a path that leads through directories"),
        (".", errno.EISDIR, "name a file in it"),
        ("x" * 256, errno.ENAMETOOLONG, "choose a shorter name"),
    ],
)
def test_paths_that_lead_nowhere(name: str, code: int, advice: str, save: Save, old: tuple[Path, bytes]) -> None:
    with pytest.raises(WriteError, match=advice) as caught:
        save({"a": torch.ones(1)}, old[0].parent / name)
    assert caught.value.errno == code
    assert isinstance(caught.value, OSError)
    assert "4100 bytes wanted" in str(caught.value)


def test_what_is_no_file_is_not_replaced(save: Save, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match="no regular file"):
        save({"a": torch.ones(1)}, tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


AS_NOBODY = """
import os, resource, sys, torch
from gdsstream.save import save_file, save_file_async
from gdsstream.errors import EngineError, WriteError
save_file({"a": torch.ones(1)}, sys.argv[1] + "/warm")  # what is imported late is imported
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[2:]:
    for save in (save_file, lambda *a: save_file_async(*a).wait(60)):
        try:
            save({"a": torch.ones(1)}, path)
            print("saved")
        except WriteError as error:
            print(error.errno, error)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    save_file_async({"a": torch.ones(1)}, sys.argv[-1])
except EngineError as error:
    print(error)
"""


def test_directories_and_files_without_permission(tmp_path: Path) -> None:
    closed, open_ = tmp_path / "closed", tmp_path / "open"
    for folder in (closed, open_):
        folder.mkdir()
        save_file({"old": torch.ones(2)}, folder / "model.safetensors")
    (open_ / "model.safetensors").chmod(0o444)
    content = (open_ / "model.safetensors").read_bytes()
    closed.chmod(0o555)
    open_.chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    out, _ = run_python(AS_NOBODY, tmp_path, closed / "new", open_ / "model.safetensors", open_ / "new")
    lines = out.splitlines()
    assert all(line.startswith(f"{errno.EACCES} ") and "mode or owner" in line for line in lines[:4]), out
    assert all(f"{open_ / 'model.safetensors'} cannot be written" in line for line in lines[2:4])
    assert lines[4:6] == ["saved", "saved"]
    assert lines[6].startswith(f"no thread can be started to save {open_ / 'new'}: ")
    assert lines[6].endswith("; use save_file")
    assert (open_ / "model.safetensors").read_bytes() == content
    assert not leftovers(closed)
    assert not leftovers(open_)
    closed.chmod(0o755)


# Storage that fails

FAILING = """
import errno, sys, threading, torch
from gdsstream.errors import WriteError
from gdsstream.save import save_file, save_file_async
tensors = {"w": torch.ones(40 << 20, dtype=torch.uint8)}
for save in (save_file, lambda *a: save_file_async(*a).wait(60)):
    try:
        save(tensors, sys.argv[1])
        print("saved")
    except WriteError as error:
        print(errno.errorcode[error.errno], error)
"""


@pytest.mark.parametrize(
    ("call", "code", "passing", "advice"),
    [
        ("fallocate", errno.ENOSPC, 0, "free some space"),
        ("fallocate", errno.EDQUOT, 0, "free some of the quota"),
        ("pwritev", errno.EIO, 1, "the storage failed"),
        ("pwritev", errno.ENOSPC, 2, "free some space"),
        ("fsync", errno.EIO, 0, "the storage failed"),
        ("rename", errno.EBUSY, 0, "look at the storage"),
    ],
)
def test_storage_that_fails(
    call: str, code: int, passing: int, advice: str, old: tuple[Path, bytes], fail_writes: Path
) -> None:
    failure = {"LD_PRELOAD": str(fail_writes), "FAIL_WRITES": f"{call}:{code}:{passing}"}
    out, _ = run_python(FAILING, old[0], **failure)
    lines = out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{errno.errorcode[code]} {old[0]} cannot be written (41947136 bytes wanted, "), out
        assert "available)" in line
        assert advice in line


def test_a_directory_that_cannot_be_synced(tmp_path: Path, fail_writes: Path) -> None:
    path = tmp_path / "model.safetensors"
    out, _ = run_python(FAILING, path, LD_PRELOAD=str(fail_writes), FAIL_WRITES=f"fsync:{errno.EIO}:1")
    assert out.startswith(f"EIO {path} is in its place, but may be gone after a loss of power")
    assert reference(path)["w"].sum() == 40 << 20


@pytest.mark.parametrize("call", ["fallocate", "fsync"])
def test_filesystems_that_can_do_less(call: str, tmp_path: Path, fail_writes: Path) -> None:
    """No space beforehand, or no fsync of directories: saved all the same."""
    code, passing = (errno.EOPNOTSUPP, 0) if call == "fallocate" else (errno.EINVAL, 1)
    path = tmp_path / "model.safetensors"
    once = FAILING.replace("(save_file, lambda *a: save_file_async(*a).wait(60))", "(save_file,)")
    out, _ = run_python(once, path, LD_PRELOAD=str(fail_writes), FAIL_WRITES=f"{call}:{code}:{passing}")
    assert out == "saved\n"
    check_file(path, {"w": torch.ones(40 << 20, dtype=torch.uint8)})


@pytest.mark.parametrize("most", [1_000_003, 4096])
def test_short_writes_are_continued(most: int, tmp_path: Path, fail_writes: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file
generator = torch.Generator().manual_seed(5)
tensors = {f"w{i}": torch.randint(0, 255, (n,), dtype=torch.uint8, generator=generator)
           for i, n in enumerate((1, 5_000_000, 0, 4096, 77, 3_000_001))}
torch.save(tensors, sys.argv[2])
save_file(tensors, sys.argv[1])
"""
    path = tmp_path / "model.safetensors"
    run_python(code, path, tmp_path / "same.pt", LD_PRELOAD=str(fail_writes), SHORT_WRITES=str(most))
    check_file(path, torch.load(tmp_path / "same.pt"))


def test_a_disk_that_takes_nothing(old: tuple[Path, bytes], fail_writes: Path) -> None:
    out, _ = run_python(FAILING, old[0], LD_PRELOAD=str(fail_writes), SHORT_WRITES="-1")
    assert out.count(f"EIO {old[0]} cannot be written") == 2
    assert out.count("nothing was written at byte 0; the storage failed") == 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield folder
    unmount = subprocess.run(["umount", folder], capture_output=True, text=True)
    if unmount.returncode:
        subprocess.run(["umount", "--lazy", folder], check=True)
        pytest.fail(f"a descriptor was left open: {unmount.stderr}")


def test_a_full_disk(save: Save, tiny_disk: Path) -> None:
    path = tiny_disk / "model.safetensors"
    save_file({"old": torch.ones(MIB)}, path)
    content = path.read_bytes()
    with pytest.raises(WriteError, match=r"\(8392704 bytes wanted, 4190208 available\): No space left") as caught:
        save({"new": torch.ones(2 * MIB)}, path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == content
    assert os.listdir(tiny_disk) == ["model.safetensors"]
    save({"new": torch.ones(MIB // 2)}, path)
    check_file(path, {"new": torch.ones(MIB // 2)})


def test_a_limit_on_file_sizes(old: tuple[Path, bytes]) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))\n"
    lines = run_python(limit + FAILING, old[0])[0].splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"EFBIG {old[0]} cannot be written") and "ulimit -f" in line for line in lines)


SLOW = """
import sys, torch
from gdsstream.save import save_file, save_file_async
tensors = {"w": torch.ones(200 << 20, dtype=torch.uint8)}
print("ready", flush=True)
try:
    save_file(tensors, sys.argv[1]) if sys.argv[2] == "sync" else save_file_async(tensors, sys.argv[1]).wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_slow_save(path: Path, kind: str, fail_writes: Path, pause_us: int = 100_000) -> subprocess.Popen[str]:
    """A process that is in the middle of its save."""
    process = start_python(SLOW, path, kind, LD_PRELOAD=str(fail_writes), SLOW_WRITES_US=str(pause_us))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 30
    while not leftovers(path.parent):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    assert process.poll() is None
    return process


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_process_leaves_the_old_file(kind: str, tmp_path: Path, fail_writes: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"old": torch.arange(1000)}, path)
    content = path.read_bytes()
    process = start_slow_save(path, kind, fail_writes)
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert path.read_bytes() == content
    assert len(leftovers(tmp_path)) == 1  # the only way to leave it
    save_file({"new": torch.ones(3)}, path)  # which is in nobody's way
    assert_same(reference(path), {"new": torch.ones(3)})


def test_an_interrupted_save_leaves_no_trace(old: tuple[Path, bytes], fail_writes: Path) -> None:
    process = start_slow_save(old[0], "sync", fail_writes)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert out == "interrupted\n", err


def test_an_interrupted_wait_lets_the_save_go_on(tmp_path: Path, fail_writes: Path) -> None:
    path = tmp_path / "model.safetensors"
    process = start_slow_save(path, "async", fail_writes)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n", err
    assert process.returncode == 0
    check_file(path, {"w": torch.ones(200 << 20, dtype=torch.uint8)})


# In a thread


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    w, turned = torch.ones(30 * MIB, dtype=torch.uint8), torch.ones(1000, 3000)
    tensors = {"w": w, "turned": turned.t()}
    for value in range(2, 6):
        pending = save_file_async(tensors, path)
        w.fill_(value)
        turned.fill_(value)
        tensors["late"] = torch.ones(1)
        pending.wait(60)
        assert pending.done()
        loaded = reference(path)
        assert set(loaded) == {"w", "turned"}
        assert loaded["w"].unique().tolist() == [value - 1]
        assert loaded["turned"].unique().tolist() == [value - 1]
        del tensors["late"]


def test_waiting_ends_and_can_go_on(tmp_path: Path, fail_writes: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file_async
pending = save_file_async({"w": torch.ones(40 << 20, dtype=torch.uint8)}, sys.argv[1])
assert not pending.done()
try:
    pending.wait(0.05)
except TimeoutError as error:
    print(error)
pending.wait()
assert pending.done()
pending.wait(0)
pending.cancel()
pending.wait(0)
"""
    path = tmp_path / "model.safetensors"
    out, _ = run_python(code, path, LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="200000")
    assert out == f"{path} is not written after 0.05 s; wait again, or cancel the save\n"
    check_file(path, {"w": torch.ones(40 << 20, dtype=torch.uint8)})


def test_a_cancelled_save_leaves_the_old_file(old: tuple[Path, bytes], fail_writes: Path) -> None:
    code = """
import sys, time, torch
from gdsstream.errors import TransferCancelledError
from gdsstream.save import save_file_async
pending = save_file_async({"w": torch.ones(200 << 20, dtype=torch.uint8)}, sys.argv[1])
time.sleep(0.3)
start = time.monotonic()
pending.cancel()
assert time.monotonic() - start < 0.1
try:
    pending.wait()
except TransferCancelledError as error:
    print(error)
assert time.monotonic() - start < 1
save_file_async({"w": torch.ones(200 << 20, dtype=torch.uint8)}, sys.argv[1]).cancel()  # and nobody minds
"""
    out, err = run_python(code, old[0], LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="100000")
    assert out == f"saving {old[0]} was cancelled; what was there before is unchanged\n"
    assert err == ""


def test_the_error_is_raised_by_every_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pending = save_file_async({"a": torch.ones(1)}, tmp_path / "missing" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(WriteError, match="make the directory first"):
            pending.wait(60)
    assert pending.done()
    dropped = weakref.ref(pending)
    del pending
    gc.collect()
    assert dropped() is None
    assert caplog.records == []


@pytest.mark.parametrize("dropped", ["before", "after"])
def test_an_error_that_nobody_waits_for_is_logged_once(
    dropped: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "missing" / "model.safetensors"
    pending = save_file_async({"a": torch.ones(8 * MIB)}, path)
    if dropped == "after":
        wait_until(pending.done)
    del pending
    wait_until(lambda: bool(caplog.records))
    gc.collect()
    assert [(r.name, r.levelno) for r in caplog.records] == [("gdsstream.save", logging.ERROR)]
    assert "was not saved, and nobody waited for it" in caplog.text
    assert "make the directory first" in caplog.text


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_error_is_logged_when_the_program_ends(tmp_path: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file_async
kept = save_file_async({"a": torch.ones(1 << 20)}, sys.argv[1])
"""
    path = tmp_path / "missing" / "model.safetensors"
    _, err = run_python(code, path)
    assert err.count(f"{path} was not saved, and nobody waited for it: {path} cannot be written") == 1


def test_a_program_that_ends_finishes_its_saves(tmp_path: Path, fail_writes: Path) -> None:
    code = """
import sys, torch
from gdsstream.save import save_file_async
save_file_async({"w": torch.ones(40 << 20, dtype=torch.uint8)}, sys.argv[1])
kept = save_file_async({"w": torch.ones(40 << 20, dtype=torch.uint8)}, sys.argv[2])
"""
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    _, err = run_python(code, *paths, LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="100000")
    assert err == ""
    for path in paths:
        check_file(path, {"w": torch.ones(40 << 20, dtype=torch.uint8)})


def test_a_failed_save_keeps_no_tensors(tmp_path: Path) -> None:
    count = 3_000_017

    def alive() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor and o.numel() in (count, 4 * count) for o in gc.get_objects())

    tensor = torch.ones(count)
    pending = save_file_async({"w": tensor}, tmp_path / "missing" / "model.safetensors")
    wait_until(pending.done)
    wait_until(lambda: alive() == 1)
    with pytest.raises(WriteError):
        pending.wait()


def test_a_child_process_cannot_wait_for_its_parents_save(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    pending = save_file_async({"w": torch.ones(8 * MIB)}, path)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: pending.wait(5), pending.done, pending.cancel):
            try:
                call()
            except ForkedProcessError as error:
                refused += f"saved by process {os.getppid()}" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    pending.wait(60)
    check_file(path, {"w": torch.ones(8 * MIB)})


def test_saves_of_one_path_at_a_time_leave_one_of_them(tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "model.safetensors"
    for _ in range(5):
        pending = [save_file_async({"w": torch.full((5 * MIB,), float(i))}, path) for i in range(4)]
        for save in pending:
            save.wait(60)
        values = reference(path)["w"].unique().tolist()
        assert len(values) == 1
        assert values[0] in range(4)
    assert not leftovers(tmp_path)


def test_nothing_is_left_behind(tmp_path: Path, no_leaks: None) -> None:
    need_direct(tmp_path)
    for direct_io in (False, True):
        for _ in range(20):
            save_file({"w": torch.ones(MIB)}, tmp_path / "model.safetensors", direct_io=direct_io)
            save_and_wait({"w": torch.ones(MIB)}, tmp_path / "model.safetensors", direct_io=direct_io)
            with pytest.raises(WriteError):
                save_file({"w": torch.ones(MIB)}, tmp_path / "missing" / "file", direct_io=direct_io)
            with pytest.raises(WriteError):
                save_and_wait({"w": torch.ones(MIB)}, tmp_path, direct_io=direct_io)


def test_no_room_for_copies(tmp_path: Path) -> None:
    code = """
import resource, sys, torch
from gdsstream.errors import MemoryBudgetError
from gdsstream.save import save_file, save_file_async
tensors = {"w": torch.zeros(200 << 20, dtype=torch.uint8)}
in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + (100 << 20), -1))
try:
    save_file_async(tensors, sys.argv[1])
except MemoryBudgetError as error:
    print(error)
save_file(tensors, sys.argv[1], fsync=False)
"""
    path = tmp_path / "model.safetensors"
    out, _ = run_python(code, path)
    assert out.startswith(f"{path}: no room on cpu to copy tensor 'w' (209715200 bytes)")
    assert "use save_file" in out
    assert path.stat().st_size == (200 << 20) + 4096


def test_no_room_for_buffers(old: tuple[Path, bytes]) -> None:
    need_direct(old[0].parent)
    code = """
import resource, sys, torch
from gdsstream.errors import MemoryBudgetError
from gdsstream.save import save_file
tensors = {"w": torch.ones(1 << 20)}
save_file(tensors, sys.argv[1] + ".warm")
in_use = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + (8 << 20), -1))
try:
    save_file(tensors, sys.argv[1], direct_io=True)
except MemoryBudgetError as error:
    print(error)
"""
    out, _ = run_python(code, old[0])
    assert out.startswith("no room for a buffer of 16777216 bytes to save through")


# From a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("direct_io", [False, True], ids=["page cache", "direct"])
def test_from_gpus_and_the_cpu_at_once(direct_io: bool, save: Save, tmp_path: Path) -> None:
    if direct_io:
        need_direct(tmp_path)
    sizes = [1, 40 * MIB + 3, 5, 0, 16 * MIB, 3 * MIB + 1]
    tensors = {f"w{i}": random_tensor("U8", (size,), seed=i) for i, size in enumerate(sizes)}
    tensors |= {name: random_tensor(name, (33, 8), seed=9) for name in SHARED_DTYPES if name not in ("F4", "F8_E8M0")}
    tensors["turned"] = random_tensor("F32", (3000, 2000), seed=10).t()
    tensors["conjugate"] = random_tensor("C64", (33, 8), seed=11).nan_to_num().conj()
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    placed = {name: tensor.to(devices[i % len(devices)]) for i, (name, tensor) in enumerate(tensors.items())}
    everything = {name: tensor.to("cuda") for name, tensor in tensors.items()}
    for chosen in (placed, everything):
        save(chosen, tmp_path / "model.safetensors", direct_io=direct_io)
        check_file(tmp_path / "model.safetensors", tensors)


@pytest.mark.gpu
@on_gpu
def test_many_small_tensors_of_a_gpu(save: Save, tmp_path: Path) -> None:
    tensors = {f"expert.{i}": random_tensor("I16", (i % 7,), seed=i) for i in range(3000)}
    save({name: tensor.cuda() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", tensors)


@pytest.mark.gpu
@on_gpu
def test_what_is_queued_before_the_call_is_saved(save: Save, tmp_path: Path) -> None:
    w, turned = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(1000, 3000, device="cuda")
    torch.cuda.synchronize()
    for value in range(1, 4):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(300_000_000)
            w.fill_(value)
            turned.fill_(value)
            save({"w": w, "turned": turned.t()}, tmp_path / "model.safetensors")
        for tensor in reference(tmp_path / "model.safetensors").values():
            assert tensor.unique().tolist() == [value]


@pytest.mark.gpu
@on_gpu
def test_a_step_right_after_the_call_is_not_saved(tmp_path: Path) -> None:
    w, turned = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(1000, 3000, device="cuda")
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    pending: list[tuple[int, PendingSave]] = []
    for value in range(12):
        w.fill_(value)
        turned.fill_(value)
        pending.append((value, save_file_async({"w": w, "turned": turned.t()}, tmp_path / f"{value}.safetensors")))
        w.fill_(200)
        turned.fill_(200)
        del value
        # Memory that a save gave back too early would be overwritten here.
        torch.full((64 * MIB,), 201, dtype=torch.uint8, device="cuda")
        if len(pending) == 3:
            check_value(tmp_path, *pending.pop(0))
    for entry in pending:
        check_value(tmp_path, *entry)
    wait_until(lambda: torch.cuda.memory_allocated() == allocated)


def check_value(folder: Path, value: int, pending: PendingSave) -> None:
    pending.wait(60)
    for tensor in reference(folder / f"{value}.safetensors").values():
        assert tensor.unique().tolist() == [value]


@pytest.mark.gpu
@on_gpu
def test_the_call_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    w = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    save_and_wait({"w": w}, tmp_path / "model.safetensors")
    torch.cuda._sleep(2_000_000_000)
    w.fill_(3)
    pending = save_file_async({"w": w}, tmp_path / "model.safetensors")
    assert not torch.cuda.current_stream().query()
    pending.wait(60)
    assert reference(tmp_path / "model.safetensors")["w"].unique().tolist() == [3]


@pytest.mark.gpu
@on_gpu
def test_a_gpu_save_that_fails_or_is_cancelled(old: tuple[Path, bytes]) -> None:
    w = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    allocated = torch.cuda.memory_allocated()
    for save in (save_file, save_and_wait):
        with pytest.raises(WriteError):
            save({"w": w}, old[0].parent)
    pending = save_file_async({"w": w}, old[0])
    pending.cancel()
    with pytest.raises(TransferCancelledError):
        pending.wait(60)
    wait_until(lambda: torch.cuda.memory_allocated() == allocated)


@pytest.mark.gpu
@on_gpu
def test_no_room_for_copies_on_a_gpu(tmp_path: Path) -> None:
    w = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 128 * MIB, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(MemoryBudgetError, match="no room on cuda:0 to copy tensor 'w'"):
            save_file_async({"w": w}, tmp_path / "model.safetensors")
        save_file({"w": w}, tmp_path / "model.safetensors")
    finally:
        del hog
        torch.cuda.empty_cache()
    check_file(tmp_path / "model.safetensors", {"w": w.cpu()})
