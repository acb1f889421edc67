"""Every route on a real GPU, with safetensors' own loader as the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_reference
from safetensors.torch import save_file

import gdsstream
from gdsstream import proofs, storage
from gdsstream.checkpoint import Checkpoint
from gdsstream.plan import plan_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three shards: odd sizes, many dtypes, small and large tensors."""
    generator = torch.Generator().manual_seed(7)
    for shard in range(3):
        tensors = {
            f"layer.{shard}.w{i}": torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
            for i, size in enumerate((1, 3, 4095, 4097, MIB + 17, 24 * MIB + 5, 700_001))
        }
        tensors[f"layer.{shard}.bf16"] = torch.randn(513, 257, generator=generator).to(torch.bfloat16)
        tensors[f"layer.{shard}.f64"] = torch.randn(5, 0, 3, dtype=torch.float64)
        tensors[f"layer.{shard}.scalar"] = torch.tensor(shard, dtype=torch.int64)
        save_file(tensors, tmp_path / f"model-{shard}.safetensors")
    return tmp_path


def reference(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(checkpoint.glob("*.safetensors")) for k, v in load_reference(path).items()}


def check(loaded: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(wanted)
    for name, tensor in wanted.items():
        assert loaded[name].device.type == "cuda"
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].cpu(), tensor), name


@pytest.mark.parametrize("knobs", [{}, {"direct_io": True}, {"backend": "mapped", "host_cache_bytes": 10**9}])
def test_tensors_that_touch_in_different_allocations(tmp_path: Path, knobs: dict[str, object]) -> None:
    # torch gives tensors of these sizes the ends and beginnings of blocks of 2, 16 and 20 MiB, which lie end to end in
    # the device's addresses; so do the tensors in the file, in the same order.
    sizes = {"a.gate": MIB // 2, "b.k": 2 * MIB, "c.o": 16 * MIB, "d.q": 16 * MIB, "e.v": 2 * MIB, "f.up": 3 * MIB}
    generator = torch.Generator().manual_seed(11)
    tensors = {
        f"layer.{layer:02}.{name}": torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=generator)
        for layer in range(12)
        for name, nbytes in sizes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = reference(tmp_path)
    for _ in range(3):
        torch.cuda.empty_cache()
        check(gdsstream.load_file(tmp_path / "model.safetensors", device="cuda", **knobs), wanted)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"direct_io": False},
        {"direct_io": False, "reader": "io_uring"},
        {"direct_io": True},
        {"direct_io": True, "reader": "pread"},
        {"chunk_size": 64 << 10, "staging_bytes": 256 << 10},
        {"backend": "traditional"},
        {"backend": "mapped", "host_cache_bytes": 1 << 30},
    ],
    ids=str,
)
def test_every_route_delivers_the_files_bytes(checkpoint: Path, knobs: dict[str, object]) -> None:
    wanted = reference(checkpoint)
    for _ in range(3):
        check(gdsstream.load_file(checkpoint, device="cuda", **knobs), wanted)
    gdsstream.release_engines()


def test_each_tensor_owns_its_memory(checkpoint: Path) -> None:
    loaded = gdsstream.load_file(checkpoint, device="cuda")
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_registered_handle_is_read_again_and_again(checkpoint: Path) -> None:
    wanted = reference(checkpoint)
    with gdsstream.safe_open(checkpoint, device="cuda", host_cache_bytes=1 << 30) as handle:
        for _ in range(5):
            check(handle.tensors(), wanted)
        name = "layer.1.bf16"
        assert torch.equal(handle.get_tensor(name).cpu(), wanted[name])
        assert torch.equal(handle.get_slice(name)[100:200, 3:9].cpu(), wanted[name][100:200, 3:9])
        assert handle.route == "registered page cache -> cuda:0"


def test_a_registered_file_that_changes_is_an_error(checkpoint: Path) -> None:
    path = checkpoint / "model-0.safetensors"
    with gdsstream.safe_open(path, device="cuda", host_cache_bytes=1 << 30) as handle:
        handle.tensors()
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(gdsstream.FileChangedError, match="truncated"):
            handle.tensors()


