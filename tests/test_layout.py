"""Which tensors make a layer, and where they lie in a slot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layer_files import layer_of, write_experts, write_layers
from safetensors.torch import save_file

from gdsstream.checkpoint import Checkpoint
from gdsstream.errors import CheckpointError, ConfigError, TensorNotFoundError
from gdsstream.layout import WEIGHT_ALIGNMENT_BYTES, LayerLayout, find_pattern, layer_layouts
from gdsstream.plan import Fused, ReadPlan


def fill(checkpoint: Checkpoint, layout: LayerLayout, plan: ReadPlan | None = None) -> dict[str, torch.Tensor]:
    """The views of a layout after its plan was carried out with plain file reads; what was not read is 0xFF."""
    memory = bytearray(b"\xff" * layout.nbytes)
    plan = plan or layout.plan
    for file, offset, nbytes, target in zip(
        plan.file.tolist(), plan.file_offset.tolist(), plan.nbytes.tolist(), plan.buffer_offset.tolist(), strict=True
    ):
        with open(checkpoint.files[file].path, "rb") as opened:
            opened.seek(offset)
            memory[target : target + nbytes] = opened.read(nbytes)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    return {
        name: torch.frombuffer(memory, dtype=torch.uint8)[p.offset : p.offset + p.nbytes]
        .clone()
        .view(dtypes[p.dtype])
        .view(p.shape)
        for name, p in layout.placements.items()
    }


@pytest.mark.parametrize("files", [1, 3])
def test_layers_are_found_and_filled(tmp_path: Path, files: int) -> None:
    tensors = write_layers(tmp_path, 4, files=files)
    checkpoint = Checkpoint.open(tmp_path)
    pattern, layouts = layer_layouts(checkpoint)
    assert pattern == "model.layers.{i}."
    assert len(layouts) == 4
    for index, layout in enumerate(layouts):
        wanted = layer_of(tensors, index)
        got = fill(checkpoint, layout)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert sum(t.nbytes for t in wanted.values()) == layout.plan.total_bytes <= layout.nbytes
    if files == 1:
        assert layouts[0].signature == layouts[3].signature


def test_every_weight_is_aligned_for_kernels(tmp_path: Path) -> None:
    write_layers(tmp_path, 1, shapes={"a": (5,), "b": (64, 64), "c": (1,), "d": (9, 3), "e": (64, 64)})
    (layout,) = layer_layouts(Checkpoint.open(tmp_path))[1]
    assert all(p.offset % WEIGHT_ALIGNMENT_BYTES == 0 for p in layout.placements.values() if p.nbytes >= 16)


def test_the_layers_with_the_most_tensors_are_found() -> None:
    names = [f"vision.blocks.{i}.w" for i in range(9)] + [f"h.{i}.experts.{e}.w" for i in range(3) for e in range(8)]
    assert find_pattern(names) == "h.{i}."


def test_the_pattern_is_the_one_whose_layers_are_alike() -> None:
    tower = [f"visual.blocks.{i}.{part}.weight" for i in range(9) for part in ("qkv", "proj", "fc1", "fc2")]
    text = [f"model.layers.{i}.{part}.weight" for i in range(4) for part in ("q_proj", "o_proj", "fc1")]
    names = [*tower, *text]
    assert find_pattern(names) == find_pattern(names, ["other.weight"]) == "visual.blocks.{i}."
    assert find_pattern(names, ["q_proj.weight", "o_proj.weight", "fc1.weight"]) == "model.layers.{i}."
    assert find_pattern(names, ["fc1.weight", "fc2.weight"]) == "visual.blocks.{i}."


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("decoder.{i}.", "no tensor's name begins with 'decoder.{i}.'; one is named 'model.embed_tokens.weight'"),
        ("model.layers.", "has to contain {i} once"),
        ({0: ["model.norm.weight"], 2: ["model.norm.weight"]}, "without 1"),
    ],
)
def test_layers_that_are_not_there(tmp_path: Path, layers: object, message: str) -> None:
    write_layers(tmp_path, 2)
    with pytest.raises((ConfigError, CheckpointError), match=message.replace("{", r"\{").replace("}", r"\}")):
        layer_layouts(Checkpoint.open(tmp_path), layers)  # type: ignore[arg-type]


def test_a_gap_in_the_numbers_is_named(tmp_path: Path) -> None:
    tensors = write_layers(tmp_path, 4)
    save_file({k: v for k, v in tensors.items() if ".layers.2." not in k}, tmp_path / "model-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"layers \[0, 1, 3\], without 2"):
        layer_layouts(Checkpoint.open(tmp_path))


def test_names_without_numbers(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.weight"):
        layer_layouts(Checkpoint.open(tmp_path))


def test_a_mapping_may_name_a_tensor_for_several_layers(tmp_path: Path) -> None:
    tensors = write_layers(tmp_path, 2)
    checkpoint = Checkpoint.open(tmp_path)
    names = ["model.layers.1.mlp.odd", "model.norm.weight"]
    pattern, layouts = layer_layouts(checkpoint, {0: names, 1: names, 2: ["model.layers.0.mlp.odd"]})
    assert pattern == ""
    assert all(torch.equal(fill(checkpoint, layouts[1])[name], tensors[name]) for name in names)
    with pytest.raises(TensorNotFoundError, match=r"model\.layers\.1\.mlp\.od'"):
        layer_layouts(checkpoint, {0: ["model.layers.1.mlp.od"]})


def test_groups_come_in_their_order(tmp_path: Path) -> None:
    write_layers(tmp_path, 1)
    checkpoint = Checkpoint.open(tmp_path)
    (layout,) = layer_layouts(checkpoint, groups=["self_attn.*", "*layernorm*"])[1]
    assert layout.plan.num_groups == 3
    assert layout.group_of["self_attn.q_proj.weight"] == layout.group_of["self_attn.q_proj.bias"] == 0
    assert layout.group_of["input_layernorm.weight"] == 1
    assert layout.group_of["mlp.up_proj.weight"] == 2
    assert (layout.plan.group[1:] >= layout.plan.group[:-1]).all()


@pytest.mark.parametrize("mixtral", [False, True])
def test_experts_are_stacked(tmp_path: Path, mixtral: bool) -> None:
    tensors = write_experts(tmp_path, 2, 12, mixtral=mixtral)
    checkpoint = Checkpoint.open(tmp_path)
    layout = layer_layouts(checkpoint, fuse="auto")[1][1]
    base = "block_sparse_moe.experts" if mixtral else "mlp.experts"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    got, wanted = fill(checkpoint, layout), layer_of(tensors, 1)
    assert set(got) == {"input_layernorm.weight", f"{base}.gate_up_proj", f"{base}.down_proj"}
    whole = torch.stack(
        [torch.cat([wanted[f"{base}.{e}.{gate}.weight"], wanted[f"{base}.{e}.{up}.weight"]]) for e in range(12)]
    )
    assert torch.equal(got[f"{base}.gate_up_proj"], whole)
    assert torch.equal(got[f"{base}.down_proj"], torch.stack([wanted[f"{base}.{e}.{down}.weight"] for e in range(12)]))


def test_an_incomplete_set_of_experts_is_left_alone(tmp_path: Path) -> None:
    tensors = write_experts(tmp_path, 1, 3)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (layout,) = layer_layouts(Checkpoint.open(tmp_path), fuse="auto")[1]
    assert set(layout.placements) == set(layer_of(tensors, 0))


@pytest.mark.parametrize("fuse", ["auto", None])
def test_some_experts_only(tmp_path: Path, fuse: str | None) -> None:
    write_experts(tmp_path, 1, 8)
    checkpoint = Checkpoint.open(tmp_path)
    (layout,) = layer_layouts(checkpoint, fuse=fuse)[1]
    assert layout.num_experts == 8
    plan = layout.plan_experts(frozenset({1, 6}))
    assert plan.total_bytes == 16 * 4 + 2 * 3 * 24 * 16 * 4
    whole, some = fill(checkpoint, layout), fill(checkpoint, layout, plan)
    assert torch.equal(whole["input_layernorm.weight"], some["input_layernorm.weight"])
    for e in range(8):
        name = "mlp.experts.gate_up_proj" if fuse else f"mlp.experts.{e}.up_proj.weight"
        pair = (whole[name][e], some[name][e]) if fuse else (whole[name], some[name])
        assert torch.equal(*pair) == (e in (1, 6)), e
    with pytest.raises(ConfigError, match="no expert 8: its experts count from 0 to 7"):
        layout.plan_experts(frozenset({8}))


def test_some_experts_of_stored_stacks(tmp_path: Path) -> None:
    stack = torch.randn(6, 8, 4)
    save_file(
        {"model.layers.0.mlp.experts.gate_up_proj": stack, "model.layers.0.w": torch.ones(3)},
        tmp_path / "m.safetensors",
    )
    checkpoint = Checkpoint.open(tmp_path)
    (layout,) = layer_layouts(checkpoint)[1]
    some = fill(checkpoint, layout, layout.plan_experts(frozenset({4})))["mlp.experts.gate_up_proj"]
    assert torch.equal(some[4], stack[4])
    assert not torch.equal(some[3], stack[3])
    with pytest.raises(ConfigError, match="it has no experts"):
        layer_layouts(checkpoint, {0: ["model.layers.0.w"]})[1][0].plan_experts(frozenset({0}))


def test_fused_by_hand(tmp_path: Path) -> None:
    tensors = write_layers(tmp_path, 2, shapes={"q": (4, 8), "k": (4, 8)})
    checkpoint = Checkpoint.open(tmp_path)
    layout = layer_layouts(checkpoint, fuse={"qk": Fused(("q", "k"), (8, 8))})[1][1]
    wanted = layer_of(tensors, 1)
    assert torch.equal(fill(checkpoint, layout)["qk"], torch.cat([wanted["q"], wanted["k"]]))
    with pytest.raises(TensorNotFoundError, match="'v'"):
        layer_layouts(checkpoint, fuse={"qv": Fused(("q", "v"), (8, 8))})
    with pytest.raises(ConfigError, match="fuse is 'all'"):
        layer_layouts(checkpoint, fuse="all")
