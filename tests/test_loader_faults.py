"""Shards that vanish, shrink or cannot be read in the middle of an epoch; callers that raise, leave or fork."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_files import rows, write_npy, write_ragged
from support import run_python, start_python

from gdsstream import (
    ReadError,
    ShardLoader,
    TransformError,
)
from gdsstream.open_files import OpenFiles

COUNT = 12  # records in each of four shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "d"
    folder.mkdir()
    for number, part in enumerate(rows(4 * COUNT, 256).split(COUNT)):
        write_npy(folder / f"{number}.npy", part)
    return folder


@pytest.fixture
def make(no_leaks: None) -> Iterator[Callable[..., ShardLoader[Any]]]:
    made: list[ShardLoader[Any]] = []

    def loader(*arguments: Any, **options: Any) -> ShardLoader[Any]:
        made.append(ShardLoader(*arguments, **{"device": "cpu", "num_threads": 1, **options}))
        return made[-1]

    yield loader
    while made:
        made.pop().close()


Loader = Callable[..., ShardLoader[Any]]
# What each of them does to a shard while it is open.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "vanishes": Path.unlink,
    "shrinks": lambda path: os.truncate(path, path.stat().st_size // 2),
    "grows": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "is replaced": lambda path: (
        shutil.copy(path, path.with_suffix(".new")) and os.replace(path.with_suffix(".new"), path)
    ),
}


def records(batches: Any) -> list[int]:
    """The numbers of the records in batches."""
    return [int(number) // 256 for batch in batches for number in batch[:, 0]]


# ---- shards


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("opened", [True, False], ids=["while open", "before it is opened"])
def test_a_shard_fails_in_the_middle_of_an_epoch(shards: Path, make: Loader, damage: str, opened: bool) -> None:
    loader = make(shards, 4, prefetch_batches=1)
    batches = iter(loader)
    seen = records(next(batches) for _ in range(4 if opened else 2))  # shard 1 begins at batch 3
    DAMAGE[damage](shards / "1.npy")
    failure: ReadError | None = None
    while failure is None:
        try:
            seen += records([next(batches)])
        except ReadError as error:
            failure = error
    assert "1.npy" in str(failure)
    assert seen == list(range(len(seen)))
    assert len(seen) < 2 * COUNT
    state = loader.state_dict()
    assert state["position"] == len(seen), "the batch that failed is still to come"
    # Those behind it do not depend on that shard, once it is passed.
    rest = []
    while True:
        try:
            rest += records([next(batches)])
        except ReadError:
            continue
        except StopIteration:
            break
    assert rest[-2 * COUNT :] == list(range(2 * COUNT, 4 * COUNT))
    assert loader.stats().failed_batches == 6 - len(seen) // 4 - (len(rest) - 2 * COUNT) // 4


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("borrow", [False, True])
def test_lost_shards_are_left_out_on_request(
    shards: Path, make: Loader, damage: str, borrow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(shards, 5, shuffle=True, on_error="skip", borrow=borrow, prefetch_batches=3)
    order = list(loader.sampler)
    batches = iter(loader)
    seen = records([next(batches)])
    DAMAGE[damage](shards / "1.npy")
    with caplog.at_level(logging.WARNING):
        seen += records(batches)
    stats = loader.stats()
    lost = [record for record in order if record not in seen]
    assert lost
    assert all(record // COUNT == 1 for record in lost)
    assert seen == [record for record in order if record not in lost], "everything else, in its order"
    assert stats.skipped_records == len(lost)
    assert stats.skipped_by_shard == {str(shards / "1.npy"): len(lost)}
    assert stats.records == len(seen)
    assert stats.failed_batches == 0
    assert len([text for text in caplog.messages if "left out" in text and "1.npy" in text]) == 1
    assert loader.epoch == 1
    # The shard is tried again in the next epoch, and lost again.
    again = records(loader)
    assert sorted(again) == [record for record in range(4 * COUNT) if record // COUNT != 1]
    assert loader.stats().skipped_records == len(lost) + COUNT
    assert len([text for text in caplog.messages if "left out" in text]) == 1, "said once"


def test_a_batch_of_nothing_but_lost_records_is_left_out(shards: Path, make: Loader) -> None:
    loader = make(shards, COUNT, on_error="skip", prefetch_batches=0)
    batches = iter(loader)
    next(batches)
    for number in (1, 3):
        (shards / f"{number}.npy").unlink()
    assert records(batches) == list(range(2 * COUNT, 3 * COUNT))
    assert loader.stats().skipped_records == 2 * COUNT
    assert loader.epoch == 1, "the epoch is over, although its last batch came to nothing"


@pytest.mark.parametrize("prefetch_batches", [0, 5])
def test_an_endless_loader_says_that_nothing_is_left(shards: Path, make: Loader, prefetch_batches: int) -> None:
    """Once an epoch, and it goes on when the shards are back."""
    loader = make(shards, 5, shuffle=True, on_error="skip", epochs=None, prefetch_batches=prefetch_batches)
    away = shards.with_name("away")
    shards.rename(away)
    batches = iter(loader)
    for epoch in range(2):
        with pytest.raises(ReadError, match=f"epoch {epoch} is over, and none of its records could be read"):
            next(batches)
        assert loader.stats().skipped_records == (epoch + 1) * 4 * COUNT
        assert loader.stats().failed_batches == epoch + 1
    away.rename(shards)
    assert [len(next(batches)) for _ in range(20)].count(5) > 10
    assert loader.epoch >= 2


def test_an_endless_loader_goes_on_with_what_is_left(shards: Path, make: Loader) -> None:
    """An epoch whose last batch comes to nothing had others."""
    loader = make(shards, COUNT, on_error="skip", epochs=None)
    (shards / "3.npy").rename(shards.with_name("away"))
    batches = iter(loader)
    assert [records([next(batches)])[0] for _ in range(7)] == [0, COUNT, 2 * COUNT, 0, COUNT, 2 * COUNT, 0]
    assert loader.stats().failed_batches == 0
    assert loader.stats().skipped_records == 2 * COUNT


def test_epochs_of_nothing_come_to_their_end(shards: Path, make: Loader) -> None:
    loader = make(shards, 5, on_error="skip", epochs=3)
    shards.rename(shards.with_name("away"))
    assert records(loader) == []
    assert loader.stats().skipped_records == 3 * 4 * COUNT
    assert loader.epoch == 3


def test_a_shard_is_lost_while_the_next_epoch_is_read_ahead(shards: Path, make: Loader) -> None:
    loader = make(shards, 4, on_error="skip", epochs=2, prefetch_batches=6)
    batches = iter(loader)
    seen = records([next(batches)])
    (shards / "3.npy").unlink()  # which has not been opened
    assert seen + records(batches) == 2 * list(range(3 * COUNT))
    assert loader.stats().skipped_by_shard == {str(shards / "3.npy"): 2 * COUNT}


def test_lost_shards_of_ragged_records(tmp_path: Path, make: Loader) -> None:
    for number in range(3):
        write_ragged(
            tmp_path / f"{number}.safetensors",
            {"x": [rows(1 + i, first=100 * number + 10 * i) for i in range(6)]},
            n=rows(6, first=6 * number),
        )
    for options in ({}, {"pad": -1}, {"borrow": True}):
        loader = make(tmp_path, 4, on_error="skip", prefetch_batches=0, **options)
        batches = iter(loader)
        numbers = next(batches)["n"].tolist()
        os.utime(tmp_path / "1.safetensors")
        for batch in batches:
            for record, number in zip(batch["x"], batch["n"].tolist(), strict=True):
                length = 1 + number % 6
                assert torch.equal(record[:length], rows(length, first=100 * (number // 6) + 10 * (number % 6)))
            numbers += batch["n"].tolist()
        assert numbers == [*range(6), *range(12, 18)]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_reads_that_fail(shards: Path, make: Loader, on_error: str) -> None:
    """Bad sectors: the file is what it was, and a read of it fails once."""
    loader = make(shards, 4, on_error=on_error, prefetch_batches=1, faults="eio@5")
    if on_error == "raise":
        failures = []
        seen: list[int] = []
        batches = iter(loader)
        while True:
            try:
                seen += records([next(batches)])
            except StopIteration:
                break
            except ReadError as error:
                failures.append(str(error))
        assert failures
        assert all(".npy" in text for text in failures)
        assert sorted(seen) == seen
        assert len(seen) == 4 * COUNT - 4 * len(failures)
    else:
        assert records(loader) == list(range(4 * COUNT)), "it could be read when it was tried again"
        assert loader.stats().skipped_records == 0


def test_want_of_descriptors_loses_no_shard(shards: Path, make: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(shards, 4, on_error="skip", prefetch_batches=0)
    batches = iter(loader)
    next(batches)

    def refused(self: OpenFiles, numbers: Any, user: Any) -> Any:
        raise ReadError("too many open files", 24)

    monkeypatch.setattr(OpenFiles, "take", refused)
    with pytest.raises(ReadError, match="too many open files"):
        next(batches)
    monkeypatch.undo()
    assert records(batches) == list(range(8, 4 * COUNT))
    assert loader.stats().skipped_records == 0


# ---- what the caller gives


@pytest.mark.parametrize("which", ["transform", "collate_fn"])
@pytest.mark.parametrize("borrow", [False, True])
def test_a_transform_that_raises(shards: Path, make: Loader, which: str, borrow: bool) -> None:
    def call(batch: Any) -> Any:
        batch = torch.stack(batch) if isinstance(batch, list) else batch
        if 8 in records([batch]):
            raise KeyError("no such thing")
        return batch

    loader = make(shards, 4, borrow=borrow, **{which: call})
    batches = iter(loader)
    seen = records(next(batches) for _ in range(2))
    with pytest.raises(
        TransformError, match=rf"{which} failed on batch 2 of epoch 0 \(KeyError: 'no such thing'\)"
    ) as e:
        next(batches)
    assert isinstance(e.value.__cause__, KeyError)
    assert loader.state_dict()["position"] == 8
    seen += records(batches)
    assert seen == [*range(8), *range(12, 4 * COUNT)]
    assert loader.stats().failed_batches == 1


def test_a_sampler_that_raises(shards: Path, make: Loader) -> None:
    def indices() -> Iterator[int]:
        yield from range(7)
        raise RuntimeError("the sampler broke")

    class Broken:
        def __iter__(self) -> Iterator[int]:
            return indices()

    batches = iter(make(shards, 2, sampler=Broken(), prefetch_batches=5))
    assert records(next(batches) for _ in range(2)) == list(range(4))
    with pytest.raises(RuntimeError, match="the sampler broke"):
        list(batches)


# ---- leaving


def test_ctrl_c_in_the_middle_of_a_read(shards: Path, make: Loader) -> None:
    """The wait ends at once, and the batch comes with the next call."""
    loader = make(shards, 4, faults="delay_us=700000", prefetch_batches=1)
    batches = iter(loader)
    started = time.monotonic()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert time.monotonic() - started < 0.6
    timer.join()
    assert records([next(batches)]) == [0, 1, 2, 3]


def test_ctrl_c_ends_a_program(shards: Path) -> None:
    code = """
