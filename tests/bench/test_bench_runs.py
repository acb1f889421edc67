"""What a run of rounds leaves behind in its process and its file, and what it tells of ios that cannot be made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steady import Steady

from bench import config, files, measure, run_parts, scenarios
from bench.config import BenchError
from bench.loaders.pread import Pread
from bench.loaders.timed_ios import TimedIos
from bench.transfer_ops import Ops

MIB = 1 << 20
READ = config.ScenarioConfig("load_model", "read")


@pytest.fixture
def thawed() -> Iterator[None]:
    was = gc.get_freeze_count()
    yield
    gc.unfreeze()
    if was:
        gc.freeze()


@dataclass
class Watching(Pread):
    """Notes how many objects collections are spared while it loads."""

    frozen: list[int] = field(default_factory=list)
    fault: bool = False

    def load(self) -> dict[str, torch.Tensor]:
        self.frozen.append(gc.get_freeze_count())
        if self.fault:
            raise KeyboardInterrupt
        return super().load()


@pytest.mark.parametrize("frozen_before", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_what_was_there_is_spared_by_collections_while_rounds_are_made(
    tmp_path: Path, frozen_before: bool, fault: bool, thawed: None
) -> None:
    gc.unfreeze()
    if frozen_before:
        gc.freeze()
    loader = Watching(fault=fault)
    with files.written(files.Plan(tmp_path, 1, MIB, "")) as written:
        workload = scenarios.build(READ, written, "cpu")
        runner = measure.Runner(workload, {"row": loader}, Steady(), cold=False, fresh_memory=False)
        if fault:
            with pytest.raises(KeyboardInterrupt):
                runner.run(3, 30.0)
        else:
            runner.run(3, 30.0)
        workload.close()
    assert loader.frozen
    assert min(loader.frozen) > 10_000  # of an interpreter with torch
    assert (gc.get_freeze_count() > 0) == frozen_before


class Touched(bytearray):
    def close(self) -> None:
        assert set(self[::4096]) == {1}


def test_memory_is_touched_once_and_then_only_what_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Memory:
        PAGESIZE = 4096

        @staticmethod
        def mmap(_: int, nbytes: int) -> Any:
            made.append(nbytes)
            return Touched(nbytes)

    monkeypatch.setattr(measure, "mmap", Memory)
    monkeypatch.setattr(measure, "_touched_bytes", 0)
    for nbytes in (MIB, MIB, MIB // 2, 2 * MIB, 2 * MIB):
        measure._touch_memory(nbytes)
    assert made == [MIB, 2 * MIB]


class Broken:
    """A record of which no line can be made."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def to_json(self) -> str:
        if self._broken:
            raise KeyboardInterrupt
        return "{}"


def test_rows_of_a_part_are_written_all_or_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_parts.append(path, [Broken(False), Broken(True)])  # type: ignore[list-item]
    assert not path.exists()
    run_parts.append(path, [Broken(False), Broken(False)])  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        run_parts.append(path, [Broken(False), Broken(True)])  # type: ignore[list-item]
    assert path.read_text() == "{}\n{}\n"


# ---- timed ios


def ops(count: int, nbytes: int) -> Ops:
    offsets = np.arange(count, dtype=np.int64) * nbytes
    return Ops(np.zeros(count, dtype=np.int32), offsets, np.full(count, nbytes, dtype=np.int64), write=False)


def test_an_io_that_fails_is_an_error_of_the_bench_and_the_next_ones_are_made(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(16 * 4096 + 5))
    memory = torch.zeros(32 * 4096, dtype=torch.uint8)
    ios = TimedIos(2)
    try:
        with path.open("rb") as file:
            with pytest.raises(BenchError, match=r"reading 4096 bytes at byte \d+ of .*/data: the file ends"):
                ios.move([file.fileno()], ops(32, 4096), memory)
            taken = ios.move([file.fileno()], ops(16, 4096), memory)
        assert (taken > 0).all()
        assert memory.numpy().tobytes()[: 16 * 4096] == path.read_bytes()[: 16 * 4096]
    finally:
        ios.close()


def test_threads_that_cannot_be_are_an_error_of_the_bench() -> None:
    with pytest.raises(BenchError, match="threads is 0"):
        TimedIos(0)
