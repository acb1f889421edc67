"""ShardLoader against torch's DataLoader over the same records, and what it adds."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_route.harness import until
from shard_files import rows, write_dataset, write_npy, write_ragged, write_safetensors, write_tokens
from support import evict, run_python
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from gdsstream import ConfigError, EngineClosedError, Jagged, ShardDataset, ShardLoader, _native
from gdsstream.batches import batch_formats
from gdsstream.loader_arguments import default_prefetch
from gdsstream.open_files import OpenFiles
from gdsstream.records import Field

# Most tests are about the CPU: the same code as for a GPU, but for streams.
Loader = Callable[..., ShardLoader[Any]]
TOKENS = {"dtype": "int32", "record_length": 4}


@pytest.fixture
def make() -> Iterator[Loader]:
    """ShardLoader on the CPU with one reader thread; closed at the end."""
    made: list[ShardLoader[Any]] = []

    def loader(*arguments: Any, **options: Any) -> ShardLoader[Any]:
        made.append(ShardLoader(*arguments, **{"device": "cpu", "num_threads": 1, **options}))
        return made[-1]

    yield loader
    while made:
        made.pop().close()


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """23 records in three safetensors shards: an image, a label, and two ragged fields."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    first = 0
    for number, count in enumerate((9, 1, 13)):
        write_ragged(
            folder / f"s{number}.safetensors",
            {
                "text": [rows(1 + (first + i) * 7 % 5, first=100 * (first + i)) for i in range(count)],
                "boxes": [rows((first + i) % 3, 4, dtype=torch.float32, first=first + i) for i in range(count)],
            },
            image=rows(count, 3, 2, dtype=torch.uint8, first=first),
            label=rows(count, dtype=torch.int64, first=first),
        )
        first += count
    return folder


def assert_equal(got: object, wanted: object) -> None:
    if isinstance(wanted, dict):
        assert isinstance(got, dict)
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            assert_equal(got[name], value)
    elif isinstance(wanted, list):
        assert isinstance(got, list | tuple)
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert isinstance(got, torch.Tensor)
        assert isinstance(wanted, torch.Tensor)
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)


def assert_same_batches(loader: ShardLoader[Any], other: DataLoader[Any]) -> None:
    assert len(loader) == len(other)
    got = list(loader)
    wanted = list(other)
    assert len(wanted) > 1
    assert_equal(got, wanted)


# ---- equality with a DataLoader


@pytest.mark.parametrize("format", ["safetensors", "npy", "tokens", "tar"])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(1, False), (4, False), (4, True), (15, False)])
def test_equal_to_a_dataloader(tmp_path: Path, make: Loader, format: str, batch_size: int, drop_last: bool) -> None:
    everything = write_dataset(tmp_path / "d", format, counts=(5, 3, 7, 5))
    options = TOKENS if format == "tokens" else {}
    dataset = ShardDataset(tmp_path / "d", **options)
    loader = make(tmp_path / "d", batch_size, drop_last=drop_last, **options)
    assert_same_batches(loader, DataLoader(dataset, batch_size, drop_last=drop_last))
    assert torch.equal(torch.cat(list(make(dataset, batch_size))), everything)


@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 5])
@pytest.mark.parametrize("borrow", [False, True])
def test_several_fields(mixed: Path, make: Loader, prefetch_batches: int, borrow: bool) -> None:
    dataset = ShardDataset(mixed, fields=["label", "image"])
    loader = make(mixed, 4, fields=["label", "image"], prefetch_batches=prefetch_batches, borrow=borrow)
    batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]
    assert_equal(batches, list(DataLoader(dataset, 4)))


