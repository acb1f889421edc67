"""Saving from a real GPU: what is queued before the call is saved, what comes later is not, and nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from save_support import MIB, SHARED_DTYPES, Save, check_file, random_tensor, save_and_wait, wait_until
from support import need_direct, reference

from gdsstream.errors import (
    MemoryBudgetError,
    TransferCancelledError,
    WriteError,
)
from gdsstream.save import PendingSave, save_file, save_file_async

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


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


def test_many_small_tensors_of_a_gpu(save: Save, tmp_path: Path) -> None:
    tensors = {f"expert.{i}": random_tensor("I16", (i % 7,), seed=i) for i in range(3000)}
    save({name: tensor.cuda() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    check_file(tmp_path / "model.safetensors", tensors)


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


def test_the_call_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    w = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    save_and_wait({"w": w}, tmp_path / "model.safetensors")
    torch.cuda._sleep(2_000_000_000)
    w.fill_(3)
    pending = save_file_async({"w": w}, tmp_path / "model.safetensors")
    assert not torch.cuda.current_stream().query()
    pending.wait(60)
    assert reference(tmp_path / "model.safetensors")["w"].unique().tolist() == [3]


def test_a_gpu_save_that_fails_or_is_cancelled(old_file: tuple[Path, bytes]) -> None:
    w = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    allocated = torch.cuda.memory_allocated()
    for save in (save_file, save_and_wait):
        with pytest.raises(WriteError):
            save({"w": w}, old_file[0].parent)
    pending = save_file_async({"w": w}, old_file[0])
    pending.cancel()
    with pytest.raises(TransferCancelledError):
        pending.wait(60)
    wait_until(lambda: torch.cuda.memory_allocated() == allocated)


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
