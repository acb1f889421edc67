"""What autograd saves, recomputes and hides: checkpointing, autocast, hooks, interruptions, and what is refused."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_support import assert_free, assert_same_step, deterministic, offloaded, step, twins
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from toy_moe import HIDDEN, ToyLayer, ToyModel, assert_equal, gradients, save, tokens

from gdsstream import OffloadError
from gdsstream.offloading import offload

__all__ = ["deterministic"]

KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])


def put_checkpoint(model: ToyModel, where: str, reentrant: bool) -> None:
    if where == "layer":
        model.call = partial(checkpoint, use_reentrant=reentrant)
    elif where == "forward":
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)


@KINDS
@pytest.mark.parametrize("where", ["layer", "forward before", "forward after"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("pair", [False, True], ids=["output", "tuple"])
def test_checkpoints_on_every_layer(tmp_path: Path, where: str, reentrant: bool, slots: int, pair: bool) -> None:
    model, twin = twins(tmp_path, 5, pair=pair)
    put_checkpoint(twin, where.split()[0], reentrant)
    if where == "forward before":
        put_checkpoint(model, "forward", reentrant)
    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        if where == "forward after":
            put_checkpoint(model, "forward", reentrant)
        elif where == "layer":
            put_checkpoint(model, "layer", reentrant)
        for seed in range(3):
            assert_same_step(model, twin, seed)
        assert [layer.calls for layer in model.layers] == [layer.calls for layer in twin.layers] == [6] * 5
        stats = handle.stats()
        assert stats.leases == 3 * 2 * 5, "recomputing shares the backward pass's lease"
        assert stats.order_misses == 0
        last = handle.streamer.last_step
        assert last is not None
        assert last.reads == 2 * (5 - slots)


@KINDS
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_checkpoints_around_several_layers(tmp_path: Path, reentrant: bool, slots: int) -> None:
    model, twin = twins(tmp_path, 6)

    def run(model: ToyModel) -> dict[str, torch.Tensor]:
        model.zero_grad()
        x = checkpoint_sequential(model.layers, 3, model.embed(tokens()), use_reentrant=reentrant)
        F.cross_entropy(model.head(x), tokens()).backward()
        return gradients(model)

    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        for _ in range(2):
            assert_equal(run(model), run(twin))
        assert [layer.calls for layer in model.layers] == [layer.calls for layer in twin.layers]
        assert_free(handle)


@KINDS
@pytest.mark.parametrize("where", ["layer", "forward"])
def test_a_checkpointed_graph_differentiated_twice(tmp_path: Path, where: str, reentrant: bool) -> None:
    model, twin = twins(tmp_path, 4)
    for each in (model, twin):
        put_checkpoint(each, where, reentrant)

    def run(model: ToyModel) -> dict[str, torch.Tensor]:
        loss = model(tokens())
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    with offloaded(model, tmp_path, num_slots=1, debug=True):
        assert_equal(run(model), run(twin))


def test_selective_checkpointing_sees_only_the_layers_operations(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    seen: dict[str, list[str]] = {"model": [], "twin": []}

    def policy(who: str, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[who].append(str(operation))
        keep = operation is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    for who, each in (("model", model), ("twin", twin)):
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, who))
        each.call = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    with offloaded(model, tmp_path, debug=True):
        for seed in range(2):
            assert_same_step(model, twin, seed)
    assert seen["model"] == seen["twin"]


# ---- other hooks


def test_hooks_around_the_model_get_everything_but_weights(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)

    def run(model: ToyModel) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            packed.append(tensor.detach().clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
            loss = model(tokens())
        loss.backward()
        return gradients(model), packed

    expected, of_twin = run(twin)
    with offloaded(model, tmp_path, num_slots=1, debug=True):
        found, of_model = run(model)
    assert_equal(found, expected)
    weights = sum(not any(torch.equal(tensor, other) for other in of_model) for tensor in of_twin)
    assert 0 < len(of_model) == len(of_twin) - weights


def test_hooks_inside_of_a_layer_that_save_copies(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    for each in (model, twin):
        for layer in each.layers:
            layer.experts.forward = _saving_clones(layer.experts.forward)
    with offloaded(model, tmp_path, num_slots=1, debug=True):
        assert_same_step(model, twin)


def _saving_clones(forward: Callable[..., Any]) -> Callable[..., Any]:
    def saving(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            return forward(*args)

    return saving


def test_a_saved_tensor_that_was_modified_is_noticed(tmp_path: Path) -> None:
    class Modifying(ToyLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.exp(self.router(x) + self.norm.bias[0])
            out = x + h.sum()
            h.add_(1)
            return out

    model = ToyModel([Modifying()])
    twin = copy.deepcopy(model)
    save(model.layers, tmp_path)
    with offloaded(model, tmp_path):
        for each in (twin, model):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                each(tokens()).backward()


def test_a_look_at_what_a_graph_saved(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    x = torch.ones(3, HIDDEN, requires_grad=True)
    with offloaded(model, tmp_path) as handle:
        node, other = (each.layers[0](x).grad_fn for each in (model, twin))
        found: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        for start, weights in ((node, found), (other, expected)):
            todo = [start]
            while todo:
                each = todo.pop()
                weights += [getattr(each, a) for a in ("_saved_mat2", "_saved_weight") if hasattr(each, a)]
                todo += [following for following, _ in each.next_functions if following is not None]
        assert_free(handle)
        assert len(found) > 5
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("where", ["nowhere", "forward before", "forward after"])
def test_double_backward_is_refused(tmp_path: Path, where: str) -> None:
    model, twin = twins(tmp_path, 3)
    if where == "forward before":
        put_checkpoint(model, "forward", reentrant=False)
    with offloaded(model, tmp_path) as handle:
        if where == "forward after":
            put_checkpoint(model, "forward", reentrant=False)
        with pytest.raises(OffloadError, match="create_graph=True"):
            torch.autograd.grad(model(tokens()), model.layers[0].mix.up, create_graph=True)
        assert_free(handle)
        assert_same_step(model, twin)


def test_functorch_is_refused(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 2)
    with offloaded(model, tmp_path) as handle:
        with pytest.raises(OffloadError, match=r"torch\.func"):
            torch.func.grad(lambda x: model.layers[0](x).sum())(torch.ones(2, HIDDEN))
        with pytest.raises(OffloadError, match=r"torch\.func"):
            torch.func.vmap(model.layers[0])(torch.ones(2, 3, HIDDEN))
        assert_free(handle)


def test_where_hooks_are_disabled_only_gradients_are_refused(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    with offloaded(model, tmp_path), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(OffloadError, match="hooks are disabled: not here"):
            model(tokens())
        with torch.no_grad():
            assert torch.equal(model(tokens()), twin(tokens()))


# ---- autocast


class Casts(TorchDispatchMode):
    """Keeps weak references to what is copied to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.made.append((StorageWeakRef(result.untyped_storage()), result.numel()))
        return result

    def kept(self) -> int:
        return sum(numel for reference, numel in self.made if not reference.expired())


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("where", ["nowhere", "layer", "forward"])
def test_autocast(tmp_path: Path, slots: int, where: str) -> None:
    model, twin = twins(tmp_path, 4)
    for each in (model, twin):
        put_checkpoint(each, where, reentrant=False)

    def run(model: ToyModel, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        model.zero_grad()
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(seed))
        kept = casts.kept()
        loss.backward()
        return loss.detach(), gradients(model), kept

    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        for seed in range(2):
            (loss, found, kept), (expected_loss, expected, all_kept) = run(model, seed), run(twin, seed)
            assert torch.equal(loss, expected_loss)
            assert_equal(found, expected)
            if where == "nowhere":
                assert kept == all_kept - frozen
        assert handle.stats().order_misses == 0


