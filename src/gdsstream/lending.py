"""Who holds which layer, and until when: leases lent to a module's parameters, forward and backward.

Parameters keep their identity. While somebody holds the layer, their `.data` are views of its slot; otherwise it is
empty, so that any other use fails loudly. Holders are forward passes, backward passes (`gates`), and whoever asks
(`OffloadHandle.hold`); they share one lease.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

from gdsstream.devices import current_stream, memory_of
from gdsstream.errors import LeaseError, OffloadError
from gdsstream.gates import Call, TaskEnd, backward_task, refuse_double_backward
from gdsstream.layers import LayerStreamer
from gdsstream.lease import Lease
from gdsstream.saved import Cast, Geometry, SlotMemory, unseen

# Another thread lets go of its last views a moment after the layer, wherever it is put to sleep.
_PATIENCE, _POLL_S = 50, 5e-3

Dequantize = Callable[[str, dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Served:
    """A parameter that is served from a slot.

    Attributes:
        name: its name inside the layer; `stored` is the streamer's for it.
        like: a meta tensor of the shape and dtype that it has while it is served.
        companions: the streamer's names of what belongs to a quantised weight, by what follows the weight's name; None
            for a weight that is used as it is stored.
    """

    parameter: Parameter
    name: str
    stored: str
    like: torch.Tensor
    companions: Mapping[str, str] | None = None


class Hold:
    """One holder of a layer. It ends with `release`, and in any case when nothing refers to it any more, since an
    interrupt may come at any time."""

    holds = False

    def __init__(self, layer: LayerWeights, *, running: bool = False) -> None:
        self.layer = layer
        self.running = running  # a forward pass

    def acquire(self) -> None:
        """Hold the layer: its parameters are served, on the current stream.

        Raises LeaseError, OffloadError, and what reading raises.
        """
        self.layer.acquire(self)

    def release(self) -> None:
        self.layer.release(self)

    def __del__(self) -> None:
        if self.holds:
            self.layer.release(self)


@dataclass(eq=False)
class Lending:
    """What the layers of one handle share."""

    streamer: LayerStreamer
    dequantize: Dequantize | None = None
    active: bool = True
    backward_seen: bool = False  # since it was last cleared
    lock: threading.RLock = field(default_factory=threading.RLock)
    layers: list[LayerWeights] = field(default_factory=list)
    in_backward: dict[LayerWeights, None] = field(default_factory=dict)  # held by backward passes, oldest first
    threads: set[int] = field(default_factory=set)  # that ran a forward pass with gradients
    everyone: set[int] = field(default_factory=set)  # that ran one
    _tasks: dict[int, weakref.ref[TaskEnd]] = field(default_factory=dict)

    def lease(self, index: int) -> Lease:
        """A lease of layer `index`; slots that only finished backward work still holds are given up for it."""
        while True:
            try:
                return self.streamer.layer(index)
            except LeaseError:
                if not any(layer.give_up() for layer in (*self.in_backward, *self.layers)):
                    raise

    def watch(self, task: int) -> None:
        """End the calls of backward pass `task`, which the thread is in, when it ends."""
        if task not in self._tasks:
            self._tasks[task] = weakref.ref(TaskEnd(task, self._ended))

    def end_stale(self) -> None:
        """End the calls of backward passes that are over, though an interrupt kept their `TaskEnd` from saying so."""
        for task in [task for task, end in self._tasks.items() if end() is None]:
            self._ended(task)

    def _ended(self, task: int) -> None:
        with self.lock:
            for layer in list(self.in_backward):
                layer.end_calls(task)
            self._tasks.pop(task, None)


class LayerWeights:
    """One layer's parameters, and the lease that they are served from while there are holders."""

    def __init__(self, lending: Lending, index: int, served: Sequence[Served]) -> None:
        self.index = index
        self.served = served
        self.lease: Lease | None = None
        self._lending = lending
        self._device = lending.streamer.device
        self._holds = 0
        self._running = 0  # those that are forward passes
        self._turns = 0  # who came or went, forward or backward
        self._calls: dict[Call, int] = {}  # what backward passes hold it for, and which
        empty = {each.like.dtype: torch.empty(0, dtype=each.like.dtype, device=self.memory_device) for each in served}
        self._empty = [(each.parameter, empty[each.like.dtype]) for each in served]
        self._plain = [each for each in served if each.companions is None]
        self._quantised = [each for each in served if each.companions is not None]
        self._views: dict[int, list[tuple[Parameter, torch.Tensor]]] = {}  # by slot
        self._dense: dict[str, torch.Tensor] = {}
        self._casts: dict[Cast, torch.Tensor] = {}
        self._made_on = 0  # the stream on which dense and casts were made
        self._lent_uses = 0

    @property
    def memory_device(self) -> torch.device:
        return memory_of(self._device)

    # ---- holding

    # An interrupt may come wherever Python calls something, and nowhere else: what belongs together is assigned without
    # a call in between, and a slot that is not given back for that reason is so by who needs one next (`give_up`).

    def acquire(self, hold: Hold) -> None:
        lending = self._lending
        with lending.lock:
            if lending.in_backward:
                lending.end_stale()
            if self.is_held:
                self._order()
            else:
                if self.lease is not None:
                    self._give_back()
                self._lend()
            self._holds, self._running, hold.holds = self._holds + 1, self._running + hold.running, True
            self._turns += 1

    def release(self, hold: Hold) -> None:
        with self._lending.lock:
            if hold.holds:
                self._holds, self._running, hold.holds = self._holds - 1, self._running - hold.running, False
                self._turns += 1
            if not self.is_held and self.lease is not None:
                self._give_back()

    @property
    def is_held(self) -> bool:
        return self._holds > 0 or bool(self._calls)

    def clear(self) -> None:
        """Make every parameter empty, and forget the slots."""
        for parameter, empty in self._empty:
            parameter.data = empty
        self._views.clear()

    def memory(self) -> SlotMemory:
        """Where the weights are, while the layer is held."""
        assert self.lease is not None
        return SlotMemory(self.lease.address, self.lease.nbytes, self._dense)

    def uses(self) -> int:
        """How many tensors share the slot's memory, the streamer's own aside."""
        assert self.lease is not None
        return self.lease.storage_use_count() - self.lease.baseline_use_count

    def check_aliases(self, before: int, name: str) -> None:
        """Raise OffloadError if, since `uses()` was `before`, somebody began to keep a tensor that shares the slot."""
        kept, turns = self.uses() - before, -1
        patience = _PATIENCE if len(self._lending.everyone) > 1 else 0
        while kept > 0 and (turns != self._turns or patience):  # equal: nobody came or went while it was counted
            if turns == self._turns:
                patience -= 1
                time.sleep(_POLL_S)
            turns = self._turns
            if self._running > 1 or (self._calls and backward_task() == -1):
                return  # another thread is at work with this layer
            gc.collect()  # what only waits for the collector is not kept
            kept = self.uses() - before
        if kept > 0:
            raise OffloadError(
                f"{name}: its forward keeps {kept} tensor(s) that share a streamed weight's memory where autograd's "
                "hooks cannot see them (in a custom function's context, in a cache, or in what it returns); they would "
                "turn into another layer's bytes. Keep those weights on the device with resident=[...], pass "
                "dequantize= where the operation is a quantised product, or return a clone"
            )

    # ---- backward passes (gates.Lender)

    def reached(self, call: Call) -> None:
        """A backward pass comes to the call's outputs."""
        if self._lending.active:
            refuse_double_backward()
            self.begin(call)

    def begin(self, call: Call) -> None:
        """Hold the layer for the backward pass that the thread is in, until `finish` or the pass's end."""
        lending, task = self._lending, backward_task()
        if self._calls.get(call) == task:
            return
        with lending.lock:
            if not lending.active:
                raise OffloadError(
                    "the backward pass needs a streamed weight, but its handle was removed; run the backward pass "
                    "first, or the forward pass again"
                )
            lending.watch(task)
            lending.backward_seen = True
            if call not in self._calls:
                hold = Hold(self)
                self.acquire(hold)
                lending.in_backward[self] = None
                self._calls[call], self._holds, hold.holds = task, self._holds - 1, False  # now the call is what holds
            self._calls[call] = task

    def begin_if_alone(self, call: Call) -> None:
        """`begin`, unless a backward pass holds the layer anyway."""
        if not self._calls:
            self.begin(call)

    def finish(self, call: Call) -> None:
        """Every node of the call was executed."""
        with self._lending.lock:
            # That follows from the order of making, which is each thread's own: with several, who keeps a view decides.
            if call in self._calls and (len(self._lending.threads) == 1 or self.is_idle()):
                self._end(call)

    def end_calls(self, task: int | None = None) -> None:
        """End those of a backward pass, or all."""
        for call in [call for call, of in self._calls.items() if task is None or of == task]:
            self._end(call)

    def is_idle(self) -> bool:
        """Whether only backward passes hold it, and none has a view in use."""
        return self.lease is not None and not self._holds and self.uses() <= self._lent_uses

    def give_up(self) -> bool:
        """Give the slot back if nothing but finished backward work is in the way; whether there was one to give."""
        if not self.is_idle():
            return False
        self.end_calls()
        if self.lease is not None:
            self._give_back()
        return True

    def _end(self, call: Call) -> None:
        del self._calls[call]
        self._turns += 1
        if not self._calls:
            self._lending.in_backward.pop(self, None)
        if not self.is_held:
            self._give_back()

    # ---- saved tensors (saved.Weights)

    def view_again(self, call: Call, geometry: Geometry) -> torch.Tensor:
        if backward_task() == -1:
            with self._looked_at():
                return self._view(geometry).clone()
        self._need(call)
        return self._view(geometry)

    def cast_again(self, call: Call, cast: Cast) -> torch.Tensor:
        if backward_task() == -1:
            with self._looked_at():
                return self._cast(cast)
        self._need(call)
        made = self._casts.get(cast)
        if made is None:
            made = self._casts[cast] = self._cast(cast)
            self._made_on = current_stream(self._device)
        return made

    def _need(self, call: Call) -> None:
        refuse_double_backward()
        self.begin(call)
        self._order()

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """Hold the layer for somebody who looks at a graph's saved tensors, outside of a backward pass."""
        if not self._lending.active:
            raise OffloadError("the saved weight is gone: the handle that streamed it was removed")
        hold = Hold(self)
        try:
            hold.acquire()
            yield
        finally:
            hold.release()

    def _view(self, geometry: Geometry) -> torch.Tensor:
        base, offset, dtype, size, stride = geometry
        if base is None:
            assert self.lease is not None
            return self.lease.restore(offset, dtype, size, stride)
        return self._dense[base].view(-1).view(dtype).as_strided(size, stride, offset // dtype.itemsize)

    def _cast(self, cast: Cast) -> torch.Tensor:
        with unseen():
            source = self._view(cast.source)
            copy: torch.Tensor = torch.ops.aten._to_copy.default(
                source, dtype=cast.dtype, memory_format=cast.memory_format
            )
            return copy

    # ---- lending

    def _lend(self) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise OffloadError(
                "an offloaded layer cannot run under torch.func transforms (grad, vmap, jvp): they wrap the "
                "tensors that weights are served as; remove the handle first"
            )
        with unseen():
            try:
                self.lease = lease = self._lending.lease(self.index)
                lease.use()
                views = self._views.get(lease.slot)
                if views is None:
                    views = [(each.parameter, lease[each.stored]) for each in self._plain]
                    self._views[lease.slot] = views
                for parameter, view in views:
                    if parameter.requires_grad:
                        raise OffloadError(self._unfrozen())
                    parameter.data = view
                for each in self._quantised:
                    if each.parameter.requires_grad:
                        raise OffloadError(self._unfrozen())
                    each.parameter.data = self._dequantised(each, lease)
                self._lent_uses = self.uses()
            except BaseException:
                if self.lease is not None:
                    self._give_back()
                raise

    def _give_back(self) -> None:
        assert self.lease is not None
        with unseen():
            for parameter, empty in self._empty:
                parameter.data = empty
            self._dense.clear()
            self._casts.clear()
            self.lease.release()
            self.lease = None

    def _order(self) -> None:
        """Make the current stream wait for what the holders share."""
        assert self.lease is not None
        self.lease.use()
        if not self._dense and not self._casts:
            return
        if current_stream(self._device) != self._made_on and self.memory_device.type == "cuda":
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(torch.cuda.ExternalStream(self._made_on, self._device))  # type: ignore[no-untyped-call]
            for tensor in (*self._dense.values(), *self._casts.values()):
                tensor.record_stream(here)

    def _dequantised(self, served: Served, lease: Lease) -> torch.Tensor:
        assert served.companions is not None
        assert self._lending.dequantize is not None
        tensors = {"": lease[served.stored], **{suffix: lease[name] for suffix, name in served.companions.items()}}
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            dense = self._lending.dequantize(served.name, tensors, served.like)
        like = served.like
        if not isinstance(dense, torch.Tensor) or dense.shape != like.shape or dense.dtype != like.dtype:
            got = f"{tuple(dense.shape)} {dense.dtype}" if isinstance(dense, torch.Tensor) else type(dense).__name__
            raise OffloadError(
                f"dequantize gave {got} for {served.name!r} of layer {self.index}; the parameter is "
                f"{tuple(like.shape)} {like.dtype}"
            )
        dense = dense.detach().contiguous()
        self._dense[served.name] = dense
        self._made_on = current_stream(self._device)
        return dense

    def _unfrozen(self) -> str:
        name = next(each.name for each in self.served if each.parameter.requires_grad)
        return (
            f"parameter {name!r} of layer {self.index} is streamed, and requires_grad was set on it: a streamed weight "
            "cannot be trained; call requires_grad_(False) on it, or offload again with it in resident=[...]"
        )


__all__ = ["Dequantize", "Hold", "LayerWeights", "Lending", "Served"]
