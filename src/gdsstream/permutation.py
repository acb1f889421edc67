"""A keyed bijection of [0, n), computed where it is asked for: no table, and the same on every machine. Pure numpy.

A shuffle of billions of records has to be asked for any position without an array of billions of entries, on every rank
and after every resume. So it is made like a cipher: a Feistel network over the integers. Position x is a cell (x // b,
x % b) of the smallest near-square grid with a * b >= n; each round adds a keyed hash of one half to the other, modulo a
or b, which whoever has the key can subtract again. The grid has fewer than sqrt(n) + 1 cells too many: where the
network leads to one of them it is applied again until it leads below n (cycle walking), which keeps the whole a
bijection. Halves of whole bits, the usual choice, would walk through up to four times n.

All of it is unsigned 64-bit integer arithmetic that wraps around: nothing depends on a library's random numbers, on
floating point or on the machine. The network, its constants and `mix_key` are part of what a saved position means: a
change of any of them is another order.

It is a shuffle, not encryption: the hash is quick, and not meant to resist anybody.
"""

from __future__ import annotations

from math import isqrt
from operator import index
from typing import SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdsstream.errors import ConfigError

MAX_SIZE = 2**62

_Words: TypeAlias = NDArray[np.uint64]

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
# Stafford's thirteenth variant of a 64-bit finaliser, as in SplitMix64.
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# (below this n, rounds). After few rounds on a small grid, neighbours stay neighbours a little too often. So many make
# all 5,040 permutations of 7 positions equally frequent, and leave no trace in 20 million neighbours of more positions.
_ROUNDS = ((64, 24), (4096, 12), (MAX_SIZE + 1, 8))
_CHUNK = 8192  # positions at a time: a few arrays of them stay in a core's nearest caches


def mix_key(*values: int) -> int:
    """A key in [0, 2**64) made of integers, each modulo 2**64, in their order: the same on every machine."""
    key = 0
    for value in values:
        key = _mix(((key ^ (value % _WORD)) + _GOLDEN) % _WORD)
    return key


def _mix(word: int) -> int:
    """A bijection of 64-bit words in which every bit depends on every bit; 0 stays 0."""
    word = ((word ^ (word >> 30)) * _MIX_1) % _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) % _WORD
    return word ^ (word >> 31)


def _mixed(words: _Words) -> _Words:
    """`_mix` of every word."""
    words = (words ^ (words >> _word(30))) * _word(_MIX_1)
    words = (words ^ (words >> _word(27))) * _word(_MIX_2)
    return words ^ (words >> _word(31))


def _word(value: int) -> _Words:
    # numpy takes a 0-d array as the second operand in half the time that it needs for a scalar.
    return np.array(value, dtype=np.uint64)


_32, _HASH_1, _HASH_2 = _word(32), _word(_MIX_1), _word(_MIX_2)


