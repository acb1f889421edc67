"""ShardLoader where frameworks expect a DataLoader: a Lightning Trainer, accelerate, torch.distributed."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from shard_files import rows, write_ragged, write_safetensors
from support import run_python

from gdsstream import ConfigError, Jagged, ShardDataset, ShardLoader

COUNT = 22


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "d"
    folder.mkdir()
    for number, part in enumerate(rows(COUNT, dtype=torch.float32).split([9, 13])):
        write_safetensors(folder / f"{number}.safetensors", x=part[:, None], n=part.long())
    return folder


def open_loader(shards: Path, **options: Any) -> ShardLoader[Any]:
    return ShardLoader(shards, **{"batch_size": 4, "shuffle": True, "device": "cpu", "num_threads": 1, **options})


# ---- Lightning


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Any]:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    def make(**options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lightning.Trainer(
                **{
                    "accelerator": "cpu",
                    "devices": 1,
                    "max_epochs": 3,
                    "logger": False,
                    "enable_checkpointing": False,
                    "enable_progress_bar": False,
                    "enable_model_summary": False,
                    "default_root_dir": tmp_path,
                    **options,
                }
            )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield make


def module() -> Any:
    """A model that remembers the records of each of its batches."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []
            self.validated: list[int] = []

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            self.seen.append(batch["n"].tolist())
            return self.layer(batch["x"]).square().mean()  # type: ignore[no-any-return]

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.validated += batch["n"].tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    return Module()


def epochs_of(shards: Path, count: int, **options: Any) -> list[list[list[int]]]:
    with open_loader(shards, **options) as loader:
        return [[batch["n"].tolist() for batch in loader] for _ in range(count)]


def test_lightning_trains(shards: Path, trainer_of: Any) -> None:
    model = module()
    with open_loader(shards) as loader, open_loader(shards, shuffle=False) as validation:
        trainer_of().fit(model, loader, validation)
        assert loader.stats().batches == 18, "the native engine read what was trained with"
        assert validation.stats().batches >= 18
        assert "page cache" in loader.route
    assert model.seen == list(itertools.chain(*epochs_of(shards, 3)))
    assert model.validated[-COUNT:] == list(range(COUNT))


def test_lightning_with_part_of_an_epoch(shards: Path, trainer_of: Any) -> None:
    """Each epoch is an epoch of its own, although none comes to its end."""
    model = module()
    with open_loader(shards) as loader:
        trainer_of(limit_train_batches=2).fit(model, loader)
    assert model.seen == list(itertools.chain(*(epoch[:2] for epoch in epochs_of(shards, 3))))


@pytest.mark.parametrize("stopped_after", [4, 6, 9, 12])
def test_lightning_resumes_where_it_stopped(shards: Path, tmp_path: Path, trainer_of: Any, stopped_after: int) -> None:
    """In the middle of an epoch, and at the end of one."""
    everything = list(itertools.chain(*epochs_of(shards, 3)))
    checkpoint = tmp_path / "checkpoint.ckpt"
    model = module()

    import lightning.pytorch as pl

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if len(model.seen) == stopped_after:
                trainer.save_checkpoint(checkpoint)

    with open_loader(shards) as loader:
        trainer_of(callbacks=[Save()]).fit(model, loader)
    again = module()
    with open_loader(shards) as loader:
        trainer_of().fit(again, loader, ckpt_path=checkpoint, weights_only=False)
    assert model.seen == everything
    assert again.seen == everything[stopped_after:]


def test_lightning_overfits_one_batch(shards: Path, trainer_of: Any) -> None:
    model = module()
    with open_loader(shards, shuffle=False) as loader:
        trainer_of(overfit_batches=1).fit(model, loader)
    assert model.seen == [[0, 1, 2, 3]] * 3


def test_lightning_moves_jagged_batches(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.fabric.utilities import move_data_to_device

    batch = {"x": Jagged(torch.arange(3), torch.tensor([0, 1, 3]))}
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved["x"], Jagged)
    assert moved["x"].values.device.type == moved["x"].offsets.device.type == "meta"


# ---- accelerate


