"""The fences of batches: bytes before transforms before consumers, and buffers filled again behind all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_route.harness import scenario, until
from gpu_route.stand_in import ILLEGAL_ADDRESS, StandIn
from shard_files import rows, write_npy, write_ragged

import gdsstream
from gdsstream import ShardLoader
from gdsstream.devices import current_stream, on_stream, parse_device

COUNT = 48
ROW = 4096  # int32 elements of a record
BATCH = 4
# Operations that a stream does before the one that matters: its delays add up.
MANY = 30
# Device memory of the stand-in is host memory: what its streams still use must not be freed.
SOURCE, TARGET = torch.ones(64), torch.zeros(64)


@contextmanager
def loading(folder: Path, **options: Any) -> Iterator[tuple[ShardLoader[Any], torch.Tensor]]:
    data = rows(COUNT, ROW)
    (folder / "d").mkdir()
    for number, part in enumerate(data.split(COUNT // 3)):
        write_npy(folder / "d" / f"{number}.npy", part)
    defaults = {"batch_size": BATCH, "device": "cuda:0", "staging_bytes": 1 << 20, "chunk_size": 64 << 10}
    with ShardLoader(folder / "d", **{**defaults, "num_threads": 2, "direct_io": False, **options}) as loader:
        yield loader, data


def busy(fake: StandIn, stream: int, count: int = MANY) -> None:
    for _ in range(count):
        fake.copy(TARGET, SOURCE, stream)


def consume(fake: StandIn, batch: torch.Tensor, stream: int, *, first: int = 0) -> torch.Tensor:
    """What a kernel on `stream` sees of a batch, `first` other operations later."""
    seen = torch.zeros_like(batch)
    busy(fake, stream, first)
    fake.copy(seen, batch, stream)
    return seen


def double_of(fake: StandIn, kept: list[torch.Tensor], *, first: int = 0) -> Any:
    """A transform: a copy of the batch, made on the stream that is current when it is called, and late."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        kept.append(batch)
        seen = consume(fake, batch, current_stream(parse_device("cuda:0")), first=first)
        kept.append(seen)
        return seen

    return transform


@scenario(delays_us=(200, 1000))
def every_batch_is_seen_whole(fake: StandIn, folder: Path) -> None:
    with fake.stream() as stream, loading(folder, shuffle=True, epochs=2) as (loader, data):
        order = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            order += list(loader.sampler)
        loader.set_epoch(0)
        with on_stream(parse_device("cuda:0"), stream):
            kept = [(batch, consume(fake, batch, stream)) for batch in loader]
        fake.synchronize(stream)
        assert torch.equal(torch.cat([seen for _, seen in kept]), data[order])


@scenario(delays_us=(200, 1000))
def every_borrowed_batch_is_seen_whole(fake: StandIn, folder: Path) -> None:
    for ahead in (0, 1, 3):
        (folder / str(ahead)).mkdir()
        options = {"borrow": True, "epochs": 2, "prefetch_batches": ahead}
        with fake.stream() as stream, loading(folder / str(ahead), **options) as (loader, data):
            with on_stream(parse_device("cuda:0"), stream):
                seen = [consume(fake, batch, stream, first=3) for batch in loader]
            fake.synchronize(stream)
            assert torch.equal(torch.cat(seen), torch.cat([data, data]))


