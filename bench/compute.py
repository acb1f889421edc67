"""Compute of a wanted length: matrix products on the current stream, in memory of their own."""

from __future__ import annotations

import time

from bench import stats
from bench.clock import Clock

#: Of the matrices, ascending. Larger ones than are needed would make the steps of the length coarse.
_CUDA_WIDTHS = (2048, 4096, 8192, 16384)
_CPU_WIDTHS = (64, 256, 1024)
#: So many products at most: a GPU takes about a thousand kernels ahead, and the host goes on only when they are queued.
_MOST = 256
#: Of a calibration, at most, and the seconds that it takes about where so many take longer.
_PRODUCTS, _CALIBRATION_S = 50, 0.1
_WARM_UP, _CALIBRATIONS = 2, 3


class Compute:
    """Matrix products of about `seconds`, which the first use of it on the device has calibrated.

    The narrowest matrices are taken of which _MOST products are long enough.
    """

    def __init__(self, device: str, clock: Clock, seconds: float) -> None:
        for width in _CUDA_WIDTHS if clock.cuda else _CPU_WIDTHS:
            self._allocate(device, width, cuda=clock.cuda)
            each = self._calibrate(clock)
            if seconds <= _MOST * each:
                break
        self._count = max(1, round(seconds / each))

    def run(self, share: float = 1.0) -> None:
        """All of it, or a share: of a batch that is not full."""
        self._products(max(1, round(share * self._count)))

    def _allocate(self, device: str, width: int, *, cuda: bool) -> None:
        import torch

        dtype = torch.bfloat16 if cuda else torch.float32
        self._left, self._right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        self._out = torch.empty_like(self._left)

    def _calibrate(self, clock: Clock) -> float:
        """Seconds of a product."""
        count, found = 1, []
        for _ in range(_WARM_UP + _CALIBRATIONS):
            clock.synchronize()
            began = time.perf_counter()
            self._products(count)
            clock.synchronize()
            found.append((time.perf_counter() - began) / count)
            # As many as there is time for.
            count = max(1, min(_PRODUCTS, int(_CALIBRATION_S / found[-1])))
        return stats.median(found[_WARM_UP:])

    def _products(self, count: int) -> None:
        import torch

        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)
