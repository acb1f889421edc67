"""The buckets in which operations are counted, by size and by duration, and percentiles out of them.

Sizes have gds_stats' buckets: below 4 KiB, 4 to 8 KiB, and so on by powers of two, the last one being 64 MiB and more.
Durations have eight buckets for each power of two from 1 us to 69 s, so that a percentile is known to 6 % or better.
A bucket holds its lower bound and not its upper one. The native engine counts in the same buckets (csrc/ledger.hpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SIZE_BUCKETS = 16
LATENCY_BUCKETS = 210
_STEPS = 8


def size_from(bucket: int) -> int:
    """The smallest size in a bucket, in bytes."""
    return 2048 << bucket if bucket else 0


def size_label(bucket: int) -> str:
    """A bucket as gds_stats writes it: "4-8(KiB)"."""
    low = size_from(bucket) >> 10
    return f"{low}-...(KiB)" if bucket == SIZE_BUCKETS - 1 else f"{low}-{size_from(bucket + 1) >> 10}(KiB)"


def latency_from_ns(bucket: int) -> int:
    """The shortest duration in a bucket, in nanoseconds."""
    if bucket == 0:
        return 0
    power, step = divmod(bucket - 1, _STEPS)
    return (_STEPS + step) << (power + 7)


def percentile_ns(counts: Sequence[int], percent: float, longest_ns: int) -> float | None:
    """The duration that `percent` of the operations do not exceed; None where there are none.

    Inside a bucket they are taken to be spread evenly; the last one ends at `longest_ns`, which nothing exceeds.
    """
    total = sum(counts)
    if not total:
        return None
    wanted = max(1, math.ceil(total * percent / 100))
    before = 0
    for bucket, count in enumerate(counts):
        if before + count >= wanted:
            low = latency_from_ns(bucket)
            high = latency_from_ns(bucket + 1) if bucket + 1 < len(counts) else longest_ns
            return min(low + (high - low) * (wanted - before) / count, float(longest_ns))
        before += count
    return float(longest_ns)


__all__ = ["LATENCY_BUCKETS", "SIZE_BUCKETS", "latency_from_ns", "percentile_ns", "size_from", "size_label"]
