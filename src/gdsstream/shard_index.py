"""What the headers of shards say, kept beside them: opening a dataset of 10,000 shards then reads none of them.

Each directory with shards gets one file for each format (and its options), `.gdsstream-index-<format>.npz`; where that
cannot be written, the user's cache directory ($XDG_CACHE_HOME/gdsstream or ~/.cache/gdsstream) takes it. It holds every
shard of the directory that was ever opened and is still there, so that a glob over a part of them adds to it. An entry
counts only while size, mtime and ctime of its shard are the same (another file that is moved there keeps its mtime, and
`cp -p` sets it; nothing sets a ctime). The other shards are read again, and the file is replaced whole, never changed.

The file is arrays (`numpy.savez`, nothing pickled): `meta` is JSON (names and schemas), and the words of all columns of
all shards lie end to end in `words`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from gdsstream.dtypes import DTYPES
from gdsstream.errors import CheckpointError, CheckpointNotFoundError
from gdsstream.notices import say_once
from gdsstream.records import KINDS, Column, Shard, Words
from gdsstream.regular_files import opened, quote
from gdsstream.shard_formats import ShardFormat
from gdsstream.shard_paths import ShardPath
from gdsstream.small_files import cache_folder

log = logging.getLogger(__name__)

_VERSION = 2
_MAX_SIZE = 2**63 - 1
# Reading headers waits for storage, and little else.
_READERS = 16


class _Entry(NamedTuple):
    """A shard as the index holds it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    num_records: int
    columns: tuple[Column, ...]


def read_shards(paths: Sequence[ShardPath], format: ShardFormat, *, cache: bool = True) -> list[Shard]:
    """The shards at `paths`, in that order; headers are read only of those that no index knows as they are now.

    Raises what `ShardFormat.read` does, of the first shard in the list that is not as it should be.
    """
    directories: dict[str, dict[str, ShardPath]] = {}
    for each in paths:
        directory, _, name = each.path.rpartition("/")
        directories.setdefault(directory or "/", {})[name] = each
    known: dict[str, Shard] = {}
    stale: dict[str, dict[str, _Entry]] = {}
    for directory, wanted in directories.items() if cache else ():
        index = stale[directory] = {}
        left = wanted
        for path in index_paths(directory, format):
            entries = _load(path, format) if left else {}
            index.update(entries)
            for name, each in left.items():
                entry = entries.get(name)
                # Its first three are the stamp's last.
                if entry is not None and entry[:3] == each.stamp[2:]:
                    known[each.path] = Shard(each.path, each.stamp, entry.num_records, entry.columns)
            left = {name: each for name, each in left.items() if each.path not in known}
    fresh = _read([each for each in dict.fromkeys(paths) if each.path not in known], format)
    known.update((shard.path, shard) for shard in fresh)
    if cache:
        for directory in {os.path.dirname(shard.path): None for shard in fresh}:
            shards = (known[each.path] for each in directories[directory].values())
            stale[directory].update((os.path.basename(shard.path), _entry(shard)) for shard in shards)
            _save(directory, format, stale[directory], set(directories[directory]))
    return [known[each.path] for each in paths]


def _entry(shard: Shard) -> _Entry:
    return _Entry(*shard.stamp[2:], shard.num_records, shard.columns)


def _read(paths: Sequence[ShardPath], format: ShardFormat) -> list[Shard]:
    if len(paths) < 2:
        return [format.read(each.path) for each in paths]
    with ThreadPoolExecutor(min(_READERS, len(paths)), "gdsstream-index") as pool:
        try:
            futures = [pool.submit(format.read, each.path) for each in paths]
        except RuntimeError as error:  # the main thread has ended, or there are too many
            say_once(log, f"headers of shards are read one after another: {error}", about="threads for headers")
            return [format.read(each.path) for each in paths]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def index_name(format: ShardFormat) -> str:
    """The name of the file that holds a directory's index for shards of that format."""
    return f".gdsstream-index-{format.key}.npz"


