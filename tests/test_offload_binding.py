"""Which parameters stream, under which names; what is shared, quantised, on the meta device; and what is refused."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_support import assert_same_step, deterministic, offloaded, twins
from safetensors.torch import load_file, save_file
from torch import nn
from toy_moe import EXPERTS, HIDDEN, INNER, ToyLayer, ToyModel, assert_equal, save, tokens, toy_model

from gdsstream import OffloadError, TensorNotFoundError
from gdsstream.layout import Fused
from gdsstream.offloading import offload

__all__ = ["deterministic"]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change what is stored in a checkpoint."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def split_experts(tensors: dict[str, torch.Tensor], mixtral: bool = False) -> None:
    """Stacks as three matrices for each expert."""
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        stack = tensors.pop(name)
        base, kind = name.rsplit(".", 1)
        for e in range(EXPERTS):
            if kind == "down_proj":
                tensors[f"{base}.{e}.{down}.weight"] = stack[e]
            else:
                tensors[f"{base}.{e}.{gate}.weight"], tensors[f"{base}.{e}.{up}.weight"] = stack[e].chunk(2)


# ---- names


@pytest.mark.parametrize("mixtral", [False, True], ids=["qwen", "mixtral"])
def test_fused_experts_of_single_ones(tmp_path: Path, mixtral: bool) -> None:
    model, twin = twins(tmp_path, 3)
    rewrite(tmp_path, lambda tensors: split_experts(tensors, mixtral))
    with offloaded(model, tmp_path) as handle:
        assert "2.experts.gate_up_proj" in handle.streamed_names
        assert_same_step(model, twin)


def test_experts_that_the_module_has_one_by_one_are_not_fused(tmp_path: Path) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(
                nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in ("gate_proj", "up_proj", "down_proj")})
                for _ in range(2)
            )
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in self.experts:
                x = each["down_proj"](F.silu(each["gate_proj"](x)) * each["up_proj"](x))
            return x

    layers = nn.ModuleList(Single() for _ in range(2))
    twin = copy.deepcopy(layers)
    save(layers, tmp_path)
    with offload(layers, tmp_path, device="cpu"):
        x = torch.ones(2, 4)
        assert torch.equal(layers[1](layers[0](x)), twin[1](twin[0](x)))


def test_names_of_peft_and_of_mixtral(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"gate": nn.ModuleDict({"base_layer": nn.Linear(3, 3, bias=False)})})
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp["gate"]["base_layer"](x)  # type: ignore[index]

    layer = Wrapped()
    weight = layer.mlp["gate"]["base_layer"].weight.detach().clone()  # type: ignore[index]
    for name in ("block_sparse_moe.gate.weight", "mlp.gate.weight", "mlp.gate.base_layer.weight"):
        save_file({f"layers.0.{name}": weight}, tmp_path / "model.safetensors")
        with offload([copy.deepcopy(layer)], tmp_path, prefix="layers.{i}.", device="cpu") as handle:
            assert torch.equal(handle.modules[0](torch.eye(3)), weight.t())


def test_names_that_the_user_gives(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    rewrite(tmp_path, lambda t: t.update({n.replace("router", "gate"): t.pop(n) for n in list(t) if "router" in n}))
    with pytest.raises(
        TensorNotFoundError, match=r"'router.weight' of layer 0 .* 'model.layers.0.router.weight'.*resi"
    ):
        offload(model.layers, tmp_path, device="cpu")
    rename = {"router.weight": "gate.weight"}.get
    with offloaded(model, tmp_path, rename=rename):
        assert_same_step(model, twin)


def test_stacks_that_the_user_describes(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)

    def halves(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            weight = tensors.pop(f"model.layers.{layer}.mix.weight")
            tensors[f"model.layers.{layer}.a"], tensors[f"model.layers.{layer}.b"] = weight.chunk(2)

    rewrite(tmp_path, halves)
    fuse = {"mix.weight": Fused(("a", "b"), (HIDDEN, HIDDEN))}
    for each in (fuse, lambda stored: fuse):
        with offload(copy.deepcopy(model).layers, tmp_path, device="cpu", fuse=each):
            pass
    with offloaded(model, tmp_path, fuse=fuse):
        assert_same_step(model, twin)


@pytest.mark.parametrize("prefix", [None, "model.layers.{i}."])
def test_the_prefix_is_found(tmp_path: Path, prefix: str | None) -> None:
    model, twin = twins(tmp_path, 2)
    rewrite(tmp_path, lambda tensors: tensors.update({"vision.0.weight": torch.ones(2)}))
    with offloaded(model, tmp_path, prefix=prefix):
        assert_same_step(model, twin)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("model.layers.", "has to contain {i} once"), ("layers.{i}.", "no tensor's name begins with 'layers.0.'")],
)
def test_a_wrong_prefix(tmp_path: Path, prefix: str, message: str) -> None:
    model, _ = twins(tmp_path, 2)
    with pytest.raises((OffloadError, TensorNotFoundError), match=message):
        offload(model.layers, tmp_path, device="cpu", prefix=prefix)


def test_fewer_layers_than_the_checkpoint_has(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 4)
    del model.layers[2:], twin.layers[2:]
    with offloaded(model, tmp_path) as handle:
        assert handle.streamer.num_layers == 2
        assert_same_step(model, twin)


def test_only_what_streams_is_read(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    for each in (model, twin):
        each.layers[1].router.requires_grad_(True)
    with offloaded(model, tmp_path, resident=["experts.gate*", "mi?.weight"]) as handle:
        assert handle.streamed_names == ("0.router.weight", "0.experts.down_proj", "1.experts.down_proj")
        assert handle.streamer.names(1) == ("model.layers.1.experts.down_proj",)
        assert_same_step(model, twin)
        assert model.layers[1].router.weight.grad is not None


# ---- refusals


def refused(model: ToyModel, folder: Path, message: str, **options: Any) -> None:
    """offload() raises, and has changed nothing."""
    before = dict([*model.named_parameters(), *model.named_buffers()])
    shapes = {name: tensor.shape for name, tensor in before.items()}
    attributes = [dict(layer.__dict__) for layer in model.layers]
    with pytest.raises((OffloadError, TensorNotFoundError), match=message):
        offload(model.layers, folder, device="cpu", **options)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[name] is tensor and tensor.shape == shapes[name] for name, tensor in before.items())
    assert [dict(layer.__dict__) for layer in model.layers] == attributes


def test_another_shape_or_dtype(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 2)
    stored = "'model.layers.1.router.weight'"
    model.layers[1].router.weight.data = torch.ones(EXPERTS, HIDDEN + 1)
    refused(model, tmp_path, rf"'router.weight' of layer 1 is \(3, 17\) torch.float32, but {stored} .* is \(3, 16\)")
    model.layers[1].router.weight.data = torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    refused(model, tmp_path, rf"is \(3, 16\) torch.bfloat16, but {stored} .* is \(3, 16\) torch.float32")


def test_a_frozen_parameter_that_is_not_stored(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mix.weight"))
    refused(model, tmp_path, r"'mix.weight' of layer 1 is frozen and not in .* 'model.layers.1.mix.weight'.*resident=")
    with offload(model.layers, tmp_path, device="cpu", resident=["mix.weight"]):
        assert_same_step(model, twin)


def test_modules_that_cannot_be_offloaded(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 3)
    with pytest.raises(OffloadError, match="no module to offload"):
        offload([], tmp_path, device="cpu")
    with pytest.raises(OffloadError, match="item 1 of modules is a str"):
        offload([model.layers[0], "layer"], tmp_path, device="cpu")  # type: ignore[list-item]
    with pytest.raises(OffloadError, match="layers 0 and 2 are one module"):
        offload([model.layers[0], model.layers[1], model.layers[0]], tmp_path, device="cpu")
    with pytest.raises(OffloadError, match="layers 0 and 1 are one module, or one inside the other"):
        offload([model.layers[0], model.layers[0].experts], tmp_path, device="cpu")
    with pytest.raises(OffloadError, match="layers 0 and 1 are one module, or one inside the other"):
        offload([model.layers[0].experts, model.layers[0]], tmp_path, device="cpu")
    with offload(model.layers, tmp_path, device="cpu") as handle:
        with pytest.raises(OffloadError, match="layer 0 is offloaded already"):
            offload(model.layers, tmp_path, device="cpu")
        with pytest.raises(OffloadError, match="layer 0 is offloaded already"):
            offload([model], tmp_path, device="cpu")
        handle.remove()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(True)
    refused(model, tmp_path, "layer 1 has no frozen parameter to stream")


def test_complex_weights(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 1)
    model.layers[0].router.weight.data = torch.ones(2, 2, dtype=torch.complex64)
    save(model.layers, tmp_path)
    refused(model, tmp_path, "'router.weight' of layer 0 is complex")


@pytest.mark.parametrize("name", ["Linear4bit", "Linear8bitLt"])
def test_modules_of_bitsandbytes(tmp_path: Path, name: str) -> None:
    model, twin = twins(tmp_path, 2)
    kind = type(name, (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model.layers[1].router.__class__ = kind
    refused(model, tmp_path, rf"'router.weight' of layer 1 belongs to a bitsandbytes.nn.modules.{name}.*dequantize=")
    with offload(model.layers, tmp_path, device="cpu", resident=["router.*"]):
        assert_same_step(model, twin)


def test_parameters_that_are_no_plain_tensors(tmp_path: Path) -> None:
    class Params4bit(nn.Parameter):
        pass

    model, _ = twins(tmp_path, 2)
    layer = model.layers[0]
    layer.router._parameters["weight"] = Params4bit(layer.router.weight.data, requires_grad=False)
    refused(model, tmp_path, r"'router.weight' of layer 0 is a .*Params4bit, not a plain tensor")


# ---- tied and shared


class Tied(ToyLayer):
    """Uses one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.again.weight = self.router.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.again(x).sum()


