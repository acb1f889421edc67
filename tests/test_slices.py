"""An index of a stored tensor reads what numpy selects, from bytes inside the tensor."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gdsstream.errors import ConfigError
from gdsstream.slices import Selection, select

ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def execute(selection: Selection, array: np.ndarray) -> np.ndarray:
    """What the runs hold, seen as the selection says."""
    data = array.tobytes()
    pieces = []
    for offset, nbytes in selection.runs:
        assert 0 <= offset < offset + nbytes <= len(data)
        pieces.append(data[offset : offset + nbytes])
    for (offset, nbytes), (following, _) in pairwise(selection.runs):
        assert following > offset + nbytes  # neighbours would be one read
    result = np.frombuffer(b"".join(pieces), dtype=array.dtype).reshape(selection.shape)
    return result if selection.then is None else result[selection.then]


def numbered(shape: tuple[int, ...], item: int) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.int64).astype(ITEMS[item]).reshape(shape)


indices = st.one_of(
    st.integers(-12, 12),
    st.builds(
        slice,
        st.none() | st.integers(-12, 12),
        st.none() | st.integers(-12, 12),
        st.none() | st.integers(1, 5),
    ),
    st.just(...),
)


@settings(max_examples=400)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    item=st.sampled_from(list(ITEMS)),
    index=st.lists(indices, max_size=5).map(tuple) | indices,
)
@example(shape=(), item=4, index=())
@example(shape=(), item=4, index=...)
@example(shape=(3, 4), item=2, index=(slice(5, 1), 2))
@example(shape=(70, 9), item=2, index=(slice(None, None, 2), 3))
def test_any_index_is_numpys(shape: tuple[int, ...], item: int, index: Any):
    check(shape, item, index)


@settings(max_examples=150)
@given(
    shape=st.tuples(st.integers(60, 300), st.integers(1, 40)) | st.tuples(st.integers(500, 3000)),
    item=st.sampled_from([1, 8]),
    index=st.lists(
        st.integers(-300, 300)
        | st.builds(slice, st.none() | st.integers(-300, 300), st.none() | st.integers(-300, 300), st.integers(1, 9)),
        min_size=1,
        max_size=2,
    ).map(tuple),
)
def test_many_tiny_runs_are_numpys(shape: tuple[int, ...], item: int, index: Any):
    check(shape, item, index)


def check(shape: tuple[int, ...], item: int, index: Any) -> None:
    array = numbered(shape, item)
    try:
        expected = array[index]
    except IndexError as error:
        wrong = ConfigError if "single ellipsis" in str(error) else IndexError
        with pytest.raises(wrong):
            select(shape, item, index)
        return
    got = execute(select(shape, item, index), array)
    assert got.shape == np.shape(expected)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        (..., ((0, 24_000),)),
        (slice(2, 5), ((4800, 7200),)),
        (-1, ((21_600, 2400),)),
        ((3, slice(1, 2)), ((7280, 80),)),
        ((slice(0, 2), slice(0, 15)), ((0, 1200), (2400, 1200))),
        ((slice(None), slice(None), slice(0, 20)), ((0, 24_000),)),
        ((slice(0, 6, 3),), ((0, 2400), (7200, 2400))),
        (slice(4, 4), ()),
    ],
)
def test_only_the_bytes_that_are_needed_are_read(index: Any, runs: tuple[tuple[int, int], ...]):
    assert select((10, 30, 20), 4, index) == Selection(runs, numbered((10, 30, 20), 4)[index].shape, None)


def test_a_column_reads_the_covering_rows_once():
    selection = select((1000, 64), 2, (slice(100, 300), 7))
    assert selection.runs == ((100 * 128, 200 * 128),)
    assert selection.then is not None


@pytest.mark.parametrize(
    "index",
    [
        None,
        True,
        np.bool_(True),
        1.5,
        "a",
        [0, 1],
        np.array([0, 1]),
        (0, None),
        (0, [1]),
        (..., 0, ...),
        slice(None, None, -1),
        slice(None, None, 0),
        slice(1.5, 2),
        slice("a", None),
    ],
)
def test_other_indices_are_refused_with_the_way_out(index: Any):
    with pytest.raises(ConfigError, match=r"index|slice"):
        select((4, 5), 4, index)


@pytest.mark.parametrize("index", [4, -5, (0, 5), (0, 0, 0), (..., 0, 0, 0), (0, -6)])
def test_out_of_range_is_an_index_error(index: Any):
    with pytest.raises(IndexError, match=r"out of range|too many"):
        select((4, 5), 4, index)


@pytest.mark.parametrize("index", [np.int64(2), np.uint8(2), (np.int32(1), slice(np.int64(1), np.int64(3)))])
def test_integers_of_numpy_are_integers(index: Any):
    array = numbered((4, 5), 4)
    assert np.array_equal(execute(select((4, 5), 4, index), array), array[index])
