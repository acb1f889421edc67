"""The permutation: a bijection, exactly the one that its definition says, as uniform as a shuffle, and quick."""

from __future__ import annotations

import time
import tracemalloc
from itertools import permutations
from math import factorial, isqrt, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gdsstream.errors import ConfigError
from gdsstream.permutation import MAX_SIZE, Permutation, mix_key

KEYS = st.integers(0, 2**64 - 1)
HUGE = st.one_of(
    st.integers(1, MAX_SIZE),
    st.integers(1, 62).flatmap(lambda bits: st.integers(max(2**bits - 2, 1), min(2**bits + 2, MAX_SIZE))),
)


# ---- a bijection


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 5000), KEYS, st.integers(-(2**63), 2**63 - 1))
def test_every_position_leads_to_a_value_of_its_own(n: int, key: int, tweak: int) -> None:
    permutation = Permutation(n, key)
    positions = np.arange(n)
    values = permutation(positions, tweak)
    assert np.array_equal(np.sort(values), positions)
    assert np.array_equal(permutation.inverse(values, tweak), positions)


@settings(deadline=None, max_examples=200)
@given(HUGE, KEYS, st.data())
def test_of_any_size_it_stays_inside_and_leads_back(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.one_of(st.integers(0, n - 1), st.just(n - 1), st.just(0)), max_size=20))
    permutation = Permutation(n, key)
    values = permutation(positions)
    assert ((values >= 0) & (values < n)).all()
    assert len(set(values.tolist())) == len(set(positions))
    assert permutation.inverse(values).tolist() == positions
    assert permutation(permutation.inverse(positions)).tolist() == positions


