"""offload: layers of an existing model, their frozen weights streamed through a few slots of device memory.

    handle = gdsstream.offload(model.model.layers, "checkpoint/", model=model)

Each layer's `forward` is wrapped on the instance: it leases the layer, lets the parameters be views of the slot, runs,
and gives the slot back, whatever happens inside (module hooks would not run on KeyboardInterrupt). With gradients, what
autograd saves of the weights are references (`saved`), and the layer is leased again when the backward pass comes to it
(`lending`). What stays on the device and what streams is decided by `binding`; `guards` keeps state dicts, moves and
copies from taking the empty parameters for weights.

Streamed weights are frozen and are never written. Gradients are those of the resident model, bit for bit where its
kernels are deterministic: the same kernels run on the same values in the same order.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from gdsstream.binding import MARK, Binding, Bound, Place, Streamed, bind, check_modules
from gdsstream.checkpoint import Checkpoint
from gdsstream.config import StreamConfig
from gdsstream.devices import memory_of, parse_device
from gdsstream.engine import merge
from gdsstream.errors import MemoryBudgetError, OffloadError
from gdsstream.gates import Call, backward_task, put_gates, tensors_in
from gdsstream.guards import Undo, guard, set_attribute
from gdsstream.layers import LayerStreamer
from gdsstream.layout import Fuse, find_pattern
from gdsstream.lending import Dequantize, Hold, LayerWeights, Lending, Served
from gdsstream.matching import Options, Rename, bare
from gdsstream.plan import Fused
from gdsstream.residents import load_residents, settle
from gdsstream.saved import hooks_on_top, saving
from gdsstream.schedule import Order
from gdsstream.telemetry import StreamStats

log = logging.getLogger(__name__)

# What autocast casts to its own dtype, if it is another.
_CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


def offload(
    modules: nn.ModuleList | Sequence[nn.Module],
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Checkpoint,
    *,
    model: nn.Module | None = None,
    prefix: str | None = None,
    num_slots: int = 2,
    device: torch.device | str | int = "cuda",
    host_cache_bytes: int = 0,
    order: Order | str = "auto",
    resident: Sequence[str] = (),
    rename: Rename | None = None,
    fuse: Fuse = "auto",
    dequantize: Dequantize | None = None,
    debug: bool = False,
    config: StreamConfig | None = None,
    **knobs: Any,
) -> OffloadHandle:
    """Stream the frozen weights of `modules` from a checkpoint, instead of keeping them on the device.

    Frozen parameters (requires_grad is False) that the checkpoint has are streamed: the checkpoint's values count, not
    those that the parameters have now. Trainable parameters (adapters, norms), buffers, and parameters that other
    modules use too stay on `device`; those on the meta device are read from the checkpoint. Parameters on the meta
    device are replaced by new ones, so make optimizers afterwards.

    Args:
        modules: the layers, in the order of their forward passes.
        checkpoint: a safetensors file, an index, a directory or a list of files (as for load_file), or a Checkpoint.
        model: the model around the layers; what it has outside of them is moved or read to `device` too.
        prefix: what the checkpoint's names of layer i begin with, such as "model.layers.{i}."; None finds it.
        num_slots: how many layers fit on the device at once; 2 is double buffering.
        device: "cuda", "cuda:1", a CUDA ordinal, or "cpu".
        host_cache_bytes: how many bytes of layers to keep in host memory; see LayerStreamer.
        order: the order of use, for reading ahead: "forward", "training", or an Order; "auto" goes by what the passes
            before did, and by the training mode until then.
        resident: patterns (fnmatch) of parameter names inside a layer that stay on the device.
        rename: gives the checkpoint's name (inside the layer) for a parameter's; None from it means the usual ones.
        fuse: how stored tensors make up a parameter of a fused module; see LayerStreamer. "auto" knows experts.
        dequantize: makes a weight from a stored tensor of another shape or dtype and its companions, which are the
            stored tensors whose names begin with the weight's ("weight.absmax"). Called as dequantize(name, tensors,
            parameter) on the current stream, once for each time that the layer is brought to the device; `tensors` has
            the stored weight as "" and companions by the rest of their names, `parameter` is a meta tensor with the
            shape and dtype of what has to be returned. `gdsstream.dequantize_nf4` is one.
        debug: fill slots with 0xFF before they are read into again.
        config, **knobs: see StreamConfig.

    Raises:
        OffloadError for what cannot be offloaded like this; TensorNotFoundError for a frozen parameter that the
        checkpoint lacks; what LayerStreamer raises. The modules are then as they were.
    """
    layers = list(modules)
    check_modules(layers)
    hooks_on_top()
    with torch.inference_mode(False):  # slots outlive it
        source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
        pattern = prefix
        if pattern is None:
            inside = [bare(name) for name, _ in layers[0].named_parameters()]
            pattern = find_pattern(source.tensors, inside)
        target = parse_device(device)
        binding = bind(layers, model, source, pattern, Options(resident, rename, fuse, dequantize is not None))
        settings = merge(config, knobs, path=source.files[0].path, device=target)
        placed = load_residents(binding.residents, source, target, settings)
        streamer = _open(binding, source, target, num_slots, host_cache_bytes, order, debug, settings)
        try:
            return OffloadHandle(layers, binding, placed, streamer, dequantize, automatic=order == "auto")
        except BaseException:
            streamer.close()
            raise


class OffloadHandle:
    """Layers whose frozen weights are streamed. Made by `offload`; a context manager that ends as `remove(load=False)`.

    Attributes:
        modules: the layers.
        streamer: what streams them.
        streamed_names: the streamed parameters, by their names in `modules` ("0.self_attn.q_proj.weight").
    """

    def __init__(
        self,
        modules: list[nn.Module],
        binding: Binding,
        placed: Sequence[torch.Tensor],
        streamer: LayerStreamer,
        dequantize: Dequantize | None,
        *,
        automatic: bool,
    ) -> None:
        self.modules = modules
        self.streamer = streamer
        self.streamed_names = tuple(f"{b.index}.{name}" for b in binding.layers for s in b.streamed for name in s.names)
        self._lending = Lending(streamer, dequantize)
        self._order = _OrderChoice(streamer) if automatic else None
        self._undo: list[Undo] = []
        self._places: list[list[list[Place]]] = []  # of each layer's served parameters
        self._layers = self._lending.layers
        for resident, value in zip(binding.residents, placed, strict=True):
            settle(resident, value)
        said: set[str] = set()
        for bound, module in zip(binding.layers, modules, strict=True):
            all_served = [self._serve(bound, each) for each in bound.streamed]
            places = [place for each in bound.streamed for place in each.places]
            layer = LayerWeights(self._lending, bound.index, all_served)
            layer.clear()
            self._layers.append(layer)
            self._places.append([each.places for each in bound.streamed])
            empty = [each.parameter.data for each in all_served]
            self._undo += guard(module, places, empty, streamer.checkpoint.path, said, self._is_active)
            self._undo.append(self._wrap(module, layer))
        if binding.shared:
            log.warning(
                "%d frozen parameter(s) are used by other modules too and stay on %s: %s",
                len(binding.shared),
                streamer.device,
                ", ".join(binding.shared[:8]) + (" ..." if len(binding.shared) > 8 else ""),
            )

    def stats(self) -> StreamStats:
        """What streaming cost so far; see StreamStats."""
        return self.streamer.stats()

    @contextmanager
    def hold(self, index: int, *, backward: bool = False) -> Iterator[None]:
        """Keep a layer on the device for several forward or backward passes of it; within, its parameters are usable.

        `backward` says that a backward pass comes to the layer, for the automatic order. Raises as a forward pass does.
        """
        if not self._lending.active:
            raise OffloadError("the handle was removed; its layers are no longer offloaded")
        layer = self._layers[index]
        hold = Hold(layer)
        try:
            if not backward:
                self._before_forward(layer)
            hold.acquire()
            yield
        finally:
            hold.release()

    def remove(self, *, load: bool = True) -> None:
        """Take everything off the modules again and close the streamer. Idempotent.

        `load` puts the streamed weights on the device, as ordinary frozen parameters; otherwise those are left on the
        meta device. Raises OffloadError while a layer is in use, MemoryBudgetError where there is no room for the
        weights; the layers are then still offloaded.
        """
        lending = self._lending
        with lending.lock:
            if not lending.active:
                return
            used = next((layer.index for layer in self._layers if layer.is_held), None)
            if used is not None:
                raise OffloadError(f"layer {used} is in use; remove the handle outside of forward and backward passes")
            values = [self._values(layer) for layer in self._layers] if load else None
            lending.active = False
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            for number, layer in enumerate(self._layers):
                layer.clear()
                for each, places in enumerate(self._places[number]):
                    if values is not None:
                        layer.served[each].parameter.data = values[number][each]
                        continue
                    meta = nn.Parameter(layer.served[each].like, requires_grad=False)
                    for place in places:
                        place.put(meta)
            self.streamer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove(load=False)

    def _is_active(self) -> bool:
        return self._lending.active

    def _serve(self, bound: Bound, streamed: Streamed) -> Served:
        """Ready a parameter to be served; one on the meta device is replaced."""
        parameter, companions = streamed.parameter, streamed.companions
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        if parameter.is_meta:
            empty = torch.empty(0, dtype=parameter.dtype, device=memory_of(self.streamer.device))
            parameter = nn.Parameter(empty, requires_grad=False)
            for place in streamed.places:
                place.put(parameter)
        return Served(
            parameter,
            streamed.names[0],
            bound.prefix + streamed.stored,
            like,
            None if companions is None else {suffix: bound.prefix + name for suffix, name in companions.items()},
        )

    def _values(self, layer: LayerWeights) -> list[torch.Tensor]:
        hold = Hold(layer)
        try:
            hold.acquire()
            return [each.parameter.detach().clone() for each in layer.served]
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(
                f"no room on {self.streamer.device} for the weights of layer {layer.index} of {len(self._layers)}: "
                f"{str(error).splitlines()[0]}; use remove(load=False)"
            ) from error
        finally:
            hold.release()

    # ---- forward

    def _wrap(self, module: nn.Module, layer: LayerWeights) -> Undo:
        original = module.forward
        lending = self._lending

        def run(args: Any, kwargs: dict[str, Any]) -> Any:
            return self._forward(layer, original, args, kwargs)

        uncompiled: Callable[..., Any] | None = None

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal uncompiled
            if not lending.active:
                return original(*args, **kwargs)
            if "torch._dynamo" not in sys.modules:
                return run(args, kwargs)
            # torch.compile may compile what is around; leases are nothing to trace.
            if uncompiled is None:
                uncompiled = torch.compiler.disable(run, reason="an offloaded layer")  # type: ignore[no-untyped-call]
            return uncompiled(args, kwargs)

        setattr(forward, MARK, lending)
        return set_attribute(module, "forward", forward)

    def _forward(self, layer: LayerWeights, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        hold = Hold(layer, running=True)
        try:
            self._before_forward(layer)
            hold.acquire()
            self._lending.everyone.add(get_ident())
            uses = layer.uses()
            if torch.is_grad_enabled():
                output = self._with_gradients(layer, original, args, kwargs)
            else:
                output = original(*args, **kwargs)
            layer.check_aliases(uses, f"layer {layer.index} ({type(self.modules[layer.index]).__name__})")
            return output
        finally:
            hold.release()

    def _with_gradients(
        self, layer: LayerWeights, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        call = Call(layer)
        self._lending.threads.add(get_ident())
        with saving(layer, call, layer.memory(), casts=self._casts(layer)):
            output = original(*args, **kwargs)
        if put_gates(call, tensors_in((args, kwargs)), tensors_in(output)) and backward_task() != -1:
            # Recomputed for a backward pass that is about to begin here: it would only lease the layer again.
            layer.begin_if_alone(call)
        return output

    def _casts(self, layer: LayerWeights) -> bool:
        """Whether autocast makes copies of the layer's weights."""
        kind = self.streamer.device.type
        if not torch.is_autocast_enabled(kind):
            return False
        dtype = torch.get_autocast_dtype(kind)
        return any(each.like.dtype in _CAST_BY_AUTOCAST and each.like.dtype != dtype for each in layer.served)

    def _before_forward(self, layer: LayerWeights) -> None:
        if layer.index == 0 and self._order is not None and not layer.is_held and backward_task() == -1:
            self._order.new_pass(self.modules[0].training, self._lending)


