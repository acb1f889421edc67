"""load_file, safe_open and read_many on the GPU route deliver what safetensors reads, whatever the streams' delays."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_route.harness import MIB, SLOT, scenario, write_random
from gpu_route.plans import small_engine
from gpu_route.stand_in import StandIn
from support import Raw, assert_same, need_direct, need_uring, random_raw, reference, write_checkpoint

import gdsstream
from gdsstream import virtual_disks
from gdsstream.checkpoint import Checkpoint
from gdsstream.config import StreamConfig
from gdsstream.load import shared_engine
from gdsstream.plan import plan_packed

ONE_SLOT = StreamConfig(chunk_size=SLOT, staging_bytes=SLOT, num_threads=3, direct_io=False)
DELAYS_US = (0, 20, 200, 2000)


def model(folder: Path, name: str = "model.safetensors", *, mib: int = 12) -> Path:
    """Tensors from nothing to several MB, at odd offsets."""
    shapes = [(5,), (SLOT,), (3 * SLOT + 1,), (0, 3), (), (mib * MIB - 4 * MIB,), (999_999,), (2, 3, 5)]
    tensors: dict[str, Raw] = {f"t{i}": random_raw("U8", shape, seed=i) for i, shape in enumerate(shapes)}
    tensors |= {f"small{i}": random_raw("BF16", (i, 37), seed=100 + i) for i in range(200)}
    return write_checkpoint(folder / name, tensors, padding=5)


def check_loads(fake: StandIn, path: Path, config: StreamConfig, route: str, *, times: int = 2) -> None:
    expected = reference(path)
    for _ in range(times):
        loaded = gdsstream.load_file(path, device="cuda:0", config=config)
        # What a consumer on the current stream sees, and no more than that: other streams may still be busy.
        fake.synchronize()
        assert_same(loaded, expected)
    assert route in shared_engine(torch.device("cuda:0"), config).route


@scenario(delays_us=DELAYS_US)
def staged_through_one_slot(fake: StandIn, folder: Path) -> None:
    check_loads(fake, model(folder), ONE_SLOT, "page cache by pread", times=1)
    assert fake.count("copies") > 150
    assert fake.count("registered_bytes") == SLOT


@scenario(delays_us=DELAYS_US)
def staged_through_four_slots(fake: StandIn, folder: Path) -> None:
    config = StreamConfig(chunk_size=SLOT, staging_bytes=4 * SLOT, num_threads=4, direct_io=False)
    check_loads(fake, model(folder), config, "page cache by pread")
    assert fake.count("registered_bytes") == 4 * SLOT


@scenario(delays_us=(0, 2000))
def staged_through_the_ring_of_paced_reads(fake: StandIn, folder: Path) -> None:
    need_uring()
    need_direct(folder)
    virtual_disks.single_queue_requests = lambda: 256
    config = StreamConfig(direct_io=True, staging_bytes=4 * MIB, num_threads=2)
    check_loads(fake, model(folder, mib=20), config, "of depth 256, paced")
    # Eight slots of half a MiB in one segment, and nothing of the other ring.
    engine = shared_engine(torch.device("cuda:0"), config)
    assert engine.stats()["staging_slots"] == 8
    assert engine.stats()["staging_bytes"] == 4 * MIB
    assert fake.count("registrations") == 1
    gdsstream.release_engines()
    assert fake.count("registrations") == 0, "a closed engine that somebody holds has no memory"


@scenario()
def staged_with_default_knobs(fake: StandIn, folder: Path) -> None:
    check_loads(fake, model(folder, mib=40), StreamConfig(), "-> cuda:0 (stand-in driver)")


@scenario(delays_us=DELAYS_US)
def staged_by_io_uring(fake: StandIn, folder: Path) -> None:
    need_uring()
    config = StreamConfig(reader="io_uring", chunk_size=SLOT, staging_bytes=3 * SLOT, num_threads=2, direct_io=False)
    check_loads(fake, model(folder), config, "page cache by io_uring")


@scenario(delays_us=(0, 500))
def staged_past_the_page_cache_by_io_uring(fake: StandIn, folder: Path) -> None:
    need_uring()
    need_direct(folder)
    config = StreamConfig(chunk_size=SLOT, staging_bytes=3 * SLOT, num_threads=2, direct_io=True, io_depth=8)
    check_loads(fake, model(folder), config, "O_DIRECT by io_uring")


@scenario(delays_us=(0, 500))
def staged_past_the_page_cache_by_pread(fake: StandIn, folder: Path) -> None:
    need_direct(folder)
    config = StreamConfig(reader="pread", chunk_size=SLOT, staging_bytes=2 * SLOT, num_threads=4, direct_io=True)
    check_loads(fake, model(folder), config, "O_DIRECT by pread")


@scenario(delays_us=(0, 200))
def mapped_again_and_again(fake: StandIn, folder: Path) -> None:
    path = model(folder)
    expected = reference(path)
    with gdsstream.safe_open(path, device="cuda:0", host_cache_bytes=64 * MIB) as handle:
        assert fake.count("registrations") == 1
        for _ in range(25):
            tensors = handle.tensors()
            one = handle.get_tensor("t5")
            part = handle.get_slice("t5")[1000:70_000]
            fake.synchronize()
            assert_same(tensors, expected)
            assert_same({"t5": one, "part": part}, {"t5": expected["t5"], "part": expected["t5"][1000:70_000]})
        # The ring was never needed: all copies came from the file's own pages.
        assert fake.count("cuMemHostRegister_v2") == 1
        assert handle.route == "registered page cache -> cuda:0 (stand-in driver)"
    assert fake.count("registrations") == 0


@scenario()
def mapped_within_a_budget_and_staged_beyond(fake: StandIn, folder: Path) -> None:
    paths = [model(folder, f"{i}.safetensors", mib=5) for i in range(2)]
    wanted = {f"{i}.{name}": t for i, path in enumerate(paths) for name, t in reference(path).items()}
    for i, path in enumerate(paths):
        renamed = {
            f"{i}.{n}": ("U8", (t.nbytes,), t.reshape(-1).view(torch.uint8).numpy().tobytes())
            for n, t in reference(path).items()
        }
        write_checkpoint(path, renamed)
    wanted = {name: t.reshape(-1).view(torch.uint8) for name, t in wanted.items()}
    budget = paths[0].stat().st_size + 1000
    with gdsstream.safe_open(paths, device="cuda:0", host_cache_bytes=budget, direct_io=False) as handle:
        for _ in range(5):
            tensors = handle.tensors()
            fake.synchronize()
            assert_same(tensors, wanted)
        assert "page cache by pread" in handle.route
        assert "registered page cache" in handle.route


@scenario(delays_us=(0, 200))
def records_of_many_files(fake: StandIn, folder: Path) -> None:
    files = [write_random(folder / f"{i}.bin", 1 * MIB + 17 * i, seed=i) for i in range(3)]
    paths = [folder / f"{i}.bin" for i in range(3)]
    random = np.random.default_rng(7)
    out = torch.zeros((2000, 517), dtype=torch.uint8)
    for _ in range(5):
        index = random.integers(0, 3, 2000)
        offsets = random.integers(0, 1 * MIB - 517, 2000)
        got = gdsstream.read_many(paths, index, offsets, 517, device="cuda:0", out=out, config=ONE_SLOT)
        fake.synchronize()
        expected = torch.stack([files[i][o : o + 517] for i, o in zip(index, offsets, strict=True)])
        assert got is out
        assert torch.equal(out, expected)


@scenario()
def two_devices_at_once(fake: StandIn, folder: Path) -> None:
    path = model(folder)
    expected = reference(path)
    failures: list[BaseException] = []

    def load(ordinal: int) -> None:
        try:
            for _ in range(3):
                loaded = gdsstream.load_file(path, device=f"cuda:{ordinal}", config=ONE_SLOT)
                fake.synchronize(ordinal=ordinal)
                assert_same(loaded, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(ordinal,)) for ordinal in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert fake.count("registrations") == 2
    # One thread, first one device, then the other.
    for ordinal in (1, 0, 1):
        load(ordinal)
    assert failures == []


@scenario()
def a_device_that_does_not_exist(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    with pytest.raises(gdsstream.ConfigError, match=r"cuda:2 does not exist.* 2 CUDA device"):
        gdsstream.load_file(path, device="cuda:2")
    assert_same(gdsstream.load_file(path, device="cpu"), reference(path))


@scenario(devices=0)
def no_device_at_all(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=5)
    with pytest.raises(gdsstream.BackendUnavailableError, match="CUDA_ERROR_NO_DEVICE"):
        gdsstream.load_file(path, device="cuda:0")
    assert_same(gdsstream.load_file(path, device="cpu"), reference(path))


@scenario(delays_us=(0, 2000))
def one_group_before_the_next(fake: StandIn, folder: Path) -> None:
    path = model(folder, mib=6)
    checkpoint = Checkpoint.open(path)
    specs = list(checkpoint.tensors.values())
    plan = plan_packed(specs, group_of=lambda name: 1 if name in ("t5", "t6") else 0)
    expected = reference(path)
    with small_engine(slots=8, num_threads=1, faults="delay_us=5000") as engine:
        out = torch.zeros(plan.buffer_bytes[0], dtype=torch.uint8)
        transfer = engine.submit(checkpoint.files, plan, [out])
        for group in (0, 1):
            transfer.wait(group)
            assert group == 1 or not transfer.done(1)
            fake.synchronize()
            for place in plan.placements:
                if (place.name in ("t5", "t6")) != (group == 1):
                    continue
                stored = expected[place.name].reshape(-1).view(torch.uint8)
                assert torch.equal(out[place.offset : place.offset + place.nbytes], stored), place.name
        transfer.wait()
        assert transfer.done()
