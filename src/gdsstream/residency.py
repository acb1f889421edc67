"""What is read into which slot, and when: the schedule, carried out against what really happens.

The schedule is exact as long as layers are used in the declared order, one after the other. Where the user does
something else (another layer, several leases at once, a read that failed), the plan is made anew from what the slots
hold at that moment. Nothing here waits for the storage or the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gdsstream.engine.base import Transfer
from gdsstream.errors import GdsStreamError, LeaseError
from gdsstream.schedule import Order, Planned, Schedule
from gdsstream.slots import Issued, Slot, SlotRing
from gdsstream.telemetry import Cause, Meter

Experts = frozenset[int] | None


class Reads(Protocol):
    """What carries out a read (`sources.LayerSources`)."""

    def submit(self, layer: int, experts: Experts, memory: torch.Tensor, stream: int | None) -> Transfer: ...
    def nbytes(self, layer: int, experts: Experts = None) -> int: ...
    def in_host_memory(self, layer: int) -> bool: ...


class Residency:
    """The position in an order, and the slots' contents. Its user holds one lock around it."""

    def __init__(self, order: Order, depth: int, ring: SlotRing, reads: Reads, meter: Meter) -> None:
        self.order = order
        self._depth = depth
        self._ring = ring
        self._reads = reads
        self._meter = meter
        self.restart(0)

    def restart(self, step: int, order: Order | None = None) -> None:
        """Plan anew from `step` (of another order), with what the slots hold now."""
        if order is not None:
            self.order = order
        held = [slot.layer if slot.experts is None else None for slot in self._ring.slots]
        # A layer that use out of order left in two slots counts in the first of them only.
        resident = [layer if layer not in held[:index] else None for index, layer in enumerate(held)]
        self._schedule = Schedule(self.order, len(resident), self._depth, start=step, resident=resident)
        self.position = step
        self._issued = step
        self._blocked = False  # whether the next read waits for a slot to be released

    def next_layer(self) -> int | None:
        """What the order says is used next; None at the end of a finite one."""
        try:
            return self.order.layer_at(self.position)
        except IndexError:
            return None

    def step_of(self, layer: int) -> int | None:
        """The next position at which the order uses a layer, or the first where a finite one is past that."""
        step = self.order.next_use(layer, self.position)
        return self.order.next_use(layer, 0) if step is None else step

    def take(self, layer: int, experts: Experts) -> tuple[Slot, Cause | None]:
        """The slot that holds a layer, or is being filled with it from now on, and what a stall would be due to.

        Raises LeaseError when every slot is leased, and what submitting the read raises.
        """
        out_of_order = self.next_layer() != layer
        if out_of_order:
            step = self.step_of(layer)
            if step is None:
                slot = self._make_room(layer, experts)
                self.restart(self.position)
                return slot, self._account(slot, layer, next_to=False, out_of_order=True)
            self.restart(step)
        step = self.position
        if step and step % len(self.order.sequence) == 0:
            self._meter.new_step()
        planned = self._schedule.at(step)
        slot = self._ring.slots[planned.slot]
        if not slot.holds(layer, experts):
            if planned.fetch and not slot.leases:
                self._begin(slot, layer, experts, "asked")
            else:
                slot = self._make_room(layer, experts)
            if experts is not None or slot.index != planned.slot or not planned.fetch:
                self.restart(step)
        self.position = step + 1
        self._issued = max(self._issued, step + 1)
        self._schedule.forget(step)
        next_to = planned.fetch and planned.after == step - 1 and step > 0
        return slot, self._account(slot, layer, next_to=next_to, out_of_order=out_of_order)

    def released(self) -> None:
        """Start what waited for a slot: a lease has ended."""
        self._blocked = False
        self.issue_ahead()

    def issue_ahead(self) -> None:
        """Start every read whose slot is free by now, in the order of use."""
        if self._blocked:
            return
        step = max(self._issued, self.position)
        # Beyond so many uses nothing can be issued: each read ahead takes a slot.
        limit = self.position + 2 * len(self._ring.slots) + 2
        while step < limit:
            try:
                planned = self._schedule.at(step)
            except IndexError:
                break
            if planned.fetch and not self._ring.slots[planned.slot].holds(planned.layer, None):
                if not self._is_free(planned):
                    self._blocked = True
                    break
                try:
                    self._begin(self._ring.slots[planned.slot], planned.layer, None, "ahead")
                except GdsStreamError:
                    break  # raised where the layer is asked for, which tries again
            step += 1
        self._issued = step

    def _is_free(self, planned: Planned) -> bool:
        return planned.after < self.position and not self._ring.slots[planned.slot].leases

    def _make_room(self, layer: int, experts: Experts) -> Slot:
        """A slot that holds the layer, or the unleased one whose layer is needed last, being filled from now on."""
        slots = self._ring.slots
        for slot in slots:
            if slot.holds(layer, experts):
                return slot
        spare = [slot for slot in slots if not slot.leases]
        if not spare:
            held = ", ".join(str(slot.layer) for slot in slots)
            raise LeaseError(
                f"layer {layer} cannot be leased: all {len(slots)} slot(s) are (layers {held}); release one first, or "
                "raise num_slots"
            )

        def next_use(slot: Slot) -> float:
            step = None if slot.layer is None else self.order.next_use(slot.layer, self.position + 1)
            return float("inf") if step is None else step

        slot = max(spare, key=next_use)
        self._begin(slot, layer, experts, "asked")
        return slot

    def _begin(self, slot: Slot, layer: int, experts: Experts, issued: Issued) -> None:
        submit: Callable[[torch.Tensor, int | None], Transfer] = lambda memory, stream: self._reads.submit(  # noqa: E731
            layer, experts, memory, stream
        )
        self._ring.begin(slot, layer, experts, issued, submit)

    def _account(self, slot: Slot, layer: int, *, next_to: bool, out_of_order: bool) -> Cause | None:
        """Count a lease. None for a layer that cannot stall its user; `next_to`: its slot was in use just before."""
        nbytes = self._reads.nbytes(layer, slot.experts)
        issued, slot.issued = slot.issued, None
        if issued is None:
            self._meter.leased(nbytes, "resident", out_of_order=out_of_order)
            return None
        host = self._reads.in_host_memory(layer)
        self._meter.leased(nbytes, "host" if host else "storage", out_of_order=out_of_order)
        if out_of_order:
            return "order"
        if issued == "asked" or next_to:
            return "slots"
        return "link" if host else "storage"


__all__ = ["Reads", "Residency"]
