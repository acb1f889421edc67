"""Plans: every byte exactly once, aligned as promised, fused tensors what stack and cat give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdsstream.checkpoint import DTYPES, TensorSpec, torch_dtype
from gdsstream.errors import ConfigError, DtypeError
from gdsstream.plan import ALIGNMENT_BYTES, Fused, ReadPlan, plan_packed, plan_separate

SOME_DTYPES = ("BOOL", "U8", "I16", "BF16", "F32", "C64", "F64", "I64", "F8_E4M3", "F4")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorSpec], dict[str, int]]:
    """Tensors of up to three files, neighbours and gaps, in any order; and a group for each."""
    specs: list[TensorSpec] = []
    groups: dict[str, int] = {}
    for file in range(draw(st.integers(1, 3))):
        offset = draw(st.integers(8, 100))
        for _ in range(draw(st.integers(0, 8))):
            dtype = draw(st.sampled_from(SOME_DTYPES))
            shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
            if dtype == "F4":
                shape = (*shape, 2 * draw(st.integers(0, 9)))
            nbytes = prod(shape) * DTYPES[dtype].bits // 8
            spec = TensorSpec(f"t{len(specs)}", dtype, shape, file, offset, nbytes)
            offset += nbytes + draw(st.sampled_from([0, 0, 0, 1, 300]))
            specs.append(spec)
            groups[spec.name] = draw(st.sampled_from([0, 0, 0, 1, 3]))
    return draw(st.permutations(specs)), groups


def contents(specs: Sequence[TensorSpec]) -> list[bytes]:
    ends = [0, 0, 0]
    for spec in specs:
        ends[spec.file] = max(ends[spec.file], spec.offset + spec.nbytes)
    return [np.random.default_rng(file).bytes(end) for file, end in enumerate(ends)]


def execute(plan: ReadPlan, files: Sequence[bytes]) -> list[bytes]:
    """The buffers after every extent was read; no byte of them may be written twice."""
    buffers = [bytearray(size) for size in plan.buffer_bytes]
    written = [np.zeros(size, dtype=np.int8) for size in plan.buffer_bytes]
    for file, start, nbytes, buffer, place in zip(
        plan.file, plan.file_offset, plan.nbytes, plan.buffer, plan.buffer_offset, strict=True
    ):
        assert nbytes > 0
        data = files[file][start : start + nbytes]
        assert len(data) == nbytes
        assert 0 <= place <= place + nbytes <= plan.buffer_bytes[buffer]
        buffers[buffer][place : place + nbytes] = data
        written[buffer][place : place + nbytes] += 1
    assert all(count.max(initial=0) <= 1 for count in written)
    return [bytes(buffer) for buffer in buffers]


def item_bytes(dtype: str) -> int:
    return max(1, DTYPES[dtype].bits // 8)


def check_order(plan: ReadPlan) -> None:
    keys = list(zip(plan.group, plan.file, plan.file_offset, strict=True))
    assert keys == sorted(keys)
    assert plan.file.dtype == plan.buffer.dtype == plan.group.dtype == np.int32
    assert plan.file_offset.dtype == plan.nbytes.dtype == plan.buffer_offset.dtype == np.int64


@given(layouts())
def test_separate_gives_each_tensor_its_own_bytes(layout: tuple[list[TensorSpec], dict[str, int]]):
    specs, groups = layout
    plan = plan_separate(specs, groups.__getitem__)
    files = contents(specs)
    buffers = execute(plan, files)
    assert plan.total_bytes == sum(spec.nbytes for spec in specs)
    assert plan.buffer_bytes == tuple(spec.nbytes for spec in specs)
    assert plan.num_groups == max((groups[spec.name] for spec in specs), default=0) + 1
    check_order(plan)
    for index, (spec, placement) in enumerate(zip(specs, plan.placements, strict=True)):
        assert (placement.name, placement.dtype, placement.shape) == (spec.name, spec.dtype, spec.torch_shape)
        assert (placement.buffer, placement.offset, placement.nbytes) == (index, 0, spec.nbytes)
        assert buffers[index] == files[spec.file][spec.offset : spec.offset + spec.nbytes]
        mine = plan.buffer == index
        assert mine.sum() == (spec.nbytes > 0)  # one read for each
        assert (plan.group[mine] == groups[spec.name]).all()


@given(layouts())
def test_packed_places_every_byte_once_and_aligned(layout: tuple[list[TensorSpec], dict[str, int]]):
    specs, groups = layout
    plan = plan_packed(specs, groups.__getitem__)
    files = contents(specs)
    (buffer,) = execute(plan, files)
    assert plan.total_bytes == sum(spec.nbytes for spec in specs)
    assert plan.num_groups == max(groups.values(), default=0) + 1
    check_order(plan)
    assert [placement.name for placement in plan.placements] == [spec.name for spec in specs]
    for spec, placement in zip(specs, plan.placements, strict=True):
        assert placement.offset % item_bytes(spec.dtype) == 0
        data = buffer[placement.offset : placement.offset + placement.nbytes]
        assert data == files[spec.file][spec.offset : spec.offset + spec.nbytes]
    begins = {(int(f), int(o)) for f, o in zip(plan.file, plan.file_offset, strict=True)}
    for spec, placement in zip(specs, plan.placements, strict=True):
        if spec.nbytes and (spec.file, spec.offset) in begins:
            assert placement.offset % ALIGNMENT_BYTES == 0
    # Neighbours in a file that are not one extent have a reason: their group, or a tensor that would be misaligned.
    for i, j in pairwise(range(len(plan.file))):
        end = plan.file_offset[i] + plan.nbytes[i]
        if plan.file[i] == plan.file[j] and plan.group[i] == plan.group[j] and end == plan.file_offset[j]:
            cursor = plan.buffer_offset[i] + plan.nbytes[i]
            (first,) = [s for s in specs if s.nbytes and (s.file, s.offset) == (plan.file[j], end)]
            assert cursor % item_bytes(first.dtype)


def test_a_run_of_neighbours_is_one_extent_whatever_the_order():
    specs = [TensorSpec(f"t{i}", "F16", (5,), 0, 100 + 10 * i, 10) for i in range(20)]
    plan = plan_packed(specs[::-1])
    assert plan.file_offset.tolist() == [100]
    assert plan.nbytes.tolist() == [200]
    assert [placement.name for placement in plan.placements] == [spec.name for spec in specs[::-1]]
    assert plan.placements[0].offset == 190  # the file's layout is kept


def test_gaps_files_groups_and_dtypes_end_a_run():
    def spec(name: str, dtype: str, file: int, offset: int, nbytes: int) -> TensorSpec:
        return TensorSpec(name, dtype, (nbytes * 8 // DTYPES[dtype].bits,), file, offset, nbytes)

    specs = [
        spec("a", "U8", 0, 8, 3),
        spec("b", "F32", 0, 11, 8),  # would be misaligned behind a
        spec("c", "U8", 0, 19, 1),  # goes on behind b
        spec("d", "U8", 0, 30, 1),  # behind a gap
        spec("e", "U8", 1, 31, 1),  # in another file
        spec("f", "U8", 1, 32, 1),  # in another group
        spec("g", "U8", 1, 33, 1),
    ]
    plan = plan_packed(specs, lambda name: int(name == "f"))
    assert [p.offset for p in plan.placements] == [0, 256, 264, 512, 768, 1280, 1024]
    assert plan.nbytes.tolist() == [3, 9, 1, 1, 1, 1]
    assert plan.buffer_bytes == (1281,)
    assert plan.group.tolist() == [0, 0, 0, 0, 0, 1]


def stored(names: Sequence[str], dtype: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[TensorSpec], bytes]:
    specs, offset = [], 24
    for name, shape in zip(names, shapes, strict=True):
        nbytes = prod(shape) * DTYPES[dtype].bits // 8
        specs.append(TensorSpec(name, dtype, shape, 0, offset, nbytes))
        offset += nbytes
    return specs, np.random.default_rng(1).bytes(offset)


def view(data: bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(dtype)).reshape(tuple(shape))


@given(
    count=st.integers(1, 5),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    dtype=st.sampled_from(["U8", "I16", "I32", "I64"]),
    order=st.randoms(use_true_random=False),
)
def test_fused_is_stack_and_cat(count: int, shape: tuple[int, int], dtype: str, order: object):
    names = [f"expert.{i}.{which}" for i in range(count) for which in ("gate", "up")] + ["norm"]
    specs, file = stored(names, dtype, [shape] * (2 * count) + [(7,)])
    # Gate and up of every expert: each pair concatenated along the rows, the pairs stacked.
    experts = Fused(tuple(names[:-1]), (count, 2 * shape[0], shape[1]))
    shuffled = list(specs)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    plan = plan_packed(shuffled, fuse={"experts": experts})
    (buffer,) = execute(plan, [file])
    placed = {placement.name: placement for placement in plan.placements}
    assert placed.keys() == {"norm", "experts"}
    whole = placed["experts"]
    assert whole.offset % ALIGNMENT_BYTES == 0
    tensors = {s.name: view(file[s.offset : s.offset + s.nbytes], dtype, s.shape) for s in specs}
    pairs = [torch.cat([tensors[f"expert.{i}.gate"], tensors[f"expert.{i}.up"]]) for i in range(count)]
    got = view(buffer[whole.offset : whole.offset + whole.nbytes], dtype, whole.shape)
    assert torch.equal(got, torch.stack(pairs))
    assert plan.nbytes.max() >= 2 * count * specs[0].nbytes  # stored in this order: one extent


def test_members_of_a_fused_tensor_may_be_of_several_groups_and_dtypes_packed():
    specs, file = stored(["a", "b", "c"], "F4", [(4, 6), (4, 6), (2,)])
    plan = plan_packed(specs, {"a": 1, "b": 0, "c": 0}.__getitem__, {"ba": Fused(("b", "a"), (2, 4, 6))})
    (buffer,) = execute(plan, [file])
    c, whole = plan.placements
    assert (c.name, c.shape, c.offset) == ("c", (1,), 0)
    assert (whole.name, whole.shape, whole.nbytes) == ("ba", (2, 4, 3), 24)
    assert buffer[whole.offset :] == file[36:48] + file[24:36]
    assert sorted(zip(plan.group.tolist(), plan.file_offset.tolist(), strict=True)) == [(0, 36), (0, 48), (1, 24)]


def test_fused_tensors_that_do_not_fit_are_refused():
    specs = [TensorSpec("a", "F32", (4,), 0, 0, 16), TensorSpec("b", "F16", (4,), 0, 16, 8)]
    with pytest.raises(ConfigError, match=r"'ab' has members of different dtypes: F16, F32"):
        plan_packed(specs, fuse={"ab": Fused(("a", "b"), (6,))})
    with pytest.raises(ConfigError, match=r"'aa' of shape \(3, 2\) and dtype F32 has 24 bytes, its 1 member"):
        plan_packed(specs, fuse={"aa": Fused(("a",), (3, 2))})
    with pytest.raises(ConfigError, match="'x' is to hold 'nope', which is not among the tensors"):
        plan_packed(specs, fuse={"x": Fused(("a", "nope"), (4,))})
    with pytest.raises(ConfigError, match="none"):
        plan_packed(specs, fuse={"x": Fused((), (0,))})


def test_a_fused_tensor_may_not_hide_a_stored_one():
    specs = [TensorSpec(name, "U8", (4,), 0, 4 * i, 4) for i, name in enumerate("abc")]
    with pytest.raises(ConfigError, match="'c'"):
        plan_packed(specs, fuse={"c": Fused(("a", "b"), (8,))})
    renamed = plan_packed(specs, fuse={"a": Fused(("a", "b"), (2, 4))})  # its own member's name is free
    assert [placement.name for placement in renamed.placements] == ["c", "a"]


def test_empty_tensors_take_no_read_and_keep_their_group():
    specs = [TensorSpec("a", "F32", (0, 4), 0, 8, 0), TensorSpec("b", "F32", (2,), 0, 8, 8)]
    for plan in (plan_separate(specs, {"a": 2, "b": 0}.__getitem__), plan_packed(specs, {"a": 2, "b": 0}.__getitem__)):
        assert len(plan.file) == 1
        assert plan.num_groups == 3  # empty groups can be waited for
        assert plan.placements[0].shape == (0, 4)
        assert plan.placements[0].nbytes == 0
    for nothing in (plan_separate([]), plan_packed([])):
        assert nothing.total_bytes == 0
        assert nothing.num_groups == 1
        assert nothing.placements == ()


def test_negative_groups_are_refused():
    for nbytes in (0, 4):
        specs = [TensorSpec("a", "U8", (nbytes,), 0, 8, nbytes)]
        for make in (plan_separate, plan_packed):
            with pytest.raises(ConfigError, match="group -1 is negative"):
                make(specs, lambda name: -1)


def test_half_a_packed_element_is_refused():
    with pytest.raises(DtypeError, match="divisible by 2"):
        plan_separate([TensorSpec("a", "F4", (2, 3), 0, 8, 3)])