def test_samplers(mixed: Path, make: Loader) -> None:
    dataset = ShardDataset(mixed, fields=["image"])

    def shuffled() -> RandomSampler:
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(3))

    assert_same_batches(make(dataset, 5, sampler=shuffled()), DataLoader(dataset, 5, sampler=shuffled()))
    picked = [3, 3, -1, 0, 22, -23]
    assert_same_batches(make(dataset, 4, sampler=picked), DataLoader(dataset, 4, sampler=picked))
    assert len(list(make(dataset, 4, sampler=picked, drop_last=True))) == 1
    batches = BatchSampler(SequentialSampler(dataset), 6, drop_last=True)
    assert_same_batches(make(dataset, batch_sampler=batches), DataLoader(dataset, batch_sampler=batches))
    assert make(dataset, batch_sampler=batches).batch_size is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_as_a_distributed_sampler(mixed: Path, make: Loader, ranks: int, drop_last: bool) -> None:
    dataset = ShardDataset(mixed, fields=["label", "image"])
    for rank in range(ranks):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank, shuffle=False, drop_last=drop_last)
        own = make(dataset, 2, rank=rank, world_size=ranks, partition="drop" if drop_last else "pad")
        assert_same_batches(own, DataLoader(dataset, 2, sampler=sampler))
        assert_same_batches(make(dataset, 2, sampler=sampler), DataLoader(dataset, 2, sampler=sampler))
        assert list(own.sampler) == list(sampler)
        assert len(own.sampler) == len(sampler)


def test_overlapping_token_windows(tmp_path: Path, make: Loader) -> None:
    for number in range(2):
        write_tokens(tmp_path / f"{number}.bin", rows(23, dtype=torch.int16, first=100 * number))
    options = {"dtype": "int16", "record_length": 6, "stride": 5}
    assert_same_batches(make(tmp_path, 3, **options), DataLoader(ShardDataset(tmp_path, **options), 3))


def test_collate_fn_gets_the_samples(mixed: Path, make: Loader) -> None:
    def collate(samples: list[dict[str, torch.Tensor]]) -> list[Any]:
        return [dict(sample) for sample in samples]

    dataset = ShardDataset(mixed)
    loader = make(dataset, 4, collate_fn=collate)
    assert_same_batches(loader, DataLoader(dataset, 4, collate_fn=collate))
    single = ShardDataset(mixed, fields=["text"])
    assert_same_batches(make(single, 4, collate_fn=list), DataLoader(single, 4, collate_fn=list))


def test_equal_to_a_dataloader_with_workers(mixed: Path, make: Loader) -> None:
    dataset = ShardDataset(mixed, fields=["image", "label"])
    assert_same_batches(make(dataset, 3), DataLoader(dataset, 3, num_workers=2, multiprocessing_context="fork"))


# ---- ragged fields


def records_of(dataset: ShardDataset, name: str) -> list[torch.Tensor]:
    return [sample[name] for sample in dataset]  # type: ignore[index,attr-defined]


@pytest.mark.parametrize("borrow", [False, True])
def test_ragged_fields_are_jagged(mixed: Path, make: Loader, borrow: bool) -> None:
    dataset = ShardDataset(mixed)
    seen: dict[str, list[torch.Tensor]] = {"text": [], "boxes": []}
    for batch in make(mixed, 4, borrow=borrow):
        assert list(batch) == [field.name for field in dataset.fields]
        for name, records in seen.items():
            assert isinstance(batch[name], Jagged)
            assert len(batch[name]) == len(batch["label"])
            records += [record.clone() for record in batch[name]]
    for name, records in seen.items():
        assert_equal(records, records_of(dataset, name))


@pytest.mark.parametrize("borrow", [False, True])
def test_padding(mixed: Path, make: Loader, borrow: bool) -> None:
    wanted = records_of(ShardDataset(mixed), "text")
    seen = 0
    for batch in make(mixed, 5, shuffle=False, pad={"text": -7}, borrow=borrow):
        text = batch["text"]
        longest = max(map(len, wanted[seen : seen + len(text)]))
        assert text.shape == (len(batch["label"]), longest)
        for row in text:
            record = wanted[seen]
            assert torch.equal(row[: len(record)], record)
            assert (row[len(record) :] == -7).all()
            seen += 1
        assert isinstance(batch["boxes"], Jagged)
    assert seen == len(wanted)


