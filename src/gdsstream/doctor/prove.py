"""--prove: read through cuFile, compare the bytes, and let the counters say which way they went.

The only thing that counts as proof is a counter below the library: cuFile's own, by GPU, or nvidia-fs's, which is
machine-wide and therefore has to be still while nobody of ours reads. A proof is stored only if every read that was
counted went directly.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from gdsstream.devices import allocate
from gdsstream.engine.cufile import CuFileEngine
from gdsstream.engine.kvikio_process import Counters, CuFileSettings
from gdsstream.errors import ConfigError, ReadError
from gdsstream.plan import build_plan
from gdsstream.proofs import GdsProof, store_gds_proof
from gdsstream.regular_files import FileStamp
from gdsstream.storage import StorageInfo

# From kvikio's threshold for cuFile on; and enough for several tasks of every thread.
LEAST_BYTES = 2**20
_MOST_BYTES = 64 * 2**20
_QUIET_S = 0.5
_MACHINE_WIDE = "nvidia-fs (machine-wide)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the read showed.

    Attributes:
        file: what was read.
        nbytes: how much, from its beginning.
        route: what the engine says of the way.
        counted: reads by their way during ours; all but "posix" went directly. Empty where nothing counts.
        proof: what was stored; None if the counters did not prove it.
        reason: why nothing was stored; empty if it was.
        stored_at: the file of proofs.
    """

    file: str
    nbytes: int
    route: str
    counted: dict[str, int]
    proof: GdsProof | None
    reason: str
    stored_at: str | None


@dataclass(frozen=True, slots=True)
class _Source:
    path: str
    stamp: FileStamp


def prove(file: str, storage: StorageInfo, device: torch.device | str | int = "cuda") -> Outcome:
    """Read up to 64 MiB of `file` to `device` through kvikio and cuFile, and store a proof if the counters give one.

    Raises:
        ConfigError: the file is smaller than 1 MiB, below which kvikio does not call cuFile.
        BackendUnavailableError: there is no CUDA device or no kvikio.
        ReadError: the read failed, other bytes arrived than the file has, or the proof cannot be stored.
    """
    size = os.path.getsize(file)
    if size < LEAST_BYTES:
        raise ConfigError(f"{file} has {size} bytes; a proof needs a file of at least {LEAST_BYTES}")
    nbytes = min(size, _MOST_BYTES) // LEAST_BYTES * LEAST_BYTES
    with CuFileEngine(device, CuFileSettings()) as engine:
        # The first read opens cuFile's driver; before that there are no counters to start from.
        _read(engine, file, LEAST_BYTES)
        others = _reads_of_others()
        before = engine.counted()
        data = _read(engine, file, nbytes)
        counted = {key: value - before.get(key, 0) for key, value in engine.counted().items()}
        route = engine.route
    _compare(file, data)
    reason = _why_not(counted, others, storage)
    if reason:
        return Outcome(file, nbytes, route, counted, None, reason, None)
    direct = sum(count for way, count in counted.items() if way != "posix")
    evidence = "nvidia-fs" if _MACHINE_WIDE in counted else "cufile"
    proof = GdsProof(storage.mount_point or "", storage.source or "", evidence, direct, nbytes)
    return Outcome(file, nbytes, route, counted, proof, "", str(store_gds_proof(proof)))


def _read(engine: CuFileEngine, file: str, nbytes: int) -> torch.Tensor:
    buffer = allocate((nbytes,), torch.uint8, engine.device)
    plan = build_plan([(0, 0, nbytes, 0, 0, 0)], (nbytes,), ())
    engine.submit([_Source(file, FileStamp.of(file))], plan, [buffer]).wait()
    return buffer


def _reads_of_others() -> int:
    """How many direct reads the machine-wide counter sees while we do nothing."""
    counters = Counters()
    time.sleep(_QUIET_S)
    return counters.delta().get(_MACHINE_WIDE, 0)


def _compare(file: str, data: torch.Tensor) -> None:
    with open(file, "rb") as stream:
        wanted = torch.frombuffer(bytearray(stream.read(data.numel())), dtype=torch.uint8)
    if not torch.equal(data.cpu(), wanted):
        raise ReadError(f"{file}: cuFile delivered other bytes than the file has; do not use backend='cufile' here")


def _why_not(counted: dict[str, int], others: int, storage: StorageInfo) -> str:
    direct = sum(count for way, count in counted.items() if way != "posix")
    if not counted:
        return "nothing counts here: kvikio kept to its POSIX path, or neither cuFile nor nvidia-fs has statistics"
    if direct <= 0:
        return "no read was counted as direct"
    if counted.get("posix"):
        return f"{counted['posix']} of {direct + counted['posix']} reads took cuFile's POSIX path"
    if _MACHINE_WIDE in counted and others:
        return f"other processes read through nvidia-fs at the same time ({others} reads in {_QUIET_S} s); try again"
    if not storage.mount_point:
        return "the path's mount was not found, and a proof holds for a mount"
    return ""


__all__ = ["LEAST_BYTES", "Outcome", "prove"]