def test_autocast_that_casts_no_weight_watches_nothing(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 2)
    for each in model.layers:
        for parameter in each.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    save(model.layers, tmp_path)
    twin = copy.deepcopy(model)
    depths: list[int] = []
    with offloaded(model, tmp_path), torch.autocast("cpu", torch.bfloat16):
        model.layers[0].router.register_forward_hook(lambda *_: depths.append(torch._C._len_torch_dispatch_stack()))
        assert_same_step(model, twin)
    assert depths == [0]


# ---- interruptions


class Failing(ToyLayer):
    """Fails on demand, in the middle of its forward or of its backward pass."""

    error: type[BaseException] | None = None
    in_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.router(x)
        if self.error is not None and self.in_backward:
            if h.requires_grad:
                h.register_hook(self.fail)
        elif self.error is not None:
            self.fail(h)
        return super().forward(x) + h.sum()

    def fail(self, _: torch.Tensor) -> None:
        assert self.error is not None
        raise self.error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "nonreentrant", "reentrant"])
def test_a_layer_that_fails_gives_its_slot_back(
    tmp_path: Path, error: type[BaseException], in_backward: bool, slots: int, checkpointed: bool | None
) -> None:
    torch.manual_seed(0)
    model = ToyModel([Failing() for _ in range(4)])
    twin = copy.deepcopy(model)
    save(model.layers, tmp_path)
    if checkpointed is not None:
        put_checkpoint(model, "layer", reentrant=checkpointed)
    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        for layer in (2, 0, 3):
            failing = model.layers[layer]
            failing.error, failing.in_backward = error, in_backward
            with pytest.raises(error):
                step(model)
            assert_free(handle)
            failing.error = None
            assert_same_step(model, twin)


