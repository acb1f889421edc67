"""Train adapters (LoRA) on a mixture-of-experts model whose layers stream from its checkpoint.

    python examples/train_lora_moe.py [--steps 21] [--layers 6] [--slots 2] [--device cuda]

Needs transformers and peft. The checkpoint is a small Qwen3-MoE with random weights, written as Hugging Face writes
them; put the path of your own in its place. The model is built without its weights, so that its layers never are in
memory as a whole: two of them at a time are on the device.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

import gdsstream


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=21)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--slots", type=int, default=2)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = arguments.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "moe"
        make_checkpoint(checkpoint, options.layers)
        train(checkpoint, options.steps, options.slots, options.device, Path(scratch) / "adapters.safetensors")


def train(checkpoint: Path, steps: int, slots: int, device: str, adapters: Path) -> None:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    model.requires_grad_(False)
    handle = gdsstream.offload(model.model.layers, checkpoint, model=model, num_slots=slots, device=device)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    # A short text to learn by heart.
    tokens = torch.randint(0, model.config.vocab_size, (2, 32), device=device)
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    print(f"{steps} steps in {time.perf_counter() - started:.1f} s on {device}")
    print(handle.stats().summary())
    gdsstream.save_file_async(get_peft_model_state_dict(model), adapters).wait()
    print(f"adapters: {adapters.stat().st_size / 1e6:.2f} MB, written whole or not at all")
    handle.remove(load=False)


def make_checkpoint(folder: Path, layers: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
