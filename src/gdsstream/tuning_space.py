"""What there is to choose from on a machine and a path: families of settings for `tuning`. Pure.

Values are a factor of two or so apart: what lies between differs by less than a measurement can tell. Routes that do
something else than a first pass are left out: "mapped" keeps what it has read, at the cost of memory that only the user
can grant (`host_cache_bytes`), and "traditional" is there to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gdsstream.tuning import MIB, Family

_KIB = 1024
_STAGING = (48 * MIB, 96 * MIB, 192 * MIB)


@dataclass(frozen=True, slots=True)
class Place:
    """What decides which settings can work.

    Attributes:
        cores: that this process may use.
        gpu: whether bytes go to one; on the CPU nothing is staged on the way from the page cache.
        direct: whether the file system takes O_DIRECT in blocks of 4 KiB.
        prefers_direct: whether `direct_io=None` reads with O_DIRECT here, when nothing is cached.
        io_uring: whether the system allows it.
        cufile: whether kvikio can be used.
    """

    cores: int
    gpu: bool
    direct: bool
    prefers_direct: bool
    io_uring: bool
    cufile: bool


def space(place: Place) -> list[Family]:
    """The families that can work there."""
    families = [_cached(place)]
    if place.direct:
        families.insert(0, _direct(place))
    if place.cufile:
        families.append(_cufile(place))
    return families


def _direct(place: Place) -> Family:
    """Past the page cache. Only what leaves other reads alone: a profile also counts where files are cached, and few
    threads, small chunks or a small ring would cost more there than they bring here."""
    # None decides file by file, so that what is cached is still read from memory.
    fixed: dict[str, Any] = {"backend": "staged", **({} if place.prefers_direct else {"direct_io": True})}
    if place.io_uring:
        ranges: dict[str, Any] = {"direct_threads": (1, 2, 4, 8), "io_depth": (32, 64, 128, 256, 512)}
    else:
        fixed["reader"] = "pread"
        ranges = {"direct_threads": (8, 16, 32, 64)}
    return Family("O_DIRECT", fixed, {**ranges, "staging_bytes": tuple(n * MIB for n in (96, 192, 384))})


def _cached(place: Place) -> Family:
    """Through the page cache."""
    fixed: dict[str, Any] = {"backend": "staged", **({"direct_io": False} if place.prefers_direct else {})}
    ranges: dict[str, Any] = {
        "num_threads": _up_to((1, 2, 4, 8, 12, 16, 24, 32), max(4, 2 * place.cores)),
        "chunk_size": (512 * _KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB),
    }
    if place.gpu:
        ranges["staging_bytes"] = _STAGING
    return Family("page cache", fixed, ranges)


def _cufile(place: Place) -> Family:
    """kvikio; its pinned memory is a buffer of one chunk for each thread."""
    ranges: dict[str, Any] = {"num_threads": (4, 8, 12, 16, 32), "chunk_size": tuple(n * MIB for n in (1, 2, 4, 8, 16))}
    if place.direct:
        ranges["direct_io"] = (False, True)
    return Family("cuFile", {"backend": "cufile"}, ranges)


def _up_to(values: Iterable[int], most: int) -> tuple[int, ...]:
    return tuple(value for value in values if value <= most)


__all__ = ["Place", "space"]
