"""The fences of layer slots: a slot is filled again behind its consumers, and used behind its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpu_route.harness import scenario, until
from gpu_route.stand_in import StandIn
from layer_files import LAYER_BYTES, layer_of, write_layers

from gdsstream.devices import on_stream, parse_device
from gdsstream.layers import LayerStreamer
from gdsstream.lease import Lease

COUNT = 6
NAME = "mlp.up_proj.weight"
# Operations that a stream does before the one that matters: its delays add up.
MANY = 30
# Device memory of the stand-in is host memory: what its streams still use must not be freed.
SOURCE, TARGET = torch.ones(64), torch.zeros(64)


@contextmanager
def streaming(folder: Path, **arguments: object) -> Iterator[tuple[LayerStreamer, dict[str, torch.Tensor]]]:
    tensors = write_layers(folder / "ck", COUNT)
    with LayerStreamer(folder / "ck", device="cuda:0", staging_bytes=4 << 20, **arguments) as streamer:  # type: ignore[arg-type]
        yield streamer, tensors


def consume(fake: StandIn, lease: Lease, stream: int, *, first: int = 0) -> torch.Tensor:
    """What a kernel on `stream` sees of a tensor, `first` other operations later."""
    view = lease[NAME]
    seen = torch.zeros_like(view)
    for _ in range(first):
        fake.copy(TARGET, SOURCE, stream)
    fake.copy(seen, view, stream)
    return seen


@scenario(delays_us=(200, 1000))
def every_layer_is_seen_whole(fake: StandIn, folder: Path) -> None:
    for backend in ("staged", "mapped"):
        with streaming(folder, backend=backend, order="training") as (streamer, tensors), fake.stream() as stream:
            with on_stream(parse_device("cuda:0"), stream):
                seen = [(lease.layer, consume(fake, lease, stream)) for _ in range(2) for lease in streamer]
            fake.synchronize(stream)
            assert [layer for layer, _ in seen] == 2 * [*range(COUNT), *reversed(range(COUNT))]
            assert all(torch.equal(got, layer_of(tensors, layer)[NAME]) for layer, got in seen)


@scenario(delays_us=(500,))
def a_consumer_waits_for_its_layer(fake: StandIn, folder: Path) -> None:
    with streaming(folder) as (streamer, tensors), fake.stream() as stream:
        with on_stream(parse_device("cuda:0"), stream):
            with fake.paused():
                until(lambda: fake.count("in_flight_copies") > 0, "the copies are enqueued")
                with streamer.layer(0) as lease:
                    seen = consume(fake, lease, stream)
            fake.synchronize(stream)
        assert torch.equal(seen, layer_of(tensors, 0)[NAME])


@scenario(delays_us=(500,))
def a_slot_is_filled_again_behind_its_consumer(fake: StandIn, folder: Path) -> None:
    with streaming(folder, num_slots=1) as (streamer, tensors), fake.stream() as stream:
        with on_stream(parse_device("cuda:0"), stream):
            with streamer.layer(0) as lease:
                early = consume(fake, lease, stream, first=MANY)
            with streamer.layer(1) as lease:
                late = consume(fake, lease, stream)
        fake.synchronize(stream)
        assert torch.equal(early, layer_of(tensors, 0)[NAME]), "layer 1 came into the slot while layer 0 was in use"
        assert torch.equal(late, layer_of(tensors, 1)[NAME])


@scenario(delays_us=(500,))
def a_slot_is_filled_again_behind_every_stream_that_used_it(fake: StandIn, folder: Path) -> None:
    device = parse_device("cuda:0")
    with streaming(folder, num_slots=1) as (streamer, tensors), fake.stream() as slow, fake.stream() as quick:
        lease = streamer.layer(0)
        with on_stream(device, slow):
            early = consume(fake, lease, slow, first=MANY)
        with on_stream(device, quick):
            other = consume(fake, lease, quick)
            lease.release()  # by another stream than the slow one
            with streamer.layer(1) as lease:
                late = consume(fake, lease, quick)
        fake.synchronize(slow)
        fake.synchronize(quick)
        for seen, layer in ((early, 0), (other, 0), (late, 1)):
            assert torch.equal(seen, layer_of(tensors, layer)[NAME])


@scenario(delays_us=(500,))
def a_second_lease_counts_for_the_fence(fake: StandIn, folder: Path) -> None:
    """A layer that stayed in its slot is used again without a wait; its second consumer is fenced all the same."""
    with streaming(folder, num_slots=2, order="training") as (streamer, tensors), fake.stream() as stream:
        with on_stream(parse_device("cuda:0"), stream):
            for layer in range(COUNT):
                with streamer.layer(layer) as lease:
                    lease.wait()
            fake.synchronize(stream)
            with streamer.layer(COUNT - 1) as lease:
                early = consume(fake, lease, stream, first=MANY)
            with streamer.layer(COUNT - 2) as lease:
                lease.wait()
            with streamer.layer(COUNT - 3) as lease:  # into the slot of the first
                lease.wait()
            fake.synchronize(stream)
        assert torch.equal(early, layer_of(tensors, COUNT - 1)[NAME])


@scenario(delays_us=(500,))
def a_read_ahead_does_not_wait_for_what_is_computed_now(fake: StandIn, folder: Path) -> None:
    device = parse_device("cuda:0")
    with streaming(folder, num_slots=2) as (streamer, tensors), fake.stream() as slow, fake.stream() as quick:
        with on_stream(device, quick):
            with streamer.layer(0) as lease:
                lease.wait()
            first = streamer.layer(1)
            first.wait()
            fake.synchronize(quick)
        with on_stream(device, slow):
            second = streamer.layer(2)
            seen = consume(fake, second, slow, first=10 * MANY)
            before = streamer.engine_stats()["copied_bytes"]
            # Layer 3 goes into its slot, while layer 2 is in use and the current stream is busy with it.
            first.release()
            until(lambda: streamer.engine_stats()["copied_bytes"] == before + LAYER_BYTES, "layer 3 was enqueued")
            until(lambda: fake.count("in_flight_copies") <= 10 * MANY // 2, "half of the consumer's work was done")
            with on_stream(device, quick), streamer.layer(3) as lease:
                ahead = consume(fake, lease, quick)
                fake.synchronize(quick)
            assert fake.count("in_flight_copies") > 0, "layer 3 came only after the consumer of layer 2"
            second.release()
        fake.synchronize(slow)
        assert torch.equal(seen, layer_of(tensors, 2)[NAME])
        assert torch.equal(ahead, layer_of(tensors, 3)[NAME])


@scenario(delays_us=(500,))
def a_layer_does_not_wait_for_the_slot_of_the_next(fake: StandIn, folder: Path) -> None:
    """The read of layer 2 is submitted, behind a busy consumer, while layer 1 is still being read."""
    device = parse_device("cuda:0")
    arguments = {"num_slots": 2, "num_threads": 1, "faults": "delay_us=150000"}
    with streaming(folder, **arguments) as (streamer, tensors), fake.stream() as slow, fake.stream() as quick:
        with on_stream(device, slow), streamer.layer(0) as lease:
            seen = consume(fake, lease, slow, first=40 * MANY)
        with on_stream(device, quick), streamer.layer(1) as lease:
            meanwhile = consume(fake, lease, quick)
            fake.synchronize(quick)
            assert fake.count("in_flight_copies") > 0, "layer 1 came only after the consumer of layer 0"
        fake.synchronize(slow)
        assert torch.equal(seen, layer_of(tensors, 0)[NAME])
        assert torch.equal(meanwhile, layer_of(tensors, 1)[NAME])


@scenario(delays_us=(500,))
def closing_waits_for_the_last_consumer(fake: StandIn, folder: Path) -> None:
    with fake.stream() as stream:
        with (
            streaming(folder) as (streamer, tensors),
            on_stream(parse_device("cuda:0"), stream),
            streamer.layer(0) as lease,
        ):
            seen = consume(fake, lease, stream, first=MANY)
        assert fake.count("in_flight_copies") == 0, "the slots are gone, and something still uses them"
        assert torch.equal(seen, layer_of(tensors, 0)[NAME])
        fake.synchronize(stream)
