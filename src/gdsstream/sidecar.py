"""The checksums beside a checkpoint's files, and a load's comparison with them.

`model.safetensors.checksums.json` lies in the directory of the files that it describes:

    {"format": "gdsstream-checksums", "version": 1, "algorithm": "gdsstream-linear64-v1",
     "files": {"model-rest.safetensors": {"nbytes": 8192, "header": "0123456789abcdef",
                                          "tensors": {"lm_head.weight": [4096, "fedcba9876543210"]}}}}

`header` is the checksum of all that comes before the data, and so stands for names, dtypes, shapes, offsets and
metadata; each tensor has its bytes and the checksum of them. Since a file is header and tensors and nothing else, no
byte of it is left out. Checksums are sixteen hexadecimal digits: JSON's numbers lose bits beyond 2**53.

A load looks at the tensors that it reads, and at nothing else; `verify` looks at everything.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gdsstream.checksum import ALGORITHM, Piece, finish, partial_sums
from gdsstream.errors import CheckpointError, CheckpointNotFoundError, ChecksumError
from gdsstream.header import TensorSpec
from gdsstream.regular_files import quote, refusal

SIDECAR_NAME = "model.safetensors.checksums.json"

_FORMAT, _VERSION = "gdsstream-checksums", 1
_NAMED = 5  # tensors that an error names one by one


class TensorRecord(NamedTuple):
    """What is known of a tensor's bytes."""

    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a file: its size in bytes, the checksum of its header (length included), and its tensors."""

    nbytes: int
    header: int
    tensors: Mapping[str, TensorRecord]


class Difference(NamedTuple):
    """A tensor, or what is not in any tensor, that is not what was recorded.

    `file` is a path; `tensor` is None where it concerns the whole file; `offset` and `nbytes` say where the tensor lies
    in the file, in bytes, and are None where nobody knows; `reason` is a clause: "its bytes changed (...)".
    """

    file: str
    tensor: str | None
    offset: int | None
    nbytes: int | None
    reason: str

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{self.file}: {self.reason}"
        where = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.file}: tensor {quote(self.tensor)}{where} {self.reason}"


def hex_of(checksum: int) -> str:
    """A checksum as it is written everywhere: sixteen hexadecimal digits."""
    return f"{checksum:016x}"


def to_json(files: Mapping[str, FileRecord]) -> str:
    """The text of a sidecar for files by their names inside its directory."""
    entries = {
        name: {
            "nbytes": record.nbytes,
            "header": hex_of(record.header),
            "tensors": {key: [tensor.nbytes, hex_of(tensor.checksum)] for key, tensor in record.tensors.items()},
        }
        for name, record in files.items()
    }
    head = {"format": _FORMAT, "version": _VERSION, "algorithm": ALGORITHM}
    return json.dumps({**head, "files": entries}, ensure_ascii=False, separators=(",", ":")) + "\n"


def read_sidecar(directory: str) -> dict[str, FileRecord]:
    """What is recorded for the files of a directory, by their names in it.

    Raises CheckpointNotFoundError where there is no sidecar, and CheckpointError for one that is damaged, of another
    kind or of a newer version.
    """
    path = os.path.join(directory, SIDECAR_NAME)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{directory} has no {SIDECAR_NAME}, so that nothing is known about what its tensors should be; "
            "`gdsstream pack` writes a copy of the checkpoint with one"
        ) from error
    except OSError as error:
        raise refusal(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({error}); it is damaged, pack the checkpoint again") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no file of checksums; pack the checkpoint again")
    if (found.get("version"), found.get("algorithm")) != (_VERSION, ALGORITHM):
        raise CheckpointError(
            f"{path} is of version {found.get('version')!r} and algorithm {quote(found.get('algorithm'))}, where this "
            f"library knows {_VERSION} and {ALGORITHM!r}; use the release that wrote it, or pack the checkpoint again"
        )
    try:
        return {name: _file_record(entry) for name, entry in found["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} lacks something or has it in a wrong form ({error!r}); it is damaged, pack the checkpoint again"
        ) from error


def _file_record(entry: Mapping[str, object]) -> FileRecord:
    tensors = entry["tensors"]
    if not isinstance(tensors, dict):
        raise TypeError("tensors")
    return FileRecord(
        _size(entry["nbytes"]),
        _checksum(entry["header"]),
        {name: TensorRecord(_size(nbytes), _checksum(checksum)) for name, (nbytes, checksum) in tensors.items()},
    )


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a size is {value!r}")
    return value


def _checksum(value: object) -> int:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
        raise ValueError(f"a checksum is {value!r}")
    return int(value, 16)


def difference(path: str, spec: TensorSpec, record: TensorRecord | None, found: int | None) -> Difference | None:
    """What is wrong with a tensor of the file `path` whose bytes have the checksum `found`, None for nothing.

    `record` is None where the sidecar lacks the tensor. Without `found`, only what the header says is looked at.
    """
    if record is None:
        reason = f"is not in {SIDECAR_NAME}"
    elif record.nbytes != spec.nbytes:
        reason = f"has {spec.nbytes} bytes, not {record.nbytes}"
    elif found is not None and found != record.checksum:
        reason = f"({spec.nbytes} bytes) has the checksum {hex_of(found)}, not {hex_of(record.checksum)}"
    else:
        return None
    return Difference(path, spec.name, spec.offset, spec.nbytes, reason)


class LoadCheck:
    """The tensors of one load, compared with what was recorded: `expect` a file, `add` what arrives, `finish`.

    On a GPU the work is queued on the current stream, and only `finish` waits for it. `known` keeps what was read of
    sidecars, by directory, for those who load again and again.
    """

    def __init__(self, known: dict[str, dict[str, FileRecord]] | None = None) -> None:
        self._known = {} if known is None else known
        self._pending: list[tuple[str, TensorSpec, torch.Tensor]] = []

    def expect(self, path: str) -> None:
        """Before bytes of a file are read. Raises as `read_sidecar`, and CheckpointError for a file it lacks."""
        directory, name = os.path.split(path)
        if directory not in self._known:
            self._known[directory] = read_sidecar(directory)
        if name not in self._known[directory]:
            raise CheckpointError(
                f"{path} is not in the {SIDECAR_NAME} beside it, so that it cannot be verified; pack the checkpoint "
                "again, or load without verify"
            )

    def add(self, paths: Mapping[int, str], specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        """Contiguous tensors that can be used on the current stream; their specs, whose `file` is a key of `paths`."""
        sums = partial_sums([Piece(tensor.reshape(-1).view(torch.uint8), 0) for tensor in tensors])
        self._pending += [(paths[spec.file], spec, each) for spec, each in zip(specs, sums, strict=True)]

    def finish(self) -> None:
        """Wait for the checksums. Raises ChecksumError that names what differs."""
        found = torch.stack([each for _, _, each in self._pending]).tolist() if self._pending else []
        differences = []
        for (path, spec, _), partial in zip(self._pending, found, strict=True):
            directory, name = os.path.split(path)
            record = self._known[directory][name].tensors.get(spec.name)
            what = difference(path, spec, record, finish(spec.nbytes, [partial]))
            if what is not None:
                differences.append(what)
        self._pending.clear()
        if differences:
            raise _error(differences)


def _error(differences: list[Difference]) -> ChecksumError:
    lines = [str(each) for each in differences[:_NAMED]]
    if len(differences) > _NAMED:
        lines.append(f"and {len(differences) - _NAMED} more")
    return ChecksumError(
        f"{len(differences)} tensor(s) are not what {SIDECAR_NAME} says: " + "; ".join(lines) + "; copy the file(s) "
        "anew from where they came from; `gdsstream verify` looks at the whole checkpoint",
        tuple(str(each.tensor) for each in differences),
    )


__all__ = [
    "SIDECAR_NAME",
    "Difference",
    "FileRecord",
    "LoadCheck",
    "TensorRecord",
    "difference",
    "hex_of",
    "read_sidecar",
    "to_json",
]