def test_accelerate_leaves_it_as_it_is(shards: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = open_loader(shards)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader
    seen = []
    for epoch in range(2):
        prepared.set_epoch(epoch)
        for batch in prepared:
            with accelerator.accumulate(model):
                loss = model(batch["x"]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(batch["n"].tolist())
    assert loader.stats().batches == 12
    loader.close()
    assert seen == list(itertools.chain(*epochs_of(shards, 2)))


def test_accelerate_accumulates_as_with_a_dataloader(shards: Path) -> None:
    """An epoch's last group of batches is a step of its own, however small."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)

    def steps(loader: Any, epochs: int, stop: int | None = None) -> list[bool]:
        accelerator.step = 0
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6), loader)
        seen = []
        for _ in range(epochs):
            for batch in itertools.islice(loader, stop):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"]).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(accelerator.sync_gradients)
        return seen

    theirs = torch.utils.data.DataLoader(ShardDataset(shards), 4)  # type: ignore[arg-type]
    expected = steps(theirs, 3)
    assert expected == [False, False, False, True, False, True] * 3
    state = accelerator.gradient_state
    with open_loader(shards) as loader, open_loader(shards, epochs=3) as long:
        assert steps(loader, 3) == expected
        assert steps(long, 1) == expected
        assert not state.in_dataloader
        assert steps(loader, 1, 5) == [False, False, False, True, False]
        batches = iter(loader)
        assert not state.in_dataloader, "an iterator that was left is given up with the next one"
        next(batches), next(batches)
        assert state.in_dataloader
        assert len(state.dataloader_references) == 2, "itself, and what is in use outside of any"
        list(batches)
        assert not state.in_dataloader, "at its end, before it is gone"


@pytest.mark.parametrize(
    ("options", "remainder"),
    [
        ({}, 0),
        ({"rank": 1, "world_size": 2}, 0),
        ({"rank": 1, "world_size": 3}, -1),
        ({"rank": 1, "world_size": 3, "partition": "drop"}, 0),
        ({"rank": 1, "world_size": 2, "shuffle": False, "sampler": range(5)}, -1),
    ],
)
def test_accelerate_is_told_what_can_be_cut(shards: Path, options: dict[str, Any], remainder: int) -> None:
    """22 records: with three ranks, two come twice, and accelerate says that it leaves them in."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    with open_loader(shards, **options) as loader:
        for number, _ in enumerate(loader, 1):
            assert accelerator.gradient_state.remainder == remainder
            assert accelerator.gradient_state.end_of_dataloader == (number == len(loader))


def test_what_accelerate_cannot_be_told_is_said_once(
    shards: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", ModuleType("accelerate.state"))
    with open_loader(shards) as loader:
        assert len(list(loader)) == 6
    assert sum("accelerate is not told" in record.getMessage() for record in caplog.records) == 1


def test_accelerate_takes_no_loader_apart(shards: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    with open_loader(shards) as loader:
        for other in (accelerator.prepare_data_loader(loader), accelerate.skip_first_batches(loader, 2)):
            with pytest.raises(ConfigError, match="load_state_dict goes on"):
                list(other)


# ---- torch.distributed


DISTRIBUTED = """
import json, os, sys
import torch, torch.distributed as dist
from gdsstream import ShardLoader
loader = ShardLoader(sys.argv[1], 2, shuffle=True, device="cpu", num_threads=1, fields=["n"], partition="uneven")
alone = loader.world_size
rank, size = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=size)
assert (loader.rank, loader.world_size, alone) == (rank, size, 1)
seen = [batch.tolist() for batch in loader]
gathered = [None] * size
dist.all_gather_object(gathered, (len(loader), seen))
assert len(seen) == len(loader)
print(json.dumps(gathered))
dist.destroy_process_group()
"""


def test_ranks_come_from_torch_distributed(shards: Path, tmp_path: Path) -> None:
    """The loader was made before the group was initialised, as scripts for Lightning do."""
    import json
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_python, DISTRIBUTED, shards, rank, 2, tmp_path / "group") for rank in range(2)]
        outputs = [json.loads(run.result()[0]) for run in runs]
    assert outputs[0] == outputs[1]
    (_, first), (_, second) = outputs[0]
    assert sorted(itertools.chain(*first, *second)) == list(range(COUNT))
    whole = list(itertools.chain(*epochs_of(shards, 1)[0]))
    assert list(itertools.chain(*first)) == whole[0::2]
    assert list(itertools.chain(*second)) == whole[1::2]


# ---- torch itself


def test_nested_tensors_compute(tmp_path: Path) -> None:
    records = [torch.randn(n, 8) for n in (3, 1, 4)]
    write_ragged(tmp_path / "a.safetensors", {"x": records})
    layer = torch.nn.Linear(8, 2)
    with ShardLoader(ShardDataset(tmp_path), 3, device="cpu", num_threads=1) as loader:
        (batch,) = loader
        for got, record in zip(layer(batch.nested()).unbind(), records, strict=True):
            torch.testing.assert_close(got, layer(record))
