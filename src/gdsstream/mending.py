"""Going on behind an interrupt (Ctrl-C) that came anywhere in a change of a streamer's slots and leases.

An interrupt can end a change between any two steps: a lease counted that nobody got, a release not yet counted, a read
submitted into a slot that is nobody's. What was changed is not undone on the way out, where the next Ctrl-C would come;
the change is noted, in as few steps as there can be, and the next call mends it before it does its own.

Each step of `mend` can be done again, so that an interrupt may end that as well.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from gdsstream.engine.base import Engine
from gdsstream.lease import Lease
from gdsstream.residency import Residency
from gdsstream.slots import Slot, SlotRing

_POLL_S = 0.0005


class Unsettled(NamedTuple):
    """What a slot's leases have to count behind a change that was interrupted, and the lease that it was to end."""

    slot: Slot
    leases: int
    ending: Lease | None = None


class Mending:
    """What interrupts have left unsettled in a streamer. Its user holds one lock around it."""

    def __init__(self, ring: SlotRing, residency: Residency, engine: Engine) -> None:
        self.needed = False
        self._unsettled: list[Unsettled] = []
        self._ring = ring
        self._residency = residency
        self._engine = engine

    def note(self, unsettled: Unsettled | None) -> None:
        """A change was interrupted, one of a slot's leases or (None) of nothing but what is read into which slot."""
        if unsettled is not None:
            self._unsettled.append(unsettled)
        self.needed = True

    def mend(self) -> None:
        """Count leases as before the change, or behind it where it was to end one, and read unleased slots anew.

        Waits until the engine is idle, where an interrupt was noted.
        """
        if not self.needed:
            return
        for slot, leases, ending in self._unsettled:
            slot.leases = leases
            if ending is not None:
                ending.released = True
        # The transfer of a read that was just being submitted may be nobody's, or a traceback's.
        while not self._engine.idle():
            time.sleep(_POLL_S)
        for slot in self._ring.slots:
            if not slot.leases:
                self._ring.forget(slot)
        self._residency.restart(self._residency.position)
        self._unsettled.clear()
        self.needed = False


__all__ = ["Mending", "Unsettled"]
