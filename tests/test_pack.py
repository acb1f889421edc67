"""Packing: what comes out is what went in, in files that others read; and a pack that fails leaves nothing behind."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_files import layer_of, write_experts, write_layers
from support import Raw, as_bytes, assert_same, build_library, random_raw, start_python, write_checkpoint

import gdsstream
from gdsstream import pack as module
from gdsstream import portions
from gdsstream.checkpoint import Checkpoint
from gdsstream.dtypes import DTYPES
from gdsstream.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FileChangedError,
    HeaderError,
    ReadError,
    TensorNotFoundError,
    WriteError,
)
from gdsstream.layers import LayerStreamer
from gdsstream.pack import pack_checkpoint
from gdsstream.packing import REST_NAME
from gdsstream.sidecar import SIDECAR_NAME
from gdsstream.verify import verify_checkpoint

MIB = 1 << 20


def by_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """What safetensors itself reads, by the index as transformers goes by it."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name in sorted(set(places.values())):
        with safetensors.safe_open(folder / name, "pt") as file:
            found.update({key: file.get_tensor(key).clone() for key in file.keys() if places[key] == name})  # noqa: SIM118
    assert found.keys() == places.keys()
    return found


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_packed(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    assert_same(by_safetensors(folder), tensors)
    assert_same(gdsstream.load_file(folder, verify=True), tensors)
    assert verify_checkpoint(folder).differences == ()
    for path in folder.glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 4096 == 4088


def names_in(path: Path) -> list[str]:
    return list(Checkpoint.open(path).tensors)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Three layers in two files; in the end they are as they were, and nothing half-made lies beside them."""
    return tmp_path / "source", write_layers(tmp_path / "source", 3, files=2)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Any:
    yield
    assert [name for name in os.listdir(tmp_path) if ".gdsstream-pack-" in name] == []


# What comes out

names = st.one_of(
    st.builds(
        "{}.{}.{}".format,
        st.sampled_from(["model.layers", "h", "enc.layer"]),
        st.integers(0, 12),
        st.sampled_from(["self_attn.q_proj.weight", "mlp.experts.0.w1.weight", "input_layernorm.weight", "x", ""]),
    ),
    st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda name: name != "__metadata__"),
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
plain_dtypes = st.sampled_from([n for n, i in DTYPES.items() if n != "F4" and hasattr(torch, i.torch_name or "-")])
texts = st.text(st.characters(codec="utf-8"), max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    specs=st.dictionaries(names, st.tuples(plain_dtypes, shapes), min_size=1, max_size=14),
    cut=st.integers(0, 14),
    metadata=st.none() | st.dictionaries(texts, texts, max_size=2),
)
def test_what_is_packed_is_what_was_there(
    specs: dict[str, tuple[str, tuple[int, ...]]],
    cut: int,
    metadata: dict[str, str] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.getbasetemp() / "any"
    shutil.rmtree(base, ignore_errors=True)
    (base / "source").mkdir(parents=True)
    raw: dict[str, Raw] = {name: random_raw(*spec, seed=seed) for seed, (name, spec) in enumerate(specs.items())}
    both = [dict(list(raw.items())[:cut]), dict(list(raw.items())[cut:])]
    for number, part in enumerate(each for each in both if each):
        write_checkpoint(base / "source" / f"{number}.safetensors", part, metadata)
    before = content_of(base / "source")
    tensors = gdsstream.load_file(base / "source")
    report = pack_checkpoint(base / "source", base / "packed")
    check_packed(base / "packed", tensors)
    assert report.num_tensors == len(tensors)
    with gdsstream.safe_open(base / "packed") as new:
        assert new.metadata() == metadata
    assert content_of(base / "source") == before
    assert sorted(os.listdir(base)) == ["packed", "source"]


def test_the_files(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = source
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.model").write_bytes(b"\0\1\2")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights")
    (folder / ".cache").mkdir()
    (folder / "original").mkdir()
    (folder / "README.md").symlink_to(folder / "config.json")
    before = content_of(folder)
    calls: list[tuple[int, int]] = []
    report = pack_checkpoint(folder, tmp_path / "packed", progress=lambda *call: calls.append(call))
    layers = [f"model-layer-0000{i}.safetensors" for i in range(3)]
    others = ["README.md", "config.json", "tokenizer.model"]
    assert sorted(os.listdir(tmp_path / "packed")) == sorted(
        [*layers, REST_NAME, SIDECAR_NAME, "model.safetensors.index.json", *others]
    )
    assert not (tmp_path / "packed" / "README.md").is_symlink()
    assert (tmp_path / "packed" / "tokenizer.model").read_bytes() == b"\0\1\2"
    check_packed(tmp_path / "packed", tensors)
    for layer, name in enumerate(layers):
        inside = names_in(tmp_path / "packed" / name)
        assert sorted(inside) == sorted(f"model.layers.{layer}.{each}" for each in layer_of(tensors, layer))
    assert names_in(tmp_path / "packed" / REST_NAME) == ["model.embed_tokens.weight", "model.norm.weight"]
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())["metadata"] == {
        "total_size": nbytes
    }
    assert (report.num_layers, report.num_tensors, report.pattern) == (3, 17, "model.layers.{i}.")
    assert (report.copied, report.skipped) == (tuple(others), ("original", "pytorch_model.bin"))
    assert [name for name, _, _ in report.files] == [*layers, REST_NAME]
    assert {name: size for name, _, size in report.files} == {
        name: (tmp_path / "packed" / name).stat().st_size for name in (*layers, REST_NAME)
    }
    assert calls[-1] == (nbytes, nbytes)
    assert calls == sorted(calls)
    assert content_of(folder) == before


def test_what_the_index_and_the_metadata_said_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    write_checkpoint(folder / "a.safetensors", {"h.0.w": random_raw("F32", (4,))}, {"format": "pt", "from": "a"})
    write_checkpoint(folder / "b.safetensors", {"h.1.w": random_raw("F32", (4,)), "old": random_raw("U8", (3,))}, {})
    index = {"metadata": {"total_size": 1, "made_by": "hand"}, "weight_map": {"h.0.w": "a.safetensors"}}
    index["weight_map"]["h.1.w"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, path in enumerate((folder, folder / "model.safetensors.index.json")):
        pack_checkpoint(path, tmp_path / str(number))
        packed = json.loads((tmp_path / str(number) / "model.safetensors.index.json").read_text())
        assert packed["metadata"] == {"total_size": 32, "made_by": "hand"}
        assert sorted(packed["weight_map"]) == ["h.0.w", "h.1.w"]  # what the index leaves out stays out
        for name in os.listdir(tmp_path / str(number)):
            if name.endswith(".safetensors"):
                assert Checkpoint.open(tmp_path / str(number) / name).metadata() == {"format": "pt", "from": "a"}


def test_a_layer_is_one_read(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = source
    pack_checkpoint(folder, tmp_path / "packed")
    with LayerStreamer(tmp_path / "packed", device="cpu") as streamer:
        for layer in range(3):
            layout = streamer._layouts[layer]
            assert len(layout.plan.nbytes) == 1
            assert int(layout.plan.file_offset[0]) % 4096 == 0
            with streamer.layer(layer) as lease:
                assert_same({name: lease[name].clone() for name in streamer.names(layer)}, layer_of(tensors, layer))


@pytest.mark.parametrize("mixtral", [False, True])
def test_stacks_of_experts_are_one_read_each(mixtral: bool, tmp_path: Path) -> None:
    tensors = write_experts(tmp_path / "source", 2, 12, mixtral=mixtral)
    pack_checkpoint(tmp_path / "source", tmp_path / "packed")
    check_packed(tmp_path / "packed", tensors)
    with LayerStreamer(tmp_path / "packed", device="cpu", fuse="auto") as streamer:
        assert [len(layout.plan.nbytes) for layout in streamer._layouts] == [2, 2]  # norm; both stacks
    with LayerStreamer(tmp_path / "source", device="cpu", fuse="auto") as streamer:
        assert min(len(layout.plan.nbytes) for layout in streamer._layouts) > 20


def test_the_order_of_use_and_what_is_aligned(tmp_path: Path) -> None:
    in_order = [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
        "something.else",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.shared_expert.up_proj.weight",
        "mlp.up_proj.weight",
    ]
    raw = {f"layers.0.{name}": random_raw("BF16", (8, 8)) for name in sorted(in_order)}
    # In order of the bytes, two that belong together stay as they are.
    raw["layers.0.self_attn.o_proj.weight"] = raw.pop("layers.0.self_attn.o_proj.weight")
    odd = {"odd8": ("I64", (1,)), "odd4": ("F32", (3,)), "odd2": ("BF16", (3, 7)), "odd1": ("U8", (5,))}
    raw = {f"layers.0.{name}": random_raw(*odd[name]) for name in ("odd1", "odd4", "odd2", "odd8")} | raw
    path = write_checkpoint(tmp_path / "model.safetensors", raw)
    pack_checkpoint(path, tmp_path / "packed")
    packed = Checkpoint.open(tmp_path / "packed")
    assert [name.removeprefix("layers.0.") for name in packed.tensors] == [*in_order, *odd]
    assert packed.spec("layers.0.input_layernorm.weight").offset % 4096 == 0
    for spec in packed.tensors.values():
        assert spec.offset % (16 if spec.nbytes % 16 == 0 else DTYPES[spec.dtype].bits // 8) == 0, spec.name


def test_layers_by_pattern_and_by_names(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = source
    pack_checkpoint(folder, tmp_path / "a", layers="model.layers.{i}.mlp.")
    check_packed(tmp_path / "a", tensors)
    assert len(names_in(tmp_path / "a" / "model-layer-00002.safetensors")) == 2
    pack_checkpoint(folder, tmp_path / "b", layers={7: ["model.norm.weight"], 2: ["model.layers.0.mlp.odd"]})
    check_packed(tmp_path / "b", tensors)
    assert names_in(tmp_path / "b" / "model-layer-00007.safetensors") == ["model.norm.weight"]
    for layers, error in (
        ("nothing.{i}.", ConfigError),
        ("model.layers.", ConfigError),
        ({0: ["x"]}, TensorNotFoundError),
    ):
        with pytest.raises(error):
            pack_checkpoint(folder, tmp_path / "c", layers=layers)
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_without_layers_is_one_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.safetensors", {"b": random_raw("F32", (3,)), "a": random_raw("I8", (1,))})
    report = pack_checkpoint(path, tmp_path / "packed")
    assert (report.pattern, report.num_layers, [name for name, _, _ in report.files]) == ("", 0, [REST_NAME])
    check_packed(tmp_path / "packed", gdsstream.load_file(path))


def test_dtypes_that_torch_lacks(tmp_path: Path) -> None:
    raw = {
        "h.0.six": random_raw("F6_E2M3", (4, 2)),
        "h.0.four": random_raw("F4", (3, 2)),
        "h.1.w": random_raw("U8", (3,)),
    }
    path = write_checkpoint(tmp_path / "model.safetensors", raw)
    pack_checkpoint(path, tmp_path / "packed")
    assert verify_checkpoint(tmp_path / "packed").ok
    packed = Checkpoint.open(tmp_path / "packed")
    for name, (dtype, shape, data) in raw.items():
        spec = packed.spec(name)
        content = Path(packed.files[spec.file].path).read_bytes()
        assert (spec.dtype, spec.shape) == (dtype, tuple(shape))
        assert content[spec.offset : spec.offset + spec.nbytes] == data


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a megabyte are cut, and buffers used again and again, while the writer still holds some."""
    monkeypatch.setattr(module, "_PORTION_BYTES", 256 << 10)
    monkeypatch.setattr(portions, "CPU_PORTION_BYTES", 256 << 10)
    for home in (module, gdsstream.writer):
        monkeypatch.setattr(home, "BLOCK_BYTES", 320 << 10)


def test_tensors_across_portions(small_portions: None, tmp_path: Path) -> None:
    sizes = [1, 3, 100_000, 0, 131_072, 131_071, 3_700_001, 5, 4096, 262_144, 65_536, 200_000, 190_000, 2_000_000]
    raw = {f"h.{i % 2}.w{i}": random_raw("U8", (size,), seed=i) for i, size in enumerate(sizes)}
    path = write_checkpoint(tmp_path / "model.safetensors", raw)
    tensors = gdsstream.load_file(path)
    for number in range(3):
        pack_checkpoint(path, tmp_path / str(number))
        check_packed(tmp_path / str(number), tensors)


def test_portions_of_ordinary_size(tmp_path: Path) -> None:
    tensors = {"h.0.a": torch.randn(18 * MIB), "h.0.b": torch.randn(7 * MIB + 1), "h.1.c": torch.ones(3)}
    gdsstream.save_file(tensors, tmp_path / "model.safetensors", fsync=False)
    pack_checkpoint(tmp_path / "model.safetensors", tmp_path / "packed")
    check_packed(tmp_path / "packed", tensors)


def test_the_same_bytes_each_time(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    pack_checkpoint(source[0], tmp_path / "a")
    pack_checkpoint(source[0], tmp_path / "b", backend="traditional")
    pack_checkpoint(tmp_path / "a", tmp_path / "c")
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b") == content_of(tmp_path / "c")


# What is refused


def test_destinations_that_are_refused(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = source
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(folder)
    before = content_of(tmp_path)
    monkeypatch.chdir(folder)
    refused = {
        folder: "where the source is",
        Path("."): "where the source is",
        tmp_path / "link": "where the source is",
        folder / "packed": "inside of the source",
        tmp_path / "link" / "deep" / "packed": "inside of the source",
        tmp_path / "full": "is not empty",
        tmp_path / "file": "is no directory",
        tmp_path / "missing" / "packed": "make it first",
        Path("/proc"): "is a mount point",
        Path("a\0b"): "cannot be a file name",
    }
    for destination, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            pack_checkpoint(folder, destination)
    for path in (folder / "model-00001.safetensors", [folder / "model-00001.safetensors"]):
        with pytest.raises(ConfigError, match="where the source is"):
            pack_checkpoint(path, folder)
    assert content_of(tmp_path) == before


def test_an_empty_directory_and_one_in_a_single_files_directory(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.safetensors", {"h.0.w": random_raw("F32", (3,))})
    (tmp_path / "packed").mkdir()
    (tmp_path / "notes.txt").touch()  # of a single file's directory nothing is known
    assert pack_checkpoint(path, tmp_path / "packed").copied == ()
    check_packed(tmp_path / "packed", gdsstream.load_file(path))


def test_sources_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "nothing.safetensors", {})
    (tmp_path / "bad.safetensors").write_bytes(bytes(100))
    for path, error in (
        (tmp_path / "missing", CheckpointNotFoundError),
        (tmp_path / "empty", CheckpointNotFoundError),
        (tmp_path / "nothing.safetensors", CheckpointError),
        (tmp_path / "bad.safetensors", HeaderError),
    ):
        with pytest.raises(error):
            pack_checkpoint(path, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def room_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    space = os.statvfs("/")
    fields = list(space)
    fields[4] = nbytes // space.f_frsize  # f_bavail
    monkeypatch.setattr(module.os, "statvfs", lambda path: os.statvfs_result(fields))


def test_too_little_room_is_found_before_anything_is_written(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tensors = source
    (folder / "tokenizer.json").write_bytes(bytes(3 * MIB))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    monkeypatch.setattr(module, "_new_directory", lambda target: pytest.fail("something was written"))
    for room in (0, nbytes, nbytes + 3 * MIB):
        room_of(monkeypatch, room)
        with pytest.raises(WriteError, match=r"bytes short, nothing was written; free some space") as caught:
            pack_checkpoint(folder, tmp_path / "packed")
        assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "packed").exists()


def test_what_a_killed_pack_left_is_named(
    source: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = tmp_path / ".packed.gdsstream-pack-1-00.tmp"
    left.mkdir()
    with caplog.at_level(logging.WARNING):
        pack_checkpoint(source[0], tmp_path / "packed")
    assert left.name in caplog.text
    shutil.rmtree(tmp_path / "packed")
    room_of(monkeypatch, 0)
    with pytest.raises(WriteError, match=left.name):
        pack_checkpoint(source[0], tmp_path / "packed")
    left.rmdir()


# What goes wrong in the middle

SLOW = """
import logging, sys
from gdsstream.pack import pack_checkpoint
def progress(done, total):
    print(done, flush=True)
try:
    pack_checkpoint(sys.argv[1], sys.argv[2], progress=progress)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture(scope="session")
def fail_writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What LD_PRELOAD names in processes whose storage fails."""
    code = Path(__file__).resolve().parent / "native" / "fail_writes.cpp"
    return build_library(tmp_path_factory.mktemp("fail_writes") / "libfailwrites.so", [code])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_pack_that_is_interrupted(
    number: signal.Signals, source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, fail_writes: Path
) -> None:
    folder, tensors = source
    before = content_of(folder)
    process = start_python(SLOW, folder, tmp_path / "packed", LD_PRELOAD=str(fail_writes), SLOW_WRITES_US="300000")
    assert process.stdout is not None
    process.stdout.readline()  # a layer is written, three more files to come
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    left = [name for name in os.listdir(tmp_path) if name != "source"]
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert len(left) == 1
        assert left[0].startswith(f".packed.gdsstream-pack-{process.pid}-")
        shutil.rmtree(tmp_path / left[0])
    else:
        assert out.endswith("interrupted\n")
        assert left == []
    assert content_of(folder) == before
    pack_checkpoint(folder, tmp_path / "packed")
    check_packed(tmp_path / "packed", tensors)


# Each in a child of its own, since the failing library counts calls; one interpreter, since torch takes long to import.
FAILING = """
import os, sys
from gdsstream.errors import WriteError
from gdsstream.pack import pack_checkpoint
for failure in sys.argv[3:]:
    child = os.fork()
    if child == 0:
        os.environ["FAIL_WRITES"] = failure
        try:
            pack_checkpoint(sys.argv[1], sys.argv[2])
            print("packed", flush=True)
        except WriteError as error:
            print(error.errno, error, os.listdir(os.path.dirname(sys.argv[2])), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
FAILURES = {
    "pwritev:28:3": errno.ENOSPC,
    "pwritev:5:2": errno.EIO,
    "fallocate:28:1": errno.ENOSPC,
    "fsync:5:1": errno.EIO,
    "fsync:5:9": errno.EIO,
    "rename:30:2": errno.EROFS,
    "rename:5:4": errno.EIO,  # of the directory itself
}


def test_storage_that_refuses_in_the_middle(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, fail_writes: Path
) -> None:
    before = content_of(source[0])
    process = start_python(FAILING, source[0], tmp_path / "packed", *FAILURES, LD_PRELOAD=str(fail_writes))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert len(lines) == len(FAILURES)
    for line, number in zip(lines, FAILURES.values(), strict=True):
        assert line.startswith(f"{number} {tmp_path}")
        assert line.endswith("['source']")
    assert content_of(source[0]) == before


def test_side_files_that_cannot_be_copied(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder = source[0]
    (folder / "gone.json").symlink_to("nowhere")
    assert pack_checkpoint(folder, tmp_path / "a").skipped == ("gone.json",)
    (folder / "bad.json").symlink_to("/proc/self/mem")  # a regular file, and its first byte is an error
    with pytest.raises(WriteError, match=f"{folder / 'bad.json'} cannot be copied .*: Input/output error") as caught:
        pack_checkpoint(folder, tmp_path / "b")
    assert caught.value.errno == errno.EIO
    assert sorted(os.listdir(tmp_path)) == ["a", "source"]


@pytest.mark.parametrize("knobs", [{}, {"backend": "traditional"}], ids=["staged", "traditional"])
def test_a_source_that_changes_or_fails(
    knobs: dict[str, Any],
    source: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = source[0]
    victim = folder / "model-00002.safetensors"
    write: Callable[..., None] = module.write_file

    def change_then_write(path: str, *arguments: Any, **options: Any) -> None:
        if path.endswith(REST_NAME):
            time.sleep(0.01)
            victim.write_bytes(victim.read_bytes())
        write(path, *arguments, **options)

    monkeypatch.setattr(module, "write_file", change_then_write)
    with pytest.raises(FileChangedError, match=victim.name):
        pack_checkpoint(folder, tmp_path / "packed", **knobs)
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_that_cannot_be_read(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="model-0000"):
        pack_checkpoint(source[0], tmp_path / "packed", faults="eio@2")
    assert os.listdir(tmp_path) == ["source"]


def test_an_error_of_the_caller_in_progress_ends_the_pack(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, no_leaks: None
) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="enough"):
            pack_checkpoint(source[0], tmp_path / "packed", progress=stop)
        assert os.listdir(tmp_path) == ["source"]


def test_another_directory_appears_meanwhile(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    def appear(done: int, total: int) -> None:
        (tmp_path / "packed").mkdir(exist_ok=True)
        (tmp_path / "packed" / "theirs").touch()

    with pytest.raises(WriteError) as caught:
        pack_checkpoint(source[0], tmp_path / "packed", progress=appear)
    assert caught.value.errno == errno.ENOTEMPTY
    assert os.listdir(tmp_path / "packed") == ["theirs"]


def test_checksums_are_of_what_was_read(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    from gdsstream.checksum import checksum

    folder, tensors = source
    pack_checkpoint(folder, tmp_path / "packed")
    files = json.loads((tmp_path / "packed" / SIDECAR_NAME).read_text())["files"]
    recorded = {name: value for file in files.values() for name, value in file["tensors"].items()}
    assert recorded == {name: [len(as_bytes(t)), f"{checksum(t):016x}"] for name, t in tensors.items()}
