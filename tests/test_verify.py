"""Verifying: a packed checkpoint, damaged in every way, by `verify_checkpoint` and by loads with verify=True."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_files import write_layers
from support import Raw, assert_same, need_direct, random_raw, write_checkpoint

import gdsstream
from gdsstream import portions
from gdsstream.checkpoint import Checkpoint, TensorSpec
from gdsstream.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    TensorNotFoundError,
)
from gdsstream.pack import pack_checkpoint
from gdsstream.sidecar import SIDECAR_NAME
from gdsstream.verify import verify_checkpoint

LAYER = "model-layer-00001.safetensors"


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    tensors = write_layers(tmp_path / "source", 3, files=2)
    pack_checkpoint(tmp_path / "source", tmp_path / "packed")
    return tensors


@pytest.fixture
def packed(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return tmp_path / "packed"


def spec_of(folder: Path, name: str) -> tuple[Path, TensorSpec]:
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec(name)
    return Path(checkpoint.files[spec.file].path), spec


def flip(path: Path, offset: int, bits: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def edit_sidecar(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads((folder / SIDECAR_NAME).read_text())
    change(found)
    (folder / SIDECAR_NAME).write_text(json.dumps(found))


# The whole checkpoint


def test_what_is_as_it_was(packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    calls: list[tuple[int, int]] = []
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    report = verify_checkpoint(packed, progress=lambda *call: calls.append(call))
    assert report.ok
    assert report.differences == ()
    assert (report.num_files, report.num_tensors) == (4, len(tensors))
    assert report.nbytes == report.verified_bytes == nbytes
    assert report.gb_per_s == nbytes / report.seconds / 1e9
    assert "CPU memory" in report.route
    assert calls[-1] == (nbytes, nbytes)


def test_a_single_changed_byte_anywhere_is_found(packed: Path) -> None:
    generator = random.Random(1)
    sizes = {path: path.stat().st_size for path in sorted(packed.glob("*.safetensors"))}
    checkpoint = Checkpoint.open(packed)
    for _ in range(60):
        path = generator.choice(list(sizes))
        offset = generator.randrange(sizes[path])
        before = path.read_bytes()
        flip(path, offset, generator.randrange(1, 256))
        report = verify_checkpoint(packed)
        assert not report.ok
        assert {each.file for each in report.differences} == {str(path)}
        inside = [
            spec
            for spec in checkpoint.tensors.values()
            if checkpoint.files[spec.file].path == str(path) and spec.offset <= offset < spec.offset + spec.nbytes
        ]
        for spec in inside:  # none where it is in the header
            (difference,) = report.differences
            assert difference[1:4] == (spec.name, spec.offset, spec.nbytes)
            assert "has the checksum" in difference.reason
        path.write_bytes(before)
    assert verify_checkpoint(packed).ok


def test_each_of_several_tensors_is_named(packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    victims = sorted(random.Random(3).sample(sorted(tensors), 6))
    for name in victims:
        path, spec = spec_of(packed, name)
        flip(path, spec.offset + spec.nbytes - 1, 0x80)
    report = verify_checkpoint(packed)
    assert sorted(str(each.tensor) for each in report.differences) == victims
    assert list(report.differences) == sorted(report.differences, key=lambda each: (each.file, each.offset))
    assert report.verified_bytes == report.nbytes


def test_swapped_tensors_of_one_shape(packed: Path) -> None:
    names = ["model.layers.1.self_attn.q_proj.bias", "model.layers.1.input_layernorm.weight"]
    (path, first), (_, second) = (spec_of(packed, name) for name in names)
    content = bytearray(path.read_bytes())
    parts = [bytes(content[spec.offset : spec.offset + spec.nbytes]) for spec in (first, second)]
    content[first.offset : first.offset + first.nbytes] = parts[1]
    content[second.offset : second.offset + second.nbytes] = parts[0]
    path.write_bytes(content)
    assert sorted(str(each.tensor) for each in verify_checkpoint(packed).differences) == sorted(names)


def test_files_that_are_missing_cut_off_or_closed(packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    (packed / "model-layer-00000.safetensors").unlink()
    os.truncate(packed / LAYER, (packed / LAYER).stat().st_size - 1)
    (packed / "model-layer-00002.safetensors").write_bytes(bytes(1000))
    path, spec = spec_of(packed / "model-rest.safetensors", "model.norm.weight")
    flip(path, spec.offset)
    report = verify_checkpoint(packed)
    reasons = {os.path.basename(each.file): each.reason for each in report.differences}
    assert len(report.differences) == 4
    assert reasons["model-layer-00000.safetensors"] == "does not exist"
    assert reasons[LAYER].startswith("is truncated in tensor 'model.layers.1.mlp.odd': 1 of its 42 bytes")
    assert reasons["model-layer-00002.safetensors"].startswith("the header has to start with")
    assert "has the checksum" in reasons["model-rest.safetensors"]
    rest = sum(tensors[name].nbytes for name in ("model.norm.weight", "model.embed_tokens.weight"))
    assert report.verified_bytes == rest


def test_a_file_of_another_checkpoint_in_its_place(packed: Path, tmp_path: Path) -> None:
    write_layers(tmp_path / "other", 3, seed=5)
    pack_checkpoint(tmp_path / "other", tmp_path / "others")
    shutil.copy(tmp_path / "others" / LAYER, packed / LAYER)
    report = verify_checkpoint(packed)
    assert len(report.differences) == 5
    assert {os.path.basename(each.file) for each in report.differences} == {LAYER}


def test_headers_that_say_something_else(packed: Path) -> None:
    path, spec = spec_of(packed, "model.layers.1.mlp.odd")
    content = path.read_bytes()
    for old, new, tensor, reason in (
        (b'"BF16","shape":[3,7]', b'"F16" ,"shape":[3,7]', None, "the header has the checksum"),
        (b'"BF16","shape":[3,7]', b'"BF16","shape":[7,3]', None, "the header has the checksum"),
        (b"model.layers.1.mlp.odd", b"model.layers.1.mlp.0dd", "model.layers.1.mlp.0dd", "is not in"),
        (b"model.layers.1.mlp.odd", b"model.layers.1.mlp.0dd", spec.name, "is not in the file"),
    ):
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        report = verify_checkpoint(packed)
        assert any(each.tensor == tensor and each.reason.startswith(reason) for each in report.differences)
        assert any(each.tensor is None for each in report.differences)


def test_a_tensor_of_another_size(packed: Path) -> None:
    edit_sidecar(
        packed, lambda found: found["files"][LAYER]["tensors"].update({"model.layers.1.mlp.odd": [40, "0" * 16]})
    )
    (difference,) = verify_checkpoint(packed).differences
    assert (difference.tensor, difference.reason) == ("model.layers.1.mlp.odd", "has 42 bytes, not 40")


def test_files_without_checksums_are_named(packed: Path) -> None:
    shutil.copy(packed / LAYER, packed / "extra.safetensors")
    (difference,) = verify_checkpoint(packed).differences
    assert (os.path.basename(difference.file), difference.reason) == ("extra.safetensors", f"is not in {SIDECAR_NAME}")
    assert verify_checkpoint(packed / LAYER).ok
    with pytest.raises(CheckpointError, match=f"extra.safetensors is not in the {SIDECAR_NAME}"):
        verify_checkpoint(packed / "extra.safetensors")


def test_one_file_alone(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(packed / "model-rest.safetensors", 5000)
    monkeypatch.chdir(packed)
    report = verify_checkpoint(LAYER)
    assert report.ok
    assert (report.num_files, report.num_tensors) == (1, 5)
    assert not verify_checkpoint("model-rest.safetensors").ok


def test_a_storage_that_fails(packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    report = verify_checkpoint(packed, faults="eio@2")
    failed = {each.file for each in report.differences}
    assert 0 < len(failed) < 4  # each reader thread fails once, in its second read
    assert sorted(str(each.tensor) for each in report.differences) == sorted(
        name for path in failed for name in Checkpoint.open(path).tensors
    )
    assert all("cannot be read" in each.reason and "Input/output error" in each.reason for each in report.differences)
    assert report.verified_bytes < report.nbytes
    assert sum(tensors[str(each.tensor)].nbytes for each in report.differences) == report.nbytes - report.verified_bytes


def test_a_file_that_changes_meanwhile(packed: Path) -> None:
    changed: list[bool] = []

    def change(done: int, total: int) -> None:
        if not changed:
            changed.append(True)
            path = packed / "model-rest.safetensors"
            path.write_bytes(path.read_bytes() + b"x")

    report = verify_checkpoint(packed, progress=change)
    assert {os.path.basename(each.file) for each in report.differences} <= {"model-rest.safetensors"}
    assert not verify_checkpoint(packed).ok


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "CPU_PORTION_BYTES", 256 << 10)


def test_tensors_in_parts(small_portions: None, tmp_path: Path) -> None:
    sizes = [1, 100_000, 0, 131_072, 3_700_001, 262_144, 65_536, 200_000, 2_000_000]
    raw: dict[str, Raw] = {f"h.{i % 2}.w{i}": random_raw("U8", (size,), seed=i) for i, size in enumerate(sizes)}
    pack_checkpoint(write_checkpoint(tmp_path / "model.safetensors", raw), tmp_path / "packed")
    for knobs in ({}, {"backend": "traditional"}, {"reader": "pread", "direct_io": False}):
        assert verify_checkpoint(tmp_path / "packed", **knobs).ok  # type: ignore[arg-type]
    for name in ("h.0.w4", "h.1.w7", "h.0.w0"):
        path, spec = spec_of(tmp_path / "packed", name)
        before = path.read_bytes()
        for offset in {0, spec.nbytes // 2, spec.nbytes - 1}:
            flip(path, spec.offset + offset)
            assert [each.tensor for each in verify_checkpoint(tmp_path / "packed").differences] == [name]
            path.write_bytes(before)
    # A part that cannot be read is not taken for one that differs.
    report = verify_checkpoint(tmp_path / "packed", faults="eio@6", chunk_size=1 << 16)
    assert {each.reason.split(": ")[0].split(") ")[1] for each in report.differences} == {"cannot be read"}


def test_past_the_page_cache(packed: Path) -> None:
    need_direct(packed / LAYER)
    report = verify_checkpoint(packed, direct_io=True)
    assert report.ok
    assert "O_DIRECT" in report.route or "io_uring" in report.route


def test_nothing_is_left_behind(packed: Path, no_leaks: None) -> None:
    for _ in range(3):
        assert verify_checkpoint(packed).ok
        verify_checkpoint(packed, faults="eio@2")


# The sidecar


def test_without_checksums(packed: Path) -> None:
    (packed / SIDECAR_NAME).unlink()
    for call in (
        lambda: verify_checkpoint(packed),
        lambda: gdsstream.load_file(packed, verify=True),
        lambda: gdsstream.safe_open(packed, verify=True),
    ):
        with pytest.raises(CheckpointNotFoundError, match=f"{packed} has no {SIDECAR_NAME}.*gdsstream pack"):
            call()
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(packed / "missing")


BAD_SIDECARS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other format": (lambda found: found.update(format="md5"), "is no file of checksums"),
    "newer": (lambda found: found.update(version=2), "is of version 2 .* use the release"),
    "other algorithm": (lambda found: found.update(algorithm="crc"), "algorithm 'crc'"),
    "no files": (lambda found: found.pop("files"), "is damaged"),
    "files list": (lambda found: found.update(files=[]), "is damaged"),
    "no header": (lambda found: found["files"][LAYER].pop("header"), "is damaged"),
    "number": (lambda found: found["files"][LAYER].update(header=17), "is damaged"),
    "short": (lambda found: found["files"][LAYER].update(header="17"), "is damaged"),
    "negative": (lambda found: found["files"][LAYER].update(nbytes=-1), "is damaged"),
    "tensors list": (lambda found: found["files"][LAYER].update(tensors=["a"]), "is damaged"),
    "lone": (lambda found: found["files"][LAYER]["tensors"].update(x=["0" * 16]), "is damaged"),
    "true": (lambda found: found["files"][LAYER]["tensors"].update(x=[True, "0" * 16]), "is damaged"),
}


@pytest.mark.parametrize("kind", BAD_SIDECARS)
def test_sidecars_that_are_damaged(kind: str, packed: Path) -> None:
    change, message = BAD_SIDECARS[kind]
    edit_sidecar(packed, change)
    for call in (verify_checkpoint, lambda path: gdsstream.load_file(path, verify=True)):
        with pytest.raises(CheckpointError, match=message):
            call(packed)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"format": "gdsstream-checks'])
def test_sidecars_that_are_no_json(content: bytes, packed: Path) -> None:
    (packed / SIDECAR_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is no (JSON|file of checksums)"):
        verify_checkpoint(packed)


# Loads


@pytest.mark.parametrize("knobs", [{}, {"backend": "traditional"}], ids=["staged", "traditional"])
def test_a_load_that_is_verified(knobs: dict[str, Any], packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    assert_same(gdsstream.load_file(packed, verify=True, **knobs), tensors)
    name = "model.layers.1.self_attn.q_proj.weight"
    path, spec = spec_of(packed, name)
    flip(path, spec.offset + 77)
    assert gdsstream.load_file(packed, **knobs).keys() == tensors.keys()
    for arguments in ({}, {"names": [name]}, {"names": lambda each: "layers.1." in each}):
        with pytest.raises(ChecksumError) as caught:
            gdsstream.load_file(packed, verify=True, **arguments, **knobs)  # type: ignore[arg-type]
        assert caught.value.tensors == (name,)
        assert f"{path}: tensor {name!r} at byte {spec.offset}" in str(caught.value)
        assert isinstance(caught.value, CheckpointError)
    others = [each for each in tensors if each != name]
    assert_same(
        gdsstream.load_file(packed, verify=True, names=others, **knobs), {each: tensors[each] for each in others}
    )
    with pytest.raises(ChecksumError):
        gdsstream.load_file(path, verify=True)
    assert gdsstream.load_file(packed / "model-rest.safetensors", verify=True)


def test_all_tensors_that_differ_are_in_the_error(packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        path, spec = spec_of(packed, name)
        flip(path, spec.offset)
    with pytest.raises(ChecksumError, match=rf"^{len(tensors)} tensor\(s\) .*; and {len(tensors) - 5} more") as caught:
        gdsstream.load_file(packed, verify=True)
    assert sorted(caught.value.tensors) == sorted(tensors)


def test_loads_of_many_portions(tmp_path: Path) -> None:
    raw = {f"h.{i % 3}.w{i}": random_raw("I8", (i * 7 % 501,), seed=i) for i in range(1500)}
    path = write_checkpoint(tmp_path / "model.safetensors", raw)
    pack_checkpoint(path, tmp_path / "packed")
    assert_same(gdsstream.load_file(tmp_path / "packed", verify=True), gdsstream.load_file(path))
    victim, spec = spec_of(tmp_path / "packed", "h.2.w1400")
    flip(victim, spec.offset)
    with pytest.raises(ChecksumError) as caught:
        gdsstream.load_file(tmp_path / "packed", verify=True)
    assert caught.value.tensors == (spec.name,)


def test_an_empty_file_and_an_empty_choice(packed: Path) -> None:
    assert gdsstream.load_file(packed, verify=True, names=[]) == {}
    assert gdsstream.load_file(packed, verify=True, names=lambda name: False) == {}


def test_files_that_the_sidecar_lacks(packed: Path) -> None:
    shutil.copy(packed / LAYER, packed / "extra.safetensors")
    for call in (gdsstream.load_file, gdsstream.safe_open):
        with pytest.raises(CheckpointError, match=r"extra.safetensors is not in the .* beside it"):
            call(packed / "extra.safetensors", verify=True)


def test_a_mapped_load_cannot_be_verified(packed: Path) -> None:
    with pytest.raises(ConfigError, match="copy=False reads nothing that verify=True could look at"):
        gdsstream.load_file(packed, copy=False, verify=True)


def test_a_handle_that_verifies(packed: Path, tensors: dict[str, torch.Tensor]) -> None:
    good, bad = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    path, spec = spec_of(packed, bad)
    flip(path, spec.offset + spec.nbytes - 1)
    with gdsstream.safe_open(packed, verify=True) as handle:
        for _ in range(2):
            assert_same({good: handle.get_tensor(good)}, {good: tensors[good]})
            with pytest.raises(ChecksumError) as caught:
                handle.get_tensor(bad)
            assert caught.value.tensors == (bad,)
        with pytest.raises(ChecksumError):
            handle.tensors()
        with pytest.raises(TensorNotFoundError):
            handle.get_tensor("missing")
        for index in (3, slice(2, 90, 7), (slice(None), 5), (..., slice(1, 9)), (0, 0), slice(5, 5)):
            part = handle.get_slice(good)[index]
            assert_same({good: part.contiguous()}, {good: tensors[good][index].contiguous()})
            with pytest.raises(ChecksumError):
                handle.get_slice(bad)[index]
    with gdsstream.safe_open(packed) as handle:
        assert handle.get_tensor(bad).shape == tensors[bad].shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_on_a_gpu(packed: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    large = {"h.0.w": torch.randn(150 << 20), "h.1.w": torch.randn(1000)}
    gdsstream.save_file(large, tmp_path / "large.safetensors", fsync=False)
    pack_checkpoint(tmp_path / "large.safetensors", tmp_path / "large")
    assert verify_checkpoint(tmp_path / "large", device="cuda").ok
    assert verify_checkpoint(tmp_path / "large", device="cpu").ok
    assert gdsstream.load_file(tmp_path / "large", "cuda", verify=True)["h.0.w"].cpu().equal(large["h.0.w"])
    path, spec = spec_of(tmp_path / "large", "h.0.w")
    flip(path, spec.offset + spec.nbytes - 1)
    assert [each.tensor for each in verify_checkpoint(tmp_path / "large").differences] == ["h.0.w"]
    with pytest.raises(ChecksumError):
        gdsstream.load_file(tmp_path / "large", "cuda", verify=True)
    with gdsstream.safe_open(packed, device="cuda", verify=True) as handle:
        for name, tensor in tensors.items():
            assert handle.get_tensor(name).cpu().equal(tensor)
