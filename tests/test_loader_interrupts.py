"""An interrupt at every line that one `next` runs through, and what comes then: each record once, in its order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from shard_files import rows, write_npy
from torch.utils.data import BatchSampler

import gdsstream
from gdsstream import ConfigError, ShardDataset, ShardLoader

COUNT = 10  # records in each of three shards
BATCH = 4
# What has a state that an interrupt could spoil.
_MODULES = (
    *("batch_buffers", "batch_reader", "batches", "feed", "loader_iterator", "lost_shards", "open_files", "prefetch"),
    *("sampler_pass", "side_streams"),
)
_TRACED = {str(Path(gdsstream.__file__).with_name(f"{name}.py")) for name in _MODULES}


class Interrupt:
    """Raise KeyboardInterrupt at the `at`-th line of the loader that is run; used as a context."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where = ""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in _TRACED else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    folder = tmp_path_factory.mktemp("d")
    for number, part in enumerate(rows(3 * COUNT, 8).split(COUNT)):
        write_npy(folder / f"{number}.npy", part)
    return ShardDataset(folder)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Its second shard is gone."""
    folder = tmp_path_factory.mktemp("damaged")
    for number, part in enumerate(rows(3 * COUNT, 8).split(COUNT)):
        write_npy(folder / f"{number}.npy", part)
    dataset = ShardDataset(folder)
    (folder / "1.npy").unlink()
    return dataset


def negated(batch: Any) -> Any:
    """In place, so that a batch that it is called with twice would be seen."""
    return batch.neg_()


WAYS: dict[str, dict[str, Any]] = {
    "owned": {"shuffle": True},
    "borrowed": {"shuffle": True, "borrow": True},
    "transformed": {"transform": negated, "collate_fn": torch.stack},
    "transformed in a buffer": {"transform": negated, "borrow": True},
    "without a lost shard": {"on_error": "skip", "borrow": True},
    "by a sampler": {"sampler": range(3 * COUNT)},
    "by a batch sampler": {"batch_size": 1, "batch_sampler": BatchSampler(range(3 * COUNT), BATCH, False)},
    "not ahead": {"prefetch_batches": 0},
}


@pytest.mark.parametrize(
    ("way", "taken"),
    [*((way, 2) for way in WAYS), ("owned", 7), ("by a batch sampler", 7), ("not ahead", 16)],
)
def test_an_interrupt_anywhere(
    dataset: ShardDataset, damaged: ShardDataset, no_leaks: None, way: str, taken: int
) -> None:
    """Interrupted is the `next` behind `taken` batches, of two epochs of 8."""
    lost = way == "without a lost shard"
    options = {"batch_size": BATCH, "prefetch_batches": 2, "epochs": 2, "num_threads": 1, "seed": 1, **WAYS[way]}
    with ShardLoader(damaged if lost else dataset, device="cpu", **options) as loader:
        wanted = [batch[:, 0].tolist() for batch in loader]
        assert len(wanted) == (12 if lost else 16)
        number, interrupted = 0, True
        while interrupted:
            number += 1
            loader.set_epoch(0)
            batches = iter(loader)
            seen = [next(batches)[:, 0].tolist() for _ in range(taken)]
            state = loader.state_dict()
            with Interrupt(number) as interrupt:
                try:
                    seen += [batch[:, 0].tolist() for batch in islice(batches, 1)]
                    interrupted = False
                except KeyboardInterrupt:
                    assert taken == 16 or loader.state_dict() == state, interrupt.where
            for batch in batches:
                seen.append(batch[:, 0].tolist())
            assert seen == wanted, interrupt.where
            assert loader.epoch == 2, interrupt.where
            assert loader.stats().failed_batches == 0
        assert number > 50


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_an_interrupt_inside_of_a_sampler(dataset: ShardDataset, repeats: bool, batched: bool) -> None:
    """A generator is at its end then. It is asked anew, and has to give what it gave."""
    asked = 0

    class Sampler:
        def __iter__(self) -> Iterator[Any]:
            nonlocal asked
            asked += 1
            shift = 0 if repeats else asked - 1
            for number in range(20):
                if asked == 1 and number == 10:
                    raise KeyboardInterrupt
                yield [number + shift] if batched else number + shift

    sampler: dict[str, Any] = {"batch_sampler" if batched else "sampler": Sampler()}
    with ShardLoader(dataset, device="cpu", prefetch_batches=1, **sampler) as loader:
        batches = iter(loader)
        seen: list[int] = []

        def go_on() -> None:
            for batch in batches:
                seen.append(int(batch[0, 0]) // 8)

        with pytest.raises(KeyboardInterrupt):
            go_on()
        assert loader.state_dict()["samples"] == len(seen) < 10
        if repeats:
            go_on()
            assert seen == list(range(20))
            assert asked == 2
        else:
            with pytest.raises(ConfigError, match="gives other records for epoch 0"):
                go_on()
            assert seen == list(range(len(seen)))
            assert len(seen) < 10
