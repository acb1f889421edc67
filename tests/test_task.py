"""The native cutting: whatever the extents, reads and copies bring exactly the wanted bytes, within one slot each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gdsstream import _native

KIB = 1024


class Extent(NamedTuple):
    file: int
    offset: int
    nbytes: int
    group: int = 0


Tasks = list[tuple[int, list[tuple[int, int, int, int, int]], list[tuple[int, int, int, int, int]]]]


def cut(
    extents: Sequence[Extent],
    targets: Sequence[int],
    *,
    task_bytes: int,
    alignment: int = 1,
    read_bytes: int | None = None,
    ramp_tasks: int = 0,
) -> Tasks:
    table = np.array([tuple(extent) for extent in extents], dtype=np.int64).reshape(-1, 4)
    return _native.cut_for_tests(
        np.ascontiguousarray(table[:, 0], dtype=np.int32),
        np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]),
        np.array(targets, dtype=np.uint64),
        np.ascontiguousarray(table[:, 3], dtype=np.int32),
        task_bytes,
        alignment,
        task_bytes if read_bytes is None else read_bytes,
        ramp_tasks,
    )


def laid_out(extents: Sequence[Extent], gaps: Sequence[int] = ()) -> list[int]:
    """Targets one behind the other, with gaps before some."""
    targets, cursor = [], 0
    for index, extent in enumerate(extents):
        cursor += gaps[index] if index < len(gaps) else 0
        targets.append(cursor)
        cursor += extent.nbytes
    return targets


def check(
    extents: Sequence[Extent],
    targets: Sequence[int],
    *,
    task_bytes: int,
    alignment: int,
    read_bytes: int,
    ramp_tasks: int = 0,
) -> Tasks:
    """Run the reads and copies of every task in memory."""
    tasks = cut(
        extents, targets, task_bytes=task_bytes, alignment=alignment, read_bytes=read_bytes, ramp_tasks=ramp_tasks
    )
    ends: Counter[int] = Counter()
    for extent in extents:
        ends[extent.file] = max(ends[extent.file], extent.offset + extent.nbytes)
    files = {number: np.random.default_rng(number).bytes(end) for number, end in ends.items()}
    size = max((t + e.nbytes for t, e in zip(targets, extents, strict=True)), default=0)
    group_at = np.full(size, -1, dtype=np.int32)
    expected = np.zeros(size, dtype=np.uint8)
    for extent, target in zip(extents, targets, strict=True):
        data = files[extent.file][extent.offset : extent.offset + extent.nbytes]
        expected[target : target + extent.nbytes] = np.frombuffer(data, dtype=np.uint8)
        group_at[target : target + extent.nbytes] = extent.group
    got = np.zeros(size, dtype=np.uint8)
    written = np.zeros(size, dtype=np.int32)
    for group, reads, copies in tasks:
        slot = np.zeros(task_bytes, dtype=np.uint8)
        filled = np.zeros(task_bytes, dtype=bool)
        assert reads
        for file, offset, nbytes, wanted, place in reads:
            assert 0 <= wanted <= nbytes <= read_bytes
            assert nbytes > 0
            assert offset % alignment == nbytes % alignment == place % alignment == 0
            assert place + nbytes <= task_bytes
            data = np.frombuffer(files[file][offset : offset + nbytes], dtype=np.uint8)
            assert len(data) >= wanted  # what has to arrive is in the file
            slot[place : place + len(data)] = data
        spans = sorted((place, place + nbytes) for _, _, nbytes, _, place in reads)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for _, _, _, wanted, place in reads:
            filled[place : place + wanted] = True
        assert copies
        for source, target, nbytes, _, _ in copies:
            assert nbytes > 0
            assert filled[source : source + nbytes].all()  # a short read of these bytes would be noticed
            assert (group_at[target : target + nbytes] == group).all()
            got[target : target + nbytes] = slot[source : source + nbytes]
            written[target : target + nbytes] += 1
    assert np.array_equal(written, (group_at >= 0).astype(np.int32))
    assert np.array_equal(got, expected)
    return tasks


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Extent], list[int]]:
    """Neighbours, gaps, jumps backwards, empty and huge extents, of several files and groups."""
    extents: list[Extent] = []
    cursor = dict.fromkeys(range(3), 0)
    group = 0
    for _ in range(draw(st.integers(0, 25))):
        file = draw(st.sampled_from([0, 0, 0, 1, 2]))
        step = draw(st.sampled_from([0, 0, 0, 1, 511, 4096, 10_000, -1, -5000]))
        offset = max(0, cursor[file] + step)
        nbytes = draw(st.integers(0, 20) | st.integers(4000, 4200) | st.integers(0, 300_000) | st.just(64 * KIB))
        group += draw(st.sampled_from([0, 0, 0, 0, 1]))
        extents.append(Extent(file, offset, nbytes, group))
        cursor[file] = offset + nbytes
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 256]), max_size=len(extents)))
    return extents, laid_out(extents, gaps)


@settings(max_examples=250, deadline=None)
@given(
    workload=workloads(),
    pages=st.sampled_from([1, 2, 3, 16, 17, 64]),
    read_pages=st.sampled_from([1, 2, 16, 64]),
    alignment=st.sampled_from([1, 4096]),
    ramp_tasks=st.sampled_from([0, 0, 2]),
)
@example(workload=([Extent(0, 4095, 2)], [0]), pages=1, read_pages=1, alignment=4096, ramp_tasks=0)
@example(workload=([Extent(0, 0, 0), Extent(0, 5, 0)], [0, 0]), pages=1, read_pages=1, alignment=1, ramp_tasks=0)
def test_any_extents_arrive_exactly_once(
    workload: tuple[list[Extent], list[int]], pages: int, read_pages: int, alignment: int, ramp_tasks: int
):
    extents, targets = workload
    tasks = check(
        extents,
        targets,
        task_bytes=pages * 4096,
        alignment=alignment,
        read_bytes=min(pages, read_pages) * 4096,
        ramp_tasks=ramp_tasks,
    )
    parts = sum(extent.nbytes > 0 for extent in extents) + len(tasks)
    read = sum(nbytes for _, reads, _ in tasks for _, _, nbytes, _, _ in reads)
    assert read <= sum(extent.nbytes for extent in extents) + 2 * (alignment - 1) * parts


@settings(max_examples=60, deadline=None)
@given(workload=workloads(), task_bytes=st.integers(1, 900), read_bytes=st.integers(1, 900))
def test_through_the_page_cache_any_sizes_work(
    workload: tuple[list[Extent], list[int]], task_bytes: int, read_bytes: int
):
    extents = [extent._replace(nbytes=min(extent.nbytes, 500)) for extent in workload[0]]
    check(extents, laid_out(extents), task_bytes=task_bytes, alignment=1, read_bytes=min(read_bytes, task_bytes))


@pytest.mark.parametrize("alignment", [1, 4096])
def test_neighbours_are_one_read_and_one_copy(alignment: int):
    extents = [Extent(0, 4096 + 100 * i, 100) for i in range(100)]
    ((group, reads, copies),) = cut(extents, laid_out(extents), task_bytes=64 * KIB, alignment=alignment)
    assert group == 0
    assert reads == [(0, 4096, 10_000 if alignment == 1 else 12_288, 10_000, 0)]
    assert copies == [(0, 0, 10_000, 0, 0)]


def test_records_from_anywhere_are_one_copy_a_task():
    offsets = np.random.default_rng(3).integers(0, 10**6, size=1000)
    extents = [Extent(int(offset) % 3, int(offset), 512) for offset in offsets]
    tasks = check(extents, laid_out(extents), task_bytes=64 * KIB, alignment=1, read_bytes=64 * KIB)
    assert len(tasks) == -(-1000 * 512 // (64 * KIB))
    for number, (_, reads, copies) in enumerate(tasks):
        assert len(reads) >= 100
        assert len(copies) == 1
        assert copies[0][1] == number * 64 * KIB


def test_aligned_records_are_one_copy_a_task_with_direct_io():
    extents = [Extent(0, 4096 * index, 4096) for index in (9, 2, 7, 7, 0)]
    ((_, reads, copies),) = check(extents, laid_out(extents), task_bytes=64 * KIB, alignment=4096, read_bytes=4096)
    assert len(reads) == 5
    assert [copy[:3] for copy in copies] == [(0, 0, 5 * 4096)]


def test_tasks_are_filled():
    extents = [Extent(0, 17, 10_000_000)]
    for alignment in (1, 4096):
        tasks = check(extents, [0], task_bytes=64 * KIB, alignment=alignment, read_bytes=64 * KIB)
        assert len(tasks) <= 10_000_000 // (64 * KIB) + 2
        assert all(len(reads) == 1 for _, reads, _ in tasks)
        # Cut at blocks of the file, so that no block is read twice.
        assert all(reads[0][1] % 4096 == 0 for _, reads, _ in tasks[1:])


def test_the_first_tasks_of_a_ramp_are_small():
    tasks = cut([Extent(0, 0, 32 << 20)], [0], task_bytes=4 << 20, ramp_tasks=4)
    sizes = [reads[0][2] for _, reads, _ in tasks]
    assert sizes[:4] == [256 * KIB] * 4
    assert sizes[4:8] == [1 << 20] * 4
    assert sizes[8] == 4 << 20
    assert sum(sizes) == 32 << 20


def test_groups_never_share_a_task():
    extents = [Extent(0, 100 * i, 100, group=i // 3) for i in range(30)]
    tasks = check(extents, laid_out(extents), task_bytes=64 * KIB, alignment=1, read_bytes=64 * KIB)
    assert [group for group, _, _ in tasks] == list(range(10))


def test_nothing_wanted_is_nothing_done():
    assert cut([], [], task_bytes=4096) == []
    assert cut([Extent(0, 7, 0), Extent(5, 0, 0)], [0, 0], task_bytes=4096) == []


def test_arrays_that_do_not_fit_are_refused():
    good: dict[str, Any] = {"task_bytes": 4096}
    with pytest.raises(ValueError, match="differ in length"):
        cut([Extent(0, 0, 1)], [0, 1], **good)
    for extent in (Extent(-1, 0, 1), Extent(0, -1, 1), Extent(0, 0, -1), Extent(0, 0, 1, -1)):
        with pytest.raises(ValueError, match="extent 0 has a negative number"):
            cut([extent], [0], **good)