def index_paths(directory: str, format: ShardFormat) -> tuple[str, str]:
    """Where the index of a directory is looked for: beside the data, then in the user's cache directory."""
    digest = hashlib.blake2b(os.path.realpath(directory).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    name = index_name(format)
    return os.path.join(directory, name), str(cache_folder() / f"shards-{digest}-{name[1:]}")


# --- reading it -----------------------------------------------------------------------------------------------------


def _load(path: str, format: ShardFormat) -> dict[str, _Entry]:
    """The entries of an index by the shards' names; none where it does not exist, or is damaged, which is logged."""
    try:
        with (
            opened(path) as (descriptor, _),
            open(descriptor, "rb", closefd=False) as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            return _unpack(arrays, format)
    except CheckpointNotFoundError:
        pass
    except (OSError, CheckpointError) as error:
        log.warning("the shard index %s cannot be read (%s); headers are read instead", path, error)
    except Exception as error:  # numpy and zipfile raise whatever the damaged bytes lead them to
        log.warning("the shard index %s is damaged (%s); it is made anew", path, str(error) or type(error).__name__)
    return {}


def _unpack(arrays: Any, format: ShardFormat) -> dict[str, _Entry]:
    """Entries out of the arrays of a file. Raises ValueError, or any other error, for what cannot be such a file."""
    meta = json.loads(arrays["meta"].tobytes())
    if meta["version"] != _VERSION or meta["format"] != format.key:
        raise ValueError(f"it is of version {meta['version']} and format {meta['format']}")
    names: list[str] = meta["names"]
    shards = arrays["shards"]
    words = arrays["words"]
    if shards.dtype != np.int64 or words.dtype != np.int64 or shards.shape != (len(names), 6) or words.ndim != 1:
        raise ValueError("its arrays do not fit each other")
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a name is no string")
    if (words < 0).any() or (shards[:, [0, 3, 4, 5]] < 0).any():  # times can be before 1970
        raise ValueError("a size, a count or a place is negative")
    schemas = [[(n, d, tuple(s), k, t) for n, d, s, k, t in schema] for schema in meta["schemas"]]
    for name, dtype, shape, kind, note in (column for schema in schemas for column in schema):
        if not isinstance(name, str) or not isinstance(note, str):
            raise ValueError("a name or a note is no string")
        if kind not in KINDS or dtype not in DTYPES:
            raise ValueError(f"a column of dtype {dtype} and kind {kind} is not known")
        if not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
            raise ValueError(f"a column has the shape {quote(shape)}")
    entries = {}
    cursor = 0
    for name, (size, mtime_ns, ctime_ns, count, schema, length) in zip(names, shards.tolist(), strict=True):
        start = cursor
        columns = []
        for column, dtype, shape, kind, note in schemas[schema]:
            end = cursor + _length(kind, count)
            columns.append(Column(column, dtype, shape, kind, words[cursor:end], note))
            cursor = end
        if cursor - start != length or cursor > len(words):
            raise ValueError(f"the entry of {name} does not have the length that its fields need")
        entries[name] = _Entry(size, mtime_ns, ctime_ns, count, tuple(columns))
    return entries


def _length(kind: str, count: int) -> int:
    return {"strided": 2, "placed": count, "ragged": 2 * count, "refused": 0}[kind]


# --- writing it -----------------------------------------------------------------------------------------------------


def _save(directory: str, format: ShardFormat, index: dict[str, _Entry], wanted: set[str]) -> None:
    """Write the index where it can be written, without entries of shards that are gone. Says so where it cannot."""
    gone = {name for name in index.keys() - wanted if not os.path.exists(os.path.join(directory, name))}
    arrays = _pack({name: entry for name, entry in index.items() if name not in gone}, format)
    beside, cached = index_paths(directory, format)
    try:
        return _write(beside, arrays)
    except OSError as error:
        reason = f"{error.strerror or error}"
    try:
        os.makedirs(os.path.dirname(cached), mode=0o700, exist_ok=True)
        _write(cached, arrays)
        say_once(log, f"the shard index of {directory} is kept in {cached}: {reason}")
    except OSError as error:
        say_once(
            log,
            f"the shard index of {directory} is not kept, so that headers are read at each start: {reason}, "
            f"and {cached}: {error.strerror or error}",
        )


def _pack(index: dict[str, _Entry], format: ShardFormat) -> dict[str, Words]:
    schemas: dict[tuple[Any, ...], int] = {}
    rows, words = [], []
    for entry in index.values():
        schema = tuple((c.name, c.dtype, c.shape, c.kind, c.note) for c in entry.columns)
        number = schemas.setdefault(schema, len(schemas))
        words += [column.words for column in entry.columns]
        rows.append((*entry[:3], entry.num_records, number, sum(len(c.words) for c in entry.columns)))
    meta = {"version": _VERSION, "format": format.key, "names": list(index), "schemas": list(schemas)}
    return {
        "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
        "shards": np.array(rows, dtype=np.int64).reshape(-1, 6),
        "words": np.concatenate(words) if words else np.empty(0, dtype=np.int64),
    }


def _write(path: str, arrays: dict[str, Any]) -> None:
    """Whole or not at all. Raises OSError."""
    part = f"{path}.{os.getpid()}-{os.urandom(4).hex()}.part"
    # With the mode of any new file, which a temporary one would not have: others read the dataset, too.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            np.savez(file, **arrays)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


__all__ = ["index_name", "index_paths", "read_shards"]
