"""One .npy array in a file or in a member of a tar: its header, read in place; and the file that it is read from.

Refused is what safetensors has no dtype for (structured, object, text, big-endian, 16-byte floats and complex numbers),
and Fortran order, whose records do not lie together.
"""

from __future__ import annotations

import ast
import os
import stat
from functools import lru_cache
from math import prod
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from gdsstream.dtypes import DTYPES
from gdsstream.errors import CheckpointError, DatasetError, HeaderError, TruncatedFileError
from gdsstream.records import STRIDED, Column, Shard
from gdsstream.regular_files import FileStamp, quote, read_at, refusal

_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 20
_MAX_SIZE = 2**63 - 1
_WINDOW_BYTES = 4096
# numpy's name, without the sign of byte order, to safetensors'.
_DTYPES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32", "u8": "U64", "i8": "I64",
    "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64",
}  # fmt: skip


class ShardFile:
    """A shard that is open for its headers; a context manager. Small reads near each other are one read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Without blocking: a pipe would wait for its writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            raise refusal(path, error) from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise CheckpointError(f"{path} is no regular file; a shard has to be one")
        self.stamp = FileStamp.of(self._descriptor)
        self._window, self._window_start = b"", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, nbytes: int, what: str) -> bytes:
        """Exactly those bytes. TruncatedFileError, which names `what` they are, where the file ends before them."""
        at = offset - self._window_start
        if at < 0 or at + nbytes > len(self._window):
            found = read_at(self._descriptor, self.path, max(nbytes, _WINDOW_BYTES), offset)
            self._window, self._window_start, at = found, offset, 0
            if len(self._window) < nbytes:
                raise TruncatedFileError(
                    f"{self.path} ends at byte {offset + len(self._window)}, within {what}, which needs {nbytes} bytes "
                    f"at {offset}; the download or the copy is incomplete"
                )
        return self._window[at : at + nbytes]


class NpyHeader(NamedTuple):
    """What the header of an array says, and where its data begins in the file."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    data_start: int
    nbytes: int  # of the data


def npy_header(file: ShardFile, offset: int, end: int, where: str) -> NpyHeader:
    """The array that begins at `offset` of the file and has to end at byte `end`; `where` names it in messages.

    Raises HeaderError for what is no valid array, TruncatedFileError, and DatasetError for one that cannot be read.
    """
    room = end - offset
    start = file.read(offset, min(room, 12), f"the header of {where}")
    if start[:6] != _MAGIC or len(start) < 12:
        raise HeaderError(f"{where} does not begin as a .npy array; it is damaged, or something else by its name")
    version = start[6]
    if version not in (1, 2, 3):
        raise HeaderError(f"{where}: version {version} of the .npy format is not known; write it as 1, 2 or 3")
    wide = 2 if version == 1 else 4
    length = int.from_bytes(start[8 : 8 + wide], "little")
    data_start = offset + 8 + wide + length
    if length > _MAX_HEADER_BYTES:
        raise HeaderError(f"{where}: a header of {length} bytes is beyond {_MAX_HEADER_BYTES}; it is damaged")
    if data_start > end:
        raise TruncatedFileError(
            f"{where} ends within its header: {length} bytes promised, {room - 8 - wide} are there; "
            "the download or the copy is incomplete"
        )
    raw = file.read(offset + 8 + wide, length, f"the header of {where}")
    try:
        dtype, shape = _parse(raw)
    except _Refused as error:
        raise DatasetError(f"{where} {error}") from None
    except ValueError as error:
        raise HeaderError(f"{where}: {error}") from None
    return NpyHeader(dtype, shape, data_start, prod(shape) * DTYPES[dtype].bits // 8)


class _Refused(ValueError):
    """A valid array that cannot be read."""


@lru_cache(maxsize=1024)
def _parse(raw: bytes) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape). ValueError says what is wrong; _Refused what is right, but not for us."""
    try:
        found = ast.literal_eval(raw.decode("utf-8").strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("the header is no dict of descr, fortran_order and shape; the file is damaged")
    shape, descr = found["shape"], found["descr"]
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {quote(shape)} is no tuple of sizes; the file is damaged")
    if isinstance(descr, list):
        raise _Refused("is a structured array; write each of its fields as an array of its own")
    if not isinstance(descr, str):
        raise ValueError(f"the dtype {quote(descr)} is not known; the file is damaged")
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"the dtype {quote(descr)} is not known; the file is damaged") from None
    if dtype.byteorder == ">" and dtype.itemsize > 1:
        raise _Refused(f"is big-endian ({descr}); write it with array.astype({dtype.newbyteorder('<').str!r})")
    name = _DTYPES.get(dtype.str[1:])
    if name is None:
        raise _Refused(f"has the dtype {descr} ({dtype.name}), which gdsstream does not read; write it as another")
    if found["fortran_order"] and len(shape) > 1:
        raise _Refused("is in Fortran order, so that no record lies together; write numpy.ascontiguousarray(array)")
    # As in numpy, one dimension of 0 does not let the others be of any size.
    if prod(size or 1 for size in shape) * dtype.itemsize > _MAX_SIZE:
        raise ValueError(f"the shape {quote(shape)} overflows 2**63 - 1 bytes; the file is damaged")
    return name, shape


def read_npy(path: str) -> Shard:
    """One array as a shard: field "data", whose dimension 0 is the record."""
    with ShardFile(path) as file:
        size = file.stamp.size
        header = npy_header(file, 0, size, path)
        if not header.shape:
            raise DatasetError(f"{path} is a scalar; a shard needs at least one dimension, whose index is the record")
        end = header.data_start + header.nbytes
        if end > size:
            raise TruncatedFileError(
                f"{path} has {size} bytes where its header promises {end} ({end - size} missing): {header.dtype} of "
                f"shape {list(header.shape)}; the download or the copy is incomplete"
            )
        if end < size:
            raise HeaderError(
                f"{path}: the array ends at byte {end}, but {size - end} more bytes follow; one array a file"
            )
        count, shape = header.shape[0], header.shape[1:]
        words = np.array([header.data_start, header.nbytes // count if count else 0], dtype=np.int64)
        return Shard(path, file.stamp, count, (Column("data", header.dtype, shape, STRIDED, words),))


__all__ = ["NpyHeader", "ShardFile", "npy_header", "read_npy"]
