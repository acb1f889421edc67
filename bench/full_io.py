"""Reads and writes that go on until every byte has moved."""

from __future__ import annotations

import os
from typing import Any


def move_full(descriptor: int, memory: Any, offset: int, *, write: bool) -> None:
    """Read or write all of `memory` at `offset`. Raises OSError, also where a file ends early."""
    call = os.pwritev if write else os.preadv
    while True:
        count = call(descriptor, [memory], offset)
        if count == len(memory):
            return
        if count == 0:
            raise OSError(f"the file ends at byte {offset}, {len(memory)} bytes early")
        memory, offset = memory[count:], offset + count