class Interrupting:
    """Raises KeyboardInterrupt at the n-th line of our own modules that is executed."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __enter__(self) -> Interrupting:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if Path(frame.f_code.co_filename).name not in ("offloading.py", "lending.py", "gates.py", "saved.py"):
            return None
        if frame.f_code.co_name == "saving":  # as open to interrupts as torch's own context managers
            return None
        self.left -= 1
        if self.left == 0 and frame.f_code.co_name != "__del__":
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt(self.where)
        return self.trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts inside of __del__
@pytest.mark.parametrize(("slots", "where"), [(1, "nowhere"), (2, "layer")])
def test_an_interrupt_at_any_line(tmp_path: Path, slots: int, where: str) -> None:
    model, twin = twins(tmp_path, 3)
    expected_loss, expected = step(twin)
    put_checkpoint(model, where, reentrant=True)
    with offloaded(model, tmp_path, num_slots=slots, debug=True) as handle:
        step(model)
        at, interrupted = 1, 0
        while True:
            interrupting = Interrupting(at)
            try:
                with interrupting:
                    step(model)
            except KeyboardInterrupt:
                interrupted += 1
            if interrupting.left > 0:
                break
            loss, found = step(model)
            assert torch.equal(loss, expected_loss), interrupting.where
            assert_equal(found, expected)
            assert_free(handle)
            at += 173
        assert interrupted > 20


def test_an_interrupt_by_signal(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)

    def interrupted(layer: nn.Module, in_backward: bool) -> None:
        def interrupt(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

        def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            output.register_hook(interrupt) if in_backward else interrupt()

        remove = layer.mix.register_forward_hook(hook)
        with pytest.raises(KeyboardInterrupt):
            step(model)
        remove.remove()

    with offloaded(model, tmp_path, num_slots=1, debug=True) as handle:
        for in_backward in (False, True):
            interrupted(model.layers[1], in_backward)
            assert_free(handle)
            assert_same_step(model, twin)


def test_a_file_that_changes_in_the_middle(tmp_path: Path) -> None:
    model, _ = twins(tmp_path, 6)
    handle = offload(model.layers, tmp_path, device="cpu")
    step(model)
    loss = model(tokens())
    os.utime(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="written to"):
        loss.backward()
    with pytest.raises(OSError, match="written to"):
        step(model)
    with pytest.raises(OSError, match="written to"):
        handle.remove()
    handle.remove(load=False)


# ---- aliases


class KeepsView(torch.autograd.Function):
    """A product that keeps a view of its weight on the context, as bitsandbytes' 4-bit product does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight, None


