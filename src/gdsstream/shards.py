"""ShardDataset: the records of a dataset's shards, one by one or in batches, read in place.

It is a map-style dataset: `len`, `[i]` and `__getitems__` are what torch's DataLoader asks for, in its workers too, and
ShardLoader opens the same. Only headers are read when it is opened, and those only once (`shard_index`). It holds no
engine of its own: each process that reads uses its shared one, so that it can be pickled and forked.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gdsstream.config import StreamConfig
from gdsstream.devices import allocate
from gdsstream.engine.base import SourceFile
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import ConfigError
from gdsstream.header import CheckpointFile
from gdsstream.load import as_bytes, collection_paused, shared_engine
from gdsstream.plan import ReadPlan
from gdsstream.records import Field, Located, RecordTable
from gdsstream.regular_files import PathLike
from gdsstream.shard_formats import ShardFormat
from gdsstream.shard_index import read_shards
from gdsstream.shard_paths import find_shards

Sample: TypeAlias = torch.Tensor | dict[str, torch.Tensor]

# Files that stay open between batches, in each process that reads.
_OPEN_FILES = 64
# Files in one native call: many systems let a process have no more than 1024 open.
_MOST_FILES = 256


class ShardDataset:
    """The records of shards: safetensors, .npy, flat token files or tar (WebDataset layout), read in place.

    Args:
        path: a directory (all shards in it, of one format, in the natural order of their names), a glob, a file, or a
            list of files in the order that counts.
        fields: which fields, in the order wanted; None means all.
        format: "safetensors", "npy", "tokens" or "tar"; None tells it by the extension.
        dtype, record_length, stride: of token files, and only of these: the dtype ("uint16", "U16", torch.uint16,
            numpy.uint16), the tokens of a record, and the tokens from one record's beginning to the next's, by default
            `record_length`. Tokens at the end of a file that do not fill a record are left out.
        index_cache: whether what the headers say is kept, beside the data or in the user's cache directory.

    Attributes:
        table: the RecordTable; fields, paths, fingerprint: its own.

    Raises:
        DatasetError: no shards, no records, or shards that disagree or cannot be decoded (which shard, which field).
        ConfigError: arguments that do not fit.
        CheckpointNotFoundError, CheckpointError, HeaderError, TruncatedFileError, ReadError: a shard is missing, not
            readable, not valid, or shorter than its header promises.
    """

    def __init__(
        self,
        path: PathLike | Sequence[PathLike],
        *,
        fields: Sequence[str] | None = None,
        format: str | None = None,
        dtype: str | torch.dtype | np.dtype[Any] | type[np.generic] | None = None,
        record_length: int | None = None,
        stride: int | None = None,
        index_cache: bool = True,
    ) -> None:
        options = {"dtype": dtype, "record_length": record_length, "stride": stride}
        if format is not None:
            ShardFormat.of(format, options)
        shards, name = find_shards(path, format)
        self.format = ShardFormat.of(name, options)
        with collection_paused():  # tens of thousands of shards make many objects, and no garbage
            self.table = RecordTable.of(read_shards(shards, self.format, cache=index_cache), fields)
        self._reader: _Reader | None = None

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.table.fields

    @property
    def paths(self) -> tuple[str, ...]:
        return self.table.paths

    @property
    def fingerprint(self) -> str:
        return self.table.fingerprint

    def __len__(self) -> int:
        return self.table.num_records

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{f.name}: {f.dtype} [{', '.join(map(str, (['n'] * f.ragged) + list(f.shape)))}]" for f in self.fields
        )
        return f"ShardDataset({len(self)} records in {len(self.paths)} {self.format.name} shard(s); {fields})"

    def __getitem__(self, index: int) -> Sample:
        """Record `index` on the CPU: a tensor where there is one field, else a dict of tensors; its memory is its own.

        Negative indices count from the end. Raises IndexError; ReadError and its kinds when the storage fails.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Records in one native call; torch's DataLoader asks for its batches like this. As `[i]` for each of them,
        except that the records of a batch share memory: keeping one of them keeps all."""
        reader = self._reader
        if reader is None or not reader.usable:
            reader = self._reader = _Reader(self)
        return reader.read(self._numbers(indices))

    def sources(self, files: Iterable[int]) -> list[SourceFile]:
        """Shards by number as what an engine opens and submits."""
        paths, stamps = self.table.paths, self.table.stamps
        return [CheckpointFile(paths[number], stamps[number], 0, None) for number in files]

    def __getstate__(self) -> dict[str, Any]:
        # Engines and descriptors stay where they are: whoever gets the copy opens its own.
        return {**self.__dict__, "_reader": None}

    def _numbers(self, indices: Sequence[int]) -> NDArray[np.int64]:
        try:
            wanted = [operator.index(index) for index in indices]
        except TypeError:
            raise TypeError(f"record numbers are integers, not {_odd(indices)!r}") from None
        count = len(self)
        try:
            numbers = np.array(wanted, dtype=np.int64)
        except OverflowError:
            numbers = np.array(wanted, dtype=object)
        bad = (numbers < -count) | (numbers >= count)
        if bad.any():
            raise IndexError(f"no record {int(numbers[bad.argmax()])}; there are {count}, counted from 0")
        return np.where(numbers < 0, numbers + count, numbers)


def _odd(indices: Iterable[object]) -> object:
    return next(index for index in indices if not hasattr(index, "__index__"))


class _Reader:
    """What reads a dataset in one process: its shared CPU engine, and the files that are open."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._table = dataset.table
        self._sources = dataset.sources
        self._pid = os.getpid()  # a fork's lock may be held by a thread that it does not have
        self._config = StreamConfig.resolve()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, SourceFile] = OrderedDict()

    @property
    def usable(self) -> bool:
        return self._pid == os.getpid()

    def read(self, records: NDArray[np.int64]) -> list[Sample]:
        """Those records on the CPU. Raises ReadError and its kinds."""
        if not len(records):
            return []
        located = self._table.locate_all(records)
        used, inverse = np.unique(located[0].file, return_inverse=True)
        if len(used) > _MOST_FILES:
            middle = len(records) // 2
            return self.read(records[:middle]) + self.read(records[middle:])
        with self._lock:
            engine, files = self._files(used.tolist())
        values = _submit(engine, files, inverse.astype(np.int32), self._table.fields, located)
        if len(values) == 1:
            return list(values[0])
        names = [field.name for field in self._table.fields]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]

    def _files(self, numbers: Sequence[int]) -> tuple[NativeEngine, list[SourceFile]]:
        """Opened, in the order of `numbers`; some of them stay open for the next batch."""
        engine = shared_engine(torch.device("cpu"), self._config)
        if not isinstance(engine, NativeEngine):
            raise ConfigError(f'shards are read by the native engine only, not by backend={engine.name!r}; use "auto"')
        files = []
        for number in numbers:
            file = self._open.pop(number, None)
            files.append(file if file is not None else engine.open(self._sources([number]))[0])
            self._open[number] = files[-1]
        while len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return engine, files


