"""Paced reads run on the CPU that takes the interrupts of their disk, where they are large and the GPU copies them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_route.harness import KIB, MIB, reader_tasks, scenario, until, write_random
from gpu_route.plans import one_buffer
from gpu_route.stand_in import StandIn
from support import evict, need_direct, need_uring, source_of

import gdsstream
from gdsstream import virtual_disks
from gdsstream.engine import Engine, native

NBYTES = 32 * MIB
STRIDE = 32 * KIB


class Disk:
    """A file on what passes for a virtual disk with a single queue, whose interrupts come to `cpu`."""

    def __init__(self, fake: StandIn, folder: Path) -> None:
        need_uring()
        need_direct(folder)
        self.cpus = os.sched_getaffinity(0)
        if len(self.cpus) < 2:
            pytest.skip("there is one CPU only")
        self.cpu = max(self.cpus)
        virtual_disks.single_queue_requests = lambda: 256
        virtual_disks.interrupt_cpu = lambda device: self.cpu
        self.fake = fake
        self.path = folder / "data"
        self.data = write_random(self.path, NBYTES)
        evict(self.path)  # or threads of the kernel's read in the readers' stead

    def open(self, device: str = "cuda:0", **knobs: Any) -> Engine:
        # Slow enough for a pace to be found in a small file.
        return gdsstream.open_engine("staged", device=device, direct_io=True, faults="delay_us=300", **knobs)

    def read(self, engine: Engine, nbytes: int = STRIDE) -> list[set[int]]:
        """As much of every 32 KiB, which all of it is one large read after another; where each reader may run that took
        part."""
        out = torch.zeros(NBYTES // STRIDE * nbytes, dtype=torch.uint8)
        offsets = range(0, NBYTES, STRIDE)
        extents = [(0, NBYTES, 0)] if nbytes == STRIDE else [(at, nbytes, 0) for at in offsets]
        before = read_by_thread()
        engine.submit([source_of(self.path)], one_buffer(extents), [out]).wait()
        self.fake.drain()
        assert torch.equal(out, self.data.view(-1, STRIDE)[:, :nbytes].reshape(-1))
        after = read_by_thread()
        assert sum(after.values()) - sum(before.values()) == len(out), "reads were made by another thread"
        return [os.sched_getaffinity(task) for task in after if after[task] > before.get(task, 0)]


def read_by_thread() -> dict[int, int]:
    """What each reader thread has read from disks."""
    found = {}
    for task in reader_tasks():
        counts = dict(line.split(": ") for line in Path(f"/proc/self/task/{task}/io").read_text().splitlines())
        found[task] = int(counts["read_bytes"])
    return found


@scenario()
def large_paced_reads_run_where_the_interrupts_come(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    alone, all_of_them = [{disk.cpu}], [disk.cpus, disk.cpus]
    with disk.open() as engine:
        for nbytes, readers in (
            (STRIDE, alone),
            (4 * KIB, all_of_them),
            (16 * KIB, alone),
            (12 * KIB, all_of_them),
            (STRIDE, alone),
        ):
            assert disk.read(engine, nbytes) == readers, nbytes


@scenario()
def other_reads_run_anywhere(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    anywhere = [disk.cpus, disk.cpus]
    with disk.open("cpu") as engine:
        assert disk.read(engine) == anywhere, "threads that copy"
    with disk.open(numa=False) as engine:
        assert disk.read(engine) == anywhere, "not wanted"
    with disk.open(io_depth=64, direct_threads=2) as engine:
        assert disk.read(engine) == anywhere, "a depth that was asked for"
    virtual_disks.interrupt_cpu = lambda device: -1
    with disk.open() as engine:
        assert disk.read(engine) == anywhere, "unknown"


@scenario()
def readers_of_a_gpu_on_another_node_stay_there(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    native.node_cpus = lambda node: [min(disk.cpus)]
    with disk.open() as engine:
        assert disk.read(engine) == [{min(disk.cpus)}]


@scenario()
def a_cpu_that_is_not_there_is_left_alone(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    for cpu in (1023, 1024, 1 << 30):
        virtual_disks.interrupt_cpu = lambda device, cpu=cpu: cpu
        with disk.open() as engine:
            assert disk.read(engine) == [disk.cpus]


@scenario(delays_us=(0, 2000))
def a_queue_of_large_and_small_reads_arrives(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    with disk.open() as engine:
        transfers, outs = [], []
        for turn in range(24):
            # Every other one is for the first reader alone, and every fourth has both kinds.
            size = (256 * KIB, 4 * KIB)[turn % 2]
            at = turn * MIB
            extents = [(at + i * 2 * size, size, 0) for i in range(MIB // size // 2)]
            if turn % 4 == 3:
                extents.append((at, MIB, 0))
            outs.append((extents, torch.zeros(sum(nbytes for _, nbytes, _ in extents), dtype=torch.uint8)))
            transfers.append(engine.submit([source_of(disk.path)], one_buffer(extents), [outs[-1][1]]))
        for transfer in transfers:
            transfer.wait()
        fake.drain()
        for extents, out in outs:
            assert torch.equal(out, torch.cat([disk.data[at : at + nbytes] for at, nbytes, _ in extents]))


@scenario(delays_us=(0, 2000))
def closed_while_one_reader_has_a_queue(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    for queued in (1, 2, 40):
        engine = disk.open()
        plan = one_buffer([(0, MIB, 0)])
        outs = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(queued)]
        transfers = [engine.submit([source_of(disk.path)], plan, [out]) for out in outs]
        engine.close()
        fake.drain()
        failures = []
        for transfer, out in zip(transfers, outs, strict=True):
            try:
                transfer.wait()
            except gdsstream.GdsStreamError as error:
                failures.append(str(error))
            else:
                assert torch.equal(out, disk.data[:MIB])
        assert all("closed" in failure for failure in failures)
        assert len(failures) > queued // 2 or queued < 40, "the queue was empty when it closed"


@scenario()
def closed_while_one_reader_waits_for_a_slot(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    engine = disk.open(chunk_size=64 * KIB, staging_bytes=64 * KIB)
    outs = [torch.zeros(64 * KIB, dtype=torch.uint8) for _ in range(2)]
    with fake.paused():
        held = engine.submit([source_of(disk.path)], one_buffer([(0, 64 * KIB, 0)]), [outs[0]])
        until(held.done, "the first task has landed")
        waits = engine.submit([source_of(disk.path)], one_buffer([(64 * KIB, 64 * KIB, 0)]), [outs[1]])
        until(lambda: engine.stats()["staging_slots_held"] == 1, "the slot is waited for")
        time.sleep(0.05)
        closing = threading.Thread(target=engine.close)
        closing.start()
        until(waits.done, "it has failed")
    closing.join()
    with pytest.raises(gdsstream.GdsStreamError, match="closed"):
        waits.wait()
    fake.drain()
    assert torch.equal(outs[0], disk.data[: 64 * KIB])