@pytest.mark.parametrize("stored", ["router", "again"])
@pytest.mark.parametrize("meta", [False, True])
def test_a_weight_tied_within_a_layer(tmp_path: Path, stored: str, meta: bool) -> None:
    torch.manual_seed(0)
    model = ToyModel([Tied() for _ in range(3)])
    twin = copy.deepcopy(model)
    save(model.layers, tmp_path)
    other = "again" if stored == "router" else "router"
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if other in name])
    if meta:
        to_meta(model.layers)
    with offloaded(model, tmp_path) as handle:
        assert {"1.router.weight", "1.again.weight"} < set(handle.streamed_names)
        assert model.layers[0].router.weight is model.layers[0].again.weight
        assert_same_step(model, twin)
    assert model.layers[0].router.weight is model.layers[0].again.weight


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("where", ["layers", "outside"])
def test_a_weight_shared_with_others_stays(
    tmp_path: Path, where: str, meta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = toy_model(3)
    if where == "layers":
        model.layers[2].router.weight = model.layers[0].router.weight
    else:
        model.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        model.gate.weight = model.layers[0].router.weight
    twin = copy.deepcopy(model)
    save(model.layers, tmp_path)
    if meta:
        to_meta(model.layers)
        (model.layers[2].router if where == "layers" else model.gate).weight = model.layers[0].router.weight
    with (
        caplog.at_level(logging.WARNING, "gdsstream"),
        offload(model.layers, tmp_path, device="cpu", model=model if meta else None) as handle,
    ):
        shared = model.layers[0].router.weight
        assert "0.router.weight" not in handle.streamed_names
        assert "1.router.weight" in handle.streamed_names
        assert shared is (model.layers[2].router if where == "layers" else model.gate).weight
        assert torch.equal(shared, twin.layers[0].router.weight)
        assert_same_step(model, twin)
    assert [r.getMessage() for r in caplog.records if "used by other modules" in r.getMessage()] != []


# ---- the meta device


def to_meta(module: nn.Module, buffers: bool = False, frozen_only: bool = True) -> None:
    """Parameters (and buffers) on the meta device; ties are kept."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not (frozen_only and parameter.requires_grad):
                meta = made.setdefault(id(parameter), nn.Parameter(parameter.data.to("meta"), parameter.requires_grad))
                part._parameters[name] = meta
        for name, buffer in part._buffers.items():
            if buffers and buffer is not None:
                part._buffers[name] = buffer.to("meta")


def test_layers_on_the_meta_device(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    to_meta(model.layers, buffers=True)
    with offload(model.layers, tmp_path, device="cpu", resident=["router.weight"]) as handle:
        assert not any(p.is_meta for p in model.parameters())
        assert torch.equal(model.layers[2].router.weight, twin.layers[2].router.weight)
        assert torch.equal(model.layers[2].scale, twin.layers[2].scale)
        assert_same_step(model, twin)
        handle.remove()
    assert_same_step(model, twin)


def test_a_whole_model_on_the_meta_device(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    for each in (model, twin):
        each.layers.requires_grad_(False)
    whole = {("model." + n if "layers" in n else n): t.clone() for n, t in twin.state_dict().items()}
    save_file(whole, tmp_path / "model.safetensors")
    to_meta(model, buffers=True, frozen_only=False)
    with offload(model.layers, tmp_path, device="cpu", model=model):
        assert model.head.weight.requires_grad
        assert_same_step(model, twin)


def test_trainable_parameters_on_the_meta_device(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    to_meta(model.layers, frozen_only=False)
    refused(model, tmp_path, "trainable parameter 'norm.weight' of layer 0 is on the meta device and not in")
    tensors = {"model.layers." + name: t.clone() for name, t in twin.layers.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with offload(model.layers, tmp_path, device="cpu"):
        assert model.layers[1].mix.up.requires_grad
        assert_same_step(model, twin)


def test_meta_tensors_without_values(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 2)
    to_meta(model.layers, buffers=True)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.scale"))
    refused(model, tmp_path, "buffer 'scale' of layer 1 is on the meta device and not in")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.1.scale": torch.ones(3)}))
    refused(model, tmp_path, r"'scale' of layer 1 has shape \(\), but 'model.layers.1.scale' .* has \(3,\)")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.1.scale": torch.tensor(0.5)}))
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.router.weight"))
    refused(model, tmp_path, "parameter 'router.weight' of layer 0 is on the meta", resident=["router.weight"])


# ---- quantised weights


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    """Matrices as 8-bit integers with a scale for each row (of each expert)."""
    for name in [name for name in tensors if name.endswith(("mix.weight", "_proj", "_proj.weight"))]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(-1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}.scale"] = scale


def dequantise(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.is_meta
    packed, scale = tensors[""], tensors["scale"]
    return (packed.float() * scale).view(parameter.shape).to(parameter.dtype)


def quantised(folder: Path, count: int, single_experts: bool = False) -> tuple[ToyModel, ToyModel]:
    """A model with a quantised checkpoint, and its twin with the values that this stands for."""
    model, twin = twins(folder, count)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if single_experts:
            split_experts(tensors)
        quantise(tensors)

    rewrite(folder, change)
    for _, weight in twin.layers.named_parameters():
        if not weight.requires_grad and tuple(weight.shape) != (EXPERTS, HIDDEN):
            scale = weight.data.abs().amax(-1, keepdim=True) / 127
            weight.data = (weight.data / scale).round() * scale
    return model, twin


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("single_experts", [False, True])
def test_dequantised_weights(tmp_path: Path, slots: int, autocast: bool, single_experts: bool) -> None:
    model, twin = quantised(tmp_path, 3, single_experts)
    names: list[str] = []

    def counted(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return dequantise(name, tensors, parameter)

    with offloaded(model, tmp_path, num_slots=slots, dequantize=counted, debug=True):
        for seed in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = [each(tokens(seed)) for each in (model, twin)]
            assert torch.equal(*losses)
            model.zero_grad(), twin.zero_grad()
            for loss in losses:
                loss.backward()
            assert_equal(
                {n: p.grad for n, p in model.named_parameters() if p.requires_grad},  # type: ignore[misc]
                {n: p.grad for n, p in twin.named_parameters() if p.requires_grad},  # type: ignore[misc]
            )
        inside = {"mix.weight", "experts.gate_up_proj", "experts.down_proj"}
        assert {name: names.count(name) for name in inside} == dict.fromkeys(inside, 2 * 2 * 3)


def test_dequantised_weights_are_not_kept(tmp_path: Path) -> None:
    model, _ = quantised(tmp_path, 4)
    made: list[torch.multiprocessing.reductions.StorageWeakRef] = []

    def watched(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        dense = dequantise(name, tensors, parameter)
        made.append(torch.multiprocessing.reductions.StorageWeakRef(dense.untyped_storage()))
        return dense

    with offloaded(model, tmp_path, dequantize=watched):
        loss = model(tokens())
        assert len(made) == 4 * 3
        assert all(each.expired() for each in made)
        loss.backward()
        assert all(each.expired() for each in made)


def test_removal_leaves_dequantised_weights(tmp_path: Path) -> None:
    model, twin = quantised(tmp_path, 2)
    handle = offload(model.layers, tmp_path, device="cpu", dequantize=dequantise)
    handle.remove()
    assert_same_step(model, twin)


def test_quantised_weights_need_dequantize(tmp_path: Path) -> None:
    model, _ = quantised(tmp_path, 2)
    refused(model, tmp_path, r"int8; it is quantised \(with mix.weight.scale\): pass dequantize=")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda name, tensors, parameter: tensors[""], r"gave \(16, 16\) torch.int8 for 'mix.weight' of layer 0"),
        (lambda name, tensors, parameter: tensors[""][0].float(), r"gave \(16,\) torch.float32"),
        (lambda name, tensors, parameter: None, r"gave NoneType"),
    ],
)
def test_what_dequantize_has_to_give(tmp_path: Path, result: Any, message: str) -> None:
    model, _ = quantised(tmp_path, 2)
    with offloaded(model, tmp_path, dequantize=result), pytest.raises(OffloadError, match=message):
        model(tokens())


def test_dequantize_may_give_the_stored_bytes(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    rewrite(tmp_path, lambda t: t.update({n: t[n].view(-1) for n in t if "experts" in n}))

    def reshaped(name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        return tensors[""].view(parameter.shape)

    with offloaded(model, tmp_path, num_slots=1, dequantize=reshaped, debug=True):
        assert_same_step(model, twin)


# ---- state dicts, moves, copies


def test_state_dicts_leave_streamed_weights_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = twins(tmp_path, 2)
    whole = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    with offload(model.layers, tmp_path, device="cpu") as handle:
        with caplog.at_level(logging.WARNING, "gdsstream"):
            state = model.state_dict()
            assert set(model.layers[0].router.state_dict()) == set()
        assert sum("leaves streamed frozen weights out" in r.getMessage() for r in caplog.records) == 1
        assert str(tmp_path) in caplog.text
        assert set(whole) - set(state) == {"layers." + name for name in handle.streamed_names}
        changed = {name: tensor + 1 for name, tensor in state.items()}
        assert model.load_state_dict(changed) == ([], [])
        assert torch.equal(model.layers[1].mix.up, twin.layers[1].mix.up + 1)
        del changed["layers.0.mix.up"]
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"layers.0.mix.up\""):
            model.load_state_dict(changed)
        with pytest.raises(OffloadError, match=r"values for 'layers.0.mix.weight', which is streamed from"):
            model.load_state_dict(whole)
        handle.remove()
    assert set(model.state_dict()) == set(whole)
    model.load_state_dict(whole)
    assert_same_step(model, twin)


def test_moves_that_change_nothing_are_allowed_and_others_refused(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    streamed = model.layers[1].router.weight
    with offload(model.layers, tmp_path, device="cpu") as handle:
        for move in (lambda: model.to("cpu"), model.float, model.cpu, lambda: model.to(torch.float32)):
            move()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            model.to("cpu")
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        assert model.layers[1].router.weight is streamed
        assert_same_step(model, twin)
        for move in (model.layers.half, model.layers[1].double, lambda: model.layers.to("meta")):
            with pytest.raises(OffloadError, match=r"streamed weights are torch\.float32 on cpu and cannot become"):
                move()
        assert_same_step(model, twin)
        handle.remove()
    model.double(), twin.double()
    assert_same_step(model, twin)


def test_copies_are_refused(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    with offload(model.layers, tmp_path, device="cpu") as handle:
        for copied in (copy.deepcopy, pickle.dumps, copy.copy):
            with pytest.raises(OffloadError, match="cannot be copied or pickled"):
                copied(model.layers[0])
        with pytest.raises(OffloadError, match="cannot be copied or pickled"):
            copy.deepcopy(model)
        handle.remove()
    assert_same_step(copy.deepcopy(model), twin)


assert INNER
