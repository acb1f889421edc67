"""LayerStreamer: the layers of a checkpoint, one after the other, in a few slots of device memory.

The order of use is declared, and the schedule says exactly what to read into which slot and when. Reads are issued as
soon as the slot's last lease has ended, so that one layer is under way while another is computed with. A layer is used
through a lease: views into its slot, valid until the lease is released.

Use out of the declared order works: the streamer counts it, reads what is missing, and goes on from there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from gdsstream.checkpoint import Checkpoint
from gdsstream.config import StreamConfig
from gdsstream.devices import parse_device
from gdsstream.engine import merge
from gdsstream.engine.base import Transfer, check_process
from gdsstream.errors import ConfigError, EngineClosedError, GdsStreamError, LeaseError
from gdsstream.layout import Fuse, LayerLayout, Layers, layer_layouts
from gdsstream.lease import Lease
from gdsstream.makespan import choose_host_layers
from gdsstream.mending import Mending, Unsettled
from gdsstream.plan import ALIGNMENT_BYTES, Placement
from gdsstream.residency import Residency
from gdsstream.schedule import Order
from gdsstream.slots import Slot, SlotRing
from gdsstream.sources import LayerSources
from gdsstream.telemetry import NOISE_S, Cause, Meter, StreamStats

# What the host tier is chosen by before anything was measured: only the ratio matters.
_ASSUMED_HOST_BYTES_PER_S = 50e9
_ASSUMED_STORAGE_BYTES_PER_S = 5e9


class LayerStreamer:
    """Stream a checkpoint's layers through a few slots of device memory.

    Args:
        checkpoint: a file, an index, a directory or a list of files (as for load_file), or a Checkpoint.
        layers: a pattern with "{i}", such as "model.layers.{i}."; None finds it. Or names for each layer number.
        device: "cuda", "cuda:1", a CUDA ordinal, or "cpu".
        num_slots: how many layers fit on the device at once; 2 is double buffering.
        host_cache_bytes: how many bytes of layers to keep in host memory, registered, read at the link's limit. The
            layers are chosen by what the order gains most from. backend="mapped" keeps all of them.
        order: "forward" (0 to n-1, again and again), "training" (0 to n-1, then n-1 to 0), or an Order.
        groups: patterns (fnmatch) of names inside a layer; each becomes usable on its own, in this order.
        fuse: "auto" stacks per-expert matrices into fused tensors; see layout.layer_layouts.
        prefetch_depth: how many uses ahead a read can at least be under way; None for half of the slots.
        debug: fill slots with 0xFF before they are read into again, so that use of a released lease shows.
        config, **knobs: see StreamConfig.

    Raises CheckpointError and its kinds, ConfigError, MemoryBudgetError (which says how many slots fit), ReadError.
    Everything is allocated and registered here; nothing is in the loop. Threads may share a streamer.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Checkpoint,
        *,
        layers: Layers = None,
        device: torch.device | str | int = "cuda",
        num_slots: int = 2,
        host_cache_bytes: int | None = None,
        order: Order | str = "forward",
        groups: Sequence[str] = (),
        fuse: Fuse = None,
        prefetch_depth: int | None = None,
        debug: bool = False,
        config: StreamConfig | None = None,
        **knobs: Any,
    ) -> None:
        if not isinstance(num_slots, int) or isinstance(num_slots, bool) or num_slots < 1:
            raise ConfigError(f"num_slots is {num_slots!r}; it has to be a whole number, at least 1")
        if prefetch_depth is not None and (not isinstance(prefetch_depth, int) or prefetch_depth < 0):
            raise ConfigError(f"prefetch_depth is {prefetch_depth!r}; it is a whole number or None")
        self.device = parse_device(device)
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
        self.pattern, self._layouts = layer_layouts(self.checkpoint, layers, groups=groups, fuse=fuse)
        first = self.checkpoint.files[0].path
        settings = merge(config, {**knobs, "host_cache_bytes": host_cache_bytes}, path=first, device=self.device)
        self.num_slots = num_slots
        self._depth = num_slots // 2 if prefetch_depth is None else prefetch_depth
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()
        self._meter = Meter()
        self._ring_wait_us = 0
        # For those who keep every lease until its end: one that an interrupt took on its way to them is ended, where
        # LeaseError would be raised. What others dropped may be in use by its tensors.
        self.reclaims_lost_leases = False
        declared = self._check_order(order)
        self._ring = SlotRing(num_slots, self.slot_bytes, self.device, debug=debug)
        self._sources = LayerSources(self.checkpoint, self._layouts, self.device, settings)
        try:
            self._sources.keep_in_host_memory(self._choose_host_layers(declared))
            self._residency = Residency(declared, self._depth, self._ring, self._sources, self._meter)
            self._mending = Mending(self._ring, self._residency, self._sources.engine)
            self._residency.issue_ahead()
        except BaseException:
            self.close()
            raise

    @property
    def num_layers(self) -> int:
        return len(self._layouts)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest layer's."""
        largest = max(layout.nbytes for layout in self._layouts)
        return max(-(-largest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, ALIGNMENT_BYTES)

    @property
    def host_layers(self) -> tuple[int, ...]:
        """The layers that are kept in host memory."""
        return self._sources.host_layers

    @property
    def route(self) -> str:
        """What moved the bytes so far, as the engine reports it."""
        return self._sources.engine.route

    def names(self, layer: int) -> tuple[str, ...]:
        """The tensors of a layer, by the names they have inside it."""
        return tuple(self._layout(layer).placements)

    def placement(self, layer: int, name: str) -> Placement:
        """Dtype, shape and place of a tensor in its layer's slot. Raises KeyError."""
        return self._layout(layer).placements[name]

    def num_groups(self, layer: int) -> int:
        """How many parts of the layer can be waited for on their own."""
        return self._layout(layer).plan.num_groups

    def layer(self, layer: int, *, experts: Iterable[int] | None = None) -> Lease:
        """Lease a layer: at once, without waiting for its bytes; looking a tensor up waits.

        `experts` reads only those experts, where the routing is known; the memory of the others is undefined.

        Raises LeaseError when every slot is leased (it never waits for another thread), ConfigError for a layer or an
        expert that does not exist, and what submitting the read raises: ReadError and its kinds.
        """
        started = time.perf_counter()
        layout = self._layout(layer)
        chosen = None if experts is None else frozenset(experts)
        undo: Unsettled | None = None
        try:
            with self._lock:
                self._check_usable()
                self._mending.mend()
                slot = next((s for s in self._ring.slots if s.leases and s.holds(layer, chosen)), None)
                cause: Cause | None = None
                if slot is None:
                    slot, cause = self._take(layer, chosen)
                undo = Unsettled(slot, slot.leases)
                self._ring.lease(slot)
                lease = Lease(self, slot, layout, cause)
                slot.holders[id(lease)] = lease
                self._residency.issue_ahead()
                self._meter.spent(time.perf_counter() - started)
                return lease
        except GdsStreamError:
            raise
        except BaseException:
            self._mending.note(undo)
            raise

    def prefetch(self, layer: int) -> None:
        """Say that `layer` is used next; its read starts as soon as a slot is free for it."""
        self._layout(layer)
        with self._lock:
            self._check_usable()
            step = self._residency.step_of(layer)
            self._plan_from(self._residency.position if step is None else step)

    def seek(self, step: int) -> None:
        """Go on from position `step` of the declared order."""
        if step < 0 or (not self.order.cyclic and step > len(self.order.sequence)):
            raise ConfigError(f"step {step} is not in the order, which has {len(self.order.sequence)} uses")
        with self._lock:
            self._check_usable()
            self._plan_from(step)

    def set_order(self, order: Order | str) -> None:
        """Declare another order and begin it at its first use. What the slots hold stays."""
        declared = self._check_order(order)
        with self._lock:
            self._check_usable()
            self._plan_from(0, declared)

    @property
    def order(self) -> Order:
        """The declared order."""
        return self._residency.order

    def __iter__(self) -> Iterator[Lease]:
        """Leases of one pass through the order (of what is left of a finite one); asking for the next ends the last."""
        for _ in range(len(self.order.sequence)):
            layer = self._residency.next_layer()
            if layer is None:
                return
            with self.layer(layer) as lease:
                yield lease

    def stats(self) -> StreamStats:
        """Everything since the streamer was opened, or since `reset_stats`."""
        with self._lock:
            return self._meter.total()

    @property
    def last_step(self) -> StreamStats | None:
        """The last complete pass through the order; its stalls are complete once the GPU has passed them."""
        with self._lock:
            self._meter.total()
            return self._meter.last_step

    def reset_stats(self) -> None:
        with self._lock:
            self._meter.reset()

    def engine_stats(self) -> dict[str, int | float]:
        """The engine's own counters."""
        return self._sources.engine.stats()

    def close(self) -> None:
        """Give up slots, host tier and engine, once nothing uses them any more. Leases end. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            sources = getattr(self, "_sources", None)
            if sources is not None:
                sources.close()
            self._ring.close()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- for leases

    def wait_for(
        self, slot: Slot, transfer: Transfer, group: int | None, stream: int, cause: Cause | None, layer: int
    ) -> None:
        started = time.perf_counter()
        timers = None if cause is None else self._meter.take_timers(self._ring.timer)
        if timers is not None:
            timers[0].record(stream)
        waiting = time.perf_counter()
        try:
            transfer.wait(group)
        except GdsStreamError as error:
            with self._lock:
                if slot.transfer is transfer:
                    self._ring.fail(slot)
            error.add_note(f"while layer {layer} ({self._layouts[layer].prefix or 'by names'}) was read into a slot")
            raise
        blocked = time.perf_counter() - waiting
        with self._lock:
            if cause == "storage" and blocked > NOISE_S and self._link_bound(blocked):
                cause = "link"
            if timers is not None and cause is not None:
                timers[1].record(stream)
                self._meter.waited(layer, cause, *timers)
            elif cause is not None and self.device.type == "cpu":
                self._meter.stalled(layer, cause, blocked)
            self._meter.spent(time.perf_counter() - started - blocked, blocked)

    def release(self, lease: Lease) -> None:
        started = time.perf_counter()
        with self._lock:
            if self._closed:
                lease.released = True
            if lease.released:
                return
            redo: Unsettled | None = None
            try:
                self._mending.mend()
                if lease.released:
                    return
                redo = Unsettled(lease.held, lease.held.leases - 1, lease)
                lease.released = True
                lease.held.holders.pop(id(lease), None)
                self._ring.release(lease.held)
                self._residency.released()
                self._meter.spent(time.perf_counter() - started)
            except BaseException:
                self._mending.note(redo)
                raise

    def _take(self, layer: int, experts: frozenset[int] | None) -> tuple[Slot, Cause | None]:
        try:
            return self._residency.take(layer, experts)
        except LeaseError:
            if not (self.reclaims_lost_leases and self._ring.reclaim()):
                raise
            return self._residency.take(layer, experts)

    def _plan_from(self, step: int, order: Order | None = None) -> None:
        try:
            self._mending.mend()
            if order is not None or step != self._residency.position:
                self._residency.restart(step, order)
            self._residency.issue_ahead()
        except BaseException:
            self._mending.note(None)
            raise

    def _link_bound(self, blocked_s: float) -> bool:
        """Whether readers waited for staging slots, and so for the link, for most of the time that we were blocked."""
        waited = self._sources.engine.ring_wait_us()
        waited, self._ring_wait_us = waited - self._ring_wait_us, waited
        return waited > 0.5e6 * blocked_s and waited > 0

    def _choose_host_layers(self, order: Order) -> Sequence[int]:
        budget = self._sources.host_budget_bytes
        if not budget:
            return ()
        sizes = [layout.plan.total_bytes for layout in self._layouts]
        if sum(sizes) <= budget:
            return range(self.num_layers)
        return choose_host_layers(
            order,
            self.num_slots,
            sizes,
            budget,
            host_bytes_per_s=_ASSUMED_HOST_BYTES_PER_S,
            storage_bytes_per_s=_ASSUMED_STORAGE_BYTES_PER_S,
            prefetch_depth=self._depth,
        )

    def _layout(self, layer: int) -> LayerLayout:
        if not isinstance(layer, int) or not 0 <= layer < len(self._layouts):
            raise ConfigError(
                f"there is no layer {layer!r}; {self.checkpoint.path} has layers 0 to {self.num_layers - 1}"
            )
        return self._layouts[layer]

    def _check_order(self, order: Order | str) -> Order:
        if isinstance(order, str):
            if order not in ("forward", "training"):
                raise ConfigError(f'order is {order!r}; it is "forward", "training" or an Order')
            return Order.forward(self.num_layers) if order == "forward" else Order.training(self.num_layers)
        if order.num_layers > self.num_layers:
            raise ConfigError(
                f"the order uses layer {order.num_layers - 1}; {self.checkpoint.path} has layers 0 to "
                f"{self.num_layers - 1}"
            )
        return order

    def _check_usable(self) -> None:
        check_process(self._pid, "layer streamer")
        if self._closed:
            raise EngineClosedError("the layer streamer was closed; open a new one")


__all__ = ["LayerStreamer", "Lease"]