# ---- shuffling


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_shuffled(mixed: Path, make: Loader, shuffle: Any) -> None:
    options = {"shuffle": shuffle, "fields": ["label"], "seed": 5, "block_records": 3, "window_blocks": 2}

    def epochs(**changed: Any) -> list[list[int]]:
        loader = make(mixed, 4, **{**options, **changed})
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, second = epochs()
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != list(range(23))
    assert first != second, "each epoch has an order of its own"
    assert epochs() == [first, second], "and the same one every time"
    assert epochs(seed=6)[0] != first
    sampled = make(mixed, 4, **options)
    assert list(sampled.sampler) == first
    sampled.sampler.set_epoch(1)
    assert torch.cat(list(sampled)).tolist() == second


def test_block_shuffling_reads_windows_ahead(tmp_path: Path, make: Loader) -> None:
    """Asked for in time, and all of it: with one batch taken, the first two windows are on their way."""
    path = write_npy(tmp_path / "a.npy", rows(4096, 1024, dtype=torch.uint8))
    other = write_npy(tmp_path / "b.npy", rows(4096, 1024, dtype=torch.uint8))
    for each in (path, other):
        evict(each)
    loader = make(tmp_path, 512, shuffle="block", block_records=256, window_blocks=4, prefetch_batches=0, seed=2)
    assert loader.config.direct_io is False
    batches = iter(loader)
    next(batches)
    next(batches)  # of the first window's 1024 records

    def resident() -> int:
        return sum(_native.resident_bytes(str(each), 0, each.stat().st_size) for each in (path, other))

    wanted = 2 * 1024 * 1024
    until(lambda: resident() >= wanted * 0.95, "two windows came into the page cache")
    assert resident() < 4 * 1024 * 1024
    assert len(list(batches)) == 14


def test_a_generator_gives_the_seed(mixed: Path, make: Loader) -> None:
    def order(number: int) -> list[int]:
        loader = make(mixed, 23, shuffle=True, fields=["label"], generator=torch.Generator().manual_seed(number))
        return next(iter(loader)).tolist()  # type: ignore[no-any-return]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert make(mixed, shuffle=True, generator=torch.Generator().manual_seed(1), seed=4).seed == 4


# ---- epochs


def test_several_epochs_in_one_iterator(mixed: Path, make: Loader) -> None:
    options = {"shuffle": True, "fields": ["label"]}
    one = make(mixed, 4, **options)
    assert_equal(list(make(mixed, 4, epochs=3, **options)), [batch for _ in range(3) for batch in one])
    assert len(make(mixed, 4, epochs=3)) == 18
    endless = make(mixed, 4, epochs=None, **options)
    batches = iter(endless)
    for _ in range(20):
        next(batches)
    assert endless.epoch == 3
    with pytest.raises(TypeError, match="no length"):
        len(endless)


def test_epochs_are_counted(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, shuffle=True, fields=["label"])
    assert loader.epoch == 0
    for _ in loader:
        assert loader.epoch == 0
    assert loader.epoch == 1
    second = torch.cat(list(loader))
    assert loader.epoch == 2
    loader.set_epoch(1)
    assert torch.equal(torch.cat(list(loader)), second)
    first = next(iter(loader))
    assert torch.equal(next(iter(loader)), first), "an epoch that was not finished begins anew"
    assert loader.epoch == 2


def test_set_epoch_reaches_an_iterator_that_has_not_begun(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, shuffle=True, fields=["label"])
    epochs = [list(loader) for _ in range(2)]
    loader.set_epoch(0)
    early = iter(loader)
    loader.set_epoch(1)
    assert_equal(list(early), epochs[1])
    loader.set_epoch(0)
    begun = iter(loader)
    batches = [next(begun)]
    loader.set_epoch(1)
    assert_equal(batches + list(begun), epochs[0])
    assert_equal(list(loader), epochs[1])