import sys, gdsstream
loader = gdsstream.ShardLoader(sys.argv[1], 2, device="cpu", num_threads=2, faults="delay_us=300000", epochs=None)
for number, batch in enumerate(loader):
    print(number, flush=True)
"""
    process = start_python(code, shards)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT, err
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_the_interpreter_exits_with_batches_under_way(shards: Path) -> None:
    code = """
import sys, gdsstream
loader = gdsstream.ShardLoader(sys.argv[1], 2, device="cpu", num_threads=2, faults="delay_us=300000")
batches = iter(loader)
print(next(batches).shape)
"""
    out, err = run_python(code, shards, timeout_s=20)
    assert out == "torch.Size([2, 256])\n"
    assert err == ""


def test_a_consumer_that_raises(shards: Path, no_leaks: None) -> None:
    def consume() -> None:
        for _ in ShardLoader(shards, 2, device="cpu", num_threads=1, prefetch_batches=4, faults="delay_us=2000"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    gc.collect()


def test_a_forked_child_reads_on_its_own(shards: Path) -> None:
    code = """
import os, sys, warnings
import torch
from gdsstream import ForkedProcessError, ShardLoader
loader = ShardLoader(sys.argv[1], 6, device="cpu", num_threads=1)
batches = iter(loader)
first = next(batches)
child = os.fork()
if not child:
    try:
        next(batches)
    except ForkedProcessError as error:
        print(error, flush=True)
    total = sum(int(batch[:, 0].view(-1)[0]) for batch in loader)
    print(total, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(1 + len(list(batches)))
"""
    out = run_python(code, shards)[0].splitlines()
    assert "belongs to process" in out[0]
    assert int(out[1]) == sum(256 * 6 * number for number in range(8))
    assert out[2] == "8"
