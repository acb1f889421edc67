"""Time on a device: marks on its current stream, and the end of everything that is queued."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class Clock:
    """Marks are events on a GPU's current stream, which cost no waiting, and moments of the wall clock on the CPU.

    `side` is a stream beside the default one for everything that is measured: libraries that synchronise or block the
    default stream would otherwise be timed as a part of the compute. On the CPU it is one thread, which leaves the
    other cores to those that read.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self._device = device
        self._stream: Any = None
        if self.cuda:
            import torch

            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch makes it non-blocking

    @contextmanager
    def side(self) -> Iterator[None]:
        """Within, the side stream is the current one; on the CPU, torch computes with one thread."""
        import torch

        if self.cuda:
            with torch.cuda.stream(self._stream):
                yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def other(self) -> AbstractContextManager[Any]:
        """Within, a new stream is the current one of this thread; on the CPU nothing changes."""
        if not self.cuda:
            return nullcontext()
        import torch

        made: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(made)

    def mark(self) -> Any:
        """A moment: when the current stream gets here."""
        if not self.cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to the other; both have been reached (`synchronize`)."""
        return float(begin.elapsed_time(end)) / 1e3 if self.cuda else float(end - begin)

    def synchronize(self) -> None:
        """Wait until the device has done everything that was queued."""
        if self.cuda:
            import torch

            torch.cuda.synchronize(self._device)

    def allocated_bytes(self) -> int:
        """Device memory in use by tensors."""
        if not self.cuda:
            return 0
        import torch

        return int(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        """The most since the peak was reset (measure.py does, before each sample)."""
        if not self.cuda:
            return 0
        import torch

        return int(torch.cuda.max_memory_allocated(self._device))
