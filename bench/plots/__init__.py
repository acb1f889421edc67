"""Plots of records: each file draws one kind, and says in its caption what is seen.

    samples.py    every sample as a dot, with its row's median and the ceiling
    overhead.py   pipelines: time and overhead of a layer against tokens
    overlap.py    pipelines, training steps and batches: compute, transfer and stalls side by side
    timeline.py   pipelines: when each layer arrived and was computed with
    sweep.py      throughput against any knob that was swept
    style.py      colours, sizes, axes; the PNG files

matplotlib is imported when the first plot is drawn, and used without pyplot, so that no global state is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.record import Record
from bench.results import Group

#: A file, and what is seen in it.
Plot = tuple[Path, str]


def of_group(group: Group, stem: str, directory: Path) -> list[Plot]:
    """Draw what one table holds, into files that begin with `stem`. Raises OSError where they cannot be written."""
    from bench.plots import overhead, overlap, samples

    if not group.measured:
        return []
    drawn = [samples.draw(group.measured, directory / f"{stem}-samples.png")]
    if (found := overhead.draw(group.measured, directory / f"{stem}-overhead.png")) is not None:
        drawn.append(found)
    if (found := overlap.draw(group.measured, directory / f"{stem}-overlap.png")) is not None:
        drawn.append(found)
    return drawn


def of_sweeps(records: Sequence[Record], directory: Path) -> list[Plot]:
    """Draw every sweep of three values or more that is found in the records' settings, each into a file of its own."""
    from bench import sweeps
    from bench.plots import sweep

    drawn: list[Plot] = []
    for found in sweeps.find(records):
        if len(sweep.values(found)) < sweep.LEAST_POINTS:
            continue
        stem = f"sweep-{found.scenario}-{found.knob.rpartition('.')[2]}"
        same = sum(path.stem == stem or path.stem.startswith(f"{stem}-") for path, _ in drawn)
        drawn.append(sweep.draw(found, directory / f"{stem}{f'-{same + 1}' if same else ''}.png"))
    return drawn