def test_an_epoch_counted_out_is_over(mixed: Path, make: Loader) -> None:
    """Those who know the length need not run into the end."""
    loader = make(mixed, 4, shuffle=True, fields=["label"])
    epochs = [list(loader) for _ in range(2)]
    loader.set_epoch(0)
    for epoch in epochs:
        batches = iter(loader)
        assert_equal([next(batches) for _ in range(len(loader))], epoch)


# ---- transforms


def test_transform(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, fields=["image"], transform=lambda batch: {"x": batch.float() / 2, "n": len(batch)})
    wanted = [{"x": batch.float() / 2, "n": len(batch)} for batch in make(mixed, 4, fields=["image"])]
    got = list(loader)
    assert [batch["n"] for batch in got] == [batch["n"] for batch in wanted]
    assert_equal([batch["x"] for batch in got], [batch["x"] for batch in wanted])


def test_collate_fn_goes_before_transform(mixed: Path, make: Loader) -> None:
    loader = make(
        mixed, 4, fields=["label"], collate_fn=lambda samples: sum(samples), transform=lambda total: total * 2
    )
    assert sum(int(batch) for batch in loader) == 2 * sum(range(23))


# ---- what is kept, what is handed out


def test_arguments_are_attributes(mixed: Path, make: Loader) -> None:
    options: dict[str, Any] = {
        "batch_size": 3,
        "shuffle": "block",
        "drop_last": True,
        "seed": 9,
        "prefetch_batches": 4,
        "rank": 1,
        "world_size": 2,
        "partition": "uneven",
        "fields": ("label", "image"),
        "transform": len,
        "collate_fn": list,
        "pad": None,
        "borrow": True,
        "epochs": 2,
        "on_error": "skip",
        "block_records": 4,
        "window_blocks": 2,
        "generator": torch.Generator(),
    }
    loader = make(mixed, **options)
    assert {name: getattr(loader, name) for name in options} == options
    assert isinstance(loader.dataset, ShardDataset)
    assert loader.device == torch.device("cpu")
    assert len(loader.batch_sampler) == len(loader)
    with pytest.raises(ConfigError, match=r"accelerator\.prepare\(loader\) leaves it as it is"):
        iter(loader.batch_sampler)
    assert make(mixed).shuffle == "none"
    assert isinstance(make(mixed).sampler, SequentialSampler)
    assert not isinstance(make(mixed, shuffle=True).sampler, SequentialSampler)
    assert not isinstance(loader, DataLoader)


def test_samplers_of_a_loader_that_is_gone(mixed: Path, make: Loader) -> None:
    with ShardLoader(mixed, 4, device="cpu") as loader:
        samplers: list[Any] = [loader.sampler, loader.batch_sampler]
        assert [len(each) for each in samplers] == [23, 6]
    del loader
    gc.collect()
    for each in samplers:
        with pytest.raises(EngineClosedError, match="the loader of this sampler is gone"):
            len(each)


def test_owned_batches_stay(mixed: Path, make: Loader) -> None:
    kept = list(make(mixed, 2, fields=["image"]))
    assert len({batch.data_ptr() for batch in kept}) == len(kept)
    assert_equal(kept, list(DataLoader(ShardDataset(mixed, fields=["image"]), 2)))


def test_borrowed_batches_come_from_few_buffers(mixed: Path, make: Loader) -> None:
    places = [batch.data_ptr() for batch in make(mixed, 2, fields=["image"], borrow=True, prefetch_batches=2)]
    assert len(set(places)) == 3
    assert places[:3] == places[3:6]