def _submit(
    engine: NativeEngine,
    files: Sequence[SourceFile],
    file: NDArray[np.int32],
    fields: Sequence[Field],
    located: Sequence[Located],
) -> list[tuple[torch.Tensor, ...]]:
    """Read records of all fields in one transfer; for each field, its value in every record."""
    first = fields[0]
    if len(fields) == 1 and not first.ragged and first.record_bytes:
        flat = allocate((len(file), *first.shape), first.torch_dtype, engine.device)
        records = as_bytes(flat).view(len(file), first.record_bytes)
        engine.gather(files, file, located[0].offset, first.record_bytes, records).wait()
        return [flat.unbind()]
    tensors, targets, values = [], [], []
    for field, where in zip(fields, located, strict=True):
        ends = np.cumsum(where.nbytes)
        if field.ragged:
            row_bytes = field.record_bytes
            flat = allocate((int(ends[-1]) // row_bytes, *field.shape), field.torch_dtype, engine.device)
            values.append(torch.split(flat, (where.nbytes // row_bytes).tolist()))
        else:
            flat = allocate((len(file), *field.shape), field.torch_dtype, engine.device)
            values.append(flat.unbind())
        tensors.append(flat)
        targets.append((ends - where.nbytes).astype(np.uint64) + np.uint64(flat.data_ptr()))
    nbytes = np.concatenate([where.nbytes for where in located])
    some = nbytes > 0  # ragged records can be empty
    plan = ReadPlan(
        file=np.tile(file, len(fields))[some],
        file_offset=np.concatenate([where.offset for where in located])[some],
        nbytes=nbytes[some],
        buffer=np.zeros(int(some.sum()), dtype=np.int32),
        buffer_offset=np.zeros(int(some.sum()), dtype=np.int64),
        group=np.zeros(int(some.sum()), dtype=np.int32),
        buffer_bytes=(),
        num_groups=1,
        placements=(),
    )
    engine.submit_to(files, plan, np.concatenate(targets)[some], keep=tensors).wait()
    return values


__all__ = ["Sample", "ShardDataset"]