def test_tensors_can_be_used_on_any_stream_at_once(checkpoint: Path) -> None:
    wanted = reference(checkpoint)
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            loaded = gdsstream.load_file(checkpoint, device="cuda")
            sums = {name: tensor.sum(dtype=torch.float64) for name, tensor in loaded.items()}
            del loaded  # its memory is used again by the next load, behind the sums
        for name, total in sums.items():
            torch.testing.assert_close(total.cpu(), wanted[name].sum(dtype=torch.float64))


def test_groups_land_one_by_one(checkpoint: Path) -> None:
    found = Checkpoint.open(checkpoint)
    plan = plan_packed(list(found.tensors.values()), group_of=lambda name: int(name.split(".")[1]))
    buffer = torch.empty(plan.buffer_bytes[0], dtype=torch.uint8, device="cuda")
    wanted = reference(checkpoint)
    with gdsstream.open_engine("staged", device="cuda") as engine:
        transfer = engine.submit(found.files, plan, [buffer])
        for group in range(plan.num_groups):
            transfer.wait(group)
            for place in plan.placements:
                if place.name.startswith(f"layer.{group}.w"):
                    part = buffer[place.offset : place.offset + place.nbytes]
                    assert torch.equal(part.cpu(), wanted[place.name])


def test_cancelled_transfers_do_not_write_into_memory_that_is_used_again(checkpoint: Path) -> None:
    found = Checkpoint.open(checkpoint)
    plan = plan_packed(list(found.tensors.values()))
    before = torch.cuda.memory_allocated()
    with gdsstream.open_engine("staged", device="cuda", faults="delay_us=300") as engine:
        for _ in range(50):
            buffer = torch.zeros(plan.buffer_bytes[0], dtype=torch.uint8, device="cuda")
            transfer = engine.submit(found.files, plan, [buffer])
            transfer.cancel()
            del transfer, buffer
            # The allocator would hand the same block out again, were it not kept until the copies have drained.
            other = torch.full((plan.buffer_bytes[0],), 7, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            assert bool((other == 7).all())
    assert torch.cuda.memory_allocated() - before < 4 * plan.buffer_bytes[0]


def test_records_are_gathered(checkpoint: Path) -> None:
    paths = sorted(checkpoint.glob("*.safetensors"))
    random = np.random.default_rng(3)
    files = random.integers(0, 3, 5000)
    offsets = random.integers(0, min(p.stat().st_size for p in paths) - 4096, 5000)
    data = [np.fromfile(path, dtype=np.uint8) for path in paths]
    wanted = np.stack([data[f][o : o + 4096] for f, o in zip(files, offsets, strict=True)])
    for direct in (False, True):
        got = gdsstream.read_many(paths, files, offsets, 4096, device="cuda", direct_io=direct)
        assert np.array_equal(got.cpu().numpy(), wanted)


def test_all_devices(checkpoint: Path) -> None:
    wanted = reference(checkpoint)
    for index in range(torch.cuda.device_count()):
        loaded = gdsstream.load_file(checkpoint, device=index)
        assert all(tensor.device.index == index for tensor in loaded.values())
        check(loaded, wanted)
    with pytest.raises(gdsstream.ConfigError, match="does not exist"):
        gdsstream.load_file(checkpoint, device=torch.cuda.device_count())


def test_too_large_for_the_device_says_how_large(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    save_file({"w": torch.zeros(64 * MIB, dtype=torch.uint8)}, tmp_path / "w.safetensors")
    hog = torch.empty(free - 32 * MIB, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(gdsstream.MemoryBudgetError, match="67108864 bytes"):
            gdsstream.load_file(tmp_path / "w.safetensors", device="cuda")
    finally:
        del hog
        torch.cuda.empty_cache()
    check(
        gdsstream.load_file(tmp_path / "w.safetensors", device="cuda"), {"w": torch.zeros(64 * MIB, dtype=torch.uint8)}
    )


def test_auto_goes_by_a_stored_proof(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvikio")
    gdsstream.release_engines()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    info = storage.describe(checkpoint)
    assert info.mount_point is not None
    assert info.source is not None
    proofs.store_gds_proof(proofs.GdsProof(info.mount_point, info.source, "cufile", reads=1, nbytes=4096))
    check(gdsstream.load_file(checkpoint, device="cuda"), reference(checkpoint))
    from gdsstream.load import _engines

    assert [engine.name for engine in _engines.values()] == ["cufile"]
    gdsstream.release_engines()
