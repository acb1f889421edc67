"""pack_checkpoint: a checkpoint rewritten so that each layer is one run of one file, with checksums beside it.

What comes out is a directory of safetensors files that any reader opens: `model-layer-00000.safetensors` and so on, one
for each layer, `model-rest.safetensors` with everything else, `model.safetensors.index.json`, the checksums
(`sidecar`), and copies of the other files (config, tokenizer). Every file has the metadata of the source. What is
aligned in them and what is not, and in which order tensors come, is told in `packing`.

Nothing of the source is touched. Everything is written into a hidden directory beside the destination, each file with
fsync, which gets the destination's name when it is complete: after an interrupt, a full disk or a loss of power there
is a whole checkpoint at that name, or none. Only a process that is killed leaves the hidden directory behind
(`.NAME.gdsstream-pack-PID-RANDOM.tmp`); it can be deleted.

The checksums are of the bytes that were read, before they were written: `verify` finds what happened to them from there
on. Memory is bounded by a few portions, however large a layer is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gdsstream.checkpoint import INDEX_SUFFIX, Checkpoint
from gdsstream.checksum import checksum, finish, partial_sums
from gdsstream.config import StreamConfig
from gdsstream.devices import parse_device
from gdsstream.engine import Engine, merge
from gdsstream.errors import CheckpointError, ConfigError, WriteError
from gdsstream.layout import Layers
from gdsstream.load import shared_engine
from gdsstream.packing import PackedFile, arrange
from gdsstream.portions import CPU_PORTION_BYTES, Source, read_portions
from gdsstream.regular_files import PathLike
from gdsstream.sidecar import SIDECAR_NAME, FileRecord, TensorRecord, to_json
from gdsstream.writer import BLOCK_BYTES, write_file

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all

INDEX_NAME = f"model{INDEX_SUFFIX}"

_PORTION_BYTES = CPU_PORTION_BYTES

# The same tensors in other formats, which nobody wants twice.
_OTHER_WEIGHTS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pt", ".pth")
# What the filesystem may take beside the bytes: for each file, and in all.
_FILE_SLACK_BYTES, _SLACK_BYTES = 8 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was written.

    Attributes:
        source, destination: paths.
        pattern: how layers were found, such as "model.layers.{i}."; "" where the checkpoint has none.
        num_layers, num_tensors: how many.
        files: (name, tensors, bytes) of each safetensors file, layers first.
        nbytes: of these files.
        copied: names of other files that were copied; `skipped` of those that were not: directories, and weights in
            other formats.
        seconds: wall time.
    """

    source: str
    destination: str
    pattern: str
    num_layers: int
    num_tensors: int
    files: tuple[tuple[str, int, int], ...]
    nbytes: int
    copied: tuple[str, ...]
    skipped: tuple[str, ...]
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes written in a second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


def pack_checkpoint(
    source: PathLike | Sequence[PathLike],
    destination: PathLike,
    *,
    layers: Layers = None,
    progress: Progress | None = None,
    config: StreamConfig | None = None,
    **knobs: Any,
) -> PackReport:
    """Write a checkpoint anew, layer by layer, with checksums.

    Args:
        source: a file, an index, a directory or a list of files, as for load_file. Of a directory (and of that of an
            index) the other files are copied, too.
        destination: a directory that does not exist yet, or an empty one; its parent has to exist.
        layers: a pattern with "{i}", such as "model.layers.{i}."; None finds it. Or names for each layer number.
        progress: called with the bytes of tensors that were written and those in all, as they grow.
        config, **knobs: see StreamConfig; they say how the source is read.

    Raises:
        ConfigError: a destination that is the source, in it, not empty or a mount point; a pattern without tensors.
        WriteError: not enough room, which is found before anything is written, or the storage refused.
        CheckpointError and its kinds, ReadError and its kinds: the source is not valid, failed or changed meanwhile.
    """
    started = time.perf_counter()
    checkpoint = Checkpoint.open(source)
    if not checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path} has no tensors; there is nothing to pack")
    target = _target(checkpoint, source, destination)
    pattern, files = arrange(checkpoint, layers)
    folder = _folder(source)
    copied, skipped = ([], []) if folder is None else _side_files(folder)
    index = _index(checkpoint, files)
    _refuse_without_room(target, files, [os.path.join(folder or "", name) for name in copied], index)
    cpu = parse_device("cpu")
    engine = shared_engine(cpu, merge(config, knobs, path=checkpoint.files[0].path, device=cpu))
    with _new_directory(target) as directory:
        for name in copied:
            _copy(os.path.join(folder or "", name), os.path.join(directory, name))
        total = sum(spec.nbytes for spec in checkpoint.tensors.values())
        run = _Run(engine, checkpoint, directory, total, progress)
        records = {file.name: run.write(file) for file in files}
        _write_text(os.path.join(directory, INDEX_NAME), index)
        _write_text(os.path.join(directory, SIDECAR_NAME), to_json(records))
    return PackReport(
        source=checkpoint.path,
        destination=target,
        pattern=pattern,
        num_layers=sum(file.layer is not None for file in files),
        num_tensors=len(checkpoint.tensors),
        files=tuple((file.name, len(file.specs), file.nbytes) for file in files),
        nbytes=sum(file.nbytes for file in files),
        copied=tuple(copied),
        skipped=tuple(skipped),
        seconds=time.perf_counter() - started,
    )