class Leaking(ToyLayer):
    """Keeps, or gives away, memory of a weight in one of many ways."""

    how = ""
    kept: object = None
    slow: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.router.weight
        out = super().forward(x)
        if self.how == "view on a context":
            return out + KeepsView.apply(x, weight.view(weight.shape)).sum()
        if self.how == "parameter on a context":
            return out + KeepsView.apply(x, weight).sum()
        if self.how == "attribute":
            self.kept = weight[1:]
        elif self.how == "detached":
            self.kept = weight.detach()
        elif self.how == "output":
            return out, weight.t()
        elif self.how == "garbage":
            cycle: list[Any] = [weight.t()]
            cycle.append(cycle)
        elif self.how == "clone":
            self.kept = weight.clone()
        elif self.how == "slow":
            return self.slow(out)
        elif self.how == "hooks inside":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
                return out + self.router(x).sum()
        return out


def leaking(folder: Path, how: str) -> tuple[ToyModel, ToyModel]:
    torch.manual_seed(0)
    model = ToyModel([Leaking() for _ in range(3)])
    for layer in model.layers:
        layer.how = how
    save(model.layers, folder)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("how", ["view on a context", "attribute", "detached", "output", "hooks inside"])
@pytest.mark.parametrize("gradients", [True, False])
def test_who_keeps_a_weights_memory_is_refused(tmp_path: Path, how: str, gradients: bool) -> None:
    model, _ = leaking(tmp_path, how)
    if not gradients and how in ("view on a context", "hooks inside"):
        pytest.skip("keeps nothing without gradients")
    with offloaded(model, tmp_path), torch.set_grad_enabled(gradients):
        with pytest.raises(OffloadError, match=r"layer 0 \(Leaking\): its forward keeps 1 tensor.*resident="):
            model(tokens())
        model.layers[0].kept = None


@pytest.mark.parametrize("how", ["parameter on a context", "garbage", "clone"])
@pytest.mark.parametrize("slots", [1, 2])
def test_who_keeps_no_memory_of_a_weight_is_not(tmp_path: Path, how: str, slots: int) -> None:
    model, twin = leaking(tmp_path, how)
    with offloaded(model, tmp_path, num_slots=slots, debug=True):
        for seed in range(2):
            assert_same_step(model, twin, seed)