@scenario(delays_us=(0, 200))
def a_transform_may_end_its_iterator(fake: StandIn, folder: Path) -> None:
    """Whichever batch it is called with, the one that is asked for or one behind it: `next` says so, and the loader can
    be iterated anew."""
    for at in range(6):
        for ending in ("anew", "state"):
            called: list[int] = []

            def transform(batch: torch.Tensor, called: list[int] = called, ending: str = ending) -> torch.Tensor:
                called.append(1)
                if len(called) == at + 1:  # noqa: B023
                    # What landed goes with its memory, and the stand-in's knows nothing of record_stream.
                    until(lambda: fake.count("in_flight_copies") == 0, "what has landed is copied")
                    iter(loader) if ending == "anew" else loader.load_state_dict(loader.state_dict())
                return batch

            where = folder / f"{at}-{ending}"
            where.mkdir()
            with (
                fake.stream() as stream,
                loading(where, transform=transform, prefetch_batches=4) as (loader, data),
                on_stream(parse_device("cuda:0"), stream),
            ):
                kept = []

                def go_on(loader: ShardLoader[Any] = loader, kept: list[torch.Tensor] = kept) -> None:
                    for batch in loader:
                        kept.append(batch)
                        until(lambda: fake.count("in_flight_copies") == 0, "what is read ahead has landed")

                with pytest.raises(gdsstream.EngineClosedError, match="this iterator was ended"):
                    go_on()
                kept += list(loader)
                seen = [consume(fake, batch, stream) for batch in kept]
                fake.synchronize(stream)
                handed = len(kept) * BATCH - COUNT if ending == "anew" else 0
                assert torch.equal(torch.cat(seen), torch.cat([data[:handed], data]))


@scenario(delays_us=(500,))
def a_consumer_waits_for_its_batch(fake: StandIn, folder: Path) -> None:
    with fake.stream() as stream, loading(folder) as (loader, data):
        with on_stream(parse_device("cuda:0"), stream):
            with fake.paused():
                batches = iter(loader)
                until(lambda: fake.count("in_flight_copies") > 0, "the copies are enqueued")
                batch = next(batches)
                seen = consume(fake, batch, stream)
            fake.synchronize(stream)
        assert torch.equal(seen, data[:BATCH])


@scenario(delays_us=(500,))
def a_buffer_is_filled_again_behind_its_consumer(fake: StandIn, folder: Path) -> None:
    with fake.stream() as stream, loading(folder, borrow=True, prefetch_batches=0) as (loader, data):
        with on_stream(parse_device("cuda:0"), stream):
            batches = iter(loader)
            early = consume(fake, next(batches), stream, first=MANY)
            late = consume(fake, next(batches), stream)
        fake.synchronize(stream)
        assert torch.equal(early, data[:BATCH]), "the next batch came into the buffer while this one was in use"
        assert torch.equal(late, data[BATCH : 2 * BATCH])


@scenario(delays_us=(500,))
def a_buffer_is_filled_again_behind_both_its_streams(fake: StandIn, folder: Path) -> None:
    device = parse_device("cuda:0")
    with (
        fake.stream() as slow,
        fake.stream() as quick,
        loading(folder, borrow=True, prefetch_batches=0) as (loader, data),
    ):
        batches = iter(loader)
        with on_stream(device, slow):
            early = consume(fake, next(batches), slow, first=MANY)
        with on_stream(device, quick):  # asks for the next one
            late = consume(fake, next(batches), quick)
        fake.synchronize(slow)
        fake.synchronize(quick)
        assert torch.equal(early, data[:BATCH])
        assert torch.equal(late, data[BATCH : 2 * BATCH])


@scenario(delays_us=(500,))
def a_transform_waits_for_all_bytes(fake: StandIn, folder: Path) -> None:
    kept: list[torch.Tensor] = []
    options = {"transform": double_of(fake, kept), "batch_size": COUNT, "staging_bytes": 8 << 20}
    with fake.stream() as stream, loading(folder, **options) as (loader, data):
        with on_stream(parse_device("cuda:0"), stream):
            batches = iter(loader)
            with fake.paused():
                batch = next(batches)
            fake.synchronize(stream)
        assert torch.equal(batch, data)


@scenario(delays_us=(500,))
def a_transform_waits_for_its_bytes_and_the_consumer_for_the_transform(fake: StandIn, folder: Path) -> None:
    kept: list[torch.Tensor] = []
    with fake.stream() as stream, loading(folder, transform=double_of(fake, kept, first=5)) as (loader, data):
        with on_stream(parse_device("cuda:0"), stream):
            seen = [consume(fake, batch, stream) for batch in loader]
        fake.synchronize(stream)
        assert torch.equal(torch.cat(seen), data)
        fake.drain()
        assert len(kept) == 2 * COUNT // BATCH


