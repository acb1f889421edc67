"""transformers' MoE models, saved with save_pretrained and streamed back; adapters of peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_support import assert_free, deterministic
from torch import nn
from toy_moe import assert_equal, gradients

from gdsstream.offloading import OffloadHandle, offload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

__all__ = ["deterministic"]

COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
}
CONFIGS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "qwen3_moe, tied, dense first": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "llama": ("LlamaConfig", {}),
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


def make(kind: str, **changes: Any) -> nn.Module:
    name, options = CONFIGS[kind]
    config = getattr(transformers, name)(**{**COMMON, **options, **changes})
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # norms that differ
    return model.requires_grad_(False).eval()


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters are made on the meta device, buffers are not: as accelerate.init_empty_weights does."""
    register = nn.Module.register_parameter

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def streamed_back(kind: str, folder: Path, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """A model whose values are only in `folder`, and its resident twin."""
    twin = make(kind, **changes)
    twin.save_pretrained(folder, max_shard_size="60KB")
    with on_meta():
        model = transformers.AutoModelForCausalLM.from_config(twin.config).requires_grad_(False).eval()
    model.tie_weights()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model, twin


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.model.layers  # type: ignore[union-attr,return-value]


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(seed))


@KINDS
@pytest.mark.parametrize("slots", [1, 2])
def test_logits(tmp_path: Path, kind: str, slots: int) -> None:
    model, twin = streamed_back(kind, tmp_path)
    with offload(layers_of(model), tmp_path, model=model, device="cpu", num_slots=slots, debug=True) as handle:
        assert not any(parameter.is_meta for parameter in model.parameters())
        with torch.no_grad():
            for seed in range(2):
                assert torch.equal(model(ids(seed)).logits, twin(ids(seed)).logits)
            found = model.generate(ids(), max_new_tokens=5, do_sample=False)
            assert torch.equal(found, twin.generate(ids(), max_new_tokens=5, do_sample=False))
        assert_free(handle)
        assert handle.stats().order_misses == 0


@KINDS
def test_removal_gives_the_whole_model_back(tmp_path: Path, kind: str) -> None:
    model, twin = streamed_back(kind, tmp_path)
    offload(layers_of(model), tmp_path, model=model, device="cpu").remove()
    assert_equal(dict(model.state_dict()), dict(twin.state_dict()))


class Adapter(nn.Module):
    """Adds a trainable low-rank product to what a linear module gives."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Parameter(torch.randn(2, inputs) / inputs)
        self.b = nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + x @ self.a.t() @ self.b.t()
        return result


def adapt(model: nn.Module) -> None:
    torch.manual_seed(1)
    for layer in layers_of(model):
        for name in ("q_proj", "o_proj"):
            attention = layer.self_attn
            base = getattr(attention, name)
            setattr(attention, name, Adapter(base, base.in_features, base.out_features))


def train(model: nn.Module, handle: OffloadHandle | None = None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(ids(step), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if handle is not None:
            assert_free(handle)
    return losses, gradients(model)


def assert_same_training(model: nn.Module, twin: nn.Module, handle: OffloadHandle) -> None:
    (losses, found), (expected_losses, expected) = train(model, handle), train(twin)
    assert torch.equal(torch.stack(losses), torch.stack(expected_losses))
    assert_equal(found, expected)


@KINDS
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "nonreentrant", "reentrant"])
def test_adapters(tmp_path: Path, kind: str, slots: int, checkpointing: bool | None) -> None:
    model, twin = streamed_back(kind, tmp_path)
    for each in (model, twin):
        adapt(each)
        each.train()
        if checkpointing is not None:
            each.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            each.enable_input_require_grads()
    with offload(layers_of(model), tmp_path, model=model, device="cpu", num_slots=slots, debug=True) as handle:
        assert_same_training(model, twin, handle)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_logits_and_their_loss(tmp_path: Path, kind: str) -> None:
    model, twin = streamed_back(kind, tmp_path, output_router_logits=True)
    for each in (model, twin):
        adapt(each)
        for layer in layers_of(each):
            layer.mlp.gate.requires_grad_(True)
    with offload(layers_of(model), tmp_path, model=model, device="cpu", num_slots=1, debug=True) as handle:
        assert "0.mlp.gate.weight" not in handle.streamed_names
        assert_same_training(model, twin, handle)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("before", [True, False], ids=["peft, then offload", "offload, then peft"])
def test_adapters_of_peft(tmp_path: Path, kind: str, before: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, twin = streamed_back(kind, tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    open_handle = partial(offload, checkpoint=tmp_path, device="cpu", num_slots=2, debug=True)
    if before:
        # The adapters need a real device; the rest may wait.
        adapted = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                owner = model.get_submodule(name.rpartition(".")[0])
                owner._parameters["weight"] = nn.Parameter(torch.empty(parameter.shape))
        handle = open_handle(layers_of(model), model=adapted)
    else:
        handle = open_handle(layers_of(model), model=model)
        adapted = peft.get_peft_model(model, config)
    adapted_twin = peft.get_peft_model(twin, config)
    others = dict(adapted_twin.named_parameters())
    assert any(p.requires_grad for p in adapted.parameters())
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(others[name])
    with handle:
        assert not any("lora" in name for name in handle.streamed_names)
        assert_same_training(adapted, adapted_twin, handle)
        saved = peft.get_peft_model_state_dict(adapted)
        assert saved.keys() == peft.get_peft_model_state_dict(adapted_twin).keys()


def test_a_model_that_from_pretrained_loaded(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    model, twin = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval() for _ in range(2))
    model.requires_grad_(False)
    with offload(layers_of(model), tmp_path, device="cpu"), torch.no_grad():
        assert torch.equal(model(ids()).logits, twin(ids()).logits)
