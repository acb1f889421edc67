"""The element types of safetensors and what they are in torch.

The table is plain data: importing it does not import torch, and a dtype that this torch lacks is an error only when
somebody asks for a tensor of it. A type below one byte reaches torch packed, so the last dimension shrinks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from gdsstream.errors import DtypeError

if TYPE_CHECKING:
    import torch


class DtypeInfo(NamedTuple):
    """One element type: its name in the file, its size in bits, and its counterpart in torch."""

    name: str
    bits: int
    torch_name: str | None  # None: no torch has it
    per_element: int = 1  # elements of the file in one element of torch


DTYPES: dict[str, DtypeInfo] = {
    info.name: info
    for info in (
        DtypeInfo("BOOL", 8, "bool"),
        DtypeInfo("F4", 4, "float4_e2m1fn_x2", 2),
        DtypeInfo("F6_E2M3", 6, None),
        DtypeInfo("F6_E3M2", 6, None),
        DtypeInfo("U8", 8, "uint8"),
        DtypeInfo("I8", 8, "int8"),
        DtypeInfo("F8_E5M2", 8, "float8_e5m2"),
        DtypeInfo("F8_E4M3", 8, "float8_e4m3fn"),
        DtypeInfo("F8_E8M0", 8, "float8_e8m0fnu"),
        DtypeInfo("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
        DtypeInfo("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
        DtypeInfo("I16", 16, "int16"),
        DtypeInfo("U16", 16, "uint16"),
        DtypeInfo("F16", 16, "float16"),
        DtypeInfo("BF16", 16, "bfloat16"),
        DtypeInfo("I32", 32, "int32"),
        DtypeInfo("U32", 32, "uint32"),
        DtypeInfo("F32", 32, "float32"),
        DtypeInfo("C64", 64, "complex64"),
        DtypeInfo("F64", 64, "float64"),
        DtypeInfo("I64", 64, "int64"),
        DtypeInfo("U64", 64, "uint64"),
    )
}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype; DtypeError when this torch has none."""
    import torch

    info = DTYPES.get(name)
    if info is None:
        raise DtypeError(f"{name!r} is not a safetensors dtype; known are {', '.join(DTYPES)}")
    dtype = getattr(torch, info.torch_name, None) if info.torch_name else None
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(
            f"dtype {name} has no counterpart in torch {torch.__version__}; "
            "leave its tensors out, or store them packed as U8"
        )
    return dtype


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that torch gives to a tensor of dtype `name`: the file's, with packed types' last dimension divided.

    DtypeError when the last dimension does not fill whole elements of torch.
    """
    per_element = DTYPES[name].per_element
    if per_element == 1:
        return shape
    if not shape or shape[-1] % per_element:
        raise DtypeError(
            f"{name} of shape {list(shape)} cannot be a torch tensor: torch packs {per_element} values into one "
            f"element, so the last dimension has to be divisible by {per_element}; store it padded, or as U8"
        )
    return (*shape[:-1], shape[-1] // per_element)


__all__ = ["DTYPES", "DtypeInfo", "torch_dtype", "torch_shape"]
