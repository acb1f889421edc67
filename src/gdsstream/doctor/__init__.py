"""doctor: can a path do native GPUDirect Storage, and if not, which condition fails and what helps?

A check is a function from a `Context` to findings. Each runs by itself: one that fails is a line that says so, and the
others go on. Nothing here claims that GPUDirect Storage works; it can only say that nothing was found in its way. The
proof is a read that cuFile's own counters saw (`prove`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gdsstream.doctor import cufile, path, routes, system
from gdsstream.doctor.context import Context
from gdsstream.doctor.cufile_json import CuFileConfig, load
from gdsstream.doctor.path import largest_file
from gdsstream.doctor.routes import Way
from gdsstream.errors import BackendUnavailableError, ConfigError, CudaError, ReadError
from gdsstream.findings import Finding, Status
from gdsstream.machine import probe
from gdsstream.machine.mounts import of_path
from gdsstream.proofs import GdsProof, gds_proof
from gdsstream.storage import StorageInfo

if TYPE_CHECKING:
    from gdsstream.doctor.prove import Outcome

Check = Callable[[Context], Iterable[Finding]]

_MACHINE: tuple[Check, ...] = (
    system.kernel,
    system.driver,
    system.cuda,
    system.gpus,
    system.iommu,
    system.acs,
    system.container,
    system.locked_memory,
    system.io_uring,
)
_CUFILE: tuple[Check, ...] = (cufile.library, cufile.kvikio, cufile.udev, cufile.config)
_PATH: tuple[Check, ...] = (
    path.path,
    path.filesystem,
    path.device,
    path.raid,
    path.direct_io,
    path.page_cache,
    path.way_to_gpu,
    path.proof,
)


class Verdict(StrEnum):
    """What can be said of native GPUDirect Storage."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `examine` found.

    Attributes:
        path: what was asked for, links resolved; None for the machine alone.
        sections: the findings, in order.
        verdict: "proven" by stored counters, "blocked" where a condition fails for certain, else "unproven".
        ways: nvidia-fs and P2PDMA, with their conditions; one that is open is enough.
        config: cuFile's.
        proof: the stored proof for the path's mount.
        outcome: of --prove.
    """

    path: str | None
    sections: tuple[Section, ...]
    verdict: Verdict
    ways: tuple[Way, ...]
    config: CuFileConfig
    proof: GdsProof | None
    outcome: Outcome | None = None
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def open_ways(self) -> tuple[str, ...]:
        """The names of the ways that no condition blocks."""
        return tuple(way.name for way in self.ways if not way.blocked)

    @property
    def findings(self) -> list[Finding]:
        """All of them."""
        return [finding for section in self.sections for finding in section.findings]

    def count(self, status: Status) -> int:
        """How many findings have that status."""
        return sum(finding.status is status for finding in self.findings)


def examine(
    target: str | os.PathLike[str] | None = None,
    *,
    root: str | os.PathLike[str] = "/",
    environ: Mapping[str, str] | None = None,
    prove: bool = False,
) -> Diagnosis:
    """Look at this machine, and at one path of it; or at a machine whose trees are recorded below `root`.

    Args:
        target: a file or a folder; None for the machine alone. With `root`, a path of the recorded machine.
        root: "/" for this machine.
        environ: the environment of the process that would read; ours by default, none for a recorded machine.
        prove: read `target` through cuFile and store a proof if its counters give one.

    Raises:
        ReadError: `target` cannot be reached.
        ConfigError: `prove` without a file of at least 1 MiB, or for a recorded machine.
    """
    machine = probe(root)
    live = machine.tree.live
    if environ is None:
        environ = os.environ if live else {}
    if prove and (target is None or not live):
        raise ConfigError("a proof needs a path on this machine; name a file or a folder with files")
    storage = of_path(machine.tree, target) if target is not None else None
    sample = None
    if storage is not None and live:
        sample = storage.path if os.path.isfile(storage.path) else _sample(storage.path)
        if sample is not None and sample != storage.path:
            storage = of_path(machine.tree, sample)
    software = None
    if live:
        from gdsstream.doctor.software import ask

        software = ask()
    config = load(machine.tree, environ)
    outcome, failure = None, None
    if prove and storage is not None:
        outcome, failure = _prove(sample, storage)
    proof = gds_proof(storage.mount_point) if storage and live and storage.mount_point else None
    context = Context(machine, config, environ, software, storage, sample, proof)
    sections = [Section("Machine", _run(_MACHINE, context)), Section("cuFile", _run(_CUFILE, context))]
    sections.append(Section("Ways from a drive to a GPU", _run((routes.findings,), context)))
    if storage is not None:
        sections.append(Section("Path", _run(_PATH, context)))
    if outcome or failure:
        sections.append(Section("Proof", tuple(_proof_findings(outcome, failure))))
    # Last, so that it holds what the checks stumbled over too.
    if unreadable := machine.tree.failures:
        lines = [Finding("unreadable", Status.WARNING, f"{name}: {why}") for name, why in unreadable]
        sections.append(Section("Could not be read", tuple(lines)))
    problems = any(one.status is Status.PROBLEM for section in sections for one in section.findings)
    verdict = Verdict.PROVEN if proof else Verdict.BLOCKED if problems else Verdict.UNPROVEN
    where = storage.path if storage is not None else None
    return Diagnosis(
        where, tuple(sections), verdict, routes.ways(context), config, proof, outcome, tuple(machine.tree.failures)
    )


def _sample(folder: str) -> str | None:
    try:
        return largest_file(folder)
    except OSError as error:
        raise ReadError(f"{folder} cannot be listed: {error.strerror}; check its permissions", error.errno) from error


def _run(checks: Iterable[Check], context: Context) -> tuple[Finding, ...]:
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check(context))
        except Exception as error:  # a tree may be broken in ways that no check thought of: the others still run
            name = check.__name__.replace("_", " ")
            found.append(Finding(name, Status.WARNING, f"could not be checked: {type(error).__name__}: {error}"))
    return tuple(found)


def _prove(sample: str | None, storage: StorageInfo) -> tuple[Outcome | None, Finding | None]:
    from gdsstream.doctor.prove import prove

    if sample is None:
        raise ConfigError(f"there is no file in {storage.path} to read; name one of at least 1 MiB")
    try:
        return prove(sample, storage), None
    except (BackendUnavailableError, CudaError, ReadError) as error:
        return None, Finding("cuFile read", Status.PROBLEM, str(error))


def _proof_findings(outcome: Outcome | None, failure: Finding | None) -> Iterable[Finding]:
    if failure is not None:
        yield failure
    if outcome is None:
        return
    mib = outcome.nbytes // 2**20
    yield Finding("cuFile read", Status.OK, f"{mib} MiB of {outcome.file}: the bytes are the file's")
    yield Finding("route", Status.INFO, outcome.route)
    counts = ", ".join(f"{count} {way}" for way, count in outcome.counted.items()) or "none"
    yield Finding("counters", Status.INFO, f"reads counted during ours: {counts}")
    if outcome.proof is None:
        yield Finding("proven", Status.PROBLEM, f"no: {outcome.reason}", "see the problems above; cufile.log says more")
    else:
        mount, evidence = outcome.proof.mount_point, outcome.proof.evidence
        found = f"yes, by {evidence}'s counters, for {mount}; stored in {outcome.stored_at}"
        yield Finding("proven", Status.OK, found)


__all__ = ["Diagnosis", "Section", "Verdict", "examine"]
