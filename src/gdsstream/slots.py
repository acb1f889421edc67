"""A ring of device buffers for layers: each with a state, a generation, and fences between its readers and its reuse.

    FREE -> READING -> READY <-> LEASED
      |        ^         |
      |        +---------+   a new read, behind the fences of the last lease
      +--- a read that failed

Everything is allocated here, once. A read into a slot is submitted "behind" the fence stream, which has been made to
wait for the slot's own fences and for nothing else: were it the caller's stream, a prefetch would wait for all compute
queued so far. Nothing here waits on the host for the GPU, but `close`, and a read into a slot whose last read nobody
waited for.

Not thread-safe: its user (LayerStreamer) holds one lock around it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

import torch

from gdsstream import _native
from gdsstream.devices import allocate, current_stream, driver_replaced, on_stream
from gdsstream.dtypes import torch_dtype
from gdsstream.engine.base import Transfer
from gdsstream.errors import MemoryBudgetError
from gdsstream.layout import LayerLayout
from gdsstream.plan import Placement

# Not a number in every float format, and an index out of every range: what still uses a released slot shows it.
POISON = 0xFF
_POLL_S = 0.0005


# How the read of a generation was issued, until the first lease of it: ahead of its use, or when it was asked for.
Issued: TypeAlias = Literal["ahead", "asked"] | None


class SlotState(Enum):
    """What a slot is doing; see the module's drawing."""

    FREE = "free"
    READING = "reading"
    READY = "ready"
    LEASED = "leased"


