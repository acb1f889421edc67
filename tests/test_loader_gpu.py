"""ShardLoader on a real GPU: bytes under load, fences of owned and borrowed batches, memory that stays flat."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_files import write_ragged, write_safetensors
from support import run_python
from torch.utils.data import DataLoader

from gdsstream import Jagged, ShardDataset, ShardLoader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
COUNT = 96
ROW = 1 << 18  # int32 elements: 1 MiB a record
BATCH = 8
KNOBS = [{"direct_io": False}, {"direct_io": True}, {"host_cache_bytes": 200_000_000}]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("records")
    data = torch.randint(-(2**31), 2**31 - 1, (COUNT, ROW), dtype=torch.int32)
    for number, part in enumerate(data.split([40, 1, 55])):
        write_safetensors(folder / f"{number}.safetensors", x=part)
    return folder, data


@pytest.fixture(scope="module")
def busy() -> torch.Tensor:
    return torch.randn(4096, 4096, device="cuda")


def keep_busy(busy: torch.Tensor, times: int = 4) -> None:
    for _ in range(times):
        busy @ busy


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
def test_what_compute_sees(
    stored: tuple[Path, torch.Tensor], busy: torch.Tensor, knobs: dict[str, Any], borrow: bool, ahead: int
) -> None:
    """The consumer is far behind the host, on two streams in turn."""
    folder, data = stored
    side = torch.cuda.Stream()
    options = {"shuffle": True, "borrow": borrow, "prefetch_batches": ahead, "epochs": 2, **knobs}
    with ShardLoader(folder, BATCH, **options) as loader:
        assert loader.device.type == "cuda"
        order = list(loader.sampler)  # type: ignore[arg-type]
        sums, batches = [], iter(loader)
        for number in range(2 * COUNT // BATCH):
            stream = side if number % 2 else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                batch = next(batches)
                keep_busy(busy)
                sums.append(batch.long().sum(1))
                del batch
        torch.cuda.synchronize()
        loader.set_epoch(1)
        order += list(loader.sampler)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(sums).cpu(), data[order].long().sum(1))


@pytest.mark.parametrize("borrow", [False, True])
def test_transforms_under_load(stored: tuple[Path, torch.Tensor], busy: torch.Tensor, borrow: bool) -> None:
    folder, data = stored
    streams = set()

    def transform(batch: torch.Tensor) -> dict[str, Any]:
        streams.add(torch.cuda.current_stream().cuda_stream)
        keep_busy(busy, 2)
        return {"half": batch.float() / 2, "tail": [batch[:, -1]]}

    with ShardLoader(folder, BATCH, transform=transform, borrow=borrow, device="cuda") as loader:
        halves, tails = [], []
        for batch in loader:
            keep_busy(busy)
            halves.append(batch["half"].sum(1))
            tails.append(batch["tail"][0].clone())
            del batch
        torch.cuda.synchronize()
    assert torch.cuda.default_stream().cuda_stream not in streams
    assert torch.equal(torch.cat(tails).cpu(), data[:, -1])
    # In parts of the same shape: a sum's rounding depends on it.
    expected = torch.cat([(part.float() / 2).sum(1) for part in data.cuda().split(BATCH)])
    assert torch.equal(torch.cat(halves), expected)


@pytest.mark.parametrize("pad", [None, -3])
@pytest.mark.parametrize("borrow", [False, True])
def test_ragged_records(tmp_path: Path, busy: torch.Tensor, pad: int | None, borrow: bool) -> None:
    records = [torch.randint(0, 1000, (1 + 37 * i % 200, 64), dtype=torch.int32) for i in range(60)]
    write_ragged(tmp_path / "a.safetensors", {"x": records}, n=torch.arange(60))
    got: list[torch.Tensor] = []
    with ShardLoader(tmp_path, 7, device="cuda", pad=pad, borrow=borrow, direct_io=False) as loader:
        for batch in loader:
            keep_busy(busy)
            x = batch["x"]
            numbers = batch["n"].tolist()
            if pad is None:
                assert isinstance(x, Jagged)
                assert x.values.is_cuda
                assert x.offsets.is_cuda
                assert x.nested().shape[0] == len(numbers)
                got += [record.cpu() for record in x]
            else:
                for row, number in zip(x.cpu(), numbers, strict=True):
                    length = len(records[number])
                    got.append(row[:length])
                    assert (row[length:] == pad).all()
    assert len(got) == 60
    assert all(torch.equal(one, other) for one, other in zip(got, records, strict=True))


def test_equal_to_a_dataloader(stored: tuple[Path, torch.Tensor]) -> None:
    folder, _ = stored
    with ShardLoader(folder, 5, device="cuda:0") as loader:
        for got, wanted in zip(loader, DataLoader(ShardDataset(folder), 5), strict=True):
            assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("transformed", [False, True])
def test_gpu_memory_is_bounded(
    stored: tuple[Path, torch.Tensor], busy: torch.Tensor, borrow: bool, transformed: bool
) -> None:
    """The host never waits for results: what it runs ahead by is bounded all the same."""
    folder, _ = stored
    gc.collect()
    torch.cuda.synchronize()
    keep_busy(busy)
    torch.cuda.synchronize()
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    transform = (lambda batch: batch ^ 1) if transformed else None
    with ShardLoader(folder, BATCH, borrow=borrow, epochs=6, prefetch_batches=2, transform=transform) as loader:
        for batch in loader:
            keep_busy(busy)
            total += batch.max()
        torch.cuda.synchronize()
    batch_bytes = BATCH * ROW * 4
    peak = torch.cuda.max_memory_allocated() - before
    products = 2 * busy.nbytes
    # Under way, in use, and behind on the device; transforms have a result each.
    batches = 3 if borrow and not transformed else 8 if not transformed else 14
    assert peak <= batches * batch_bytes + products + (1 << 20)
    assert torch.cuda.memory_allocated() - before < 2 * batch_bytes


def test_nothing_stalls_where_compute_is_longer(stored: tuple[Path, torch.Tensor], busy: torch.Tensor) -> None:
    folder, _ = stored
    with ShardLoader(folder, BATCH, shuffle=True, direct_io=False, epochs=3) as loader:
        batches = iter(loader)
        next(batches)
        for batch in batches:
            keep_busy(busy, 8)
            batch.max().item()
        stats = loader.stats()
        print(stats.summary())
        assert stats.stall_s / stats.batches < 2e-3
        assert stats.host_s / stats.batches < 5e-3


def test_stopping_early(stored: tuple[Path, torch.Tensor], no_leaks: None) -> None:
    torch.cuda.synchronize()
    for borrow in (False, True):
        loader = ShardLoader(stored[0], BATCH, borrow=borrow, prefetch_batches=4)
        for _ in loader:
            break
        del loader
        gc.collect()


def test_a_fork_after_cuda_is_refused(stored: tuple[Path, torch.Tensor]) -> None:
    code = """
import os, sys
from gdsstream import ForkedProcessError, ShardLoader
loader = ShardLoader(sys.argv[1], 8, device="cuda")
batches = iter(loader)
next(batches)
child = os.fork()
if not child:
    for use in (lambda: iter(loader), lambda: next(batches)):
        try:
            use()
        except ForkedProcessError as error:
            print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(len(list(batches)))
"""
    out = run_python(code, stored[0])[0].splitlines()
    assert "does not survive a fork" in out[0]
    assert "belongs to process" in out[1]
    assert out[2] == "11"
