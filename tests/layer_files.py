"""Checkpoints made of layers, for the tests of everything that streams them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHAPES = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.q_proj.bias": (64,),
    "mlp.up_proj.weight": (128, 64),
    "mlp.odd": (3, 7),
}
LAYER_BYTES = 2 * (64 + 64 * 64 + 64 + 128 * 64 + 3 * 7)


def write_layers(
    folder: Path, count: int, *, shapes: dict[str, tuple[int, ...]] | None = None, files: int = 1, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A checkpoint of `count` layers in bfloat16 beside some other tensors; returns all tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(10, 64, generator=generator)}
    for layer in range(count):
        for name, shape in (shapes or SHAPES).items():
            tensors[f"model.layers.{layer}.{name}"] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    tensors["model.norm.weight"] = torch.randn(64, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    step = -(-len(names) // files)
    for number in range(files):
        part = {name: tensors[name] for name in names[number * step : (number + 1) * step]}
        save_file(part, folder / f"model-{number + 1:05d}.safetensors")
    return tensors


def write_experts(
    folder: Path, count: int, experts: int, *, mixtral: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Layers of single experts' matrices: hidden 16, intermediate 24."""
    generator = torch.Generator().manual_seed(seed)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    base = "block_sparse_moe.experts" if mixtral else "mlp.experts"
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(count):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(16, generator=generator)
        for e in range(experts):
            for name, shape in ((gate, (24, 16)), (up, (24, 16)), (down, (16, 24))):
                tensors[f"model.layers.{layer}.{base}.{e}.{name}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def layer_of(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """A layer's tensors by their names inside it."""
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


__all__ = ["LAYER_BYTES", "SHAPES", "layer_of", "load_file", "write_experts", "write_layers"]
