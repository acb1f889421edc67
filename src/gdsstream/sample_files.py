"""What a measurement reads of a path: windows of its files, one after the other, round and round.

Each measurement gets the next window, so that no drive serves it from a cache of its own while there are others. What
the page cache holds of a window is dropped first where the path is on a disk; pages that others hold on to stay, which
`residency` tells.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from gdsstream.errors import ConfigError, ReadError
from gdsstream.regular_files import FileStamp
from gdsstream.storage import residency

#: Files are used in whole MiB, so that every read is aligned.
UNIT = 2**20
_MOST_FILES = 256
_MOST_ENTRIES = 10_000
_LEAST_ALLOCATED = 0.9


class Piece(NamedTuple):
    """A part of a file, in bytes."""

    path: str
    stamp: FileStamp
    offset: int
    nbytes: int


class SampleFiles:
    """The regular files at a path: the file itself, or those directly in a folder, the largest first.

    Attributes:
        path: as given.
        files: (path, bytes that are used), whole MiB.
        nbytes: of all of them.
        sparse: names of files that have fewer blocks than bytes: holes, or compressed data, which read faster.

    Raises ReadError for a path that cannot be reached, and ConfigError where there is no file of at least `least_bytes`
    in all.
    """

    def __init__(self, path: str | os.PathLike[str], least_bytes: int = UNIT) -> None:
        self.path = os.fspath(path)
        found = _files(self.path)
        self.files = [(name, size // UNIT * UNIT) for name, size, _ in found if size >= UNIT]
        self.nbytes = sum(size for _, size in self.files)
        self.sparse = [name for name, size, blocks in found if size >= UNIT and blocks * 512 < size * _LEAST_ALLOCATED]
        if self.nbytes < least_bytes:
            raise ConfigError(
                f"{self.path} has {self.nbytes} bytes to read, in whole MiB of files; it takes at least {least_bytes}: "
                "name a larger file, or the folder of a model"
            )
        self._at = (0, 0)

    def window(self, nbytes: int) -> list[Piece]:
        """The next `nbytes` bytes (rounded down to MiB, at most all there are), beginning where the last ones ended."""
        left = min(nbytes, self.nbytes) // UNIT * UNIT
        pieces = []
        index, offset = self._at
        while left:
            path, size = self.files[index]
            count = min(left, size - offset)
            pieces.append(Piece(path, _stamp(path), offset, count))
            left -= count
            offset += count
            if offset == size:
                index, offset = (index + 1) % len(self.files), 0
        self._at = (index, offset)
        return pieces


def drop_cached(pieces: Sequence[Piece]) -> float:
    """Have the page cache let go of the files of the pieces; returns the share of the pieces that it kept, 0 to 1.

    All of each file goes, since what is cached of it decides how an engine reads it. Only clean pages that nobody has
    mapped go; a file that was just written is brought to the disk first.
    """
    kept = total = 0.0
    for piece in pieces:
        fd = _open(piece.path)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ReadError(f"{piece.path}: its pages cannot be dropped: {error.strerror}", error.errno) from error
        finally:
            os.close(fd)
        kept += residency(piece.path, piece.offset, piece.nbytes) * piece.nbytes
        total += piece.nbytes
    return kept / total if total else 0.0


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(f"{path} cannot be opened: {error.strerror}; check the path", error.errno) from error


def _stamp(path: str) -> FileStamp:
    try:
        return FileStamp.of(path)
    except OSError as error:
        raise ReadError(f"{path} cannot be reached: {error.strerror}; check the path", error.errno) from error


def _files(path: str) -> list[tuple[str, int, int]]:
    """(path, bytes, blocks of 512 bytes) of the regular files."""
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is neither a file nor a folder; name one of those")
            return [(path, status.st_size, status.st_blocks)]
        found = []
        with os.scandir(path) as entries:
            for count, entry in enumerate(entries):
                if count == _MOST_ENTRIES:
                    break
                if entry.is_file() and not entry.name.startswith("."):
                    one = entry.stat()
                    found.append((entry.path, one.st_size, one.st_blocks))
    except OSError as error:
        raise ReadError(f"{path} cannot be reached: {error.strerror}; check the path", error.errno) from error
    return sorted(found, key=lambda one: (-one[1], one[0]))[:_MOST_FILES]


__all__ = ["UNIT", "Piece", "SampleFiles", "drop_cached"]
