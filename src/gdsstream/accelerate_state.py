"""What accelerate wants to know of a loader that is iterated: gradients are synchronised at its end, and what is
gathered there is cut by what was padded. accelerate leaves a ShardLoader as it is, so that it has to be told.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from gdsstream.notices import say_once

log = logging.getLogger(__name__)


class AccelerateState:
    """One iterator, as accelerate's GradientState knows its loaders. Does nothing where accelerate is not in use.

    Attributes:
        end_of_dataloader: whether the batch that was handed out last is the last of its epoch.
        remainder: how many records of the last batch, over all ranks, accelerate is to keep: 0 is all of them, -1 that
            it cannot tell, which it then says itself. Padded records lie between the others where ranks take turns.
    """

    def __init__(self, *, padded: bool) -> None:
        self.end_of_dataloader = False
        self.remainder = -1 if padded else 0
        self._told: Any = None

    def begin(self) -> None:
        """A batch is asked for."""
        module = sys.modules.get("accelerate.state")
        if self._told is not None or module is None:
            return
        try:
            state = module.GradientState()
            state._add_dataloader(self)
        except AttributeError as error:
            say_once(log, f"accelerate is not told where a ShardLoader's epoch ends, for it has changed: {error}")
            return
        self._told = state

    def end(self) -> None:
        """No batch comes any more. Idempotent."""
        told, self._told = self._told, None
        if told is not None:
            told._remove_dataloader(self)


__all__ = ["AccelerateState"]
