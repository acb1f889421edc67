"""The checksum: its formula against plain integers, its guarantees against changes that were chosen to defeat it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_bytes

from gdsstream import ConfigError
from gdsstream import checksum as module
from gdsstream.checksum import BLOCK_BYTES, Piece, checksum, finish, partial_sums

MASK = 2**64 - 1
FACTOR = 0x9E3779B97F4A7C15


def scatter(x: int, bits: int) -> int:
    z = (x + 1) * FACTOR & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    z ^= z >> 31
    low = x % 2**bits
    for _ in range(3):
        low ^= low >> (bits + 1) // 2
        low = low * 0x9E3779B1 % 2**bits
    return z >> bits << bits | low


def weight(word: int) -> int:
    block, column = divmod(word, 2**14)
    return (4 * scatter(column, 14) + 1) * (2**16 * scatter(block, 17) + 1)


def by_the_formula(data: bytes) -> int:
    total = len(data) * FACTOR
    data += bytes(-len(data) % 4)
    for word in range(len(data) // 4):
        total += int.from_bytes(data[4 * word : 4 * word + 4], "little", signed=True) * weight(word)
    return total & MASK


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[: len(data)]


def sum_of(data: bytes) -> int:
    return checksum(tensor_of(data))


def swapped(data: bytes, first: int, second: int, size: int) -> bytes:
    changed = bytearray(data)
    changed[first : first + size], changed[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    return bytes(changed)


# What it is

EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 4095, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 6, 200_003]


@pytest.mark.parametrize("nbytes", EDGES)
def test_the_formula(nbytes: int) -> None:
    data = random_bytes(nbytes, seed=nbytes)
    assert sum_of(data) == by_the_formula(data)
    assert sum_of(b"\xff" * nbytes) == by_the_formula(b"\xff" * nbytes)
    assert sum_of(bytes(nbytes)) == nbytes * FACTOR & MASK


def test_a_gpus_operations_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(19 * BLOCK_BYTES + 77, seed=5)
    expected = sum_of(data)
    monkeypatch.setattr(module, "_by_matrix", module._by_elements)
    for blocks in (1, 3, 256):
        monkeypatch.setattr(module, "_CPU_BLOCKS", blocks)
        assert sum_of(data) == expected == by_the_formula(data)


def test_known_values() -> None:
    # Written down: what is recorded beside checkpoints must mean the same in every release.
    assert f"{sum_of(b''):016x}" == "0000000000000000"
    assert f"{sum_of(b'gdsstream'):016x}" == "ffa0ed2507748171"
    assert f"{sum_of(bytes(range(256)) * 1000):016x}" == "242472313bcb9140"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_bytes_count_and_not_dtypes_or_strides(dtype: torch.dtype) -> None:
    raw = tensor_of(random_bytes(4800, seed=1)) % 2 if dtype == torch.bool else tensor_of(random_bytes(4800, seed=1))
    tensor = raw.clone().view(dtype).reshape(20, -1)
    assert checksum(tensor) == checksum(raw)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor[3]) == checksum(raw[3 * 240 : 4 * 240])
    assert checksum(raw[3:][:1001]) == by_the_formula(raw[3:][:1001].numpy().tobytes())


def test_a_scalar_a_parameter_and_inference_mode() -> None:
    data = np.float32(3.5).tobytes()
    assert checksum(torch.tensor(3.5)) == checksum(torch.nn.Parameter(torch.tensor(3.5))) == by_the_formula(data)
    with torch.inference_mode():
        assert checksum(torch.tensor(3.5)) == by_the_formula(data)
    assert checksum(torch.tensor(3.5)) == by_the_formula(data)


def test_what_has_no_bytes_is_refused() -> None:
    for tensor in (torch.ones(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(ConfigError, match="has no bytes to check"):
            checksum(tensor)


def test_words_are_little_endian_on_every_machine() -> None:
    raw = tensor_of(bytes(range(1, 8)))
    native = module._words(raw)
    assert native.tolist() == [0x04030201, 0x00070605]
    # What a big-endian machine would see in the same bytes, before and after.
    assert native.numpy().byteswap().tolist() == module._words(raw, "big").tolist()


@settings(deadline=None, max_examples=40)
@given(data=st.data(), nbytes=st.integers(0, 5 * BLOCK_BYTES))
def test_pieces_add_up(data: st.DataObject, nbytes: int) -> None:
    raw = tensor_of(random_bytes(nbytes, seed=nbytes))
    cuts = sorted(data.draw(st.sets(st.integers(1, 4))))
    edges = [0, *(cut * BLOCK_BYTES for cut in cuts if cut * BLOCK_BYTES < nbytes), nbytes]
    pieces = [Piece(raw[a:b], a) for a, b in pairwise(edges)]
    assert finish(nbytes, partial_sums(pieces)) == checksum(raw)


def test_a_piece_in_the_middle_of_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins at byte 4"):
        partial_sums([Piece(torch.zeros(8, dtype=torch.uint8), 4)])


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tensor_of(random_bytes(3_000_001, seed=3))
    alone = checksum(raw)
    started = []
    make = module.ThreadPoolExecutor
    monkeypatch.setattr(module, "_JOB_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda n, **k: started.append(n) or make(n, **k))
    assert checksum(raw) == alone
    assert partial_sums([Piece(raw[:5], 0), Piece(raw, 0), Piece(raw[:0], 0)])[1:] == partial_sums(
        [Piece(raw, 0), Piece(raw[:0], 0)]
    )
    assert started == [3, 3, 3]


# What it finds

BASE = random_bytes(BLOCK_BYTES + 8192, seed=7)
positions = st.integers(0, len(BASE) - 1)
BASE_SUM = sum_of(BASE)


@settings(deadline=None, max_examples=100)
@given(position=positions, change=st.integers(1, 255))
def test_a_changed_byte(position: int, change: int) -> None:
    changed = bytearray(BASE)
    changed[position] ^= change
    assert sum_of(bytes(changed)) != BASE_SUM


@pytest.mark.parametrize("data", [bytes(5003), b"\xff" * 5003, random_bytes(5003, seed=1)], ids=["0", "ff", "random"])
def test_every_single_byte_of_a_tensor(data: bytes) -> None:
    sums = {sum_of(data)}
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= random.Random(position).randrange(1, 256)
        sums.add(sum_of(bytes(changed)))
    assert len(sums) == len(data) + 1


@settings(deadline=None, max_examples=100)
@given(size=st.sampled_from([1, 2, 4]), places=st.tuples(positions, positions), high=st.booleans())
def test_swapped_elements(size: int, places: tuple[int, int], high: bool) -> None:
    first, second = (place // size * size for place in places)
    base = BASE
    if high:  # all that differs is the highest bit, of which the sum keeps least
        plain = bytearray(BASE)
        plain[first : first + size] = bytes(size)
        plain[second : second + size] = bytes(size - 1) + b"\x80"
        base = bytes(plain)
    changed = swapped(base, first, second, size)
    assert (sum_of(changed) == sum_of(base)) == (changed == base)


@settings(deadline=None, max_examples=100)
@given(bits=st.tuples(positions, positions, st.integers(0, 7), st.integers(0, 7)), zeros=st.booleans())
def test_two_flipped_bits(bits: tuple[int, int, int, int], zeros: bool) -> None:
    base = bytes(len(BASE)) if zeros else BASE
    changed = bytearray(base)
    changed[bits[0]] ^= 1 << bits[2]
    changed[bits[1]] ^= 1 << bits[3]
    assert (sum_of(bytes(changed)) == sum_of(base)) == (changed == base)


def test_the_weights_are_what_the_guarantees_need() -> None:
    """No two of 2^31 words have weights that are equal mod 2^33, and all are 1 mod 4: by the structure, all of it."""
    columns = module._column_table("cpu").numpy().view(np.uint64)
    factors = module._factor_table("cpu", 2**17).numpy().view(np.uint64)
    assert (columns % 4 == 1).all()
    assert len(np.unique(columns % 2**16)) == len(columns) == 2**14
    assert (factors % 2**16 == 1).all()
    assert len(np.unique(factors % 2**33)) == len(factors) == 2**17
    # The rest is as random as a fair coin, within four standard deviations.
    for table, low in ((columns, 16), (factors, 33)):
        for bit in range(low, 64):
            ones = int((table >> np.uint64(bit) & np.uint64(1)).sum())
            assert abs(ones - len(table) / 2) < 2 * len(table) ** 0.5, bit


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "page zeroed": lambda data: data[:8192] + bytes(4096) + data[12288:],
    "page of another place": lambda data: data[:8192] + data[:4096] + data[12288:],
    "pages swapped": lambda data: swapped(data, 4096, 40960, 4096),
    "blocks swapped": lambda data: swapped(data, 0, BLOCK_BYTES, BLOCK_BYTES),
    "shifted by a byte": lambda data: data[1:] + data[:1],
    "shifted by a word": lambda data: data[4:] + data[:4],
    "shifted by a block": lambda data: data[BLOCK_BYTES:] + data[:BLOCK_BYTES],
    "reversed": lambda data: data[::-1],
    "bytes of words reversed": lambda data: np.frombuffer(data, "<u4").byteswap().tobytes(),
    "one byte less": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
}


@pytest.mark.parametrize("kind", ["random", "one-hot rows", "numbers", "weights"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_storage_does(damage: str, kind: str) -> None:
    data = {
        "random": random_bytes(3 * BLOCK_BYTES, seed=7),
        "one-hot rows": np.eye(1024, dtype=np.float32)[:48].tobytes(),
        "numbers": np.arange(3 * BLOCK_BYTES // 8).tobytes(),
        "weights": torch.randn(3 * BLOCK_BYTES // 2, generator=torch.Generator().manual_seed(1))
        .bfloat16()
        .view(torch.uint8)
        .numpy()
        .tobytes(),
    }[kind]
    damaged = DAMAGES[damage](data)
    assert damaged != data
    assert sum_of(damaged) != sum_of(data)


def test_sums_are_spread() -> None:
    """Tensors that differ little have sums that agree in half of their bits."""
    counts = []
    for seed in range(200):
        generator = random.Random(seed)
        changed = bytearray(BASE)
        changed[generator.randrange(0, len(BASE), 4)] ^= 1 << generator.randrange(8)
        counts.append((sum_of(bytes(changed)) ^ BASE_SUM).bit_count())
    assert 26 < sum(counts) / len(counts) < 34


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("nbytes", [*EDGES, 40_000_003])
def test_a_gpu_gets_the_same(nbytes: int) -> None:
    raw = tensor_of(random_bytes(nbytes, seed=nbytes))
    assert checksum(raw.cuda()) == checksum(raw)
    assert checksum(torch.cat([raw[:1], raw]).cuda()[1:]) == checksum(raw)
