"""What transfers are made of: which ios, what files hold, ceilings, and the configuration."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer_support import BASE, KIB, MIB, POOL, built, run, workload

from bench import ceilings_transfer
from bench import transfer_ops as ops_
from bench.config import BenchConfigError, BenchError, TransferConfig, parts
from bench.transfer_memory import Memory, Pattern

# ---- which ios


def test_sequential_ios_follow_each_other_through_the_files_and_begin_again() -> None:
    found = ops_.make("read", [4096], 6 * 4096, [2 * 4096 + 100, 2 * 4096])
    assert found.file.tolist() == [0, 0, 1, 1, 0, 0]
    assert found.offset.tolist() == [0, 4096, 0, 4096, 0, 4096]
    assert not found.write


def test_random_ios_are_a_permutation_of_all_blocks_by_the_seed() -> None:
    def made(seed: int) -> list[tuple[int, int]]:
        found = ops_.make("randwrite", [4096], 40 * 4096, [20 * 4096, 20 * 4096], seed=seed)
        assert found.write
        return list(zip(found.file.tolist(), found.offset.tolist(), strict=True))

    one = made(1)
    assert sorted(one) == [(file, 4096 * block) for file in (0, 1) for block in range(20)]
    assert one != sorted(one)
    assert made(1) == one
    assert made(2) != one


def test_offset_and_shift_move_all_ios_and_leave_room_at_the_end() -> None:
    found = ops_.make("read", [4096], 99 * 4096, [10 * 4096], offset_bytes=8192, shift_bytes=1)
    assert found.offset.min() == 8193
    assert (found.offset + found.nbytes).max() <= 10 * 4096
    assert set(found.offset % 4096) == {1}


@pytest.mark.parametrize("op", ["read", "randread"])
def test_a_range_of_sizes_comes_in_turn_without_overlap(op: str) -> None:
    sizes = ops_.range_sizes(4096, 12288, 4096)
    assert sizes == [4096, 8192, 12288]
    found = ops_.make(op, sizes, 5 * sum(sizes), [10 * 12288, 10 * 12288])
    assert found.nbytes.tolist() == sizes * 5
    assert found.uniform is None
    taken = sorted(zip(found.file.tolist(), found.offset.tolist(), found.nbytes.tolist(), strict=True))
    for (file, offset, nbytes), (other, begin, _) in pairwise(taken):
        assert file != other or offset + nbytes <= begin


def test_places_are_aligned_and_apart_and_bounded_by_the_memory() -> None:
    found = ops_.make("read", [5000], 10 * 5000, [MIB])
    assert found.place.tolist() == [8192 * i for i in range(10)]
    assert found.memory_bytes == 81920
    assert len(found.within(8192 * 3 - 1)) == 3
    with pytest.raises(BenchConfigError, match=r"scenario\.total_bytes"):
        found.within(4999)


def test_ios_that_no_file_has_room_for_are_refused() -> None:
    with pytest.raises(BenchConfigError, match=r"ios of 8192 bytes from offset 4096 on do not fit into files of 8192"):
        ops_.make("read", [8192], 8192, [8192], offset_bytes=4096)


# ---- the pattern


@pytest.mark.parametrize("nbytes", [512, 4096, 5000, 3 * MIB + 7])
def test_the_pattern_finds_a_single_wrong_byte(nbytes: int) -> None:
    from bench.scenarios.base import VerificationError

    pattern, memory = Pattern(POOL), torch.zeros(8 * MIB, dtype=torch.uint8)
    found = ops_.make("read", [nbytes], 2 * nbytes, [8 * MIB])
    pattern.fill(memory, found, 0)
    pattern.check(memory, found)
    assert bytes(memory[:100].tolist()) == POOL[:100].tobytes()
    for at in (0, nbytes - 1, int(found.place[1]), int(found.place[1]) + nbytes - 1):
        memory[at] ^= 1
        with pytest.raises(VerificationError, match=r"io [01] "):
            pattern.check(memory, found)
        memory[at] ^= 1


def test_the_comparison_of_a_gpu_finds_the_same() -> None:
    pattern, memory = Pattern(POOL), torch.zeros(MIB, dtype=torch.uint8)
    for nbytes in (4096, 128 * KIB):
        found = ops_.make("read", [nbytes], 4 * nbytes, [MIB])
        pattern.fill(memory, found, 0)
        ((places, starts, count),) = pattern._pieces(found, 0, found.place)
        assert pattern._first_wrong(memory, places, starts, count) is None
        memory[2 * nbytes + 5] ^= 1
        assert pattern._first_wrong(memory, places, starts, count) == 2 * nbytes


def test_a_sample_that_memory_has_no_room_for_is_refused_before_it_is_taken() -> None:
    with pytest.raises(BenchError, match=r"of host memory .* lower scenario\.total_bytes"):
        Memory("cpu", 1 << 50).tensor(host=True, registered=False)


def test_memory_that_several_rows_register_is_registered_once() -> None:
    memory, calls = Memory("cpu", 4096), []
    tensor = memory.tensor(host=False, registered=True)
    memory.register(tensor, lambda: calls.append("on"))
    memory.register(tensor, lambda: calls.append("twice"))
    memory.deregister(tensor, lambda: calls.append("early"))
    memory.deregister(tensor, lambda: calls.append("off"))
    assert calls == ["on", "off"]


# ---- ceilings


@pytest.mark.parametrize(
    ("op", "size", "cold", "kinds"),
    [
        ("read", MIB, False, {"preadv_warm"}),
        ("randread", 4096, False, {"index_select_mapped"}),
        ("read", 4096, True, {"disk_o_direct"}),
        ("randread", 4096, True, {"disk_o_direct_records"}),
        ("write", MIB, True, {"disk_o_direct_writes", "page_cache_writes"}),
        ("randwrite", 4096, True, {"disk_o_direct_record_writes", "disk_o_direct_writes", "page_cache_writes"}),
    ],
)
def test_the_ceiling_is_of_the_same_kind_of_io(tmp_path: Path, op: str, size: int, cold: bool, kinds: set[str]) -> None:
    with workload(tmp_path, replace(BASE, ops=[op], io_bytes=[size])) as made:
        ceiling = ceilings_transfer.choose(made, cold=cold)
        try:
            assert ceiling.kind in kinds
            assert ceiling.sample() > 0
            assert ceiling.describe()
        finally:
            ceiling.close()


@pytest.mark.parametrize("op", ["randread", "randwrite", "write"])
def test_without_kernel_aio_threads_are_the_ceiling(tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import aio

    monkeypatch.setattr(aio, "_CALLS", {})
    with workload(tmp_path, replace(BASE, ops=[op], io_bytes=[4096])) as made:
        ceiling = ceilings_transfer.choose(made, cold=True)
        assert "threads" in ceiling.describe()
        ceiling.close()
    row = run(tmp_path, BASE, {"aio": built("storage_cpu_aio")})["aio"]
    assert (row.status, row.reason[:41]) == ("skipped", "no kernel AIO call numbers are known for ")


# ---- the configuration


def test_a_run_measures_every_combination() -> None:
    scenario = replace(BASE, ops=["read", "randwrite"], io_bytes=[4096, MIB], depth=[1, 2, 4])
    found = parts(scenario)
    assert len(found) == 12
    assert all(isinstance(part, TransferConfig) and len(part.ops) == len(part.depth) == 1 for part in found)


def test_pairs_are_parts_without_their_combinations() -> None:
    found = parts(replace(BASE, pairs=["randread:4096", "write:1048576"], depth=[1, 2]))
    kinds = [(part.ops[0], part.io_bytes[0], part.depth[0]) for part in found if isinstance(part, TransferConfig)]
    assert kinds == [("randread", 4096, 1), ("randread", 4096, 2), ("write", MIB, 1), ("write", MIB, 2)]
    assert replace(BASE, pairs=["write:4096"]).writes
    assert not replace(BASE, pairs=["read:4096"], ops=["write"]).writes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": ["reed"]}, r"'scenario\.ops' is 'reed'; did you mean 'read'"),
        ({"ops": []}, r"'scenario\.ops' is empty"),
        ({"pairs": ["reed:4096"]}, r"'scenario\.pairs' is 'reed'; did you mean 'read'"),
        ({"pairs": ["read:4k"]}, r"holds 'read:4k'; it has to be operation:bytes"),
        ({"pairs": []}, r"'scenario\.pairs' is empty"),
        ({"depth": [129]}, "at most 128"),
        ({"threads": [0]}, r"'scenario\.threads' is 0"),
        ({"io_bytes": [2 * MIB]}, r"raise it, or lower scenario\.io_bytes"),
        ({"io_range": [4096, 1024, 1]}, r"it has to be \[least, most, step\]"),
        ({"registered": ["yes"]}, "a list of true and false"),
        ({"sample_seconds": 0.0}, "has to be positive"),
        ({"shift_bytes": [-1]}, "at least 0"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchConfigError, match=message):
        replace(BASE, **changes)
