"""Names of devices: in their natural order, and runs of them in short."""

from __future__ import annotations

import re
from collections.abc import Sequence


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts "mlx5_10" after "mlx5_9"."""
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]


def runs(names: Sequence[str]) -> str:
    """Names with runs put together: "nvme0n1 nvme1n1 nvme4n1" is "nvme[0-1]n1 nvme4n1", "0 1 2 5" is "0-2 5"."""
    found: list[tuple[str, int, int, str]] = []
    for name in names:
        match = re.fullmatch(r"(nvme)(\d+)(n\d+(?:p\d+)?)|(.*?)(\d+)", name)
        if match is None:
            found.append((name, -1, -1, ""))
            continue
        head, number, tail = match[1] or match[4] or "", int(match[2] or match[5]), match[3] or ""
        last = found[-1] if found else None
        if last and last[2] >= 0 and (last[0], last[3], last[2] + 1) == (head, tail, number):
            found[-1] = (head, last[1], number, tail)
        else:
            found.append((head, number, number, tail))
    return " ".join(_run(*run) for run in found) or "-"


def _run(head: str, first: int, last: int, tail: str) -> str:
    if first < 0:
        return head
    if first == last:
        return f"{head}{first}{tail}"
    return f"{head}[{first}-{last}]{tail}" if head or tail else f"{first}-{last}"


__all__ = ["natural", "runs"]
