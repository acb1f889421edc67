"""Words for table cells: sizes and links."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdsstream.machine.pci import Link


def size(nbytes: int | None) -> str:
    """Decimal, three digits: "3.84 TB"; "-" where it is not known."""
    if nbytes is None:
        return "-"
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"


def link(one: Link | None) -> str:
    """ "32 GT/s x16"; "2.5 of 32 GT/s x16", "32 GT/s x2 of x4" where more is possible; "-" without one."""
    if one is None or (one.speed is None and one.max_speed is None):
        return "-"
    speed = _number(one.speed) + (f" of {_number(one.max_speed)}" if one.slow else "")
    width = f"x{one.width or '?'}" + (f" of x{one.max_width}" if one.narrow else "")
    return f"{speed} GT/s {width}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


__all__ = ["link", "size"]
