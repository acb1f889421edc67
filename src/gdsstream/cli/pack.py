"""`gdsstream pack`: arguments and output of `gdsstream.pack`."""

from __future__ import annotations

import os

import click

from gdsstream.cli.output import Cell, Column, Lines, Marked, Report, Status, Table, emit, json_option
from gdsstream.cli.progress import byte_progress, size
from gdsstream.pack import PackReport, pack_checkpoint
from gdsstream.sidecar import SIDECAR_NAME

_MOST_ROWS = 12


@click.command("pack")
@click.argument("source", metavar="SRC", type=click.Path(exists=True))
@click.argument("destination", metavar="DST_DIR", type=click.Path())
@click.option(
    "--layers",
    metavar="PATTERN",
    help='What the names of a layer\'s tensors begin with, such as "model.layers.{i}."; found by itself otherwise.',
)
@json_option
def command(source: str, destination: str, layers: str | None, as_json: bool) -> None:
    """Rewrite a checkpoint layer by layer, aligned and with checksums.

    SRC is a safetensors file, an index or a directory; DST_DIR is made, and must not exist yet (or be empty). It gets
    one safetensors file for each layer and one for everything else, an index, the checksums that `gdsstream verify` and
    verify=True compare with, and copies of config and tokenizer files. Any reader of safetensors opens it.

    The data of each file begins at a multiple of 4 KiB. SRC is only read. Where the room does not suffice, nothing is
    written; a pack that is interrupted leaves nothing at DST_DIR.
    """
    with byte_progress("packing") as progress:
        report = pack_checkpoint(source, destination, layers=layers, progress=progress)
    emit(_report(report), as_json=as_json)


def _report(report: PackReport) -> Report:
    data = {
        "source": report.source,
        "destination": report.destination,
        "pattern": report.pattern,
        "num_layers": report.num_layers,
        "num_tensors": report.num_tensors,
        "nbytes": report.nbytes,
        "seconds": report.seconds,
        "gb_per_s": report.gb_per_s,
        "checksums": os.path.join(report.destination, SIDECAR_NAME),
        "files": [{"name": name, "tensors": tensors, "nbytes": nbytes} for name, tensors, nbytes in report.files],
        "copied": list(report.copied),
        "skipped": list(report.skipped),
    }
    layers = f"{report.num_layers} layers ({report.pattern})" if report.pattern else f"{report.num_layers} layers"
    said: list[Cell] = [
        Marked(f"{report.destination} is complete.", Status.OK),
        f"{layers}, {report.num_tensors} tensors, {size(report.nbytes)} in {report.seconds:.1f} s "
        f"({report.gb_per_s:.2f} GB/s)",
    ]
    if report.copied:
        said.append(f"- copied as they are: {', '.join(report.copied)}")
    if report.skipped:
        said.append(
            Marked(
                f"- not copied (directories, and weights in other formats): {', '.join(report.skipped)}", Status.WARNING
            )
        )
    said.append(f"- compare it with its checksums at any time: gdsstream verify {report.destination}")
    shown = report.files if len(report.files) <= _MOST_ROWS else (*report.files[: _MOST_ROWS - 2], report.files[-1])
    table = Table(
        [Column("file"), Column("tensors", justify="right"), Column("size", justify="right")],
        [(name, str(tensors), size(nbytes)) for name, tensors, nbytes in shown],
        note=f"{len(report.files) - len(shown)} more like these" if len(shown) < len(report.files) else "",
    )
    return Report("pack", data, [Lines(said), table])


__all__ = ["command"]