@dataclass(eq=False)
class Slot:
    """One buffer. `layer` is what it holds or is being filled with; `experts` is the subset of it, None for all."""

    index: int
    memory: torch.Tensor
    address: int
    layer: int | None = None
    experts: frozenset[int] | None = None
    generation: int = 0
    leases: int = 0
    transfer: Transfer | None = None
    streams: set[int] = field(default_factory=set)  # that used it since the last fence
    ordered: set[tuple[int, int | None]] = field(default_factory=set)  # (stream, group) that this generation waited for
    fences: dict[int, _native.Fence] = field(default_factory=dict)  # by stream, recorded when the last lease ended
    pending: list[_native.Fence] = field(default_factory=list)  # to be passed before the next read
    issued: Issued = None
    # The leases that somebody has, by their ids.
    holders: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    baseline_use_count: int = 0  # what `use_count` is when nobody else has views
    _views: dict[tuple[Placement, ...], dict[str, torch.Tensor]] = field(default_factory=dict)
    _views_of_layer: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    _typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.baseline_use_count = self.use_count()

    @property
    def state(self) -> SlotState:
        if self.leases:
            return SlotState.LEASED
        if self.layer is None or self.transfer is None:
            return SlotState.FREE
        return SlotState.READY if self.transfer.done() else SlotState.READING

    def holds(self, layer: int, experts: frozenset[int] | None) -> bool:
        """Whether everything that is asked for is, or will be, in it."""
        if self.layer != layer:
            return False
        return self.experts is None or (experts is not None and experts <= self.experts)

    def views_of(self, layout: LayerLayout) -> dict[str, torch.Tensor]:
        """A layer's tensors in this slot; made once for all layers that are laid out alike."""
        views = self._views_of_layer.get(layout.index)
        if views is not None:
            return views
        views = self._views.get(layout.signature)
        if views is None:
            before = self.use_count()
            views = {name: _view(self.memory, placement) for name, placement in layout.placements.items()}
            self._views[layout.signature] = views
            self.baseline_use_count += self.use_count() - before
        self._views_of_layer[layout.index] = views  # a signature is long to hash
        return views

    def typed_memory(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole slot as one flat tensor of a dtype."""
        if dtype not in self._typed:
            before = self.use_count()
            self._typed[dtype] = self.memory.view(dtype)
            self.baseline_use_count += self.use_count() - before
        return self._typed[dtype]

    def drop(self) -> None:
        """Let go of the memory. Leases that are held on to are no longer valid, and do not keep it."""
        self.generation += 1
        self.transfer = None
        for views in self._views.values():
            views.clear()
        self._views_of_layer.clear()
        self._typed.clear()
        self.memory = self.memory.new_empty(0)

    def use_count(self) -> int:
        """How many tensors (and handles of the storage) share the memory now."""
        return int(torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata))


class SlotRing:
    """`count` slots of `slot_bytes` bytes each on one device. Raises MemoryBudgetError that says how many fit."""

    def __init__(self, count: int, slot_bytes: int, device: torch.device, *, debug: bool = False) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self._debug = debug
        self._fence_stream = _native.FenceStream(device.index) if device.type == "cuda" else None
        self.slots: list[Slot] = []
        for index in range(count):
            try:
                memory = allocate((slot_bytes,), torch.uint8, device)
            except MemoryBudgetError as error:
                self.slots.clear()
                raise MemoryBudgetError(
                    f"{index} of {count} slots of {slot_bytes} bytes fit on {device}; "
                    f"use num_slots={max(index, 1)}{'' if index else ' and smaller layers'}, or free device memory "
                    f"first ({error})"
                ) from error
            self.slots.append(Slot(index, memory, memory.data_ptr()))
        if self._fence_stream is not None:
            # The memory may still be in use by what was queued on this stream before it was ours.
            allocated = _native.Fence(self._fence_stream)
            allocated.record(current_stream(device))
            for slot in self.slots:
                slot.pending.append(allocated)

    def begin(
        self,
        slot: Slot,
        layer: int,
        experts: frozenset[int] | None,
        issued: Issued,
        submit: Callable[[torch.Tensor, int | None], Transfer],
    ) -> None:
        """Start a new generation: `submit(memory, stream)` has to start the read, behind `stream` (None on the CPU).

        Whatever `submit` raises leaves the slot free.
        """
        assert slot.leases == 0, "a leased slot was to be overwritten"
        self._settle(slot)
        slot.layer = None
        slot.generation += 1
        slot.ordered.clear()
        if self._fence_stream is None:
            stream = None
        else:
            stream = self._fence_stream.handle
            for fence in slot.pending:
                fence.order(stream)
        slot.pending.clear()
        if self._debug:
            self._poison(slot)
        slot.transfer = submit(slot.memory, stream)
        slot.layer, slot.experts, slot.issued = layer, experts, issued

    def fail(self, slot: Slot) -> None:
        """What was read into it is no good: nobody may count on it any more."""
        slot.layer = None

    def forget(self, slot: Slot) -> None:
        """What an unleased slot holds is not known any more, and nothing that was submitted writes to it."""
        self._settle(slot)
        slot.layer = None
        self.fence(slot)

    def lease(self, slot: Slot) -> None:
        slot.leases += 1

    def reclaim(self) -> bool:
        """End leases that nobody has any more; whether there were any."""
        lost = [slot for slot in self.slots if slot.leases > len(slot.holders)]
        for slot in lost:
            slot.leases = len(slot.holders)
            self.fence(slot)
        return bool(lost)

    def release(self, slot: Slot) -> None:
        """The end of one lease. With the last, a fence is recorded on every stream that used the slot."""
        slot.leases -= 1
        self.fence(slot)

    def fence(self, slot: Slot) -> None:
        """Put a fence behind every stream that used an unleased slot. Can be repeated."""
        if slot.leases or self._fence_stream is None:
            return
        for stream in slot.streams:
            fence = slot.fences.get(stream)
            if fence is None:
                fence = slot.fences[stream] = _native.Fence(self._fence_stream)
            fence.record(stream)
            if fence not in slot.pending:
                slot.pending.append(fence)
        slot.streams.clear()

    def timer(self) -> _native.Fence | None:
        """A fence with timing, or None on the CPU."""
        return None if self._fence_stream is None else _native.Fence(self._fence_stream, timing=True)

    def close(self) -> None:
        """Give the memory back once no stream uses it any more. The engine has to be closed before."""
        for slot in self.slots:
            for fence in slot.pending:
                while not fence.done():
                    time.sleep(_POLL_S)
        for slot in self.slots:
            slot.drop()
        self.slots.clear()

    def _settle(self, slot: Slot) -> None:
        previous = slot.transfer
        whole = any(group is None for _, group in slot.ordered)
        if previous is not None and not whole:
            # A prediction that came out wrong, a read that failed, or groups that nobody waited for: no fence stands
            # behind its copies.
            previous.cancel()
            while not previous.drained():
                time.sleep(_POLL_S)
        slot.transfer = None

    def _poison(self, slot: Slot) -> None:
        if self._fence_stream is None or driver_replaced():
            slot.memory.fill_(POISON)
        else:
            with on_stream(self.device, self._fence_stream.handle):
                slot.memory.fill_(POISON)


def _view(memory: torch.Tensor, placement: Placement) -> torch.Tensor:
    part = memory[placement.offset : placement.offset + placement.nbytes]
    return part.view(torch_dtype(placement.dtype)).view(placement.shape)


__all__ = ["POISON", "Issued", "Slot", "SlotRing", "SlotState"]
