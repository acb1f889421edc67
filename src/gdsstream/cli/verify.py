"""`gdsstream verify`: arguments and output of `gdsstream.verify`."""

from __future__ import annotations

import os

import click

from gdsstream.cli.output import Lines, Marked, Report, Status, emit, json_option
from gdsstream.cli.progress import byte_progress, size
from gdsstream.sidecar import Difference
from gdsstream.verify import VerifyReport, verify_checkpoint

_MOST_LINES = 40


@click.command("verify")
@click.argument("path", metavar="DIR", type=click.Path(exists=True))
@click.option("--device", metavar="DEVICE", help="Where to compute: cpu, cuda or cuda:N; a GPU where there is one.")
@click.option(
    "--direct-io", is_flag=True, help="Read from the disk, past the page cache, where the filesystem has O_DIRECT."
)
@json_option
def command(path: str, device: str | None, direct_io: bool, as_json: bool) -> None:
    """Compare a packed checkpoint with its checksums, at full speed.

    DIR is a directory that `gdsstream pack` wrote, or one file in it. Every byte of every file is read and compared;
    what differs is named by file, tensor and offset, and the exit code is 1. A file that cannot be read is one of the
    differences, and the rest is still looked at.

    Files that were read or written lately are in the page cache, and are read from there: --direct-io asks the disk.
    """
    with byte_progress("verifying") as progress:
        report = verify_checkpoint(path, device=device, progress=progress, direct_io=direct_io or None)
    emit(_report(report), as_json=as_json)


def _report(report: VerifyReport) -> Report:
    data = {
        "path": report.path,
        "ok": report.ok,
        "num_files": report.num_files,
        "num_tensors": report.num_tensors,
        "nbytes": report.nbytes,
        "verified_bytes": report.verified_bytes,
        "seconds": report.seconds,
        "gb_per_s": report.gb_per_s,
        "route": report.route,
        "differences": [each._asdict() for each in report.differences],
    }
    how = f"in {report.seconds:.1f} s ({report.gb_per_s:.2f} GB/s; {report.route})"
    if report.ok:
        said = Marked(f"{report.path} is what its checksums say.", Status.OK)
        count = f"{report.num_files} files, {report.num_tensors} tensors, {size(report.nbytes)} {how}"
        return Report("verify", data, [Lines([said, count])])
    tensors = {(each.file, each.tensor) for each in report.differences if each.tensor is not None}
    files = {each.file for each in report.differences}
    said = Marked(
        f"{report.path} is not what its checksums say: {len(tensors)} of {report.num_tensors} tensors differ, in "
        f"{len(files)} file(s).",
        Status.PROBLEM,
    )
    count = f"{size(report.verified_bytes)} of {size(report.nbytes)} looked at {how}"
    shown = [f"- {_sentence(each)}" for each in report.differences[:_MOST_LINES]]
    if len(report.differences) > _MOST_LINES:
        shown.append(f"- and {len(report.differences) - _MOST_LINES} more; --json has all of them")
    advice = Lines(["Copy these files anew from where they came from, or pack the checkpoint again."])
    return Report("verify", data, [Lines([said, count]), Lines(shown), advice], problem=True)


def _sentence(each: Difference) -> str:
    return str(each._replace(file=os.path.basename(each.file)))


__all__ = ["command"]
