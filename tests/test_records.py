"""Where records lie: columns of shards become one table, located by arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstream.errors import ConfigError, DatasetError
from gdsstream.records import PLACED, RAGGED, REFUSED, STRIDED, Column, Field, RecordTable, Shard
from gdsstream.regular_files import FileStamp


def words(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def shard(number: int, count: int, *columns: Column, directory: str = "/data", size: int = 1000) -> Shard:
    return Shard(f"{directory}/shard-{number}", FileStamp(1, number, size, 5, 5), count, columns)


def strided(
    base: int = 64, stride: int = 16, name: str = "x", dtype: str = "I32", shape: tuple[int, ...] = (4,)
) -> Column:
    return Column(name, dtype, shape, STRIDED, words(base, stride))


def test_a_field_knows_its_sizes() -> None:
    assert Field("x", "F16", (3, 5), ragged=False).record_bytes == 30
    assert Field("x", "F32", (), ragged=True).record_bytes == 4
    assert Field("x", "F4", (8,), ragged=False).record_bytes == 8  # two values of the file in each element of torch
    assert Field("x", "BOOL", (), ragged=False).itemsize == 1


def test_strided_records_lie_at_base_and_stride_of_their_shard() -> None:
    table = RecordTable.of([shard(0, 3, strided(100, 16)), shard(1, 2, strided(200, 8))])  # the second overlaps
    assert table.num_records == 5
    assert table.starts.tolist() == [0, 3, 5]
    assert table.fields == (Field("x", "I32", (4,), ragged=False),)
    file, offset, nbytes = table.locate("x", np.array([4, 0, 2, 3, 0]))
    assert file.tolist() == [1, 0, 0, 1, 0]
    assert offset.tolist() == [208, 100, 132, 200, 100]
    assert nbytes.tolist() == [16] * 5
    assert (file.dtype, offset.dtype, nbytes.dtype) == (np.int32, np.int64, np.int64)


def test_shards_without_records_keep_their_number_and_hold_nothing() -> None:
    empty = shard(0, 0), shard(2, 0, strided(shape=(9,))), shard(4, 0)
    table = RecordTable.of([empty[0], shard(1, 2, strided(10)), empty[1], shard(3, 1, strided(20)), empty[2]])
    file, offset, _ = table.locate("x", np.arange(3))
    assert file.tolist() == [1, 1, 3]
    assert offset.tolist() == [10, 26, 20]
    assert len(table.paths) == 5


def test_placed_and_ragged_records_have_places_of_their_own() -> None:
    fixed = [Column("y", "U8", (6,), PLACED, words(9, 3)), Column("y", "U8", (6,), PLACED, words(5))]
    ragged = [Column("x", "I16", (2,), RAGGED, words(40, 44, 4, 0)), Column("x", "I16", (2,), RAGGED, words(80, 12))]
    table = RecordTable.of([shard(0, 2, ragged[0], fixed[0]), shard(1, 1, ragged[1], fixed[1])])
    assert table.fields == (Field("x", "I16", (2,), ragged=True), Field("y", "U8", (6,), ragged=False))
    x, y = table.locate_all(np.array([2, 0, 1]))
    assert x.offset.tolist() == [80, 40, 44]
    assert x.nbytes.tolist() == [12, 4, 0]
    assert y.offset.tolist() == [5, 9, 3]
    assert y.nbytes.tolist() == [6, 6, 6]
    assert x.file.tolist() == y.file.tolist() == [1, 0, 0]


def test_members_of_another_length_in_another_shard_are_ragged() -> None:
    columns = [
        Column("x", "F32", (2, 3), PLACED, words(10, 20)),
        Column("x", "F32", (5, 3), PLACED, words(30)),
        Column("x", "F32", (3,), RAGGED, words(40, 50, 12, 0)),
    ]
    table = RecordTable.of([shard(0, 2, columns[0]), shard(1, 1, columns[1]), shard(2, 2, columns[2])])
    assert table.fields == (Field("x", "F32", (3,), ragged=True),)
    located = table.locate("x", np.arange(5))
    assert located.nbytes.tolist() == [24, 24, 60, 12, 0]
    assert located.offset.tolist() == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("lengths", [(0, 2), (2, 0), (0, 2, 0)])
def test_records_without_rows_are_ragged_with_those_that_have_some(lengths: tuple[int, ...]) -> None:
    shards = [
        shard(number, 1, Column("x", "F32", (length, 4), PLACED, words(10 * number)))
        for number, length in enumerate(lengths)
    ]
    table = RecordTable.of(shards)
    assert table.fields == (Field("x", "F32", (4,), ragged=True),)
    assert table.locate("x", np.arange(len(lengths))).nbytes.tolist() == [16 * length for length in lengths]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_locate_agrees_with_walking_over_the_shards(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any))
    shards, walked = [], []
    for number, count in enumerate(counts):
        base, stride = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 40))
        shards.append(shard(number, count, strided(base, stride)))
        walked += [(number, base + row * stride) for row in range(count)]
    records = np.array(data.draw(st.lists(st.integers(0, len(walked) - 1), max_size=20)), dtype=np.int64)
    located = RecordTable.of(shards).locate("x", records)
    assert list(zip(located.file.tolist(), located.offset.tolist(), strict=True)) == [walked[at] for at in records]


def test_billions_of_records_take_no_memory_of_their_own() -> None:
    count = 2**40
    table = RecordTable.of([shard(0, count, strided(64, 4096)), shard(1, count, strided(64, 4096))])
    located = table.locate("x", np.array([2 * count - 1, count, count - 1]))
    assert located.file.tolist() == [1, 1, 0]
    assert located.offset.tolist() == [64 + (count - 1) * 4096, 64, 64 + (count - 1) * 4096]


def test_millions_of_records_a_second_are_located() -> None:
    shards = [shard(number, 1000 + number % 7, strided(64, 4096)) for number in range(10_000)]
    table = RecordTable.of(shards)
    records = np.random.default_rng(0).integers(0, table.num_records, 500_000)
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        table.locate("x", records)
        best = min(best, time.thread_time() - start)
    assert len(records) / best > 2e6  # 11 million where nothing else uses the caches


@pytest.mark.parametrize("record", [-1, 5, 2**40])
def test_records_that_do_not_exist_are_refused(record: int) -> None:
    table = RecordTable.of([shard(0, 5, strided())])
    with pytest.raises(ConfigError, match=rf"no record {record}; there are 5"):
        table.locate("x", np.array([0, record]))


def test_a_field_that_was_not_chosen_is_refused() -> None:
    table = RecordTable.of([shard(0, 5, strided(), strided(name="y"))], ["y"])
    assert [field.name for field in table.fields] == ["y"]
    with pytest.raises(ConfigError, match=r"no field 'x'; there are y"):
        table.locate("x", np.array([0]))


def test_the_order_of_chosen_fields_counts() -> None:
    columns = [strided(name=name) for name in "abc"]
    assert [field.name for field in RecordTable.of([shard(0, 1, *columns)], ["c", "a"]).fields] == ["c", "a"]
    for fields, why in ((["z"], r"shard-0 has no field 'z'; it has 'a', 'b', 'c'"),):
        with pytest.raises(DatasetError, match=why):
            RecordTable.of([shard(0, 1, *columns)], fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], "fields is empty"),
        ("ab", r"for one field write \['ab'\]"),
        (3, "fields is 3; it has to be a list of names"),
        (["a", 3], "fields has 3, which is no name"),
        ([["a"]], r"fields has \['a'\], which is no name"),
        (["a", "b", "a"], "fields has 'a' twice"),
        (iter(()), "fields is empty"),
    ],
)
def test_fields_that_are_no_names_are_refused(fields: Any, why: str) -> None:
    columns = [strided(name=name) for name in "ab"]
    with pytest.raises(ConfigError, match=why):
        RecordTable.of([shard(0, 1, *columns)], fields)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (strided(dtype="F32"), r"field 'x' is F32 in /data/shard-1, but I32 in /data/shard-0"),
        (strided(shape=(5,)), r"field 'x' has records of shape \[5\] in /data/shard-1, but \[4\] in /data/shard-0"),
        (
            Column("x", "I32", (), RAGGED, words(0, 0, 4, 4)),
            r"'x' has records of shape \[n\] in /data/shard-1, but \[4\]",
        ),
        (strided(name="y"), r"/data/shard-1 has no field 'x', which /data/shard-0 has"),
    ],
)
def test_shards_that_disagree_are_refused_by_name(second: Column, why: str) -> None:
    with pytest.raises(DatasetError, match=why):
        RecordTable.of([shard(0, 2, strided()), shard(1, 2, second)])


@pytest.mark.parametrize(
    "columns",
    [
        [Column("x", "F32", (2, 3), PLACED, words(1)), Column("x", "F32", (2, 4), PLACED, words(1))],
        [Column("x", "F32", (), PLACED, words(1)), Column("x", "F32", (2,), PLACED, words(1))],
        [Column("x", "F32", (2, 3), PLACED, words(1)), Column("x", "F32", (4,), RAGGED, words(1, 1))],
    ],
)
def test_only_dimension_0_of_members_can_vary(columns: list[Column]) -> None:
    with pytest.raises(DatasetError, match=r"field 'x' has records of shape .* in /data/shard-1, but"):
        RecordTable.of([shard(number, 1, column) for number, column in enumerate(columns)])


def test_a_field_only_some_shards_have_can_be_left_out() -> None:
    shards = [shard(0, 1, strided(), strided(name="y")), shard(1, 1, strided())]
    assert RecordTable.of(shards, ["x"]).num_records == 2
    with pytest.raises(DatasetError, match=r"/data/shard-1 has no field 'y', which /data/shard-0 has"):
        RecordTable.of(shards)


def test_what_is_wrong_with_a_column_matters_to_who_asks_for_it() -> None:
    broken = Column("y", "U8", (), REFUSED, words(), "is compressed")
    odd = strided(name="z", dtype="F6_E2M3")
    shards = [shard(0, 1, strided(), broken, odd)]
    assert RecordTable.of(shards, ["x"]).num_records == 1
    with pytest.raises(DatasetError, match=r"/data/shard-0: field 'y' is compressed; or leave the field out"):
        RecordTable.of(shards, ["x", "y"])
    with pytest.raises(DatasetError, match=r"/data/shard-0: field 'z': dtype F6_E2M3 has no counterpart"):
        RecordTable.of(shards, ["z"])


def test_ragged_rows_without_bytes_cannot_be_counted() -> None:
    with pytest.raises(DatasetError, match=r"rows of field 'x', of shape \[0\], have no bytes"):
        RecordTable.of([shard(0, 1, Column("x", "F32", (0,), RAGGED, words(0, 0)))])
    varying = [shard(number, 1, Column("x", "F32", (number, 0), PLACED, words(0))) for number in range(2)]
    with pytest.raises(DatasetError, match=r"rows of field 'x', of shape \[0\], have no bytes"):
        RecordTable.of(varying)


def test_more_records_than_can_be_counted_are_refused() -> None:
    many = [shard(number, 2**61 + number, strided(0, 0, shape=(0,))) for number in range(2)]
    assert RecordTable.of(many[:1]).num_records == 2**61
    with pytest.raises(
        DatasetError, match=f"more than 2..62 records in 2 shard.*, {2**61 + 1} of them in /data/shard-1"
    ):
        RecordTable.of(many)


@pytest.mark.parametrize("shards", [[], [shard(0, 0, strided()), shard(1, 0)]])
def test_no_record_at_all_is_refused(shards: list[Shard]) -> None:
    with pytest.raises(DatasetError, match=rf"no record in {len(shards)} shard"):
        RecordTable.of(shards)


def test_the_fingerprint_is_of_the_dataset_not_of_its_place_and_time() -> None:
    def fingerprint(*shards: Shard, fields: list[str] | None = None) -> str:
        return RecordTable.of(shards, fields).fingerprint

    same = fingerprint(shard(0, 2, strided(), strided(name="y")), shard(1, 2, strided(), strided(name="y")))
    moved = [shard(n, 2, strided(), strided(name="y"), directory="/mnt/copy") for n in (0, 1)]
    assert fingerprint(*moved) == same
    assert fingerprint(*[each._replace(stamp=each.stamp._replace(mtime_ns=9, inode=7)) for each in moved]) == same
    assert fingerprint(*moved, fields=["y"]) == same
    others = [
        fingerprint(*reversed(moved)),
        fingerprint(moved[0]),
        fingerprint(moved[0], moved[1]._replace(num_records=3)),
        fingerprint(moved[0], moved[1]._replace(stamp=moved[1].stamp._replace(size=999))),
        fingerprint(moved[0]._replace(path="/mnt/copy/shard-7"), moved[1]),
        fingerprint(*[shard(n, 2, strided(), strided(name="z")) for n in (0, 1)]),
        fingerprint(*[shard(n, 2, strided(), strided(name="y", dtype="F32")) for n in (0, 1)]),
    ]
    assert same not in others
    assert len(set(others)) == len(others)
