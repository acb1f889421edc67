"""The ceilings of disks: which arrangement is chosen, and that each moves the bytes that it says."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import aio, cache, ceilings_best, ceilings_disk
from bench.ceilings import Ceiling, ParallelRead
from bench.ceilings_best import Best
from bench.ceilings_disk import Arrangement, Disk
from bench.ceilings_write import DirectWrite
from bench.config import BenchError
from bench.loaders.base import GatherRequest
from bench.measure import ALONE
from bench.run_parts import InTurn

MIB = 1 << 20


class Rates:
    """Arrangements that are as fast as they are told, and how often and with how much each was asked."""

    def __init__(self, **rates: float) -> None:
        self.rates, self.asked = dict(rates), []  # type: tuple[dict[str, float], list[tuple[str, int]]]

    def __call__(self, choice: str, nbytes: int) -> float:
        self.asked.append((choice, nbytes))
        return self.rates[choice]


def test_the_best_few_are_asked_in_every_round_and_the_best_of_all_rounds_is_the_ceiling() -> None:
    rates = Rates(a=1.0, b=4.0, c=3.0, d=2.0, e=0.5)
    best = Best(rates, list("abcde"), 1 << 40)
    assert best.in_hindsight(0) == []
    assert best.winner == "b", "by the trials, before any round"
    rates.asked.clear()
    assert best.sample() == 4.0
    rates.rates |= {"c": 5.5, "d": 5.0}  # the one that was picked is not the fastest for ever
    rounds = [best.sample(), best.sample()]
    assert rounds == [5.5, 5.5]
    assert [name for name, _ in rates.asked] == ["b", "c", "d", "c", "d", "b", "d", "b", "c"]
    assert best.winner == "c"
    assert best.in_hindsight(3) == [3.0, 5.5, 5.5], "its own in the first round, too"
    assert best.in_hindsight(2) == [5.5, 5.5]
    assert best.describe(str) == "c; in the same rounds b had 73%, d had 91%"


def test_luck_is_no_ceiling() -> None:
    # The expectation of the highest of three normal values is 0.85 standard deviations above theirs.
    noise = np.random.default_rng(1)
    best = Best(lambda choice, nbytes: 1 + 0.1 * noise.standard_normal(), list("abc"), 1 << 40)
    for _ in range(300):
        best.sample()
    row = 1 + 0.1 * noise.standard_normal(300)
    luckiest = np.max(list(best.rates.values()), axis=0)
    assert np.median(row / luckiest) < 0.94
    assert 0.96 < np.median(row / best.in_hindsight(300)) < 1.02


@pytest.mark.parametrize("kind", ["disk", "cache", "writes"])
def test_ceilings_of_several_ways_are_known_in_hindsight(paths: list[str], tmp_path: Path, kind: str) -> None:
    ceiling: Ceiling
    if kind == "disk":
        ceiling = Disk(paths, MIB)
    elif kind == "cache":
        ceiling = ParallelRead(paths, consumer=False, nbytes=MIB)
    else:
        ceiling = DirectWrite(tmp_path, MIB)
    ceiling._best.rates = {"a": [1.0, 9.0, 1.0], "b": [2.0, 3.0, 2.0]}
    for each in (ceiling, InTurn(ceiling, ALONE)):
        assert each.in_hindsight([9.0, 9.0, 9.0]) == [2.0, 3.0, 2.0]
    ceiling.close()


def test_a_lucky_screening_is_corrected_by_the_trial() -> None:
    rates = Rates(a=1.0, b=2.0, c=3.0, d=4.0)
    seen: list[str] = []

    def rate(choice: str, nbytes: int) -> float:
        seen.append(choice)
        return 9.0 if choice == "a" and seen.count("a") <= 2 else rates(choice, nbytes)

    best = Best(rate, list("abcd"), 1 << 40)
    assert set(best.rates) == {"b", "c", "d"}


def test_trials_and_samples_are_as_long_as_they_have_to_be() -> None:
    fast, slow = Rates(a=4.0), Rates(a=0.01)
    for rates in (fast, slow):
        Best(rates, ["a"], 1 << 40).sample()
    assert fast.asked[-2:] == [("a", int(1e9)), ("a", int(4e9))], "0.25 s, and a second in a round"
    assert slow.asked[-2:] == [("a", 4 * MIB), ("a", 10_000_000)], "no more than that of a slow disk"
    short = Rates(a=4.0)
    Best(short, ["a"], 8 * MIB, lambda _: 64 * MIB).sample()
    assert {nbytes for _, nbytes in short.asked} == {8 * MIB}, "no more than there is"
    assert len(short.asked) == 2 + ceilings_best._TRIAL_PASSES + 1, "in several passes"


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no arrangement"):
        Best(Rates(), [], MIB)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(2 * MIB))
    return [str(tmp_path / name) for name in ("a", "b")]


@pytest.fixture(autouse=True)
def _nothing_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_disk, "_FOUND", {})


def records(record: int, count: int) -> GatherRequest:
    numbers = np.random.default_rng(0).permutation(2 * MIB // record)[:count].astype(np.int64)
    return GatherRequest((np.arange(count) % 2).astype(np.int32), numbers * record, record)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Arrangement]:
    """What would be searched; nothing is."""
    seen: list[Arrangement] = []

    class Nothing:
        def __init__(self, rate: Any, choices: list[Arrangement], *rest: Any) -> None:
            seen.extend(choices)
            self.rates: dict[Arrangement, list[float]] = {}

    monkeypatch.setattr(ceilings_disk, "Best", Nothing)
    return seen


def only(monkeypatch: pytest.MonkeyPatch, keep: Any) -> None:
    """Leave one arrangement to be found."""
    within = ceilings_disk._within
    monkeypatch.setattr(ceilings_disk, "_within", lambda found: [each for each in within(found) if keep(each)][:1])


@pytest.mark.parametrize("by_aio", [False, True])
@pytest.mark.parametrize("record", [None, 4096])
def test_writes_reach_every_place_once(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, by_aio: bool, record: int | None
) -> None:
    wanted = records(record, 300) if record else None
    only(monkeypatch, lambda each: each.aio == by_aio)
    before = [Path(path).read_bytes() for path in paths]
    try:
        disk = Disk(paths, 4 * MIB if wanted is None else wanted.total_bytes, request=wanted, write=True)
    except (ValueError, OSError, BenchError) as error:
        pytest.skip(f"no O_DIRECT or no kernel AIO here: {error}")
    (choice,) = disk._best.rates
    assert disk.rate(choice, 1 << 40) > 0
    disk.close()
    changed = [
        (np.frombuffer(Path(path).read_bytes(), np.uint8) != np.frombuffer(old, np.uint8)).reshape(-1, 4096).any(axis=1)
        for path, old in zip(paths, before, strict=True)
    ]
    expected = [np.full(512, wanted is None) for _ in paths]
    if wanted is not None:
        for file, offset in zip(wanted.file_index, wanted.offsets, strict=True):
            expected[file][offset // 4096] = True
    assert all((mine == theirs).all() for mine, theirs in zip(changed, expected, strict=True))


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("depth", "queues"), [(8, 1), (5, 3), (1024, 8)])
def test_queues_share_the_ios_and_read_what_is_there(paths: list[str], depth: int, queues: int) -> None:
    count = 312
    wanted = records(4096, count)
    disk = Disk(paths, 4 * MIB, request=wanted)
    if disk._no_aio is not None:
        pytest.skip(disk._no_aio)
    assert disk.rate(Arrangement(4096, max(depth, queues), True, True, queues), MIB) > 0
    disk.close()
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    places = np.array([(descriptors[f], at) for f, at in zip(wanted.file_index, wanted.offsets, strict=True)])
    try:
        with mmap.mmap(-1, count * 4096) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            for number in range(queues):
                mine = places[number::queues]
                queue, at = aio.Queue(depth), address + number * len(mine) * 4096
                queue.stream(aio.Prepared(mine, 4096, at, len(mine), 4096, write=False))
                queue.close()
            read = np.frombuffer(bytes(memory), np.uint8).reshape(-1, 4096)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    order = [index for number in range(queues) for index in range(number, count, queues)]
    held = [np.frombuffer(Path(path).read_bytes(), np.uint8).reshape(-1, 4096) for path in paths]
    for row, index in zip(read, order, strict=True):
        assert (row == held[wanted.file_index[index]][wanted.offsets[index] // 4096]).all()


def test_an_io_past_the_end_is_an_error(paths: list[str]) -> None:
    try:
        queue = aio.Queue(4)
    except BenchError as error:
        pytest.skip(str(error))
    descriptor = os.open(paths[0], os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 8192) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            for offset, said in ((2 * MIB - 4096, "returned 4096"), (512 + 1, "Invalid argument")):
                ios = aio.Prepared(
                    np.array([[descriptor, 0], [descriptor, offset]]), 8192, address, 1, 8192, write=False
                )
                with pytest.raises(BenchError, match=f"an O_DIRECT io of 8192 bytes by kernel AIO.*{said}"):
                    queue.stream(ios)
    finally:
        queue.close()
        os.close(descriptor)


def test_a_rows_own_ios_are_among_the_arrangements(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Arrangement] = []
    real = ceilings_disk._within
    monkeypatch.setattr(ceilings_disk, "_within", lambda found: seen.extend(real(found)) or real(found))
    Disk(paths, 4 * MIB, own=(256 << 10, 6)).close()
    assert {(each.length, each.in_flight) for each in seen} >= {(256 << 10, 6), (MIB, 8)}
    assert len(set(seen)) == len(seen)
    if any(each.aio for each in seen):
        found = {(each.length, each.in_flight) for each in seen if each.aio}
        assert found >= {(512 << 10, 128), (MIB, 128)}
    assert all(each.in_flight_bytes <= 256 * MIB and each.length <= 2 * MIB for each in seen)


def test_the_next_part_asks_what_the_first_one_found_and_its_own(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Disk(paths, 4 * MIB)
    first.close()
    seen: list[Arrangement] = []
    real = ceilings_disk._within
    monkeypatch.setattr(ceilings_disk, "_within", lambda found: seen.extend(real(found)) or real(found))
    Disk(paths, 4 * MIB, own=(64 << 10, 2)).close()
    assert set(first._best.rates) < set(seen)
    assert {(each.length, each.in_flight) for each in set(seen) - set(first._best.rates)} == {(64 << 10, 2)}
    seen.clear()
    Disk(paths, 4 * MIB, write=True).close()
    assert len(seen) > 8, "another direction is another search"


@pytest.mark.parametrize("record", [4096, 64 << 10])
def test_so_it_does_of_records(paths: list[str], request: pytest.FixtureRequest, record: int) -> None:
    first = Disk(paths, 4 * MIB, request=records(record, 16), own=(record, 3))
    first.close()
    asked: list[Arrangement] = request.getfixturevalue("asked")
    Disk(paths, 4 * MIB, request=records(record, 8), own=(record, 5)).close()
    assert set(first._best.rates) <= set(asked)
    assert {(each.length, each.in_flight) for each in set(asked) - set(first._best.rates)} == {(record, 5)}
    asked.clear()
    Disk(paths, 4 * MIB, request=records(record // 2, 8)).close()
    assert len(asked) >= 3, "records of another length are another search"
    assert all(each.length == record // 2 for each in asked)


def test_without_o_direct_or_kernel_aio_the_detail_says_so(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_CALLS", {})
    disk = Disk(paths, 4 * MIB, request=records(4096, 64))
    assert "threads only: no kernel AIO call numbers are known" in disk.describe()
    disk.close()
    monkeypatch.setattr(cache, "refuses_direct", lambda path: "O_DIRECT is refused here (Invalid argument)")
    for wanted, kind in ((None, "preadv_cold"), (records(4096, 64), "pread_cold_records")):
        disk = Disk(paths, MIB, request=wanted)
        assert disk.kind == kind
        assert disk.sample() > 0
        assert "through the page cache: O_DIRECT is refused here" in disk.describe()
        disk.close()


@pytest.mark.parametrize(
    ("record", "write", "shuffled", "blocks"),
    [
        (4096, False, False, False),
        (64 << 10, False, False, True),
        (64 << 10, False, True, False),
        (64 << 10, True, False, False),
    ],
)
def test_large_records_may_be_read_as_blocks(
    paths: list[str], asked: list[Arrangement], record: int, write: bool, shuffled: bool, blocks: bool
) -> None:
    Disk(paths, 4 * MIB, request=records(record, 8), shuffled=shuffled, write=write).close()
    assert any(each.records and each.length == record for each in asked)
    assert any(not each.records for each in asked) == blocks


@pytest.mark.parametrize("request_of", [None, 4096])
@pytest.mark.parametrize("shuffled", [True, False])
def test_an_epoch_is_read_in_another_order_each_time(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, request_of: int | None, shuffled: bool
) -> None:
    asked = None if request_of is None else records(request_of, 64)
    disk = Disk(paths, 4 * MIB, request=asked, shuffled=shuffled)
    orders: list[list[tuple[str, int]]] = []

    def taken(choice: Arrangement, ios: ceilings_disk.Places) -> float:
        orders.append([(os.readlink(f"/proc/self/fd/{descriptor}"), offset) for descriptor, offset in ios.tolist()])
        return 1.0

    monkeypatch.setattr(disk, "_by_aio", taken)
    monkeypatch.setattr(disk, "_by_threads", taken)
    choice = Arrangement(request_of or MIB, 4, True, request_of is not None)
    everything = sum(os.path.getsize(path) for path in paths)
    for _ in range(2):
        disk.rate(choice, everything)
    disk.close()
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(orders[0]) == (64 if request_of else everything // MIB)
    assert (orders[0] != orders[1]) == shuffled
    if asked is not None and not shuffled:
        assert orders[0] == [(paths[f], at) for f, at in zip(asked.file_index, asked.offsets, strict=True)]
