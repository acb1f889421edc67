"""Paced reads run on the CPU that takes the interrupts of their disk, where they are large and the GPU copies them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_route.harness import KIB, MIB, scenario, write_random
from gpu_route.plans import one_buffer
from gpu_route.stand_in import StandIn
from support import need_direct, need_uring, source_of

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

    def open(self, device: str = "cuda:0", **knobs: Any) -> Engine:
        # Slow enough for a pace to be found in a small file.
        return gdsstream.open_engine("staged", device=device, direct_io=True, faults="delay_us=300", **knobs)

    def read(self, engine: Engine, nbytes: int = STRIDE) -> set[frozenset[int]]:
        """As much of every 32 KiB, which all of it is one read after another; where the readers may run then."""
        out = torch.zeros(NBYTES // STRIDE * nbytes, dtype=torch.uint8)
        offsets = range(0, NBYTES, STRIDE)
        extents = [(0, NBYTES, 0)] if nbytes == STRIDE else [(at, nbytes, 0) for at in offsets]
        engine.submit([source_of(self.path)], one_buffer(extents), [out]).wait()
        self.fake.drain()
        assert torch.equal(out, self.data.view(-1, STRIDE)[:, :nbytes].reshape(-1))
        return readers()


def readers() -> set[frozenset[int]]:
    """Where each reader thread may run, each set once."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        if Path(f"/proc/self/task/{task}/comm").read_text().strip() == "gdsstream":
            found.add(frozenset(os.sched_getaffinity(int(task))))
    return found


@scenario()
def large_paced_reads_run_where_the_interrupts_come(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    with disk.open() as engine:
        for nbytes, cpus in (
            (STRIDE, {disk.cpu}),
            (4 * KIB, disk.cpus),
            (16 * KIB, {disk.cpu}),
            (12 * KIB, disk.cpus),
            (STRIDE, {disk.cpu}),
        ):
            assert disk.read(engine, nbytes) == {frozenset(cpus)}, nbytes


@scenario()
def other_reads_run_anywhere(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    anywhere = {frozenset(disk.cpus)}
    with disk.open("cpu") as engine:
        assert disk.read(engine) == anywhere, "threads that copy"
    with disk.open(numa=False) as engine:
        assert disk.read(engine) == anywhere, "not wanted"
    with disk.open(io_depth=64) as engine:
        assert disk.read(engine) == anywhere, "a depth that was asked for"
    virtual_disks.interrupt_cpu = lambda device: -1
    with disk.open() as engine:
        assert disk.read(engine) == anywhere, "unknown"


@scenario()
def readers_of_a_gpu_on_another_node_stay_there(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    native.node_cpus = lambda node: [min(disk.cpus)]
    with disk.open() as engine:
        assert disk.read(engine) == {frozenset({min(disk.cpus)})}


@scenario()
def a_cpu_that_is_not_there_is_left_alone(fake: StandIn, folder: Path) -> None:
    disk = Disk(fake, folder)
    for cpu in (1023, 1024, 1 << 30):
        virtual_disks.interrupt_cpu = lambda device, cpu=cpu: cpu
        with disk.open() as engine:
            assert disk.read(engine) == {frozenset(disk.cpus)}
