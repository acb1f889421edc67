"""Which tensors a checkpoint has and where: one safetensors file, a directory, an index or a list of files.

Order in `Checkpoint.tensors` is that of the bytes: by file, and by offset in each file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gdsstream.dtypes import DTYPES, DtypeInfo, torch_dtype, torch_shape
from gdsstream.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    HeaderError,
    TensorNotFoundError,
)
from gdsstream.header import MAX_HEADER_BYTES, CheckpointFile, TensorSpec, read_file, read_index
from gdsstream.regular_files import FileStamp, PathLike, absolute, quote, refusal, status_of

Part: TypeAlias = tuple[CheckpointFile, list[TensorSpec]]
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One or many safetensors files as one set of named tensors; no file stays open."""

    path: str  # what was opened, for messages
    files: tuple[CheckpointFile, ...]
    tensors: dict[str, TensorSpec]  # by file, then by offset

    @classmethod
    def open(cls, path: PathLike | Sequence[PathLike]) -> Checkpoint:
        """Reads and validates the headers of a checkpoint.

        `path` is a safetensors file; an index (`*.safetensors.index.json`); a directory, where an index goes before
        `model.safetensors`, and that before all `*.safetensors` in the order of their names; or a list of files. Of
        shards named by an index, only the tensors that the index gives to them belong to the checkpoint.

        Raises CheckpointNotFoundError, HeaderError, TruncatedFileError, CheckpointError for what is no regular or no
        readable file, and ReadError when the storage fails.
        """
        source, parts = headers(path)
        files: list[CheckpointFile] = []
        tensors: dict[str, TensorSpec] = {}
        for file, specs in parts:
            files.append(file)
            tensors.update((spec.name, spec) for spec in specs)
        return cls(source, tuple(files), tensors)

    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` of all files, where the first file to name a key counts; None when no file has any."""
        found = [file.metadata for file in self.files if file.metadata is not None]
        return {key: value for each in reversed(found) for key, value in each.items()} if found else None

    def keys(self) -> list[str]:
        """The names in alphabetical order."""
        return sorted(self.tensors)

    def offset_keys(self) -> list[str]:
        """The names in the order of the bytes: by file, then by offset."""
        return list(self.tensors)

    def spec(self, name: str) -> TensorSpec:
        """Where tensor `name` lies; TensorNotFoundError when there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorNotFoundError(self._lacks(name)) from None

    def select(self, names: Iterable[str] | Callable[[str], bool] | None = None) -> list[TensorSpec]:
        """Specs of some tensors: each of `names` once, in their order, or those whose name a predicate accepts.

        A predicate's, and those of None, which means all, come in the order of the bytes. TensorNotFoundError when a
        name is missing.
        """
        if names is None:
            return list(self.tensors.values())
        if callable(names):
            return [spec for name, spec in self.tensors.items() if names(name)]
        if isinstance(names, str):
            raise ConfigError(f"names is a list or a predicate; for one tensor write [{names!r}]")
        return [self.spec(name) for name in dict.fromkeys(names)]

    def _lacks(self, name: str) -> str:
        import difflib

        few = self.tensors if len(self.tensors) <= 2000 else ()  # on more, the search takes seconds
        close = difflib.get_close_matches(str(name), few, n=1)
        hint = f"did you mean {quote(close[0])}?" if close else "Checkpoint.keys() lists the names"
        return f"{self.path}: no tensor {quote(name)} among {len(self.tensors)}; {hint}"


def headers(path: PathLike | Sequence[PathLike]) -> tuple[str, Iterator[Part]]:
    """What `Checkpoint.open` reads, file by file: what was opened, for messages, and an iterator over its parts.

    A part is a file with those of its tensors that belong to the checkpoint, in the order of their bytes. Its bytes
    can be read while later headers are parsed. Raises as `Checkpoint.open`: for the path at once, for a file and for
    what it has in common with earlier ones when its turn comes.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        if not isinstance(path, Iterable):
            raise ConfigError(f"a checkpoint is a path or a list of paths, not {type(path).__name__}")
        paths = [_absolute(item) for item in path]
        if not paths:
            raise CheckpointNotFoundError("the list of checkpoint files is empty; name at least one file")
        return (f"{paths[0]} and {len(paths) - 1} more" if paths[1:] else paths[0]), _of_files(paths)
    source = _absolute(path)
    found = _in_directory(source) if stat.S_ISDIR(status_of(source).st_mode) else [source]
    if found[0].endswith(".json"):
        return found[0], _of_index(found[0])
    return source, _of_files(found)


def _of_files(paths: Sequence[str]) -> Iterator[Part]:
    seen: dict[str, int] = {}
    for index, path in enumerate(paths):
        file, specs = read_file(path, index)
        # A single file's names were checked with its header.
        for spec in specs if len(paths) > 1 else ():
            other = seen.setdefault(spec.name, index)
            if other != index:
                raise HeaderError(
                    f"{path}: tensor {quote(spec.name)} is also in {paths[other]}; open the files one by one, or "
                    "through an index that tells which of them counts"
                )
        yield file, specs


def _of_index(index: str) -> Iterator[Part]:
    for number, (shard, names) in enumerate(sorted(read_index(index).items())):
        try:
            file, specs = read_file(os.path.join(os.path.dirname(index), shard), number)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{error}; {index} has {len(names)} tensor(s) in it, {quote(next(iter(names)))} for one; "
                "the download or the copy is incomplete"
            ) from error
        chosen = [spec for spec in specs if spec.name in names]
        if len(chosen) != len(names):
            present = {spec.name for spec in chosen}
            lacking = [name for name in names if name not in present]
            raise HeaderError(
                f"{file.path}: tensor {quote(lacking[0])} is not in it, though {index} says so "
                f"({len(lacking)} such tensor(s)); index and shards are not of the same checkpoint"
            )
        yield file, chosen


def _absolute(path: PathLike) -> str:
    if not isinstance(path, str | bytes | os.PathLike):
        raise ConfigError(f"a checkpoint path is a string or os.PathLike, not {type(path).__name__}")
    return absolute(path)


def _in_directory(directory: str) -> list[str]:
    """The files that make up the checkpoint in a directory, or its one index. Raises CheckpointNotFoundError."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError as error:
        raise refusal(directory, error) from error
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    shards = [name for name in names if name.endswith(".safetensors")]
    for candidates, first in ((indices, f"model{INDEX_SUFFIX}"), (shards, "model.safetensors")):
        if first in candidates:
            return [os.path.join(directory, first)]
        if len(candidates) > 1 and candidates is indices:
            raise CheckpointError(f"{directory} has several indices ({', '.join(indices)}); open one of them by name")
        if candidates:
            return [os.path.join(directory, name) for name in candidates]
    raise CheckpointNotFoundError(f"{directory} has no *.safetensors file and no *{INDEX_SUFFIX}")


__all__ = [
    "DTYPES",
    "INDEX_SUFFIX",
    "MAX_HEADER_BYTES",
    "Checkpoint",
    "CheckpointFile",
    "DtypeInfo",
    "FileStamp",
    "TensorSpec",
    "torch_dtype",
    "torch_shape",
]