@scenario(delays_us=(500,))
def a_borrowed_buffer_is_filled_again_behind_its_transform(fake: StandIn, folder: Path) -> None:
    """The consumer has no view of the buffer and never waits for the transform."""
    kept: list[torch.Tensor] = []
    transform = double_of(fake, kept, first=MANY)
    options = {"transform": transform, "borrow": True, "prefetch_batches": 0}
    with fake.device(), loading(folder, **options) as (loader, data):
        for _ in zip(range(3), loader, strict=False):
            pass
        fake.drain()
        for number in range(3):
            assert torch.equal(kept[2 * number + 1], data[number * BATCH : (number + 1) * BATCH])


@scenario(delays_us=(500,))
def a_buffer_is_filled_again_behind_the_stream_that_asks_for_the_next(fake: StandIn, folder: Path) -> None:
    device = parse_device("cuda:0")
    with (
        fake.stream() as slow,
        fake.stream() as quick,
        loading(folder, borrow=True, prefetch_batches=0) as (loader, data),
    ):
        batches = iter(loader)
        with on_stream(device, quick):
            batch = next(batches)
            fake.synchronize(quick)
        with on_stream(device, slow):  # a stream that the caller ordered behind the other
            early = consume(fake, batch, slow, first=MANY)
            late = consume(fake, next(batches), slow)
        fake.synchronize(slow)
        assert torch.equal(early, data[:BATCH])
        assert torch.equal(late, data[BATCH : 2 * BATCH])


@scenario(delays_us=(500,))
def transforms_run_beside_the_consumer(fake: StandIn, folder: Path) -> None:
    """Batch 1 is transformed while the consumer's stream is busy with batch 0."""
    kept: list[torch.Tensor] = []
    options = {"transform": double_of(fake, kept), "prefetch_batches": 0}
    with fake.stream() as stream, loading(folder, **options) as (loader, data):
        batches = iter(loader)
        with on_stream(parse_device("cuda:0"), stream):
            early = consume(fake, next(batches), stream, first=20 * MANY)
            late = consume(fake, next(batches), stream)
            until(lambda: torch.equal(kept[3], data[BATCH : 2 * BATCH]), "batch 1 is transformed")
            assert not early.any(), "batch 1 was transformed only after the consumer of batch 0"
        fake.synchronize(stream)
        assert torch.equal(early, data[:BATCH])
        assert torch.equal(late, data[BATCH : 2 * BATCH])


@scenario(delays_us=(500,))
def reads_do_not_wait_for_the_transform_before(fake: StandIn, folder: Path) -> None:
    kept: list[torch.Tensor] = []
    options = {"transform": double_of(fake, kept, first=10 * MANY), "prefetch_batches": 1}
    with fake.stream() as stream, loading(folder, **options) as (loader, data):
        batches = iter(loader)
        with on_stream(parse_device("cuda:0"), stream):
            # The reads of batch 2 are begun when the transform of batch 0 was queued.
            got = [next(batches) for _ in range(3)]
            until(lambda: torch.equal(kept[4], data[2 * BATCH : 3 * BATCH]), "the bytes of batch 2 are there")
            assert not torch.equal(kept[1], data[:BATCH]), "they waited for the transform of batch 0"
            fake.synchronize(stream)
        assert torch.equal(torch.cat(got), data[: 3 * BATCH])
        del batches
        fake.drain()


@scenario(delays_us=(500,))
def the_host_stays_near_the_device(fake: StandIn, folder: Path) -> None:
    """Owned batches are new memory: a host that ran through an epoch ahead of the device would need all of it."""
    kept = []
    with fake.stream() as stream, loading(folder, prefetch_batches=1) as (loader, data):
        with on_stream(parse_device("cuda:0"), stream):
            for batch in loader:
                kept.append((batch, consume(fake, batch, stream, first=MANY)))
                assert fake.count("in_flight_copies") < 5 * (MANY + 1)
        fake.synchronize(stream)
        assert torch.equal(torch.cat([seen for _, seen in kept]), data)


