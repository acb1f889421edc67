"""Shapes of Llama 3, and how they are made to fit."""

from __future__ import annotations

import pytest

from bench import llama
from bench.config import BenchConfigError


@pytest.mark.parametrize(("model", "parameters"), [("8b", 8_030_261_248), ("70b", 70_553_706_496)])
def test_the_whole_model_has_the_published_number_of_parameters(model: str, parameters: int) -> None:
    whole = llama.scaled(model, 10**13, optimizer=False, shrink=1)
    assert (whole.nbytes, whole.layers, whole.whole) == (2 * parameters, llama.SHAPES[model].layers, True)
    assert llama.full_bytes(model, optimizer=False) == 2 * parameters
    assert llama.full_bytes(model, optimizer=True) == 14 * parameters


def test_layers_of_a_true_shape_are_left_out_until_the_rest_fits() -> None:
    found = llama.scaled("8b", 10_000_000_000, optimizer=False, shrink=1)
    assert (found.layers, found.whole) == (18, True)
    assert found.nbytes <= 10_000_000_000 < found.nbytes + llama.nbytes(llama.layer(llama.SHAPES["8b"], 0))
    shapes = {name: shape for name, _, shape in found.tensors}
    assert shapes["model.layers.17.mlp.down_proj.weight"] == (4096, 14336)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 4096)
    assert shapes["lm_head.weight"] == (128256, 4096)
    alone = llama.scaled("8b", 1_000_000_000, optimizer=False, shrink=1)
    assert (alone.layers, alone.whole) == (2, False)
    assert all(name.startswith("model.layers.") for name, _, _ in alone.tensors)


def test_optimizer_state_is_fp32_and_of_the_weights_shapes() -> None:
    found = llama.scaled("8b", 10_000_000_000, optimizer=True, shrink=1)
    by_name = {name: (dtype, shape) for name, dtype, shape in found.tensors}
    weights = [name for name in by_name if not name.startswith("optimizer.")]
    assert len(by_name) == 4 * len(weights)
    for name in weights:
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert by_name[f"optimizer.{kind}.{name}"] == ("F32", by_name[name][1])


def test_where_no_layer_fits_the_sizes_are_said() -> None:
    with pytest.raises(BenchConfigError, match=r"70b takes 1\.711 GB, and a checkpoint may have 1\.000 GB here"):
        llama.scaled("70b", 10**9, optimizer=False, shrink=1)


def test_narrowed_shapes_have_no_empty_tensor() -> None:
    for model in llama.SHAPES:
        found = llama.scaled(model, 10**9, optimizer=False, shrink=256)
        assert all(min(shape) > 0 for _, _, shape in found.tensors)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_shards_hold_every_tensor_once_and_none_is_empty(count: int) -> None:
    tensors = llama.scaled("8b", 40_000_000, optimizer=False, shrink=16).tensors
    groups = llama.shards(tensors, count)
    assert [each for group in groups for each in group] == tensors
    assert all(groups)
    assert len(groups) <= count
    if count == 7:
        sizes = [llama.nbytes(group) for group in groups]
        assert max(sizes) < 2 * llama.nbytes(tensors) / 7
