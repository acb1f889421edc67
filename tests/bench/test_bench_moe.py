"""The compute of the layer scenarios, against autograd; and what a layer's file holds."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import files, moe
from bench.clock import Clock
from bench.config import MoeConfig

SMALL = MoeConfig(hidden=64, shared=128, expert=32, active=3)
REFERENCE = MoeConfig()


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    # Larger than a model's, so that the activations of so small a layer are not all alike.
    names = enumerate(moe.matrices(SMALL).items())
    return {name: moe.random(shape, "cpu", number, 0.1).to(dtype) for number, (name, shape) in names}


def resized(state: torch.Tensor) -> torch.Tensor:
    return state / (state.norm(dim=-1, keepdim=True) * SMALL.hidden**-0.5 + 1e-6)


def layer_of(x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer as one would write it, without its normalisation."""
    total = torch.zeros_like(x)
    for base in ["mlp.shared_experts", *(f"mlp.experts.{i}" for i in range(SMALL.active))]:
        gate, up, down = (values[f"{base}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        total = total + torch.nn.functional.linear(torch.nn.functional.silu(x @ gate.T) * (x @ up.T), down)
    return total


def test_forward_is_what_one_would_write() -> None:
    compute = moe.Moe(SMALL, 16, "cpu", backward=False)
    expected = compute.state.double()
    for _ in range(2):
        compute.layer(weights())
        expected = resized(expected + layer_of(expected, weights(torch.float64)))
    torch.testing.assert_close(compute.state.double(), expected, atol=0.05, rtol=0.05)


def test_backward_is_autograds() -> None:
    compute = moe.Moe(SMALL, 16, "cpu", backward=True)
    gradient = compute.state.double()
    x = gradient.flip(0).requires_grad_()
    layer_of(x, weights(torch.float64)).backward(gradient)
    assert x.grad is not None
    compute.layer(weights())
    torch.testing.assert_close(compute.state.double(), resized(gradient + x.grad), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", list(moe.matrices(SMALL)))
def test_every_weight_counts(backward: bool, name: str) -> None:
    results = []
    for change in (0.0, 0.5):
        compute = moe.Moe(SMALL, 8, "cpu", backward=backward)
        values = weights()
        values[name][3, 5] += change
        for _ in range(2):
            compute.layer(values)
        results.append(compute.state.clone())
    assert not torch.equal(*results)


def test_start_begins_anew_and_gives_the_same_bits() -> None:
    compute = moe.Moe(SMALL, 16, "cpu", backward=False, seed=3)
    results = []
    for _ in range(2):
        compute.start()
        for _ in range(5):
            compute.layer(weights())
        results.append(compute.state.clone())
    assert torch.equal(*results)
    assert torch.isfinite(results[0]).all()
    assert results[0].float().square().mean() == pytest.approx(1.0, rel=0.05)


class Products(TorchDispatchMode):
    """Counts the floating-point operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "mm" in name:
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_backward_has_twice_the_matrix_products() -> None:
    for backward in (False, True):
        compute = moe.Moe(SMALL, 8, "cpu", backward=backward)
        with Products() as counter:
            compute.layer(weights())
        assert counter.flops == moe.flops(SMALL, 8, backward=backward)
    assert moe.flops(REFERENCE, 8192, backward=False) == 8192 * 2 * 3 * 5120 * (12288 + 8 * 1536)


@pytest.mark.parametrize(("nbytes", "whole"), [(1_237_000_000, 27), (200_000_000, 1 + 4), (1_000_003, 0)])
def test_a_layer_holds_what_fits_and_is_full(nbytes: int, whole: int) -> None:
    found = moe.layer_tensors(REFERENCE, nbytes)
    assert nbytes - 8 < 2 * sum(map(prod, found.values())) <= nbytes
    assert list(found)[-1] == moe.REST
    assert len(found) - 1 == whole
    assert all(found[name] == shape for name, shape in moe.matrices(REFERENCE).items() if name in found)
    assert 2 * found[moe.REST][0] % moe.SUM_BYTES == 0


def test_a_layer_without_a_rest() -> None:
    exact = 2 * sum(map(prod, moe.matrices(SMALL).values()))
    assert moe.REST not in moe.layer_tensors(SMALL, exact + 7)
    assert moe.layer_tensors(SMALL, exact + 8)[moe.REST] == (4,)


def test_files_of_weights_hold_finite_numbers_of_their_size(tmp_path: Path) -> None:
    plan = files.Plan(tmp_path, 2, 40_000_000, "", shapes=lambda layer, n: moe.shapes(SMALL, layer, n), weights=True)
    with files.written(plan) as written:
        raw = torch.from_numpy(np.fromfile(written.paths[1], dtype=np.uint8))
        for info in written.tensors.values():
            if info.file != 1:
                continue
            values = raw[info.offset : info.offset + info.nbytes].clone().view(torch.bfloat16).float()
            # The rest is longer than the pool, and wraps around in it.
            assert torch.isfinite(values).all(), info.name
            assert 2**-9 <= values.abs().min() <= values.abs().max() < 2**-5
            assert values.std() == pytest.approx(moe.WEIGHT_SIZE, rel=0.1)
            assert abs(float(values.mean())) < 0.002


def test_a_sum_is_of_every_word() -> None:
    data = torch.arange(64, dtype=torch.int16).view(torch.bfloat16)
    before, after = torch.zeros(2, dtype=torch.int64)
    moe.add_up(data, before)
    data.view(torch.uint8)[77] ^= 4
    moe.add_up(data, after)
    assert int(before - after) in (4 << 8 * (77 % 8), -(4 << 8 * (77 % 8)))


def test_the_clock_on_the_cpu_gives_torch_its_threads_back() -> None:
    clock, before = Clock("cpu"), torch.get_num_threads()
    inside = []

    def fail() -> None:
        with clock.side():
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [1]
    assert torch.get_num_threads() == before
    begin = clock.mark()
    clock.synchronize()
    assert clock.seconds(begin, clock.mark()) > 0
