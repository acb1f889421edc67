"""`gdsstream limits`: arguments and output of `gdsstream.limits`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gdsstream.cli.output import (
    Block,
    Cell,
    Column,
    Lines,
    Marked,
    Report,
    Status,
    Table,
    device_option,
    emit,
    json_option,
)

if TYPE_CHECKING:
    from gdsstream.ceilings import Measured
    from gdsstream.limits import Limits, Station


@click.command("limits")
@click.argument("path", type=click.Path(exists=True))
@device_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=15,
    show_default=True,
    help="For the reads from storage; the copies take a few more.",
)
@json_option
def command(path: str, device: str | None, seconds: float, as_json: bool) -> None:
    """How fast can bytes get from PATH to a GPU at most, and which station on the way is the slowest?

    PATH is a file of at least 8 MiB, or a folder with such files. Each station has what its links carry by their
    specification, and what bare reads and copies reach here: O_DIRECT reads with 1 to 32 threads (3.3 GB or less),
    copies out of the page cache, from pinned memory to the GPU, and within the GPU's memory. Where there are both, what
    was measured counts. The chain is as fast as its slowest station:

      min(drives, network, file system, PCIe link, GPU memory)

    Files are only read; what the page cache holds of them is dropped, so that the storage itself is measured. GB/s are
    decimal.
    """
    from gdsstream.devices import default_device
    from gdsstream.limits import limits

    emit(report(limits(path, device or default_device(), seconds=seconds)), as_json=as_json)


def report(found: Limits) -> Report:
    """What `limits` says."""
    binding = found.binding
    rows: list[list[Cell]] = []
    for one in found.stations:
        binds = one is binding
        name: Cell = Marked(one.name, Status.WARNING) if binds else one.name
        rows.append(
            [name, one.which, _rate(one.specified), _measured(one), _share(one, found), _how(one)],
        )
    columns = [
        Column("station"),
        Column("which", width=21, wrap=True),
        Column("specified", "right"),
        Column("measured", "right"),
        Column("of binding", "right"),
        Column("how", wrap=True),
    ]
    title = f"From {found.path} to {found.device}, in GB/s"
    blocks: list[Block] = [Table(columns, rows, title=title), Lines([_verdict(found)], title="What binds")]
    if found.notes:
        blocks.append(Lines([Marked(f"- {note}", Status.WARNING) for note in found.notes], title="Notes"))
    return Report("limits", _data(found), blocks)


def sentence(found: Limits) -> str:
    """Which station binds, in words."""
    ranking = found.ranking
    if not ranking:
        return "Nothing is known of any station."
    first, *others = ranking
    text = f"The {first.name} ({first.which}): {_gb(first.limit)} GB/s"
    text += ", measured." if first.measured else ", by its specification alone."
    if others:
        second = others[0]
        text += f" Next comes the {second.name} with {_gb(second.limit)} GB/s, {_times(first, second)} as much."
    cache, link = found.station("page cache"), found.station("PCIe link")
    ends = [one.limit for one in (cache, link) if one is not None and one.limit]
    if cache is not None and cache.limit:
        text += f" What is cached already comes at up to {_gb(min(ends))} GB/s."
    return text


def _verdict(found: Limits) -> Cell:
    return Marked(sentence(found), Status.OK if found.ranking else Status.PROBLEM)


def _times(first: Station, second: Station) -> str:
    return f"{(second.limit or 0.0) / (first.limit or 1.0):.3g} x"


def _share(one: Station, found: Limits) -> Cell:
    binding = found.binding
    if binding is None or not one.limit or not binding.limit or not one.counts:
        return "-" if one.counts or not one.limit else "(cached)"
    return Marked("binds", Status.WARNING) if one is binding else f"{one.limit / binding.limit:.3g} x"


def _how(one: Station) -> str:
    parts = []
    if one.measured is not None:
        parts.append(one.measured.how)
    elif one.why_not:
        parts.append(f"not measured: {one.why_not}")
    return "; ".join([*parts, one.formula] if one.formula else parts)


def _measured(one: Station) -> str:
    return _rate(one.measured.rate if one.measured else None)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else _gb(rate)


def _gb(rate: float | None) -> str:
    value = (rate or 0.0) / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _data(found: Limits) -> dict[str, Any]:
    binding = found.binding
    return {
        "path": found.path,
        "device": found.device,
        "filesystem": found.info.filesystem,
        "mount_point": found.info.mount_point,
        "disks": list(found.info.disks),
        "raid_level": found.info.raid_level,
        "stations": [
            {
                "name": one.name,
                "which": one.which,
                "counts": one.counts,
                "specified_gb_per_s": _plain(one.specified),
                "formula": one.formula,
                "measured_gb_per_s": _plain(one.measured.rate if one.measured else None),
                "how": one.measured.how if one.measured else one.why_not,
                "samples_gb_per_s": _samples(one.measured),
                "limit_gb_per_s": _plain(one.limit),
            }
            for one in found.stations
        ],
        "binding": None
        if binding is None
        else {"station": binding.name, "gb_per_s": _plain(binding.limit), "measured": binding.measured is not None},
        "sentence": sentence(found),
        "most_read_bytes": found.read_bytes,
        "notes": list(found.notes),
    }


def _samples(measured: Measured | None) -> list[float]:
    return [] if measured is None else [rate / 1e9 for rate in measured.samples]


def _plain(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


__all__ = ["command", "report", "sentence"]