def test_a_borrowed_batch_is_not_written_before_the_next_is_asked_for(tmp_path: Path, make: Loader) -> None:
    write_npy(tmp_path / "a.npy", rows(64, 512))
    loader = make(tmp_path, 4, borrow=True, prefetch_batches=1)
    for number, batch in enumerate(loader):
        wanted = rows(64, 512)[4 * number :][:4]
        assert torch.equal(batch, wanted)
        for _ in range(3):
            assert torch.equal(batch, wanted)


def test_statistics(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, fields=["image"])
    list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.records, stats.bytes, stats.epochs) == (6, 23, 23 * 6, 1)
    assert stats.skipped_records == stats.failed_batches == 0
    assert 0 < stats.first_batch_s < 5
    assert stats.host_s > 0
    assert "6 batches, 23 records" in stats.summary()
    assert "CPU memory" in loader.route


def test_memory_is_bounded(tmp_path: Path) -> None:
    """16 MiB batches, two ahead: a pass over 256 MiB takes what three or four batches take."""
    code = """
import resource, sys, torch
import gdsstream
loader = gdsstream.ShardLoader(sys.argv[1], 64, device="cpu", prefetch_batches=2, num_threads=1, direct_io=False,
                               sampler=[i % 64 for i in range(64 * 16)], borrow=sys.argv[2] == "borrow")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = 0
for batch in loader:
    total += batch[:, 0].long().sum()
print(int(total), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    array = np.zeros((64, 1 << 18), dtype=np.uint8)
    array[:, 0] = 1
    np.save(tmp_path / "a.npy", array)
    for mode in ("owned", "borrow"):
        total, grown_kib = map(int, run_python(code, tmp_path, mode)[0].split())
        assert total == 64 * 16
        # The batch in the consumer's hands, one being waited for, two ahead.
        assert grown_kib < (4.5 if mode == "owned" else 3.5) * 16 * 1024


# ---- many shards


def test_more_shards_than_descriptors(
    tmp_path: Path, no_leaks: None, make: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches whose shards do not fit together are read in parts; the others wait for the batches ahead of them."""
    everything = write_dataset(tmp_path / "d", "npy", counts=(2,) * 40)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1)).tolist()
    most = 0
    original = OpenFiles.take

    def take(self: OpenFiles, numbers: Any, user: Any) -> Any:
        nonlocal most
        taken = original(self, numbers, user)
        most = max(most, len(os.listdir("/proc/self/fd")))
        return taken

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("gdsstream.open_files.descriptor_limit", lambda: 6)
    monkeypatch.setattr(OpenFiles, "take", take)
    for batch_size in (2, 5, 80):
        loader = make(tmp_path / "d", batch_size, sampler=order, prefetch_batches=4)
        assert torch.equal(torch.cat(list(loader)), everything[order])
        loader.close()
    # A reader thread lets go of a batch's files a moment after it has landed; the rest is the engine's own.
    assert most - before <= 2 * 6 + 4