class _Run:
    """Writes file after file, and knows how far it came."""

    def __init__(
        self, engine: Engine, checkpoint: Checkpoint, directory: str, total: int, progress: Progress | None
    ) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._directory = directory
        self._total = total
        self._progress = progress
        self._done = 0

    def write(self, file: PackedFile) -> FileRecord:
        """Write one file; what is recorded of it."""
        header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
        sums: dict[str, int] = {}
        path = os.path.join(self._directory, file.name)
        write_file(path, self._pieces(header, file, sums), {}, False, True, lambda: None, nbytes=file.nbytes)
        tensors = {spec.name: TensorRecord(spec.nbytes, finish(spec.nbytes, [sums[spec.name]])) for spec in file.specs}
        return FileRecord(file.nbytes, checksum(header), tensors)

    def _pieces(self, header: torch.Tensor, file: PackedFile, sums: dict[str, int]) -> Iterator[torch.Tensor]:
        yield header
        # What the writer still holds has to stay as it is: two of its blocks; portions are filled to three quarters.
        kept = -(-2 * BLOCK_BYTES // (_PORTION_BYTES * 3 // 4))
        source = Source(self._checkpoint.files, file.specs)
        for portion in read_portions(self._engine, [source], portion_bytes=_PORTION_BYTES, kept=kept):
            if portion.error is not None:
                raise portion.error
            added = torch.stack(partial_sums([piece for _, piece in portion.parts])).tolist()
            for (spec, piece), each in zip(portion.parts, added, strict=True):
                sums[spec.name] = sums.get(spec.name, 0) + each
                yield piece.data
                self._done += piece.data.numel()
            if self._progress is not None:
                self._progress(self._done, self._total)


# Where it goes


def _target(checkpoint: Checkpoint, source: PathLike | Sequence[PathLike], destination: PathLike) -> str:
    """The real path of the destination. Refuses one that must not be written to."""
    try:
        target = os.path.realpath(os.fsdecode(destination))
    except ValueError as error:  # a NUL, or a lone surrogate
        raise ConfigError(f"{destination!r} cannot be a file name: {error}") from None
    folder = _folder(source)
    inside = [] if folder is None else [os.path.realpath(folder)]
    same = [os.path.realpath(os.path.dirname(file.path)) for file in checkpoint.files]
    if target in (*inside, *same):
        raise ConfigError(f"{target} is where the source is, which is never written to; choose another directory")
    if any(target.startswith(each.rstrip("/") + "/") for each in inside):
        raise ConfigError(f"{target} is inside of the source {inside[0]}; choose a directory beside it")
    if os.path.lexists(target):
        if not os.path.isdir(target):
            raise ConfigError(f"{target} is no directory; choose another name")
        if os.path.ismount(target):
            raise ConfigError(
                f"{target} is a mount point, which cannot be replaced in one step; name a directory in it"
            )
        if os.listdir(target):
            raise ConfigError(f"{target} is not empty, and nothing is overwritten; choose another name, or empty it")
    elif not os.path.isdir(os.path.dirname(target)):
        raise ConfigError(f"{os.path.dirname(target)} is no directory; make it first")
    return target


def _folder(source: PathLike | Sequence[PathLike]) -> str | None:
    """The directory that the whole checkpoint is in; None for single files."""
    if not isinstance(source, str | os.PathLike):
        return None
    path = os.path.abspath(os.fspath(source))
    if os.path.isdir(path):
        return path
    return os.path.dirname(path) if path.endswith(".json") else None


def _side_files(folder: str) -> tuple[list[str], list[str]]:
    """Names of what else to copy, and of what not."""
    copied: list[str] = []
    skipped: list[str] = []
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        name = entry.name
        if name.endswith((".safetensors", INDEX_SUFFIX)) or name == SIDECAR_NAME or name.startswith("."):
            continue
        is_wanted = entry.is_file() and not name.endswith(_OTHER_WEIGHTS)
        (copied if is_wanted else skipped).append(name)
    return copied, skipped


def _refuse_without_room(target: str, files: Sequence[PackedFile], copied: Sequence[str], index: str) -> None:
    sidecar = to_json({f.name: FileRecord(0, 0, {s.name: TensorRecord(s.nbytes, 0) for s in f.specs}) for f in files})
    wanted = sum(file.nbytes for file in files) + len(index.encode()) + len(sidecar.encode()) + _SLACK_BYTES
    wanted += sum(os.stat(path).st_size for path in copied) + _FILE_SLACK_BYTES * (len(files) + len(copied) + 2)
    parent, name = os.path.split(target)
    space = os.statvfs(parent)
    room = space.f_bavail * space.f_frsize
    leftovers = [each for each in os.listdir(parent) if each.startswith(f".{name}.gdsstream-pack-")]
    hint = f"; {leftovers[0]} in it was left behind by a pack that was killed, or is being written" if leftovers else ""
    if wanted > room:
        raise WriteError(
            f"{target} needs {wanted} bytes, and {parent} has {room} available: {wanted - room} bytes short, nothing "
            f"was written; free some space, or choose another place{hint}",
            errno.ENOSPC,
        )
    if leftovers:
        log.warning("%s: %s is there, left behind by a pack that was killed, or being written", parent, leftovers[0])


@contextmanager
def _new_directory(target: str) -> Iterator[str]:
    """A directory that gets the name `target` when all went well, and is removed when not."""
    parent, name = os.path.split(target)
    directory = os.path.join(parent, f".{name}.gdsstream-pack-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        os.mkdir(directory)
        try:
            yield directory
            _fsync_directory(directory)
            os.rename(directory, target)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        _fsync_directory(parent)
    except WriteError:
        raise
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith((directory, parent)):
            raise
        raise _write_error(target, error) from error


def _copy(source: str, path: str) -> None:
    try:
        with open(source, "rb") as old, open(path, "xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
    except OSError as error:
        raise WriteError(
            f"{source} cannot be copied to {path}: {error.strerror}; check its mode and the storage", error.errno
        ) from error


def _write_text(path: str, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: str, error: OSError) -> WriteError:
    return WriteError(
        f"{path} cannot be written: {error.strerror}; look at the storage, or pack elsewhere", error.errno
    )


def _fsync_directory(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some filesystems cannot do it, and keep renames in order without
            raise _write_error(path, error) from error
    finally:
        os.close(folder)


def _index(checkpoint: Checkpoint, files: Sequence[PackedFile]) -> str:
    """The text of the index, with what else the source's had."""
    metadata: Mapping[str, Any] = {}
    if checkpoint.path.endswith(".json"):
        with open(checkpoint.path, encoding="utf-8") as file:
            found = json.load(file).get("metadata")
        metadata = found if isinstance(found, dict) else {}
    total = sum(spec.nbytes for spec in checkpoint.tensors.values())
    places = {spec.name: file.name for file in files for spec in file.specs}
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, ensure_ascii=False, indent=2) + "\n"


__all__ = ["INDEX_NAME", "PackReport", "Progress", "pack_checkpoint"]
