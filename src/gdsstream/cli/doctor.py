"""`gdsstream doctor`: the conditions of native GPUDirect Storage, one line each, with what helps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gdsstream.cli.output import Block, Cell, Column, Lines, Marked, Report, Status, Table, emit, json_option

if TYPE_CHECKING:
    from gdsstream.doctor import Diagnosis

# Status, topic, what was found.
_COLUMNS = (
    Column("", width=7),
    Column("", width=18, wrap=True),
    Column("", width=71, wrap=True),
)


@click.command("doctor")
@click.argument("path", required=False, type=click.Path())
@click.option(
    "--prove", is_flag=True, help="Read PATH through cuFile, show its counters, and keep the proof for the mount."
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False),
    default="/",
    help="Look at the sys, proc and etc trees recorded below this folder instead of this machine's.",
)
@json_option
def command(path: str | None, prove: bool, root: str, as_json: bool) -> None:
    """Can PATH do native GPUDirect Storage (GDS), and if not, exactly what stands in the way?

    Looks at driver, GPUs, nvidia-fs and P2PDMA, IOMMU and ACS, cuFile and kvikio, and at PATH's file system, device,
    RAID, O_DIRECT and place on the PCIe bus. Each line says what was found, whether that is fine, and what helps.
    Without PATH, the machine alone.

    A request for GDS that quietly took another path looks just like one that did not. So this command never says that
    GDS works: with --prove it reads PATH (a file of at least 1 MiB, or a folder with one) to a GPU and lets cuFile's
    own counters say which way the bytes went. backend="auto" uses cuFile only on mounts with such a proof.

    Exit code 1 if PATH was given and a condition fails, unless --prove proved it all the same.
    """
    from gdsstream.doctor import examine

    if prove and path is None:
        raise click.UsageError("--prove needs a PATH to read")
    if prove and root != "/":
        raise click.UsageError("--prove reads from this machine; it cannot be combined with --root")
    if path is not None and root == "/":
        # click's own words and exit code for what does not exist.
        click.Path(exists=True).convert(path, None, click.get_current_context())
    emit(report(examine(path, root=root, prove=prove), root), as_json=as_json)


def report(diagnosis: Diagnosis, root: str = "/") -> Report:
    """What `doctor` says of a diagnosis."""
    blocks: list[Block] = []
    for section in diagnosis.sections:
        rows: list[list[Cell]] = []
        for one in section.findings:
            rows.append([Marked(one.status, one.status), one.topic, one.found])
            if one.remedy:
                rows.append(["", "", f"-> {one.remedy}"])
        blocks.append(Table(_COLUMNS, rows, title=section.title))
    blocks.append(Lines([_verdict(diagnosis)], title="Native GPUDirect Storage"))
    proven_now = diagnosis.outcome is not None and diagnosis.outcome.proof is not None
    problem = diagnosis.path is not None and diagnosis.count(Status.PROBLEM) > 0 and not proven_now
    return Report("doctor", _data(diagnosis, root), blocks, problem=problem)


def _verdict(diagnosis: Diagnosis) -> Cell:
    return Marked(
        sentence(diagnosis), {"proven": Status.OK, "blocked": Status.PROBLEM}.get(diagnosis.verdict, Status.WARNING)
    )


def sentence(diagnosis: Diagnosis) -> str:
    """The verdict in words; "proven" only where counters said so."""
    problems = _count(diagnosis.count(Status.PROBLEM), "problem")
    where = diagnosis.path or "this machine"
    if diagnosis.verdict == "proven" and diagnosis.proof is not None:
        now = f" {problems} now in its way, though." if diagnosis.count(Status.PROBLEM) else ""
        return f"Proven for {diagnosis.proof.mount_point} by {diagnosis.proof.evidence}'s own counters.{now}"
    if diagnosis.verdict == "blocked":
        failing = ", ".join(f"{way.name} by {_count(way.failing, 'condition')}" for way in diagnosis.ways)
        both = "" if diagnosis.open_ways else f" Both ways are blocked ({failing}); one open way is enough."
        return (
            f"Not possible for {where} as it is: {problems} above.{both} "
            "gdsstream reads on its other routes meanwhile: storage -> pinned memory -> GPU."
        )
    ways = " and ".join(diagnosis.open_ways) or "no way"
    return (
        f"Nothing was found in its way ({ways}), which proves nothing. Only cuFile's counters do: "
        f"gdsstream doctor {diagnosis.path or 'PATH'} --prove"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _data(diagnosis: Diagnosis, root: str) -> dict[str, Any]:
    outcome = diagnosis.outcome
    return {
        "root": root,
        "path": diagnosis.path,
        "verdict": str(diagnosis.verdict),
        "sentence": sentence(diagnosis),
        "open_ways": list(diagnosis.open_ways),
        "counts": {str(status): diagnosis.count(status) for status in Status},
        "sections": [
            {
                "title": section.title,
                "findings": [
                    {"topic": one.topic, "status": str(one.status), "found": one.found, "remedy": one.remedy}
                    for one in section.findings
                ],
            }
            for section in diagnosis.sections
        ],
        "cufile_json": {
            "path": diagnosis.config.path,
            "error": diagnosis.config.error,
            "values": diagnosis.config.values,
            "origins": diagnosis.config.origins,
        },
        "proof": asdict(diagnosis.proof) if diagnosis.proof else None,
        "prove": None
        if outcome is None
        else {
            "file": outcome.file,
            "bytes": outcome.nbytes,
            "route": outcome.route,
            "counted": outcome.counted,
            "proven": outcome.proof is not None,
            "reason": outcome.reason,
        },
        "unreadable": [{"path": name, "reason": why} for name, why in diagnosis.unreadable],
    }


__all__ = ["command", "report", "sentence"]