def test_what_another_thread_has_in_use_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes to the layer while this one looks who keeps its memory."""
    model, _ = leaking(tmp_path, "garbage")
    layer, inside, go_on = model.layers[0], threading.Event(), threading.Event()

    def slow(out: torch.Tensor) -> torch.Tensor:
        view = layer.router.weight.t()
        inside.set()
        assert go_on.wait(20)
        return out * view.sum()

    def other() -> None:
        with torch.no_grad():
            layer.how = "slow"
            layer(torch.ones(3, HIDDEN))

    thread = threading.Thread(target=other)
    collect = gc.collect

    def while_it_collects() -> int:
        found = collect()
        if not thread.ident:
            thread.start()
            assert inside.wait(20)
        return found

    layer.slow = slow
    monkeypatch.setattr(gc, "collect", while_it_collects)
    with offloaded(model, tmp_path), torch.no_grad():
        try:
            layer(torch.ones(3, HIDDEN))
        finally:
            go_on.set()
            thread.join(20)
        assert inside.is_set()
        layer.how = "attribute"
        later = threading.Timer(0.05, lambda: setattr(layer, "kept", None))
        later.start()
        layer(torch.ones(3, HIDDEN))
        later.join()
        assert layer.kept is None, "another thread lets go of it a moment later"
        with pytest.raises(OffloadError, match="keeps 1 tensor"):
            layer(torch.ones(3, HIDDEN))
        layer.kept = None


def test_a_kept_weight_may_be_resident(tmp_path: Path) -> None:
    model, twin = leaking(tmp_path, "view on a context")
    with offload(model.layers, tmp_path, device="cpu", num_slots=1, resident=["router.*"], debug=True) as handle:
        assert "0.router.weight" not in handle.streamed_names
        for seed in range(2):
            assert_same_step(model, twin, seed)


# ---- frozen stays frozen


def test_a_streamed_weight_that_is_unfrozen(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    with offloaded(model, tmp_path) as handle:
        model.layers[1].router.requires_grad_(True)
        with pytest.raises(OffloadError, match=r"'router.weight' of layer 1 .* requires_grad"):
            model(tokens())
        model.layers[1].router.requires_grad_(False)
        assert_free(handle)
        assert_same_step(model, twin)


def test_a_module_around_is_compiled(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 2)
    with offloaded(model, tmp_path):
        compiled = torch.compile(model, backend="eager")
        loss = compiled(tokens())
        loss.backward()
    expected_loss, expected = step(twin)
    assert torch.equal(loss, expected_loss)
    assert_equal(gradients(model), expected)


def test_outputs_in_a_dataclass(tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class Output:
        hidden: torch.Tensor
        more: dict[str, list[torch.Tensor]]

    class Wrapping(ToyLayer):
        def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
            out, logits = super().forward(x)
            return Output(out, {"logits": [logits]})

    torch.manual_seed(0)
    model = ToyModel([Wrapping(pair=True) for _ in range(3)])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.call = lambda layer, x: ((out := layer(x)).hidden, *out.more["logits"])
    save(model.layers, tmp_path)
    for each in (model, twin):  # computed again without us, so that weights have to be there in time
        for layer in each.layers:
            layer.mix.forward = partial(checkpoint, layer.mix.forward, use_reentrant=False)
    with offloaded(model, tmp_path, num_slots=1, debug=True):
        assert_same_step(model, twin)


class Aside(ToyLayer):
    """Has a frozen weight on a path that does not lead to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside = self.frozen.view(-1) * self.trained
        return super().forward(x) + torch.tanh(aside)


@pytest.mark.parametrize("where", ["nowhere", "forward"])
def test_layers_that_ran_in_several_threads(tmp_path: Path, where: str) -> None:
    # Autograd orders nodes by numbers that each thread counts for itself: with layers of another thread it comes to
    # what is in front of a layer before it is done with the layer.
    torch.manual_seed(0)
    model = ToyModel([Aside() for _ in range(4)])
    twin = copy.deepcopy(model)
    save(model.layers, tmp_path)

    for each in (model, twin):
        put_checkpoint(each, where, reentrant=False)  # inside of our wrapper: what it computes again are raw views

    def run(model: ToyModel) -> dict[str, torch.Tensor]:
        made: list[torch.Tensor] = []

        def first_half() -> None:
            x = model.embed(tokens())
            for _ in range(5000):
                x.view(-1)  # makes nodes, and so large numbers
            for layer in model.layers[:3]:
                x = layer(x)
            made.append(x)

        thread = threading.Thread(target=first_half)
        thread.start()
        thread.join()
        model.layers[3](made[0]).sum().backward()
        return gradients(model)

    with offloaded(model, tmp_path, num_slots=2, debug=True):
        assert_equal(run(model), run(twin))


def test_a_module_inside_is_checkpointed(tmp_path: Path) -> None:
    model, twin = twins(tmp_path, 3)
    for each in (model, twin):
        for number, layer in enumerate(each.layers):
            layer.experts.forward = partial(checkpoint, layer.experts.forward, use_reentrant=bool(number % 2))
    with offloaded(model, tmp_path, num_slots=1, debug=True):
        for seed in range(2):
            assert_same_step(model, twin, seed)


assert nn is not None
