"""storage -> CPU: native threads that pread or pwrite whole ios, gdsio's transfer type 1.

A call waits for its io, so that `depth` ios in flight in each of `threads` threads are as many threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from bench.loaders.timed_ios import TimedIos
from bench.loaders.transfer_route import Route

if TYPE_CHECKING:
    from bench.transfer_ops import Ops


@dataclass
class Posix(Route):
    """`direct` False goes through the page cache."""

    direct: bool = True

    on_host: ClassVar[bool] = True

    _ios: TimedIos | None = field(default=None, init=False, repr=False)

    def start(self) -> None:
        self.open_files(direct=self.direct)
        self._ios = TimedIos(self.num_threads * self.in_flight)
        self.memory()

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64]:
        assert self._ios is not None
        assert self._way is not None
        return self._ios.move(self._way.descriptors, ops, self.memory())

    def close(self) -> None:
        if self._ios is not None:
            self._ios.close()
            self._ios = None
        super().close()

    def route(self) -> str:
        call = "pwrite" if self.request.write else "pread"
        kind = "page-locked memory" if self.pinned else "ordinary memory"
        return self.said(f"{call} x{self.num_threads * self.in_flight} native threads, {kind}")

    def pinned_bytes(self) -> int:
        return self.request.memory.nbytes if self.pinned else 0
