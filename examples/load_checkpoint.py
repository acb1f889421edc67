"""Load a checkpoint, or a part of it, and look at how fast that went: python examples/load_checkpoint.py [PATH]

Without a path it writes a small checkpoint of its own first.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import gdsstream


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else _made_in(Path(scratch))
        start = time.perf_counter()
        tensors = gdsstream.load_file(path, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        rate = nbytes / seconds / 1e9
        print(f"{len(tensors)} tensors, {nbytes / 1e9:.2f} GB to {device} in {seconds:.3f} s: {rate:.1f} GB/s")

        with gdsstream.safe_open(path, device=device) as checkpoint:
            name = checkpoint.keys()[0]
            part = checkpoint.get_slice(name)[:1]
            print(
                f"{name}: {checkpoint.get_slice(name).get_shape()}, its first row on {part.device}: {tuple(part.shape)}"
            )
            print(f"by {checkpoint.route}")


def _made_in(directory: Path) -> Path:
    for layer in range(4):
        tensors = {f"layer.{layer}.w{i}": torch.randn(1024, 1024, dtype=torch.bfloat16) for i in range(8)}
        save_file(tensors, directory / f"model-{layer}.safetensors")
    return directory


if __name__ == "__main__":
    main()
