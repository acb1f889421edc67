"""Weights in 4-bit NormalFloat as bitsandbytes stores them, made dense again in plain torch.

A weight is packed two values to a byte, the first in the high half, row after row; each value is an index into a code
of 16 numbers, and each block of consecutive values (64, mostly) has a scale, `absmax`. Rows of companions: a weight
that is stacked from several stored ones (experts) has one row of scales for each of them.
"""

from __future__ import annotations

import torch

from gdsstream.errors import OffloadError

# The quantiles of a normal distribution that QLoRA (Dettmers et al., 2023, appendix E) publishes.
CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 32)
# Values made at once, so that what is needed meanwhile (an index and a float for each) stays small beside the result.
_PIECE = 1 << 24


def dequantize_nf4(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """The dense weight, in the shape and dtype of `parameter`; for `gdsstream.offload(dequantize=...)`.

    `tensors` has the packed weight as "" (uint8), its scales as "absmax" (float32), and may have the code as
    "quant_map". Values are computed in float32 and rounded once. Raises OffloadError for what is not stored like this,
    for scales that are quantised themselves ("double quantisation") among it.
    """
    nested = sorted(suffix for suffix in tensors if suffix.startswith("nested_"))
    if nested:
        raise OffloadError(
            f"the scales of {name!r} are quantised themselves (it has {name}.{nested[0]}); dequantize_nf4 takes plain "
            "scales: store the weights with bnb_4bit_use_double_quant=False, or keep them with resident=[...]"
        )
    packed, scales = tensors[""], tensors.get("absmax")
    if packed.dtype != torch.uint8 or scales is None or scales.dtype != torch.float32:
        has = ", ".join(f"{suffix or 'weight'}: {t.dtype}" for suffix, t in tensors.items())
        raise OffloadError(f"{name!r} is not NF4 as bitsandbytes stores it: a uint8 weight with float32 absmax ({has})")
    count = parameter.numel()
    rows = scales.shape[0] if scales.dim() == 2 else 1
    each = count // rows
    block = _block_size(each, scales.numel() // rows)
    if count % rows or block is None or packed.numel() != rows * ((each + 1) // 2):
        raise OffloadError(
            f"{name!r} of shape {tuple(parameter.shape)} has {packed.numel()} packed bytes and {scales.numel()} scales "
            f"in {rows} row(s), which no block size explains"
        )
    code = tensors.get("quant_map")
    if code is None:
        code = torch.tensor(CODE, dtype=torch.float32, device=packed.device)
    codes = code.reshape(-1, 16).float().expand(rows, 16)
    dense = torch.empty(rows, each, dtype=parameter.dtype, device=packed.device)
    for row, (source, scale, values) in enumerate(
        zip(packed.view(rows, -1), scales.reshape(rows, -1), codes, strict=True)
    ):
        _unpack(source, scale, values, block, dense[row])
    return dense.view(parameter.shape)


def _unpack(packed: torch.Tensor, scales: torch.Tensor, code: torch.Tensor, block: int, out: torch.Tensor) -> None:
    # Both values of a byte at once: 256 pairs.
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack((code[byte >> 4], code[byte & 15]), dim=1)
    step = _PIECE // block * block
    for start in range(0, out.numel(), step):
        target = out[start : start + step]
        values = pairs[packed[start // 2 : (start + step) // 2].int()].view(-1)[: target.numel()]
        of = scales[start // block : (start + step) // block]
        whole = target.numel() // block * block
        target[:whole].view(-1, block).copy_(values[:whole].view(-1, block) * of[: whole // block, None])
        if whole < target.numel():
            target[whole:].copy_(values[whole:] * of[-1])


def _block_size(count: int, scales: int) -> int | None:
    return next((block for block in _BLOCK_SIZES if -(-count // block) == scales), None)


__all__ = ["CODE", "dequantize_nf4"]
