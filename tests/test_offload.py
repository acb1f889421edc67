"""Offloaded training and inference against the resident model's, bit for bit; and what a handle does."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from offload_support import assert_free, assert_same_step, deterministic, offloaded, step, twins
from support import run_python
from torch import nn
from toy_moe import ToyLayer, ToyModel, assert_equal, gradients, save, tokens, toy_model

from gdsstream import EngineClosedError, LeaseError, OffloadError
from gdsstream.layers import LayerStreamer
from gdsstream.offloading import offload
from gdsstream.schedule import Order

__all__ = ["deterministic"]


def test_a_resident_model_equals_its_twin(tmp_path: Path) -> None:
    # Without this the comparisons below would say nothing.
    model, twin = twins(tmp_path, 3)
    for seed in range(3):
        assert_same_step(model, twin, seed)


@pytest.mark.parametrize(("layers", "slots"), [(5, 1), (5, 2), (7, 3), (4, 3), (3, 3), (2, 5), (1, 2)])
@pytest.mark.parametrize("pair", [False, True], ids=["output", "tuple"])
def test_training_equals_the_resident_model(tmp_path: Path, layers: int, slots: int, pair: bool) -> None:
    model, twin = twins(tmp_path, layers, pair=pair)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (model, twin)]
    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        for seed in range(5):
            assert_same_step(model, twin, seed)
            for optimizer in optimizers:
                optimizer.step()
        assert_equal({n: p for n, p in model.named_parameters() if p.requires_grad}, trained(twin))
        stats = handle.stats()
        assert stats.order_misses == 0
        assert stats.leases == 5 * 2 * layers, "each layer is leased once forward, once backward"
        last = handle.streamer.last_step
        assert last is not None
        assert last.reads == 2 * max(layers - slots, 0)


def trained(model: ToyModel) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("slots", [1, 2])
def test_a_first_layer_without_input_gradient(tmp_path: Path, slots: int) -> None:
    model, twin = twins(tmp_path, 3, trained_embedding=False)
    with offloaded(model, tmp_path, num_slots=slots) as handle:
        for seed in range(3):
            assert_same_step(model, twin, seed)
        assert handle.stats().order_misses == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_then_training(tmp_path: Path, mode: type) -> None:
    model, twin = twins(tmp_path, 4)
    with offloaded(model, tmp_path) as handle:
        for each in (model, twin):
            each.eval()
        with mode():
            for seed in range(2):
                assert torch.equal(model(tokens(seed)), twin(tokens(seed)))
        assert handle.streamer.order == Order.forward(4)
        assert handle.stats().order_misses == 0
        for each in (model, twin):
            each.train()
        assert_same_step(model, twin)
        assert handle.streamer.order == Order.training(4)


def test_offload_itself_under_inference_mode(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    with torch.inference_mode():
        handle = offload(model.layers, tmp_path, device="cpu")
        assert torch.equal(model(tokens()), twin(tokens()))
    assert_same_step(model, twin)
    handle.remove()


def test_the_order_follows_what_passes_do(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 4)
    model.eval(), twin.eval()
    with offloaded(model, tmp_path) as handle:
        assert_same_step(model, twin)  # nothing says before that a backward pass will come
        assert handle.streamer.order == Order.forward(4)
        missed = handle.stats().order_misses
        assert missed > 0
        for _ in range(3):
            assert_same_step(model, twin)
        assert handle.streamer.order == Order.training(4)
        assert handle.stats().order_misses == missed
        with torch.no_grad():
            model(tokens())
        assert handle.streamer.order == Order.forward(4)
        model.train()
        with torch.no_grad():
            for _ in range(2):
                model(tokens())
        assert handle.streamer.order == Order.forward(4)
        assert_same_step(model, twin)
        assert handle.stats().order_misses == missed


def test_an_order_of_the_users_own_is_kept(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    order = Order.explicit([0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 1, 0], cyclic=True)
    with offloaded(model, tmp_path, order=order) as handle:
        for _ in range(2):
            losses = [model(tokens(seed)) for seed in (0, 1)]
            for loss in reversed(losses):
                loss.backward()
        assert handle.streamer.order == order
        assert handle.stats().order_misses == 0
    assert order.sequence[3:5] == (0, 1)
    for seed in (0, 1, 0, 1):
        twin(tokens(seed)).backward()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("how", ["one by one", "both, last first", "both, first first", "sum", "twice"])
def test_accumulated_gradients(tmp_path: Path, slots: int, how: str) -> None:
    model, twin = twins(tmp_path, 4)

    def accumulate(model: ToyModel) -> dict[str, torch.Tensor]:
        if how == "one by one":
            for seed in (1, 2):
                model(tokens(seed)).backward()
        elif how == "twice":
            loss = model(tokens(1))
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            losses = [model(tokens(seed)) for seed in (1, 2)]
            if how == "sum":
                sum(losses).backward()
            for loss in [] if how == "sum" else losses[::-1] if "last" in how.split(",")[1] else losses:
                loss.backward()
        return gradients(model)

    with offloaded(model, tmp_path, num_slots=slots, debug=True):
        assert_equal(accumulate(model), accumulate(twin))


def test_a_part_of_the_model_is_differentiated(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 4)

    def run(model: ToyModel) -> tuple[torch.Tensor, ...]:
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = [x]
        for layer in model.layers:
            outputs.append(layer(outputs[-1]))
        weight = model.layers[2].mix.up
        return torch.autograd.grad(outputs[-1].sum(), [outputs[2], weight, x])

    with offloaded(model, tmp_path, num_slots=2):
        for found, expected in zip(run(model), run(twin), strict=True):
            assert torch.equal(found, expected)


def test_one_layer_used_twice_in_a_pass(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)

    def run(model: ToyModel) -> dict[str, torch.Tensor]:
        x = model.embed(tokens())
        for index in (0, 1, 1, 2, 0):
            x = model.layers[index](x)
        x.sum().backward()
        return gradients(model)

    for slots in (1, 2):
        model.zero_grad(), twin.zero_grad()
        with offload(model.layers, tmp_path, device="cpu", num_slots=slots) as handle:
            assert_equal(run(model), run(twin))
            assert_free(handle)
            handle.remove(load=True)


def test_a_layer_that_passes_its_input_through(tmp_path: Path) -> None:
    class Passing(ToyLayer):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x

    torch.manual_seed(0)
    model = ToyModel([Passing() for _ in range(4)])
    model.call = lambda layer, x: sum(layer(x))
    twin = copy.deepcopy(model)
    save(model.layers, tmp_path)
    with offloaded(model, tmp_path, num_slots=2) as handle:
        for _ in range(2):
            assert_same_step(model, twin)
        assert handle.stats().order_misses == 0


@pytest.mark.parametrize("trained_embedding", [True, False])
def test_the_backward_pass_gives_each_layer_up_as_it_leaves_it(tmp_path: Path, trained_embedding: bool) -> None:
    model, _ = twins(tmp_path, 4, trained_embedding=trained_embedding)
    held: dict[int, list[int]] = {}
    with offloaded(model, tmp_path, num_slots=4) as handle:

        def watch(module: nn.Module, number: int) -> None:
            def record(gradient: torch.Tensor) -> None:
                held[number] = [layer.index for layer in handle._layers if layer.is_held]

            def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
                output.register_hook(record)

            module.register_forward_hook(hook)

        for index, layer in enumerate(model.layers):
            watch(layer, index)
            watch(layer.mix, index + 10)
        step(model)
    inside = {index + 10: [index] for index in range(4)}
    assert {index: layers for index, layers in held.items() if index >= 10} == inside
    assert all(len(layers) <= 1 for layers in held.values())


def test_two_models_at_once(tmp_path: Path) -> None:
    first, first_twin = twins(tmp_path / "1", 3, seed=1)
    second, second_twin = twins(tmp_path / "2", 4, seed=2)
    with offloaded(first, tmp_path / "1"), offloaded(second, tmp_path / "2", num_slots=1):
        for each, twin in ((first, first_twin), (second, second_twin)):
            assert_same_step(each, twin)

        def chained(one: ToyModel, other: ToyModel) -> dict[str, torch.Tensor]:
            one.zero_grad(), other.zero_grad()
            x = one.embed(tokens())
            for layer in (*one.layers, *other.layers):
                x = layer(x)
            x.sum().backward()
            return {**gradients(one), **{"other " + n: g for n, g in gradients(other).items()}}

        assert_equal(chained(first, second), chained(first_twin, second_twin))


def test_lists_of_one_model_with_a_handle_each(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 6)
    halves = [model.layers[:3], model.layers[3:]]
    handles = []
    for number, half in enumerate(halves):
        save(half, tmp_path / str(number), "encoder.block.")
        handles.append(offload(half, tmp_path / str(number), device="cpu", num_slots=2 - number))
    for seed in range(2):
        assert_same_step(model, twin, seed)
    for handle in handles:
        assert handle.stats().order_misses == 0
        handle.remove()
    assert_same_step(model, twin)


def test_a_handle_tells_what_it_streams_and_goes_without_a_trace(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    before = [dict(layer.__dict__) for layer in model.layers]
    parameters = dict(model.named_parameters())
    handle = offload(model.layers, tmp_path, device="cpu")
    assert isinstance(handle.streamer, LayerStreamer)
    inside = ("mix.weight", "router.weight", "experts.gate_up_proj", "experts.down_proj")
    assert handle.streamed_names == tuple(f"{i}.{name}" for i in range(2) for name in inside)
    assert handle.stats().leases == 0
    assert model.layers[0].router.weight.shape == (0,)
    with pytest.raises(RuntimeError):
        model.layers[0].router(torch.ones(3, 16))
    handle.remove()
    handle.remove()
    assert [dict(layer.__dict__) for layer in model.layers] == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert_equal(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert not model.layers[0].router.weight.requires_grad
    assert_same_step(model, twin)
    with pytest.raises(EngineClosedError):
        handle.streamer.layer(0)


def test_remove_without_loading_leaves_meta_parameters(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 2)
    with offload(model.layers, tmp_path, device="cpu"):
        pass
    weight = model.layers[1].experts.down_proj
    assert weight.is_meta
    assert weight.shape == (3, 16, 24)
    assert not weight.requires_grad
    assert not model.layers[1].mix.up.is_meta


def test_remove_while_a_layer_is_in_use(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    handle = offload(model.layers, tmp_path, device="cpu")
    with handle.hold(1), pytest.raises(OffloadError, match="layer 1 is in use"):
        handle.remove()
    loss = model(tokens())
    handle.remove()
    with pytest.raises(OffloadError, match="handle was removed"):
        loss.backward()
    with pytest.raises(OffloadError, match="handle was removed"), handle.hold(0):
        pass
    assert_same_step(model, twin)


def test_who_wrapped_a_layer_again_keeps_the_wrapping(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    handle = offload(model.layers, tmp_path, device="cpu")
    layer = model.layers[0]
    ours, calls = layer.forward, []

    def outer(*args: object) -> object:
        calls.append(1)
        return ours(*args)

    layer.forward = outer
    assert_same_step(model, twin)
    handle.remove()
    assert layer.forward is outer
    assert_same_step(model, twin)
    assert len(calls) == 2


def test_holding_a_layer(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 4)
    with offloaded(model, tmp_path) as handle:
        with handle.hold(2):
            assert torch.equal(model.layers[2].router.weight, twin.layers[2].router.weight)
            with handle.hold(2):
                pass
            assert torch.equal(model.layers[2].mix.weight, twin.layers[2].mix.weight)
            assert_same_step(model, twin)
            leases = handle.stats().leases
            model.layers[2](torch.ones(3, 16))
            assert handle.stats().leases == leases
        with handle.hold(0), handle.hold(1), pytest.raises(LeaseError, match="all 2 slot"), handle.hold(2):
            pass


def test_two_threads_on_one_model(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 5)
    expected = {seed: step(twin, seed)[0] for seed in range(4)}
    found: dict[int, list[torch.Tensor]] = {seed: [] for seed in range(4)}
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for _ in range(5):
                with torch.set_grad_enabled(seed % 2 == 0):
                    loss = model(tokens(seed))
                if seed % 2 == 0:
                    loss.backward()
                found[seed].append(loss.detach())
        except BaseException as error:
            errors.append(error)

    with offloaded(model, tmp_path, num_slots=4):
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        for seed, losses in found.items():
            assert len(losses) == 5
            assert all(torch.equal(loss, expected[seed]) for loss in losses)


def test_memory_is_flat_over_many_steps(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    with offloaded(model, tmp_path):
        counts = []
        for _ in range(3):  # slots make their views when they are first needed
            for _ in range(10):
                step(model)
                model(tokens())  # a graph that is dropped without a backward pass
            counts.append(count_tensors())
        assert counts[2] == counts[1]
    assert_equal(step(toy_model(3))[1], step(twin)[1])


def count_tensors() -> int:
    import gc

    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_the_interpreter_exits_with_a_graph_alive(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from offload_support import offload, twins
from toy_moe import tokens
model, twin = twins(Path(sys.argv[1]), 3)
handle = offload(model.layers, sys.argv[1], device="cpu")
loss = model(tokens())
"""
    assert run_python(code, tmp_path) == ("", "")