class Permutation:
    """A bijection of [0, n), chosen by `key`.

    Args:
        n: how many positions there are, 0 to 2**62.
        key: which bijection, from 0 to 2**64 - 1; `mix_key` makes a key of several numbers.

    Raises ConfigError. An object holds a few kilobytes, whatever n; any number of threads may call it.
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n = checked_integer("n", n, 0, MAX_SIZE)
        self.key = key = checked_integer("key", key, 0, _WORD - 1)
        rows = isqrt(max(n - 1, 0)) + 1  # the square root, rounded up
        rows += rows % 2  # rounds of an odd number of rows and columns would make even permutations only
        self._n = _word(n)
        self._rows, self._columns = _word(rows), _word(max(1, -(-n // rows)))
        self._rounds = next(rounds for limit, rounds in _ROUNDS if n < limit)
        self._keys = tuple(mix_key(key, number) for number in range(self._rounds))
        self._key_words = tuple(_word(round_key) for round_key in self._keys)

    def __call__(self, positions: ArrayLike, tweak: int | ArrayLike = 0) -> NDArray[np.int64]:
        """Where the bijection leads.

        Args:
            positions: integers in [0, n), of any shape.
            tweak: each value chooses another bijection under the same key: one integer, or one for each position.

        Returns an int64 array of the shape of `positions`, a new one. Raises IndexError for positions outside [0, n),
        and ConfigError for what are no integers or for tweaks of another shape.
        """
        return self._map(positions, tweak, forward=True)

    def inverse(self, values: ArrayLike, tweak: int | ArrayLike = 0) -> NDArray[np.int64]:
        """Where the bijection comes from: `inverse(self(x, t), t)` is x. Arguments and errors as in a call."""
        return self._map(values, tweak, forward=False)

    def _map(self, positions: ArrayLike, tweak: int | ArrayLike, forward: bool) -> NDArray[np.int64]:
        given = checked_positions(positions, self.n)
        if isinstance(tweak, int | np.integer):
            mixed = _mix(int(tweak) % _WORD)
            keys = tuple(_word(key ^ mixed) for key in self._keys) if mixed else self._key_words
            tweaks = None
        else:
            keys = self._key_words
            tweaks = np.asarray(tweak)
            if tweaks.shape != given.shape or tweaks.dtype.kind not in "iu":
                raise ConfigError(
                    f"tweak has the shape {tweaks.shape} and dtype {tweaks.dtype}; it has to be one integer, or one "
                    f"for each of the positions, whose shape is {given.shape}"
                )
            tweaks = _mixed(tweaks.astype(np.uint64).ravel())
        words = np.array(given, dtype=np.uint64, order="C").ravel()  # a copy, which becomes the result
        for begin in range(0, words.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            self._walk(words[chunk], keys, None if tweaks is None else tweaks[chunk], forward)
        return words.view(np.int64).reshape(given.shape)

    def _walk(self, words: _Words, keys: tuple[_Words, ...], tweaks: _Words | None, forward: bool) -> None:
        """The network in place, again for those that it leads to n or beyond."""
        self._network(words, keys, tweaks, forward)
        outside = np.flatnonzero(words >= self._n)
        while outside.size:
            again = words[outside]
            self._network(again, keys, None if tweaks is None else tweaks[outside], forward)
            words[outside] = again
            outside = outside[again >= self._n]

    def _network(self, words: _Words, keys: tuple[_Words, ...], tweaks: _Words | None, forward: bool) -> None:
        """One application to cells of the grid, in place. No step allocates."""
        row = words // self._columns
        scratch = row * self._columns
        column = np.subtract(words, scratch, out=words)
        folded = np.empty_like(scratch)
        for number in range(self._rounds) if forward else reversed(range(self._rounds)):
            half, other, size = (row, column, self._rows) if number % 2 == 0 else (column, row, self._columns)
            # A hash of the other half, 32 bits of it, scaled to [0, size): size is at most 2**31.
            if tweaks is None:
                np.bitwise_xor(other, keys[number], out=scratch)
            else:
                np.bitwise_xor(tweaks, keys[number], out=scratch)
                np.bitwise_xor(other, scratch, out=scratch)
            np.multiply(scratch, _HASH_1, out=scratch)
            np.right_shift(scratch, _32, out=folded)
            np.bitwise_xor(scratch, folded, out=scratch)
            np.multiply(scratch, _HASH_2, out=scratch)
            np.right_shift(scratch, _32, out=scratch)
            np.multiply(scratch, size, out=scratch)
            np.right_shift(scratch, _32, out=scratch)
            # Modulo size without a division: of the two candidates the wrong one has wrapped around, or is too large.
            if forward:
                np.add(half, scratch, out=half)
                np.subtract(half, size, out=scratch)
            else:
                np.subtract(half, scratch, out=half)
                np.add(half, size, out=scratch)
            np.minimum(half, scratch, out=half)
        np.multiply(row, self._columns, out=row)
        np.add(row, column, out=words)


def checked_integer(name: str, value: int, least: int, most: int) -> int:
    """An int, also of what only acts as one (numpy's, but no bool). Raises ConfigError outside [least, most]."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool) or not least <= index(value) <= most:
        raise ConfigError(f"{name} is {value!r}; it has to be a whole number from {least} to {most}")
    return index(value)


def checked_positions(positions: ArrayLike, n: int) -> NDArray[np.int64]:
    """Positions as an int64 array, all in [0, n). Raises IndexError where one is not, ConfigError for other dtypes."""
    given = np.asarray(positions)
    if given.dtype.kind not in "iu" and given.size:
        raise ConfigError(f"positions have the dtype {given.dtype}; they have to be integers")
    if given.size:
        least, most = int(given.min()), int(given.max())
        if least < 0 or most >= n:
            raise IndexError(f"position {least if least < 0 else most} is outside [0, {n})")
    return given.astype(np.int64, copy=False)


__all__ = ["MAX_SIZE", "Permutation", "checked_integer", "checked_positions", "mix_key"]
