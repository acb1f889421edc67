"""NF4 weights made dense, against a reference that goes value by value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from offload_support import assert_same_step, deterministic, offloaded, twins
from safetensors.torch import load_file, save_file
from test_offload_binding import split_experts

from gdsstream import OffloadError
from gdsstream.nf4 import CODE, dequantize_nf4

__all__ = ["deterministic"]


def quantised(weight: torch.Tensor, block: int = 64) -> dict[str, torch.Tensor]:
    """A weight as bitsandbytes stores it, by what its names end with."""
    flat = weight.reshape(-1).double().numpy()
    scales = [np.abs(flat[i : i + block]).max() for i in range(0, len(flat), block)]
    code = np.array(CODE)
    values = [int(np.abs(code - flat[i] / scales[i // block]).argmin()) for i in range(len(flat))]
    values += [0] * (len(values) % 2)
    packed = [high << 4 | low for high, low in zip(values[::2], values[1::2], strict=True)]
    return {
        "": torch.tensor(packed, dtype=torch.uint8)[:, None],
        "absmax": torch.tensor(scales, dtype=torch.float32),
        "quant_map": torch.tensor(CODE, dtype=torch.float32),
        "quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"quant_type": "nf4"}'), dtype=torch.uint8),
    }


def reference(tensors: dict[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype, block: int) -> torch.Tensor:
    packed = tensors[""].flatten().tolist()
    code, scales = np.array(CODE, dtype=np.float32), tensors["absmax"].numpy()
    values = []
    for i in range(shape.numel()):
        nibble = packed[i // 2] >> 4 if i % 2 == 0 else packed[i // 2] & 15
        values.append(code[nibble] * scales[i // block])
    return torch.tensor(np.array(values, dtype=np.float32)).view(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "block"), [((64, 64), 64), ((3, 100), 64), ((7, 19), 64), ((5, 1), 64), ((9, 256), 128), ((64, 130), 32)]
)
@pytest.mark.parametrize("has_code", [True, False])
def test_values(
    shape: tuple[int, ...], block: int, dtype: torch.dtype, has_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsstream.nf4._PIECE", 640)  # several pieces
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensors = quantised(weight, block)
    like = torch.empty(shape, dtype=dtype, device="meta")
    expected = reference(tensors, like.shape, dtype, block)
    if not has_code:
        del tensors["quant_map"]
    found = dequantize_nf4("w", tensors, like)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert (expected.float() - weight).abs().max() < 0.3 * weight.abs().max()


def test_stacked_weights_have_a_row_of_scales_each() -> None:
    weights = torch.randn(4, 3, 25, generator=torch.Generator().manual_seed(0))  # 75 values: no whole number of blocks
    each = [quantised(weight) for weight in weights]
    stacked = {suffix: torch.stack([one[suffix] for one in each]) for suffix in each[0]}
    found = dequantize_nf4("w", stacked, weights.to("meta"))
    for number, one in enumerate(each):
        assert torch.equal(found[number], reference(one, weights[0].shape, torch.float32, 64))


def test_what_is_not_nf4_like_this_is_refused() -> None:
    tensors = quantised(torch.randn(64, 64))
    like = torch.empty(64, 64, device="meta")
    nested = {**tensors, "nested_absmax": torch.ones(1), "nested_quant_map": torch.ones(256)}
    with pytest.raises(OffloadError, match=r"'w' are quantised themselves \(it has w.nested_absmax\).*double_quant"):
        dequantize_nf4("w", nested, like)
    with pytest.raises(OffloadError, match="not NF4 as bitsandbytes stores it"):
        dequantize_nf4("w", {"": tensors[""]}, like)
    with pytest.raises(OffloadError, match=r"not NF4 as bitsandbytes stores it.*weight: torch.int8"):
        dequantize_nf4("w", {**tensors, "": tensors[""].to(torch.int8)}, like)
    with pytest.raises(OffloadError, match="which no block size explains"):
        dequantize_nf4("w", {**tensors, "absmax": tensors["absmax"][1:]}, like)
    with pytest.raises(OffloadError, match="which no block size explains"):
        dequantize_nf4("w", tensors, torch.empty(64, 65, device="meta"))


@pytest.mark.parametrize("single_experts", [False, True])
def test_training_on_nf4_weights(tmp_path: Path, single_experts: bool) -> None:
    model, twin = twins(tmp_path, 3)
    path = tmp_path / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    if single_experts:
        split_experts(stored)
    dense: dict[str, torch.Tensor] = {}
    for name in [name for name in stored if "_proj" in name or name.endswith("mix.weight")]:
        weight = stored.pop(name)
        parts = quantised(weight)
        dense[name] = reference(parts, weight.shape, weight.dtype, 64)
        stored.update({f"{name}.{suffix}" if suffix else name: tensor for suffix, tensor in parts.items()})
    path.unlink()
    save_file(stored, path)
    for index, layer in enumerate(twin.layers):
        base = f"model.layers.{index}."
        layer.mix.weight.data = dense[base + "mix.weight"]
        for kind, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for e in range(3) if single_experts else ():
                names = [f"{base}experts.{e}.{part}.weight" for part in parts]
                getattr(layer.experts, kind).data[e] = torch.cat([dense[name] for name in names])
            if not single_experts:
                getattr(layer.experts, kind).data = dense[f"{base}experts.{kind}"]
    with offloaded(model, tmp_path, num_slots=1, dequantize=dequantize_nf4, debug=True):
        for seed in range(2):
            assert_same_step(model, twin, seed)
