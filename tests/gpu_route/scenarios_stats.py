"""Statistics of the GPU route: staged reads, copies out of mapped files, and the memory that is pinned for both."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu_route.harness import MIB, SLOT, scenario, write_random
from gpu_route.plans import one_buffer, read_whole, small_engine
from gpu_route.stand_in import UNKNOWN, StandIn
from support import source_of

import gdsstream
from gdsstream.engine.native import NativeEngine
from gdsstream.stats import EngineStats, Operations, process_stats
from gdsstream.stats_publisher import stop_publishing


def _engine(device: str) -> EngineStats:
    return next(one for one in process_stats().engines if one.device == device)


def _io(device: str, route: str) -> Operations:
    return next(one.io for one in _engine(device).routes if one.route == route)


@scenario()
def statistics_of_staged_reads(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, 2 * MIB + 5)
    with small_engine("cuda:0", stats=3) as first, small_engine("cuda:1", stats=3) as second:
        for engine, times in ((first, 1), (second, 2)):
            for _ in range(times):
                out = torch.zeros(len(data), dtype=torch.uint8)
                read_whole(engine, path, out).wait()
                fake.drain()
                assert torch.equal(out, data)
        for engine, device, times in ((first, "cuda:0", 1), (second, "cuda:1", 2)):
            io = _io(device, "page cache")
            assert (io.operations, io.bytes) == (engine.stats()["reads"], times * len(data))
            assert sum(io.sizes) == io.operations
            found = _engine(device)
            assert found.pinned_bytes == engine.stats()["staging_bytes"] > 0
            assert found.slots == found.pinned_bytes // SLOT
            assert (found.open, found.registered_bytes) == (1, 0)
        assert process_stats().pinned_bytes == fake.count("registered_bytes")
    assert process_stats().pinned_bytes == 0
    stop_publishing()


@scenario()
def statistics_of_mapped_copies(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    data = write_random(path, MIB)
    with gdsstream.open_engine("mapped", device="cuda:0", host_cache_bytes=4 * MIB, stats=3) as engine:
        assert isinstance(engine, NativeEngine)
        opened = engine.open([source_of(path)])
        out = torch.zeros(300_000, dtype=torch.uint8)
        engine.submit(opened, one_buffer([(7, 200_000, 0), (MIB - 100_000, 100_000, 0)]), [out]).wait()
        fake.drain()
        assert torch.equal(out, torch.cat([data[7:200_007], data[-100_000:]]))
        io = _io("cuda:0", "mapped")
        assert (io.operations, io.bytes, io.errors) == (2, 300_000, 0)
        assert (io.timed, io.average_s, sum(io.latencies)) == (0, None, 0), "nobody learns when a copy has ended"
        assert sum(io.sizes) == 2
        assert process_stats().registered_bytes == MIB
        assert _io("cuda:0", "page cache") == Operations()
        del opened
    stop_publishing()


@scenario()
def statistics_of_copies_that_the_driver_refuses(fake: StandIn, folder: Path) -> None:
    path = folder / "data"
    write_random(path, MIB)
    with gdsstream.open_engine("mapped", device="cuda:0", host_cache_bytes=4 * MIB, stats=3) as engine:
        assert isinstance(engine, NativeEngine)
        opened = engine.open([source_of(path)])
        fake.fail("cuMemcpyHtoDAsync_v2", UNKNOWN)
        transfer = engine.submit(opened, one_buffer([(0, MIB, 0)]), [torch.zeros(MIB, dtype=torch.uint8)])
        try:
            transfer.wait()
        except gdsstream.CudaError:
            pass
        else:
            raise AssertionError("the copy was refused, and nobody said so")
        io = _io("cuda:0", "mapped")
        assert (io.operations, io.errors) == (0, 1)
        del opened, transfer
    stop_publishing()
