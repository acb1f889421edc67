"""Which files are the shards of a dataset, and in which order: a directory, a glob, a file or a list of files."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gdsstream.errors import CheckpointError, CheckpointNotFoundError, ConfigError, DatasetError
from gdsstream.regular_files import FileStamp, PathLike, absolute, quote, status_of
from gdsstream.shard_formats import EXTENSIONS, FORMATS

_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".npz")
# {000..010} and {train,valid}, as shells and WebDataset expand them.
_BRACES = re.compile(r"\{[^{}]*(\.\.|,)[^{}]*\}")


class ShardPath(NamedTuple):
    """A file that is to be a shard, and its state when it was found."""

    path: str  # absolute
    stamp: FileStamp


def find_shards(path: PathLike | Sequence[PathLike], format: str | None = None) -> tuple[list[ShardPath], str]:
    """The shards in their order, and the name of their one format.

    A directory's shards are the files in it whose extension is one of the format's (without `format`: of any format);
    they and the matches of a glob come in natural order (shard-2 before shard-10), a list in its own. Other files of a
    directory, and all whose names begin with a dot, are none of the dataset. Of a path or glob that names a file,
    `format` decides whatever its extension is.

    Raises DatasetError where there is no shard, shards of several formats, or a path that is not UTF-8;
    CheckpointNotFoundError and CheckpointError for a path that does not exist or is no file; ConfigError for what is no
    path.
    """
    if isinstance(path, str | os.PathLike):
        name = _absolute(path)
        if os.path.isdir(name):
            names = _in_directory(name, format)
        elif glob.has_magic(name) and not os.path.lexists(name):
            names = _in_order(each for each in glob.glob(name, recursive=True) if not os.path.isdir(each))
            if not names:
                raise DatasetError(f"nothing matches {name}; {_brace_hint(name) or 'check the pattern'}")
        else:
            names = [name]
    elif isinstance(path, Iterable) and not isinstance(path, bytes):
        names = [_absolute(each) for each in path]
        if not names:
            raise DatasetError("the list of shards is empty; name at least one file")
    else:
        hint = "; give it the dataset, and sampler=subset.indices" if hasattr(path, "indices") else ""
        raise ConfigError(f"a dataset is a path, a glob or a list of files, not {type(path).__name__}{hint}")
    found = [ShardPath(each, _stamp(each)) for each in names]
    return found, format or _one_format(names)


def natural(path: str) -> list[str | int]:
    """A key that sorts numbers in names by their value."""
    # Every other part is a number, so that numbers only meet numbers.
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", path))]


def _in_order(names: Iterable[str]) -> list[str]:
    # s1 and s01 have one natural key: the directory's own order would decide.
    return sorted(names, key=lambda name: (natural(name), name))


def _absolute(path: PathLike) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a shard's path is a string or os.PathLike, not {type(path).__name__}")
    return absolute(path)


def _in_directory(directory: str, format: str | None) -> list[str]:
    try:
        files = [name for name in os.listdir(directory) if not name.startswith(".")]
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}; check its mode and owner") from error
    wanted = [name for name in files if EXTENSIONS.get(_extension(name)) in ((format,) if format else FORMATS)]
    if not wanted:
        packed = next((name for name in sorted(files) if name.endswith(_COMPRESSED)), None)
        hint = (
            f"{packed} is compressed: decompress it, since records are read in place"
            if packed
            else (f"it has {len(files)} other file(s), {sorted(files)[0]} for one" if files else "it is empty")
        )
        extensions = [extension for extension, name in EXTENSIONS.items() if format in (None, name)]
        raise DatasetError(f"{directory} has no shard ({', '.join(extensions)}); {hint}")
    return [os.path.join(directory, name) for name in _in_order(wanted)]


def _one_format(names: Sequence[str]) -> str:
    first: dict[str, str] = {}
    for name in names:
        kind = EXTENSIONS.get(_extension(name))
        if kind is None:
            if name.endswith(_COMPRESSED):
                raise DatasetError(f"{name} is compressed: decompress it, since records are read in place")
            raise DatasetError(f"{name}: the extension tells no format; give one, format={FORMATS[0]!r} or the like")
        first.setdefault(kind, name)
    if len(first) > 1:
        (kind, path), (other, odd) = list(first.items())[:2]
        raise DatasetError(
            f"shards of several formats: {path} is {kind}, {odd} is {other}; choose one with format=, or with a glob"
        )
    return next(iter(first))


def _extension(name: str) -> str:
    _, dot, extension = name.rpartition("/")[2].rpartition(".")
    return (dot + extension).lower()


def _brace_hint(path: str) -> str:
    """What to do about a path that is not there, where it has braces to expand; else nothing."""
    if not _BRACES.search(path):
        return ""
    return "braces are not expanded here: give a glob, such as shard-*.tar, or a list of the files"


def _stamp(path: str) -> FileStamp:
    try:
        status = status_of(path)
    except CheckpointNotFoundError as error:
        if hint := _brace_hint(path):
            raise CheckpointNotFoundError(f"{error}; {hint}") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        what = (
            "a directory; name the files in it, or open it alone" if stat.S_ISDIR(status.st_mode) else "no regular file"
        )
        raise CheckpointError(f"{path} is {what}; a shard is a file")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DatasetError(
            f"the path {quote(os.fsencode(path))} of a shard is not UTF-8, so that it cannot be read; rename it"
        ) from None
    return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


__all__ = ["ShardPath", "find_shards", "natural"]