@scenario(delays_us=(500,))
def ragged_batches(fake: StandIn, folder: Path) -> None:
    records = [rows(1 + i % 5, 512, first=100 * i) for i in range(40)]
    write_ragged(folder / "a.safetensors", {"x": records})
    options = {"device": "cuda:0", "num_threads": 2, "staging_bytes": 1 << 20, "chunk_size": 64 << 10}
    for borrow in (False, True):
        with fake.stream() as stream, ShardLoader(folder, 6, borrow=borrow, **options) as loader:
            with on_stream(parse_device("cuda:0"), stream):
                kept = [
                    (batch, consume(fake, batch.values, stream, first=3), batch.offsets.clone()) for batch in loader
                ]
            fake.synchronize(stream)
            assert torch.equal(torch.cat([seen for _, seen, _ in kept]), torch.cat(records))
            lengths = torch.cat([offsets.diff() for _, _, offsets in kept])
            assert lengths.tolist() == [len(record) for record in records]


@scenario(delays_us=(500,))
def batches_in_parts_are_seen_whole(fake: StandIn, folder: Path) -> None:
    """More shards in a batch than may be open: the consumer waits for the copies of all parts."""
    import gdsstream.open_files

    gdsstream.open_files.descriptor_limit = lambda: 1  # type: ignore[assignment]
    with fake.stream() as stream, loading(folder, sampler=[0, 16, 32, 1, 40, 17], batch_size=3) as (loader, data):
        with on_stream(parse_device("cuda:0"), stream):
            kept = [(batch, consume(fake, batch, stream)) for batch in loader]
        fake.synchronize(stream)
        assert torch.equal(torch.cat([seen for _, seen in kept]), data[[0, 16, 32, 1, 40, 17]])


@scenario(delays_us=(500,))
def closing_waits_for_the_last_borrower(fake: StandIn, folder: Path) -> None:
    with fake.stream() as stream:
        with loading(folder, borrow=True) as (loader, data), on_stream(parse_device("cuda:0"), stream):
            batches = iter(loader)
            seen = consume(fake, next(batches), stream, first=MANY)
        assert fake.count("in_flight_copies") == 0, "the buffers are gone, and something still uses them"
        assert torch.equal(seen, data[:BATCH])
        fake.synchronize(stream)


@scenario(delays_us=(2000,))
def stopping_early(fake: StandIn, folder: Path) -> None:
    for number, borrow in enumerate((False, True)):
        (folder / str(number)).mkdir()
        with loading(folder / str(number), borrow=borrow, prefetch_batches=5, faults="delay_us=3000") as (loader, _):
            batches = iter(loader)
            batch = next(batches)
            del batches
            fake.drain()
            del batch


@scenario()
def a_copy_that_fails_belongs_to_its_batch(fake: StandIn, folder: Path) -> None:
    with loading(folder, prefetch_batches=0) as (loader, data):
        batches = iter(loader)
        kept = [next(batches)]
        fake.fail("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS)
        with pytest.raises(gdsstream.CudaError, match="ILLEGAL_ADDRESS"):
            next(batches)
        fake.clear_faults()
        assert loader.state_dict()["position"] == BATCH
        kept += list(batches)
        fake.drain()
        assert torch.equal(torch.cat(kept), torch.cat([data[:BATCH], data[2 * BATCH :]]))


@scenario()
def a_forked_child_is_refused(fake: StandIn, folder: Path) -> None:
    with loading(folder) as (loader, _):
        batches = iter(loader)
        kept = [next(batches)]
        child = os.fork()
        if not child:
            status = 1
            try:
                with pytest.raises(gdsstream.ForkedProcessError, match="does not survive a fork"):
                    iter(loader)
                with pytest.raises(gdsstream.ForkedProcessError, match="belongs to process"):
                    next(batches)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        kept += list(batches)
        assert len(kept) == COUNT // BATCH
        fake.drain()
