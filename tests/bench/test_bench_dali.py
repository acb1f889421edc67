"""DALI's row: what it is given to read, and that it delivers every record of an epoch, having read none before."""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import config, loaders, record_shards
from bench.loaders import dali, own_format
from bench.loaders.base import EpochRequest, Job, Unavailable

#: Neither of whole blocks, nor in whole batches.
COUNT, SIZE, BATCH = 41, 1000, 6
POOL = np.random.default_rng(0).integers(0, 256, 99_998, dtype=np.uint8)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    shards = record_shards.write(tmp_path / "shards", POOL, COUNT, SIZE, 3)
    return Job(shards.paths, shards.data_bytes, "cpu", epoch=EpochRequest(shards, tmp_path, BATCH, 0))


@pytest.fixture(params=["cpu", "webdataset"])
def loader(request: pytest.FixtureRequest, job: Job) -> Iterator[dali.Dali]:
    pytest.importorskip("nvidia.dali", exc_type=ImportError)
    found = loaders.build("row", {"kind": "dali", "reader": request.param, "num_threads": 2, "shuffle_records": 8})
    assert isinstance(found, dali.Dali)
    found.check(job)
    found.convert(job)
    found.prepare(job)
    yield found
    found.close()
    assert sorted(path.name for path in job.epoch.directory.iterdir()) == ["shards"]  # type: ignore[union-attr]


def sample(loader: dali.Dali, job: Job, epochs: int) -> list[list[int]]:
    """The numbers of the records in each epoch, their bytes compared."""
    contents = record_shards.RecordContents(POOL, SIZE, "cpu")
    loader.arm()
    batches = list(loader.epochs(epochs))
    loader.disarm()
    rows = torch.cat(batches)
    assert contents.first_difference(rows) is None
    numbers = record_shards.numbers_of(rows).tolist()
    assert len(numbers) == epochs * COUNT
    return [numbers[i * COUNT : (i + 1) * COUNT] for i in range(epochs)]


def test_every_record_comes_once_in_each_of_several_epochs(loader: dali.Dali, job: Job) -> None:
    orders = [*sample(loader, job, 3), *sample(loader, job, 2)]
    assert [sorted(order) for order in orders] == [list(range(COUNT))] * 5
    assert len(set(map(tuple, orders))) == 5, "an order came twice"
    assert list(range(COUNT)) not in orders


def test_nothing_is_read_before_the_first_batch_is_asked_for(loader: dali.Dali, job: Job) -> None:
    loader.arm()
    time.sleep(0.2)
    (number,) = np.frombuffer(b"\x7f" * 8, dtype=np.int64)
    for path in loader.paths(job):
        data = bytearray(Path(path).read_bytes())
        begin = len(data) - SIZE if path.endswith(".npy") else own_format.BLOCK
        data[begin : begin + 8] = number.tobytes()
        with open(path, "r+b") as file:
            file.write(data)
    found = record_shards.numbers_of(torch.cat(list(loader.epochs(1)))).tolist()
    assert found.count(number) == len(loader.paths(job))
    loader.disarm()


def test_a_sample_that_is_broken_off_leaves_no_threads(loader: dali.Dali, job: Job) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def broken_off() -> int:
        """Threads within, after which nothing of the pipeline is held any more."""
        loader.arm()
        stream = loader.epochs(1)
        batch = next(stream)
        within = threads()
        loader.disarm()
        stream.close()  # type: ignore[attr-defined]
        assert record_shards.RecordContents(POOL, SIZE, "cpu").first_difference(batch) is None
        return within

    # The library and torch start threads of the process with their first work, which stay.
    broken_off()
    time.sleep(1)
    before = threads()
    for _ in range(3):
        assert broken_off() > before
        deadline = time.monotonic() + 5
        while threads() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads() <= before


def test_an_index_says_where_a_tar_file_has_the_records(job: Job) -> None:
    assert job.epoch is not None
    tars = own_format.write_tars(job, own_format.folder(job, "tars"))
    indexes = dali._write_indexes(job, tars)
    expected = [row.tobytes() for row in own_format.rows(job)]
    found, named = [], []
    for path, index in zip(tars, indexes, strict=True):
        data = Path(path).read_bytes()
        version, *lines = Path(index).read_text(encoding="ascii").splitlines()
        assert version == f"v1.2 {len(lines)}"
        with tarfile.open(path) as tar:
            named += [(member.name, member.offset_data, member.size) for member in tar]
        for line in lines:
            ending, offset, size, name = line.split()
            assert named[len(found)] == (name, int(offset), int(size))
            assert name == f"{len(found):012d}.{ending}"
            found.append(data[int(offset) :][: int(size)])
    assert found == expected


def test_readers_that_are_unknown_or_need_a_gpu_are_refused(job: Job) -> None:
    with pytest.raises(config.BenchConfigError, match="'reader' is 'tar'; valid: cpu, gpu, webdataset"):
        loaders.build("row", {"kind": "dali", "reader": "tar"})
    with pytest.raises(Unavailable, match="DALI's GPU reader loads to CUDA devices only"):
        loaders.build("row", {"kind": "dali", "reader": "gpu"}).check(job)
    with pytest.raises(Unavailable, match="41 are more than most_files"):
        loaders.build("row", {"kind": "dali", "most_files": 40}).check(job)
    loaders.build("row", {"kind": "dali", "most_files": 40, "reader": "webdataset"}).check(job)
