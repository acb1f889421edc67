"""What streaming cost, step by step: bytes by tier, stalls by layer and by cause, and the host's own time.

A step is one pass through the declared order. A stall is the time for which the consumer's stream stood still in front
of a layer: measured on the GPU by a pair of events around the wait, read when they are complete; on the CPU it is the
time that the caller was blocked. Causes:

    storage   the layer came from storage, which was slower than the link
    link      the copy to the device was what took long
    slots     no slot was free early enough to read ahead
    order     the layer was used out of the declared order
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from gdsstream import _native

Cause = Literal["storage", "link", "slots", "order"]
Tier = Literal["resident", "host", "storage"]
CAUSES: tuple[Cause, ...] = ("storage", "link", "slots", "order")
# So many waits are read at once: the first costs a thread that slept for a layer ten times what the others do.
_READ_AT_ONCE = 8
# A wait that the scheduler or an event's own granularity explains is no stall.
NOISE_S = 20e-6


@dataclass(slots=True)
class StreamStats:
    """Sums over leases. Bytes are those delivered; seconds are wall time.

    Attributes:
        leases: how many layers were leased; those found in their slot are `hits`, those read are `reads`.
        order_misses: leases out of the declared order.
        resident_bytes, host_bytes, storage_bytes: by where the layer was when it was leased or read.
        stall_s: how long consumers stood still; by cause and by layer below.
        blocked_s: how long the calling thread was blocked, waiting for reads and for copies to be enqueued.
        host_s: the calling thread's time inside the streamer, blocking excluded.
        wall_s: from the first lease to the last one's end.
    """

    leases: int = 0
    hits: int = 0
    reads: int = 0
    order_misses: int = 0
    resident_bytes: int = 0
    host_bytes: int = 0
    storage_bytes: int = 0
    stall_s: float = 0.0
    stall_s_by_cause: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    stall_s_by_layer: dict[int, float] = field(default_factory=dict)
    blocked_s: float = 0.0
    host_s: float = 0.0
    wall_s: float = 0.0

    @property
    def read_bytes(self) -> int:
        """Bytes that were moved to the device."""
        return self.host_bytes + self.storage_bytes

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes moved in a second of wall time; 0 before anything happened."""
        return self.read_bytes / self.wall_s / 1e9 if self.wall_s else 0.0

    def summary(self) -> str:
        """One line."""
        causes = ", ".join(f"{cause} {s * 1e3:.1f}" for cause, s in self.stall_s_by_cause.items() if s > 0)
        host_us = self.host_s / self.leases * 1e6 if self.leases else 0.0
        return (
            f"{self.leases} layers in {self.wall_s * 1e3:.1f} ms: {self.reads} read "
            f"({self.storage_bytes / 1e9:.2f} GB storage, {self.host_bytes / 1e9:.2f} GB host, "
            f"{self.gb_per_s:.1f} GB/s), {self.hits} resident"
            + (f", {self.order_misses} out of order" if self.order_misses else "")
            + f"; stalled {self.stall_s * 1e3:.1f} ms"
            + (f" ({causes})" if causes else "")
            + f"; host {host_us:.0f} us a layer"
        )


@dataclass(slots=True)
class _Wait:
    layer: int
    cause: Cause
    begin: _native.Fence
    end: _native.Fence
    target: StreamStats


class Meter:
    """Collects leases into the statistics of the present step and of everything so far."""

    def __init__(self) -> None:
        self._total = StreamStats()
        self._step = StreamStats()
        self.last_step: StreamStats | None = None
        self._waits: deque[_Wait] = deque()
        self._spare: list[_native.Fence] = []
        self._started: float | None = None
        self._step_started: float | None = None

    def new_step(self) -> None:
        """The order begins anew."""
        now = time.perf_counter()
        if self._step.leases:
            self._step.wall_s = now - (self._step_started or now)
            self.last_step = self._step
        self._step = StreamStats()
        self._step_started = now

    def leased(self, nbytes: int, tier: Tier, *, out_of_order: bool) -> None:
        if self._started is None:
            self._started = time.perf_counter()
        if self._step_started is None:
            self._step_started = self._started
        for stats in (self._total, self._step):
            stats.leases += 1
            stats.order_misses += out_of_order
            if tier == "resident":
                stats.hits += 1
                stats.resident_bytes += nbytes
            else:
                stats.reads += 1
                if tier == "host":
                    stats.host_bytes += nbytes
                else:
                    stats.storage_bytes += nbytes

    def spent(self, host_s: float, blocked_s: float = 0.0) -> None:
        for stats in (self._total, self._step):
            stats.host_s += host_s
            stats.blocked_s += blocked_s

    def stalled(self, layer: int, cause: Cause, seconds: float) -> None:
        """A stall whose length is known."""
        for stats in (self._total, self._step):
            _add_stall(stats, layer, cause, seconds)

    def take_timers(self, make: Callable[[], _native.Fence | None]) -> tuple[_native.Fence, _native.Fence] | None:
        """Two fences for `waited`, used ones where there are any; None without a GPU."""
        if len(self._waits) >= _READ_AT_ONCE:
            self._collect()
        pair = []
        for _ in range(2):
            timer = self._spare.pop() if self._spare else make()
            if timer is None:
                return None
            pair.append(timer)
        return pair[0], pair[1]

    def waited(self, layer: int, cause: Cause, begin: _native.Fence, end: _native.Fence) -> None:
        """A stall between two recorded fences; its length is known when both are complete."""
        self._waits.append(_Wait(layer, cause, begin, end, self._step))

    def total(self) -> StreamStats:
        """Everything so far; waits that the GPU has not reached yet are not in it."""
        self._collect()
        if self._started is not None:
            self._total.wall_s = time.perf_counter() - self._started
        return self._total

    def reset(self) -> None:
        """Forget everything."""
        self._total, self._step, self.last_step = StreamStats(), StreamStats(), None
        self._started = self._step_started = None
        for wait in self._waits:
            wait.target = StreamStats()
        self._waits.clear()

    def _collect(self) -> None:
        while self._waits and self._waits[0].end.done():
            wait = self._waits.popleft()
            elapsed_s = wait.end.elapsed_ms(wait.begin) / 1e3
            self._spare += (wait.begin, wait.end)
            if elapsed_s == elapsed_s:  # not NaN
                _add_stall(self._total, wait.layer, wait.cause, elapsed_s)
                _add_stall(wait.target, wait.layer, wait.cause, elapsed_s)


def _add_stall(stats: StreamStats, layer: int, cause: Cause, seconds: float) -> None:
    if seconds < NOISE_S:
        return
    stats.stall_s += seconds
    stats.stall_s_by_cause[cause] += seconds
    stats.stall_s_by_layer[layer] = stats.stall_s_by_layer.get(layer, 0.0) + seconds


__all__ = ["CAUSES", "NOISE_S", "Cause", "Meter", "StreamStats", "Tier"]
