"""Regular files: which file in which state, opened and read, and what to say where that cannot be.

Nothing but a regular file is opened: a pipe would wait for its writer, a device may act on being opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from gdsstream.errors import CheckpointError, CheckpointNotFoundError, ReadError

PathLike: TypeAlias = str | os.PathLike[str]


class FileStamp(NamedTuple):
    """Which file, in which state: two stamps differ once a file was replaced, truncated or rewritten."""

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: int | PathLike) -> FileStamp:
        """The stamp of an open descriptor or of a path, of the target where it is a link. Raises OSError."""
        return cls._from(os.stat(file))

    @classmethod
    def _from(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def quote(name: object) -> str:
    """A name or value as an error message shows it: on one line, and not without end."""
    text = repr(name)
    return text if len(text) <= 256 else f"{text[:256]}... ({len(text)} characters)"


def refusal(path: str, error: OSError | ValueError) -> CheckpointError:
    """The error to raise where `path` cannot be asked for, opened or listed, for this reason."""
    if isinstance(error, ValueError):  # a NUL or a lone surrogate, which no file name has
        return CheckpointNotFoundError(f"{path!r} cannot be a file name: {error}")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if os.path.islink(path):
            return CheckpointNotFoundError(f"{path} is a link to {os.readlink(path)}, which does not exist")
        return CheckpointNotFoundError(f"{path} does not exist")
    if error.errno in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"{path}: no permission to read it; change its mode or owner, or run as another user")
    return CheckpointError(f"{path} cannot be opened: {error.strerror}")


def status_of(path: str) -> os.stat_result:
    """What the system knows of a file, of the target where it is a link. Raises CheckpointError and its kinds."""
    try:
        return os.stat(path)
    except (OSError, ValueError) as error:
        raise refusal(path, error) from error


def absolute(path: PathLike | bytes) -> str:
    """The path's name for as long as the process lives: a later read must not depend on the working directory."""
    name = os.fsdecode(path)
    # Not abspath: it would take ".." behind a link literally.
    return name if os.path.isabs(name) else os.path.join(os.getcwd(), name)


@contextmanager
def opened(path: str) -> Iterator[tuple[int, FileStamp]]:
    """A descriptor of a regular file and its stamp, closed at the end. Raises CheckpointError and its kinds."""
    # Asked before it is opened, since opening a device can have effects; without blocking, since it may change between.
    _require_regular(path, status_of(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise refusal(path, error) from error
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status)
        yield descriptor, FileStamp._from(status)
    finally:
        os.close(descriptor)


def _require_regular(path: str, status: os.stat_result) -> None:
    kinds = {
        stat.S_IFDIR: "a directory; open it alone, or name the files in it",
        stat.S_IFIFO: "a pipe; copy what it brings to a file first",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device; open a file on it",
    }
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path} is no regular file but {kinds.get(stat.S_IFMT(status.st_mode), 'something else')}"
        )


def read_at(descriptor: int, path: str, nbytes: int, offset: int) -> bytes:
    """`nbytes` bytes from `offset` on, or what there is before the end of the file. Raises ReadError."""
    parts: list[bytes] = []
    while nbytes:
        try:
            part = os.pread(descriptor, nbytes, offset)
        except OSError as error:
            text = f"{path}: reading at byte {offset} failed: {error.strerror}; check the storage"
            raise ReadError(text, error.errno) from error
        if not part:
            break
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


__all__ = ["FileStamp", "PathLike", "absolute", "opened", "quote", "read_at", "refusal", "status_of"]