class _OrderChoice:
    """Which order the next pass will have, from what passes of its kind had. A wrong guess only costs reads."""

    def __init__(self, streamer: LayerStreamer) -> None:
        self._streamer = streamer
        self._current = "forward"
        self._kind: tuple[bool, bool] | None = None  # of the present pass: training mode, gradients enabled
        self._had_backward: dict[tuple[bool, bool], bool] = {}

    def new_pass(self, training: bool, lending: Lending) -> None:
        if self._kind is not None:
            self._had_backward[self._kind] = lending.backward_seen
        lending.backward_seen = False
        # Reentrant checkpointing runs training passes without gradients.
        self._kind = training, torch.is_grad_enabled()
        order = "training" if self._had_backward.get(self._kind, training) else "forward"
        if order != self._current:
            self._streamer.set_order(order)
            self._current = order


def _open(
    binding: Binding,
    checkpoint: Checkpoint,
    device: torch.device,
    num_slots: int,
    host_cache_bytes: int,
    order: Order | str,
    debug: bool,
    settings: StreamConfig,
) -> LayerStreamer:
    names: dict[int, list[str]] = {}
    fused: dict[str, Fused] = {}
    for bound in binding.layers:
        if not bound.stored:
            raise OffloadError(
                f"layer {bound.index} has no frozen parameter to stream: every one is trainable, shared or resident"
            )
        names[bound.index] = list(bound.stored.values())
        for name, whole in bound.fused.items():
            fused[bound.prefix + name] = Fused(tuple(bound.prefix + part for part in whole.names), whole.shape)
    streamer = LayerStreamer(
        checkpoint,
        layers=names,
        device=device,
        num_slots=num_slots,
        host_cache_bytes=host_cache_bytes,
        order="forward" if order == "auto" else order,
        fuse=lambda stored: {name: whole for name, whole in fused.items() if whole.names[0] in stored},
        debug=debug,
        config=settings,
    )
    streamer.reclaims_lost_leases = True
    return streamer


__all__ = ["OffloadHandle", "offload"]
