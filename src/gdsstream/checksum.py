"""A checksum of 64 bits for a tensor's bytes, by plain integer operations, the same on a GPU and a CPU.

The bytes, filled up with zeros to a multiple of four, are little-endian 32-bit words w_0, w_1, ... with a sign, and

    checksum = nbytes * C + sum of w_i * m_i                      (mod 2^64)
    m_i = u(i mod 2^14) * v(i div 2^14)
    u(j) = 4 s(j, 14) + 1         v(b) = 2^16 s(b, 17) + 1        C = 0x9E3779B97F4A7C15

s(x, k) is the output of splitmix64 for the state x, but for its k lowest bits: those are the k lowest bits of x after
three rounds of `x ^= x >> ceil(k/2); x *= 0x9E3779B1; keep k bits`, and so a permutation of them.

What it guarantees. Every m_i is odd, and 1 mod 4; for i < 2^31 no two are equal mod 2^33, since mod 2^16 they are u(j),
which tells j, and then v(b) mod 2^33 tells b. Two words differ by less than 2^32, which 2 divides 31 times at most. So,
of two byte strings of the same length, the checksums differ for certain if all that happened is

- a change of any kind inside one aligned word of four bytes, and so of one byte, or of a run of up to 8 bits;
- any two bits that flipped, less than 8 GiB apart;
- two elements of 1, 2 or 4 bytes that changed places, less than 8 GiB apart.

Anything else (blocks that are swapped, shifted, zeroed or stale) goes unnoticed by chance only: about 2^-64, and never
more than about 2^-33 where all that changed are the words' highest bits. It is no cryptographic hash: who wants to can
make another tensor of the same checksum. It says nothing about dtype and shape, and is the same on every device and for
every cut into pieces.

How it is computed. Every block of 2^14 words (64 KiB) meets the same table u, and the blocks' sums are weighed by v.
Words are widened to 64 bits a few blocks at a time: beside the tables (128 KiB, and 8 bytes for each 64 KiB of the
longest tensor) the CPU takes 1 MiB a thread, which stays in its cache, and a GPU 32 MiB. On the CPU several threads
share what is longer than a few MiB. The two sum products by different operations: torch has no integer matrix products
on a GPU, and on the CPU they spare a pass through the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsstream.errors import ConfigError

ALGORITHM = "gdsstream-linear64-v1"
BLOCK_BYTES = 1 << 16

_WORD_BYTES = 4
_BLOCK_WORDS = BLOCK_BYTES // _WORD_BYTES
_COLUMN_BITS, _BLOCK_BITS = 14, 17
_LENGTH_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_CPU_BLOCKS, _GPU_BLOCKS = 8, 256
_JOB_BYTES = 8 << 20  # what a thread takes at a time
_MIN_TABLE_BLOCKS = 1 << 10


class Piece(NamedTuple):
    """Bytes of a tensor, uint8 [n], contiguous, on any device; where they begin in it, a multiple of BLOCK_BYTES."""

    data: torch.Tensor
    start: int


def checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor's bytes, from 0 to 2**64 - 1; waits for its device.

    Of any dtype and device. One that is not contiguous is copied first. Raises ConfigError for one without bytes of its
    own (sparse, meta).
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ConfigError(
            f"a {tensor.layout} tensor on {tensor.device} has no bytes to check; load or densify it first"
        )
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return finish(raw.numel(), partial_sums([Piece(raw, 0)]))


def finish(nbytes: int, partials: Iterable[torch.Tensor | int]) -> int:
    """The checksum of a tensor of `nbytes` bytes from the partial sums of all its pieces. Waits for their devices."""
    return (nbytes * _LENGTH_FACTOR + sum(int(partial) for partial in partials)) & _MASK


def partial_sums(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """What each piece adds to its tensor's checksum: int64 [] on the piece's device, which is not waited for.

    Any piece but a tensor's last has to be a multiple of BLOCK_BYTES long. Raises ConfigError for one that begins
    elsewhere.
    """
    for piece in pieces:
        if piece.start % BLOCK_BYTES:
            raise ConfigError(f"a piece begins at byte {piece.start}; it has to be a multiple of {BLOCK_BYTES}")
    nbytes = sum(piece.data.numel() for piece in pieces if piece.data.device.type == "cpu")
    threads = min(torch.get_num_threads(), nbytes // _JOB_BYTES)
    if threads < 2:
        return [_partial(piece) for piece in pieces]
    # Threads of this call alone: nothing stays behind, and nothing is broken in a forked child.
    with ThreadPoolExecutor(threads, thread_name_prefix="gdsstream-checksum") as pool:
        jobs = [[pool.submit(_partial, part) for part in _jobs(piece)] for piece in pieces]
        return [torch.stack([job.result() for job in each]).sum() for each in jobs]


def _jobs(piece: Piece) -> list[Piece]:
    starts = range(0, max(piece.data.numel(), 1), _JOB_BYTES)
    return [Piece(piece.data[start : start + _JOB_BYTES], piece.start + start) for start in starts]


def _partial(piece: Piece) -> torch.Tensor:
    data, block = piece.data, piece.start // BLOCK_BYTES
    device = data.device
    whole = data.numel() // BLOCK_BYTES
    columns = _columns(device)
    factors = _factors(device, block + whole + 1)
    if not whole and data.numel():  # most tensors of most checkpoints
        return _rest(data, columns, factors[block])
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = _CPU_BLOCKS if device.type == "cpu" else _GPU_BLOCKS
    wide = torch.empty((min(step, whole), _BLOCK_WORDS), dtype=torch.int64, device=device)
    for first in range(0, whole, step):
        last = min(first + step, whole)
        words = _words(data[first * BLOCK_BYTES : last * BLOCK_BYTES]).view(-1, _BLOCK_WORDS)
        sums = (_by_matrix if device.type == "cpu" else _by_elements)(words, columns, wide[: last - first])
        total += sums.mul_(factors[block + first : block + last]).sum()
    if data.numel() > whole * BLOCK_BYTES:
        total += _rest(data[whole * BLOCK_BYTES :], columns, factors[block + whole])
    return total


def _rest(data: torch.Tensor, columns: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    words = _words(data)
    return (columns[: words.numel()] * words).sum().mul_(factor)


# Sums of the products of each row of int32 words with the table, int64 [rows]; `wide` is scratch memory for the rows.


def _by_matrix(words: torch.Tensor, columns: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    # Not copy_, which would wake torch's own threads: there are enough here, and each makes long calls without the
    # interpreter lock.
    np.copyto(wide.numpy(), words.numpy())
    return torch.mv(wide, columns)


def _by_elements(words: torch.Tensor, columns: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    wide.copy_(words)
    return wide.mul_(columns).sum(1)


def _words(raw: torch.Tensor, byteorder: str = sys.byteorder) -> torch.Tensor:
    """Bytes as little-endian words, int32 [ceil(n / 4)], zeros at the end where they do not fill the last."""
    lacking = -raw.numel() % _WORD_BYTES
    if lacking:
        raw = torch.cat([raw, raw.new_zeros(lacking)])
    elif raw.data_ptr() % _WORD_BYTES:
        raw = raw.clone()  # torch and the hardware want words where words can be
    if byteorder == "big":
        raw = raw.view(-1, _WORD_BYTES).flip(1).reshape(-1)
    return raw.view(torch.int32)


# The tables


def _columns(device: torch.device) -> torch.Tensor:
    return _column_table(str(device))


def _factors(device: torch.device, blocks: int) -> torch.Tensor:
    """v(0), v(1), ...: at least so many."""
    return _factor_table(str(device), max(_MIN_TABLE_BLOCKS, 1 << (blocks - 1).bit_length()))


@lru_cache(maxsize=64)
def _column_table(device: str) -> torch.Tensor:
    return _on_device(_scatter(_BLOCK_WORDS, _COLUMN_BITS) * np.uint64(4) + np.uint64(1), device)


@lru_cache(maxsize=64)
def _factor_table(device: str, blocks: int) -> torch.Tensor:
    return _on_device(_scatter(blocks, _BLOCK_BITS) * np.uint64(1 << 16) + np.uint64(1), device)


def _on_device(table: NDArray[np.uint64], device: str) -> torch.Tensor:
    with torch.inference_mode(False):  # it is kept, and may be used outside of inference mode later
        return torch.from_numpy(table.view(np.int64)).to(device)


def _scatter(count: int, bits: int) -> NDArray[np.uint64]:
    """s(0, bits), ..., s(count - 1, bits)."""
    x = np.arange(count, dtype=np.uint64)
    z = (x + np.uint64(1)) * np.uint64(_LENGTH_FACTOR)  # splitmix64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    mask = np.uint64((1 << bits) - 1)
    low = x & mask
    for _ in range(3):
        low ^= low >> np.uint64((bits + 1) // 2)
        low = (low * np.uint64(0x9E3779B1)) & mask
    return (z & ~mask) | low


__all__ = ["ALGORITHM", "BLOCK_BYTES", "Piece", "checksum", "finish", "partial_sums"]
