"""Layouts of batches, and Jagged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gdsstream import ConfigError, Jagged
from gdsstream.batches import BatchLayout, batch_formats, lay_out
from gdsstream.dtypes import DTYPES
from gdsstream.records import Field, Located

IMAGE = Field("image", "U8", (2, 3), ragged=False)
LABEL = Field("label", "I64", (), ragged=False)
TEXT = Field("text", "I32", (), ragged=True)
BOXES = Field("boxes", "F32", (4,), ragged=True)


def at(files: Sequence[int], offsets: Sequence[int], nbytes: Sequence[int]) -> Located:
    return Located(np.array(files, np.int32), np.array(offsets, np.int64), np.array(nbytes, np.int64))


def read(layout: BatchLayout, stored: dict[int, bytes]) -> list[bytearray]:
    """Carry the plan out over files that are byte strings."""
    buffers = [bytearray(b"\xee" * part.nbytes) for part in layout.parts]
    plan = layout.plan
    for file, offset, nbytes, buffer, start in zip(
        plan.file, plan.file_offset, plan.nbytes, plan.buffer, plan.buffer_offset, strict=True
    ):
        buffers[buffer][start : start + nbytes] = stored[int(layout.files[file])][offset : offset + nbytes]
    return buffers


def test_one_fixed_field_is_one_gather() -> None:
    layout = lay_out(batch_formats([IMAGE], None), [at([7, 3, 7], [12, 0, 30], [6, 6, 6])])
    assert layout.parts[0].shape == (3, 2, 3)
    assert layout.files.tolist() == [3, 7]
    assert layout.plan.file.tolist() == [1, 0, 1]
    assert layout.stride == 6
    assert layout.nbytes == 18
    stored = {3: bytes(range(100)), 7: bytes(range(100, 200))}
    wanted = [*range(112, 118), *range(6), *range(130, 136)]
    assert list(read(layout, stored)[0]) == wanted


def test_many_shards_are_numbered_like_few() -> None:
    files = [20_000, 3, 20_000, 16_384]
    layout = lay_out(batch_formats([LABEL], None), [at(files, [0] * 4, [8] * 4)])
    assert layout.files.tolist() == [3, 16_384, 20_000]
    assert layout.plan.file.tolist() == [2, 0, 2, 1]
    assert layout.plan.file.dtype == np.int32


def test_fields_of_all_kinds_are_one_plan() -> None:
    located = [
        at([1, 0], [0, 6], [6, 6]),
        at([1, 0], [40, 48], [8, 8]),
        at([1, 0], [60, 60], [12, 4]),
        at([1, 0], [80, 80], [0, 32]),
    ]
    layout = lay_out(batch_formats([IMAGE, LABEL, TEXT, BOXES], None), located)
    assert [part.shape for part in layout.parts] == [(2, 2, 3), (2,), (4,), (2, 4)]
    assert layout.parts[0].offsets is None
    assert layout.parts[2].offsets is not None
    assert layout.parts[2].offsets.tolist() == [0, 3, 4]
    assert layout.parts[3].offsets is not None
    assert layout.parts[3].offsets.tolist() == [0, 0, 2]
    assert layout.stride == 0
    assert (layout.plan.nbytes > 0).all(), "an empty record is no extent"
    stored = {0: bytes(range(120)), 1: bytes(range(120, 240))}
    got = read(layout, stored)
    assert bytes(got[0]) == stored[1][:6] + stored[0][6:12]
    assert bytes(got[1]) == stored[1][40:48] + stored[0][48:56]
    assert bytes(got[2]) == stored[1][60:72] + stored[0][60:64]
    assert bytes(got[3]) == stored[0][80:112]


def test_padding_leaves_room_for_the_longest() -> None:
    located = [at([0, 0, 0], [0, 20, 40], [4, 12, 0])]
    layout = lay_out(batch_formats([TEXT], 5), located)
    assert layout.parts[0].shape == (3, 3)
    assert layout.parts[0].offsets is None
    assert layout.parts[0].format.pad == 5
    got = read(layout, {0: bytes(range(60))})[0]
    pad = b"\xee"
    assert bytes(got) == bytes(range(4)) + pad * 8 + bytes(range(20, 32)) + pad * 12


def test_only_some_files() -> None:
    located = [at([5, 6, 7, 5], [0, 10, 20, 30], [6] * 4)]
    layout = lay_out(batch_formats([IMAGE], None), located)
    part = layout.only(1, 3)
    assert part.file.tolist() == [0, 1]
    assert part.file_offset.tolist() == [10, 20]
    assert part.buffer_offset.tolist() == [6, 12]


def test_records_without_bytes() -> None:
    empty = Field("x", "F32", (0, 4), ragged=False)
    layout = lay_out(batch_formats([empty], None), [at([0, 0], [8, 8], [0, 0])])
    assert layout.parts[0].shape == (2, 0, 4)
    assert len(layout.plan.file) == 0


@pytest.mark.parametrize("pad", [{"image": 0}, {"nothing": 0}])
def test_padding_of_what_is_not_ragged_is_refused(pad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="no ragged field; ragged: 'text'"):
        batch_formats([IMAGE, TEXT], pad)


def test_padding_with_what_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="pad for 'text' is 'x'"):
        batch_formats([TEXT], "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "pad", "held"),
    [("U8", -1, False), ("U16", 65535, True), ("I64", 1.5, False), ("I32", float("nan"), False), ("F32", 0.1, True)],
)
def test_padding_that_the_dtype_would_change_is_refused(dtype: str, pad: float, held: bool) -> None:
    field = Field("text", dtype, (), ragged=True)
    if held:
        assert batch_formats([field], pad)[0].pad == pad
        return
    with pytest.raises(ConfigError, match=f"pad for 'text' is {pad}, and the field is {dtype}; .* whole number from"):
        batch_formats([field], pad)


@pytest.mark.parametrize(
    ("dtype", "pad", "held"),
    [
        ("F16", 65504, True),
        ("F16", 1e6, False),
        ("F16", -1e6, False),
        ("F16", float("-inf"), True),
        ("F16", float("nan"), True),
        ("BF16", 2**1100, False),
        ("F32", 1e39, False),
        ("F64", float("inf"), True),
        ("C64", float("inf"), True),
        ("C64", 1e39, False),
        ("F8_E4M3", 448, True),
        ("F8_E4M3", 1000, False),
        ("F8_E4M3", float("inf"), False),
        ("F8_E4M3", float("nan"), True),
        ("F8_E5M2", float("inf"), True),
        ("F8_E5M2FNUZ", float("inf"), False),
        ("F8_E8M0", 0.5, True),
        ("F8_E8M0", 0, False),
        ("F8_E8M0", -1.0, False),
        ("F4", 0, False),
    ],
)
def test_padding_that_a_float_does_not_have_is_refused(dtype: str, pad: float, held: bool) -> None:
    field = Field("text", dtype, (), ragged=True)
    if held:
        form = batch_formats([field], pad)[0]
        assert np.array_equal(torch.empty(1, dtype=form.dtype).fill_(pad)[0].item(), pad, equal_nan=True)
        return
    with pytest.raises(ConfigError, match=f"pad for 'text' is .*, and the field is {dtype}"):
        batch_formats([field], pad)


def test_padding_can_be_chosen_by_field() -> None:
    formats = batch_formats([IMAGE, TEXT, BOXES], {"text": 1})
    assert [form.pad for form in formats] == [None, 1, None]
    assert [form.pad for form in batch_formats([IMAGE, TEXT, BOXES], 2)] == [None, 2, 2]


@pytest.fixture
def jagged() -> Jagged:
    return Jagged(torch.arange(12).reshape(6, 2), torch.tensor([0, 2, 2, 5, 6]))


def test_a_jagged_is_its_records(jagged: Jagged) -> None:
    assert len(jagged) == 4
    assert jagged.lengths().tolist() == [2, 0, 3, 1]
    records = [[[0, 1], [2, 3]], [], [[4, 5], [6, 7], [8, 9]], [[10, 11]]]
    assert [record.tolist() for record in jagged] == records
    assert [jagged[i].tolist() for i in range(-4, 4)] == records * 2
    for index in (4, -5):
        with pytest.raises(IndexError, match="of a batch of 4"):
            jagged[index]
    assert jagged[0].data_ptr() == jagged.values.data_ptr(), "records are views"


def test_a_jagged_as_a_nested_tensor(jagged: Jagged) -> None:
    nested = jagged.nested()
    assert nested.layout == torch.jagged
    assert nested.shape[0] == 4
    assert nested.values().data_ptr() == jagged.values.data_ptr()
    assert [record.tolist() for record in nested.unbind()] == [record.tolist() for record in jagged]


def test_a_jagged_padded(jagged: Jagged) -> None:
    padded = jagged.to_padded(-1)
    assert padded.shape == (4, 3, 2)
    for row, record in zip(padded, jagged, strict=True):
        assert torch.equal(row[: len(record)], record)
        assert (row[len(record) :] == -1).all()
    empty = Jagged(torch.zeros(0, 3), torch.zeros(1, dtype=torch.int64))
    assert empty.to_padded().shape == (0, 0, 3)


@pytest.mark.parametrize(
    "dtype",
    [info.torch_name for info in DTYPES.values() if info.torch_name and info.per_element == 1],
)
def test_a_jagged_of_any_dtype_padded(dtype: str) -> None:
    values = torch.tensor([1, 2, 4, 1, 8]).to(getattr(torch, dtype))
    padded = Jagged(values, torch.tensor([0, 3, 3, 5])).to_padded(1)
    assert padded.dtype == values.dtype
    wanted = torch.tensor([[1, 2, 4], [1, 1, 1], [1, 8, 1]]).to(values.dtype)
    assert torch.equal(padded.view(torch.uint8), wanted.view(torch.uint8))


def test_gradients_go_through_padding() -> None:
    values = torch.arange(5.0, requires_grad=True)
    Jagged(values, torch.tensor([0, 3, 3, 5])).to_padded().square().sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, 2 * torch.arange(5.0))


def test_a_jagged_goes_where_tensors_go(jagged: Jagged) -> None:
    half = jagged.to(torch.float16)
    assert half.values.dtype == torch.float16
    assert half.offsets.dtype == torch.int64
    assert jagged.to("meta", non_blocking=True).offsets.device.type == "meta"
