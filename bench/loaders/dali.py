"""NVIDIA DALI: its readers of numpy files and of WebDataset's tar files, and its iterator for torch.

- `cpu` and `gpu`: a sample is a file for the numpy readers, so that each record becomes an .npy file. `gpu` reads
  through GPUDirect Storage's library. The shuffle is of all files, before every epoch.
- `webdataset`: the tar files of webdataset.py, with an index. The shuffle is of the tar files before every epoch, and
  of a buffer of records. One thread goes through the files in sequence; with `use_mmap` it only notes where the
  records are, and the first to touch them are the `num_threads` that bring a batch together.

A pipeline reads ahead for as long as it lives, into the next epoch too. So each sample has a new one, made before its
clock starts and gone after it: it reads nothing before it is asked for a batch, as the workers of other loaders, and
nothing while another loader is measured. Inside a sample its epochs follow on each other without a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bench.config import BenchConfigError
from bench.loaders import own_format
from bench.loaders.base import Job, Unavailable, need, need_cuda

if TYPE_CHECKING:
    import torch

_READERS = ("cpu", "gpu", "webdataset")
_PACKAGE = "nvidia-dali-cuda130"


@dataclass
class Dali(own_format.Converted):
    """`reader`: cpu, gpu or webdataset. At most `most_files` records are made files of, for the first two; the others
    of `shuffle_records` on are the webdataset reader's, whose buffer has fewer where they are large."""

    reader: str = "cpu"
    num_threads: int = 8
    prefetch_queue_depth: int = 2
    most_files: int = 150_000
    shuffle_records: int = 1000
    shuffle_bytes: int = 1 << 30
    use_mmap: bool = True

    verbs: ClassVar[frozenset[str]] = frozenset({"epoch", "mlperf"})

    _job: Job | None = field(default=None, init=False, repr=False)
    _iterator: Any = field(default=None, init=False, repr=False)
    _indexes: list[str] = field(default_factory=list, init=False, repr=False)
    _made: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.reader not in _READERS:
            raise BenchConfigError(f"'reader' is {self.reader!r}; valid: {', '.join(_READERS)}")

    def check(self, job: Job) -> None:
        if self.reader == "gpu":
            need_cuda(job, "DALI's GPU reader")
        shards = own_format.request_of(job).shards
        if shards.sizes is not None:
            raise Unavailable("its iterator for torch needs samples of one shape, and these records differ in size")
        count = shards.num_records
        if self.reader != "webdataset" and count > self.most_files:
            raise Unavailable(f"a record is a file for its numpy reader, and {count} are more than most_files")

    def convert(self, job: Job) -> None:
        need("nvidia.dali", _PACKAGE)
        self._directory = own_format.folder(job, f"dali-{id(self)}")
        if self.reader == "webdataset":
            self._files = own_format.write_tars(job, self._directory)
            self._indexes = _write_indexes(job, self._files)
            return
        for number, row in enumerate(own_format.rows(job)):
            path = self._directory / f"{number:09d}.npy"
            np.save(path, row)
            self._files.append(str(path))

    def prepare(self, job: Job) -> None:
        self._job = job
        self._iterator = self._made_anew(job)

    def arm(self) -> None:
        assert self._job is not None
        if self._iterator is None:
            self._iterator = self._made_anew(self._job)

    def disarm(self) -> None:
        # Without a reference to it, its threads end and its files are closed.
        self._iterator = None

    def _made_anew(self, job: Job) -> Any:
        """An iterator that has read nothing. Each one's order is another."""
        dali = need("nvidia.dali", _PACKAGE)
        plugin = need("nvidia.dali.plugin.pytorch", _PACKAGE)
        request = own_format.request_of(job)
        seed = request.seed + self._made
        self._made += 1

        def pipeline() -> Any:
            data = self._read(dali.fn, job, seed)
            return data.gpu() if job.cuda and self.reader != "gpu" else data

        built = dali.pipeline_def(pipeline)(
            batch_size=request.batch_size,
            num_threads=self.num_threads,
            device_id=int(job.device.partition(":")[2] or 0) if job.cuda else None,
            prefetch_queue_depth=self.prefetch_queue_depth,
        )
        return plugin.DALIGenericIterator(
            [built],
            ["x"],
            reader_name="records",
            last_batch_policy=plugin.LastBatchPolicy.PARTIAL,
            auto_reset=True,
            prepare_first_batch=False,
        )

    def _read(self, fn: Any, job: Job, seed: int) -> Any:
        shared = {
            "name": "records",
            "seed": seed,
            "shuffle_after_epoch": True,
            "shuffle_after_epoch_seed": seed,
            # Not read on from the next epoch, some of whose records would then be missing in it.
            "pad_last_batch": True,
        }
        if self.reader != "webdataset":
            return fn.readers.numpy(device=self.reader, files=self._files, cache_header_information=True, **shared)
        held = own_format.held(job, self.shuffle_records, self.shuffle_bytes)
        return fn.readers.webdataset(
            paths=self._files,
            index_paths=self._indexes,
            ext=[own_format.MEMBER],
            random_shuffle=True,
            initial_fill=held,
            dont_use_mmap=not self.use_mmap,
            **shared,
        )

    def epochs(self, count: int) -> Iterator[torch.Tensor]:
        iterator = self._iterator
        for _ in range(count):
            for batch in iterator:
                yield batch[0]["x"]

    def close(self) -> None:
        made, self._iterator = self._made, None
        if made:
            # Device and pinned memory, which it keeps for a next pipeline.
            need("nvidia.dali.backend", _PACKAGE).ReleaseUnusedMemory()
        self._made = 0
        super().close()

    def route(self) -> str | None:
        if self.reader == "webdataset":
            mapped = "mapped" if self.use_mmap else "read"
            return f"tar, {mapped}, {self.num_threads} threads, tar files and {self.shuffle_records} records shuffled"
        return f"numpy reader to the {self.reader}, {self.num_threads} threads, files shuffled"


def _write_indexes(job: Job, tars: list[str]) -> list[str]:
    """What DALI's wds2idx writes of each tar file of `own_format.write_tars`: where its members are."""
    shards = own_format.request_of(job).shards
    size, step = shards.record_bytes, own_format.tar_bytes(shards.record_bytes)
    found = []
    first = 0
    for path, count in zip(tars, shards.rows, strict=True):
        found.append(f"{path}.idx")
        with open(found[-1], "x", encoding="ascii") as file:
            file.write(f"v1.2 {count}\n")
            for i in range(count):
                name = own_format.member_name(first + i)
                file.write(f"{own_format.MEMBER} {own_format.BLOCK + i * step} {size} {name}\n")
        first += count
    return found