@settings(deadline=None, max_examples=100)
@given(HUGE, KEYS, st.data())
def test_a_tweak_for_each_position_is_the_tweak_for_all_of_them(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    tweaks = data.draw(
        st.lists(st.integers(-3, 3) | st.just(2**63 - 1), min_size=len(positions), max_size=len(positions))
    )
    permutation = Permutation(n, key)
    expected = [int(permutation(position, tweak)) for position, tweak in zip(positions, tweaks, strict=True)]
    values = permutation(positions, np.array(tweaks))
    assert values.tolist() == expected
    assert permutation.inverse(values, np.array(tweaks)).tolist() == positions


def test_positions_in_large_arrays_are_mapped_like_single_ones() -> None:
    n = 10**10 + 19
    positions = np.random.default_rng(0).integers(0, n, 50_000)
    tweaks = positions % 7
    permutation = Permutation(n, 3)
    values, tweaked = permutation(positions), permutation(positions, tweaks)
    for index in [0, 1, 8191, 8192, 8193, 16384, 49_999]:
        assert values[index] == permutation(int(positions[index]))
        assert tweaked[index] == permutation(int(positions[index]), int(tweaks[index]))
    assert np.array_equal(permutation.inverse(tweaked, tweaks), positions)


# ---- which bijection


def definition(n: int, key: int, position: int, tweak: int = 0) -> int:
    """The same permutation in Python's integers, as slow and plain as can be."""
    word = 2**64

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % word
        return x ^ (x >> 31)

    def derived(number: int) -> int:
        first = mix((key + 0x9E3779B97F4A7C15) % word)
        return mix(((first ^ number) + 0x9E3779B97F4A7C15) % word) ^ mix(tweak % word)

    def scaled_hash(x: int, number: int, size: int) -> int:
        x = (x ^ derived(number)) * 0xBF58476D1CE4E5B9 % word
        x = (x ^ (x >> 32)) * 0x94D049BB133111EB % word
        return (x >> 32) * size >> 32

    rows = isqrt(n - 1) + 1
    rows += rows % 2
    columns = (n + rows - 1) // rows
    while True:
        row, column = divmod(position, columns)
        for number in range(24 if n < 64 else 12 if n < 4096 else 8):
            if number % 2 == 0:
                row = (row + scaled_hash(column, number, rows)) % rows
            else:
                column = (column + scaled_hash(row, number, columns)) % columns
        position = row * columns + column
        if position < n:
            return position


@settings(deadline=None, max_examples=300)
@given(HUGE | st.integers(1, 5000), KEYS, st.integers(-(2**63), 2**63 - 1) | st.just(0), st.data())
def test_it_is_the_one_defined(n: int, key: int, tweak: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    assert Permutation(n, key)(positions, tweak).tolist() == [definition(n, key, p, tweak) for p in positions]


GOLDEN_KEYS = (16294208416658607535, 15020427595393229491, 16490336266968443936)
GOLDEN = {
    (1, 0): [0],
    (2, 1): [0, 1],
    (3, 1): [2, 1, 0],
    (7, 5): [4, 3, 0, 1, 6, 5, 2],
    (10, 0): [9, 0, 2, 4, 3, 7, 5, 6, 1, 8],
    (63, 18446744073709551615): [50, 32, 4, 53, 17, 42, 36, 27, 51, 3],
    (64, 1): [36, 29, 37, 50, 28, 58, 51, 19, 20, 45],
    (1000, 7): [441, 214, 167, 386, 662, 114, 428, 246, 478, 423],
    (4096, 7): [562, 3298, 1168, 2090, 1732, 3724, 34, 828, 711, 2541],
    (65537, 13608149317741381227): [34851, 51553, 40837, 56245, 31407, 32297, 12962, 48369, 37243, 24510],
    (1000000000, 1): [
        398944985,
        361055505,
        839176065,
        997774347,
        269291501,
        228976839,
        789395200,
        117126113,
        115840083,
        666687980,
    ],
    (1000000000039, 12345): [
        718413915149,
        219810262083,
        982553046270,
        175027144745,
        116806435964,
        618068392368,
        544620945095,
        266415292667,
        703471667140,
        178167729869,
    ],
    (4611686018427387904, 9223372036854775808): [
        4137577985147573588,
        89925126675295917,
        2964033882895938730,
        2265034082120650445,
        4520762371898359215,
        3813127021401740400,
        818000675877954504,
        1125543415073230945,
        1627361796828324689,
        4518351912969469426,
    ],
}
GOLDEN_TWEAKED = [195, 363, 5, 300, 127]


def test_it_never_changes() -> None:
    # These are part of what saved states mean. A change of any of them needs another version of the state.
    assert mix_key() == 0
    assert mix_key(0) == GOLDEN_KEYS[0]
    assert mix_key(1, 2, 3) == GOLDEN_KEYS[1]
    assert mix_key(-1) == mix_key(2**64 - 1) == GOLDEN_KEYS[2]
    for (n, key), values in GOLDEN.items():
        assert Permutation(n, key)(np.arange(n)[:10] if n < 10 else np.arange(10)).tolist() == values, (n, key)
    assert Permutation(1000, 7)(np.arange(5), 9).tolist() == GOLDEN_TWEAKED


def test_keys_of_other_numbers_or_orders_differ() -> None:
    keys = [mix_key(), mix_key(0), mix_key(0, 0), mix_key(1), mix_key(0, 1), mix_key(1, 0), mix_key(-1), mix_key(2, 3)]
    assert len(set(keys)) == len(keys)
    assert len({mix_key(seed, epoch) for seed in range(100) for epoch in range(100)}) == 10_000


# ---- as uniform as a shuffle


def excess(counts: NDArray[np.int64]) -> float:
    """How far counts are from equal: chi-square in standard deviations from what chance makes of it."""
    expected = counts.sum() / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float((chi_square - (counts.size - 1)) / sqrt(2 * (counts.size - 1)))


def many(n: int, count: int) -> NDArray[np.int64]:
    """[count, n]: permutations under one key, by tweaks; and one for each of 50 keys in front of them."""
    tweaks = np.repeat(np.arange(count), n).reshape(count, n)
    by_key = [Permutation(n, mix_key(seed, n))(np.arange(n)) for seed in range(50)]
    return np.concatenate([by_key, Permutation(n, mix_key(n))(np.tile(np.arange(n), (count, 1)), tweaks)])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_positions_are_equally_frequent(n: int) -> None:
    drawn = many(n, factorial(n) * 200)
    code = drawn @ (n ** np.arange(n))
    codes = np.array(list(permutations(range(n)))) @ (n ** np.arange(n))
    counts = np.bincount(code, minlength=n**n)
    assert counts[codes].sum() == len(drawn)
    assert abs(excess(counts[codes])) < 4


@pytest.mark.parametrize("n", [9, 16, 25, 63, 64, 100, 1000, 4095, 4096])
def test_pairs_and_neighbours_are_equally_frequent(n: int) -> None:
    drawn = many(n, 4_000_000 // n)
    # How far apart neighbours end up, modulo n: what few rounds on a small grid betray first. Neighbours are of
    # one row of the grid, and then of one of its columns.
    rows = isqrt(n - 1) + 1
    columns = -(-n // (rows + rows % 2))
    for step in (1, columns):
        apart = np.bincount(((drawn[:, step:] - drawn[:, :-step]) % n).ravel(), minlength=n)
        assert apart[0] == 0
        assert abs(excess(apart[1:])) < 4, step
    if n > 100:
        return
    for first, second in [(0, 1), (0, n - 1), (1, 1 + columns), (2, n // 2)]:
        pairs = np.bincount(drawn[:, first] * n + drawn[:, second], minlength=n * n).reshape(n, n)
        assert abs(excess(pairs[~np.eye(n, dtype=bool)])) < 4, (first, second)


@pytest.mark.parametrize("n", [10**6, 10**9 + 7, MAX_SIZE])
def test_values_of_many_positions_are_spread_evenly(n: int) -> None:
    for seed in range(5):
        values = Permutation(n, mix_key(seed))(np.arange(10**6))
        if n > 10**6:
            assert abs(excess(np.bincount((values // (n // 1000 + 1)).astype(np.int64), minlength=1000))) < 4
        # Expected: one of n neighbours lands beside its neighbour on either side.
        assert (abs(np.diff(values)) == 1).sum() <= 10
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 4e-3


def test_permutations_of_neighbouring_keys_and_tweaks_are_unrelated() -> None:
    n = 10_000
    positions = np.arange(n)
    ways = [Permutation(n, 0), Permutation(n, 1), Permutation(n, 2**63)]
    drawn = [way(positions, tweak) for way in ways for tweak in (0, 1, 2, -1)]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            assert (one == other).sum() < 10  # one is expected
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
            assert (np.diff(one) == np.diff(other)).sum() < 10


# ---- what it takes and gives


def test_shapes_dtypes_and_what_is_given_stay() -> None:
    permutation = Permutation(100, 1)
    expected = permutation(np.arange(100))
    assert expected.dtype == np.int64
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        positions = np.arange(100, dtype=dtype)
        assert np.array_equal(permutation(positions), expected)
        assert np.array_equal(positions, np.arange(100))
    grid = np.arange(100).reshape(4, 25)
    assert np.array_equal(permutation(grid), expected.reshape(4, 25))
    assert np.array_equal(permutation(grid.T), expected.reshape(4, 25).T)
    assert np.array_equal(permutation(np.arange(100)[::-3]), expected[::-3])
    assert permutation([]).shape == (0,)
    assert permutation([]).dtype == np.int64
    assert permutation(5).shape == ()
    assert permutation(5, np.int32(3)) == permutation(np.array([5]), 3)[0]
    assert permutation(np.empty((0, 3), int)).shape == (0, 3)
    assert Permutation(np.int64(100), np.uint64(1))(np.arange(100)).tolist() == expected.tolist()  # type: ignore[arg-type]
    assert Permutation(1, 9)([0, 0]).tolist() == [0, 0]


def test_a_position_outside_is_named() -> None:
    permutation = Permutation(10, 1)
    for positions in (np.array([0, 10]), np.array([-1, 3]), np.array([2**64 - 1, 1], np.uint64)):
        wrong = next(position for position in positions.tolist() if not 0 <= position < 10)
        for way in (permutation, permutation.inverse):
            with pytest.raises(IndexError, match=rf"position {wrong} is outside \[0, 10\)"):
                way(positions)
    with pytest.raises(IndexError, match=r"outside \[0, 0\)"):
        Permutation(0, 1)([0])
    assert Permutation(0, 1)([]).size == 0


def test_what_cannot_be_permuted_is_refused() -> None:
    for n in (-1, MAX_SIZE + 1, 1.0, True, "3"):
        with pytest.raises(ConfigError, match="n is "):
            Permutation(n, 0)  # type: ignore[arg-type]
    for key in (-1, 2**64, None):
        with pytest.raises(ConfigError, match="key is "):
            Permutation(1, key)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="positions have the dtype float64"):
        Permutation(10, 0)([1.0])
    with pytest.raises(ConfigError, match="positions have the dtype bool"):
        Permutation(10, 0)([True])
    for tweak in ([1], 1.5, [1.0, 2.0]):
        with pytest.raises(ConfigError, match="tweak has the shape"):
            Permutation(10, 0)([1, 2], tweak)


def best_time(permutation: Permutation, positions: NDArray[np.int64], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        permutation(positions)
        times.append(time.thread_time() - begin)
    return min(times)


def test_speed() -> None:
    # 60 million a second, and 40 us, where nothing else runs; the limits are for a machine that is busy.
    permutation = Permutation(10**12, 5)
    assert best_time(permutation, np.arange(2**20), 5) < 2**20 / 5e6
    assert best_time(permutation, np.arange(256), 100) < 400e-6


def test_memory_does_not_grow_with_n() -> None:
    positions = np.arange(2**20)
    tracemalloc.start()
    try:
        permutation = Permutation(MAX_SIZE, 5)
        made = tracemalloc.get_traced_memory()[1]
        permutation(positions)
        called = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made < 20_000
    assert called < positions.nbytes + 2_000_000  # the result, and a few arrays of some thousand positions