def test_the_descriptor_limit_is_respected(tmp_path: Path) -> None:
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import torch, gdsstream
loader = gdsstream.ShardLoader(sys.argv[1], 90, shuffle=True, device="cpu", num_threads=1, prefetch_batches=3, epochs=3)
print(sum(int(batch.sum()) for batch in loader))
"""
    everything = write_dataset(tmp_path / "d", "npy", counts=(1,) * 200)
    assert int(run_python(code, tmp_path / "d")[0]) == 3 * int(everything.sum())


@pytest.mark.parametrize(
    ("record_bytes", "batch_size", "ragged", "batches"),
    [
        (64 << 10, 256, False, 12),  # 16 MiB: what the staging ring can use of them
        (4 << 10, 1, False, 12),  # never more
        (1 << 20, 64, False, 3),  # 64 MiB: three are 192 MiB
        (150_000_000, 1, False, 2),  # never fewer
        (4 << 10, 1, True, 2),  # nobody knows before how large they are
    ],
)
def test_how_far_ahead_is_read(record_bytes: int, batch_size: int, ragged: bool, batches: int) -> None:
    formats = batch_formats([Field("x", "U8", (record_bytes,), ragged)], None)
    assert default_prefetch(formats, batch_size) == batches


def test_host_cache(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, fields=["image"], host_cache_bytes=1 << 20)
    assert_equal(list(loader), list(make(mixed, 4, fields=["image"])))
    assert "registered page cache" in loader.route


def test_records_without_bytes(tmp_path: Path, make: Loader) -> None:
    write_safetensors(tmp_path / "a.safetensors", x=torch.zeros(5, 0, 3), y=torch.arange(5))
    for fields in (["x"], ["x", "y"]):
        dataset = ShardDataset(tmp_path, fields=fields)
        assert_same_batches(make(dataset, 2), DataLoader(dataset, 2))


# ---- the end


def test_nothing_is_left_behind_by_who_stops_early(mixed: Path, no_leaks: None) -> None:
    for action in ("close", "del", "with", "loop", "never"):
        loader = ShardLoader(mixed, 2, device="cpu", num_threads=2, prefetch_batches=4, faults="delay_us=2000")
        if action == "close":
            next(iter(loader))
            loader.close()
            loader.close()
        elif action == "del":
            batches = iter(loader)
            next(batches)
            del batches
        elif action == "with":
            with loader:
                next(iter(loader))
        elif action == "loop":
            for _ in loader:
                break
        gone = weakref.ref(loader)
        del loader
        assert gone() is None, f"{action}: a reference cycle keeps the loader"


def test_an_iterator_keeps_its_loader(mixed: Path, no_leaks: None) -> None:
    batches = iter(ShardLoader(mixed, 2, device="cpu", num_threads=1))
    gc.collect()
    assert len(list(batches)) == 12
    with pytest.raises(StopIteration):
        next(batches)


def test_one_iterator_at_a_time(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(EngineClosedError, match="ended"):
        next(first)
    assert len(list(second)) == 6


def test_a_closed_loader(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4)
    batches = iter(loader)
    loader.close()
    with pytest.raises(EngineClosedError, match="ended"):
        next(batches)
    with pytest.raises(EngineClosedError, match="closed"):
        iter(loader)
    assert len(loader) == 6


def test_a_loader_can_be_sent_to_another_process(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, shuffle=True, fields=["label"])
    batches = iter(loader)
    next(batches)
    there = pickle.loads(pickle.dumps(loader))
    rest = [batch.tolist() for batch in batches]
    there.load_state_dict(there.state_dict())
    assert [batch.tolist() for batch in there] == rest
    there.close()


# ---- arguments that cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": None}, "batch_size is None"),
        ({"prefetch_batches": -1}, "prefetch_batches is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2 and world_size is 2"),
        ({"rank": 1}, "give both"),
        ({"rank": 0}, "give both"),
        ({"world_size": 2}, "give both"),
        ({"world_size": 0}, "world_size is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"drop_last": 1}, "drop_last is 1"),
        ({"borrow": "yes"}, "borrow is 'yes'"),
        ({"generator": 4}, "generator is 4; it has to be a torch.Generator"),
        ({"partition": "some"}, "partition is 'some'"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"shuffle": "some"}, "shuffle is 'some'"),
        ({"collate_fn": 3}, "collate_fn is 3"),
        ({"transform": 3}, "transform is 3"),
        ({"sampler": [1], "shuffle": True}, "leave out shuffle"),
        ({"sampler": 5}, "cannot be iterated"),
        ({"batch_sampler": [[1]], "batch_size": 3}, "decides alone"),
        ({"fields": []}, "fields is empty"),
        ({"fields": "label"}, "for one field write"),
        ({"fields": ["label", "label"]}, "twice"),
        ({"config": 3}, "has to be a StreamConfig"),
        ({"batch_sampler": [[1]], "sampler": [1]}, "decides alone"),
        ({"batch_size": 24, "drop_last": True}, "an epoch has no batch: 23 records over 1 rank"),
        ({"batch_size": 12, "drop_last": True, "rank": 0, "world_size": 2, "partition": "drop"}, "over 2 rank"),
        ({"num_workers": 4}, "worker processes"),
        ({"prefetch_factor": 2}, "leave it out, or give None"),
        ({"nonsense": 1}, "'nonsense' is no knob, and no argument of ShardLoader$"),
        ({"prefetch": 3}, "did you mean 'prefetch_batches'"),
        ({"io_depht": 3}, "did you mean 'io_depth'"),
        ({"fields": ["nothing"]}, "nothing"),
        ({"pad": {"image": 1}}, "no ragged field"),
        ({"seed": "x"}, "seed"),
        ({"shuffle": "block", "block_records": 0}, "block_records"),
    ],
)
def test_arguments_that_cannot_work(mixed: Path, make: Loader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(mixed, **options)


def test_a_backend_that_cannot_work(mixed: Path, make: Loader) -> None:
    loader = make(mixed, backend="traditional")
    with pytest.raises(ConfigError, match="natively only"):
        iter(loader)


def test_what_a_dataloader_takes_for_no_workers(mixed: Path, make: Loader) -> None:
    names = ("num_workers", "pin_memory", "pin_memory_device", "prefetch_factor", "persistent_workers")
    names += ("worker_init_fn", "multiprocessing_context", "timeout", "in_order")
    loader = make(mixed, 4, fields=["label"])
    theirs = DataLoader(ShardDataset(mixed), 4)
    for source in (loader, theirs):
        neutral = {name: getattr(source, name) for name in names if hasattr(source, name)}
        assert len(neutral) >= 8
        assert len(list(make(mixed, 4, fields=["label"], **neutral))) == len(loader)
    assert len(make(mixed, 4, pin_memory=True)) == len(make(mixed, 4, pin_memory=None)) == 6
    batches = make(mixed, batch_sampler=[[1, 2]])
    assert len(make(mixed, batch_size=batches.batch_size, batch_sampler=batches.batch_sampler)) == 1


def test_a_loader_says_what_it_is(mixed: Path, make: Loader) -> None:
    loader = make(mixed, 4, shuffle=True, rank=1, world_size=2, prefetch_batches=3)
    text = repr(loader)
    assert "23 records" in text
    for part in ("batch_size=4", "shuffle='full'", "rank=1, world_size=2", "device='cpu'", "epoch=0"):
        assert part in text
    loader.close()
    assert repr(loader).endswith(", closed)")


def test_dataset_options_are_for_paths(mixed: Path, make: Loader) -> None:
    with pytest.raises(ConfigError, match="record_length: the dataset is open already"):
        make(ShardDataset(mixed), record_length=4)


def test_a_subset_is_told_how_its_records_are_read(mixed: Path, make: Loader) -> None:
    subset = torch.utils.data.Subset(ShardDataset(mixed, fields=["label"]), [3, 1])
    with pytest.raises(ConfigError, match=r"not Subset; give it the dataset, and sampler=subset\.indices"):
        make(subset)
    assert [len(batch) for batch in make(subset.dataset, 2, sampler=subset.indices)] == [2]


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ([0, 23], IndexError, "record 23"),
        ([0, -24], IndexError, "record -24"),
        ([0, "a"], ConfigError, "record numbers"),
    ],
)
def test_a_sampler_that_is_wrong(mixed: Path, make: Loader, sampler: Any, error: Any, message: str) -> None:
    batches = iter(make(mixed, 1, sampler=sampler))
    next(batches)
    with pytest.raises(error, match=message):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_rank_without_records(mixed: Path, make: Loader) -> None:
    dataset = ShardDataset(mixed, fields=["label"])
    for epochs in (1, None):
        loader = make(dataset, 4, rank=29, world_size=30, partition="uneven", epochs=epochs)
        assert list(loader) == []
    assert len(list(make(dataset, 4, rank=0, world_size=30, partition="uneven"))) == 1
