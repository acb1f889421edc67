"""What autograd saves of a streamed layer: references into its slot instead of the weights themselves.

A product of activations and a weight saves the weight, or a view of it, for the backward pass. The slot holds another
layer by then. So while a layer's forward runs, hooks turn each saved tensor that lies in the slot into a *geometry*:
the offset in the layer, dtype, size and stride. A layer's tensors always lie in the same places of whatever slot holds
it, so that is enough to make the same view again, wherever the layer is in the backward pass. Transposed weights,
slices of experts and reinterpreted views need no further thought.

Two kinds of tensors are not in the slot and still nothing but weights: the result of a dequantisation, and the copy
in another dtype that autocast makes for each product. Both are saved as the geometry of what they were made from, and
made again. Nothing else is ours: it goes to the hooks that were active before (those of a checkpoint around the layer,
say, which ours would shadow), and without such hooks autograd keeps it as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gdsstream.errors import OffloadError

Pack: TypeAlias = Callable[[torch.Tensor], Any]
Unpack: TypeAlias = Callable[[Any], torch.Tensor]


class Geometry(NamedTuple):
    """A view of a layer's weights: `offset` bytes from the layer's first byte, `stride` in elements; `base` names the
    dequantised tensor in which it lies instead, if it lies in one."""

    base: str | None
    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class Cast(NamedTuple):
    """A copy of weights in another dtype, and how it is made."""

    source: Geometry
    dtype: torch.dtype
    memory_format: torch.memory_format | None


class Weights(Protocol):
    """A layer's weights, as a saved reference finds them again."""

    def view_again(self, call: Any, geometry: Geometry) -> torch.Tensor: ...
    def cast_again(self, call: Any, cast: Cast) -> torch.Tensor: ...


class SavedView:
    """A saved weight: a view of a layer."""

    __slots__ = ("call", "geometry", "weights")

    def __init__(self, weights: Weights, call: Any, geometry: Geometry) -> None:
        self.weights, self.call, self.geometry = weights, call, geometry

    def restore(self) -> torch.Tensor:
        return self.weights.view_again(self.call, self.geometry)


class SavedCast:
    """A saved weight: a view (`size`, `stride`, `offset` in elements) of a copy in another dtype."""

    __slots__ = ("call", "cast", "offset", "size", "stride", "weights")

    def __init__(self, weights: Weights, call: Any, cast: Cast, view: torch.Tensor) -> None:
        self.weights, self.call, self.cast = weights, call, cast
        self.size, self.stride, self.offset = view.size(), view.stride(), view.storage_offset()

    def restore(self) -> torch.Tensor:
        return self.weights.cast_again(self.call, self.cast).as_strided(self.size, self.stride, self.offset)


class _Foreign:
    """What the hooks that were active before made of a tensor."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Unpack, packed: Any) -> None:
        self.unpack, self.packed = unpack, packed


class SlotMemory(NamedTuple):
    """Where a layer's weights are while it is leased: the slot's bytes, and dequantised tensors by their names."""

    address: int
    nbytes: int
    dense: Mapping[str, torch.Tensor]

    def geometry(self, tensor: torch.Tensor) -> Geometry | None:
        """What `tensor` is a view of, or None if of nothing here."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse tensors and some subclasses have none
            return None
        start, base = self.address, None
        if not start <= address < start + self.nbytes:
            for name, dense in self.dense.items():
                start = dense.data_ptr()
                if start <= address < start + dense.nbytes:
                    base = name
                    break
            else:
                return None
        return Geometry(base, address - start, tensor.dtype, tensor.size(), tensor.stride())


class CastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which tensors are copies of weights in another dtype, as autocast makes them, below autograd's eyes."""

    def __init__(self, memory: SlotMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        # By storage. The reference keeps the storage's address from being used again, not its bytes.
        self._made: dict[int, tuple[StorageWeakRef, Cast]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            source = args[0]
            geometry = self._memory.geometry(source)
            if geometry is not None and result.device == source.device:
                reference = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
                memory_format = (kwargs or {}).get("memory_format")
                self._made[reference.cdata] = (reference, Cast(geometry, result.dtype, memory_format))
        return result

    def find(self, tensor: torch.Tensor) -> Cast | None:
        """How `tensor`'s memory was made, if it is such a copy or a view of one."""
        if not self._made:
            return None
        found = self._made.get(tensor.untyped_storage()._cdata)
        # Seen as another dtype, its strides would mean other bytes.
        return None if found is None or found[1].dtype is not tensor.dtype else found[1]


@contextmanager
def saving(weights: Weights, call: Any, memory: SlotMemory, *, casts: bool) -> Iterator[None]:
    """Within, tensors that autograd saves and that are weights in `memory` become references that `weights` resolves.

    `casts` looks for autocast's copies as well, at some cost for every operation. Raises OffloadError where
    saved-tensor hooks are not allowed (torch.func).
    """
    recorder = CastRecorder(memory) if casts else None
    pack = _pack(weights, call, memory, recorder, hooks_on_top())
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        raise OffloadError(
            f"an offloaded layer cannot run with gradients where saved-tensor hooks are disabled: {disabled}; run it "
            "under torch.no_grad(), or remove its handle first"
        )
    try:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, _unpack)
        if recorder is None:
            yield
        else:
            with recorder:
                yield
    finally:
        top = hooks_on_top()
        if top is not None and top[0] is pack:  # not so if an interrupt came in between
            torch._C._autograd._pop_saved_tensors_default_hooks()


def hooks_on_top() -> tuple[Pack, Unpack] | None:
    """The saved-tensor hooks that are active now. Raises OffloadError where torch does not tell."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError) as error:
        raise OffloadError(
            f"torch {torch.__version__} does not tell which saved-tensor hooks are active, and ours would shadow those "
            "of activation checkpointing; use torch 2.8 to 2.13"
        ) from error


def _pack(
    weights: Weights,
    call: Any,
    memory: SlotMemory,
    recorder: CastRecorder | None,
    previous: tuple[Pack, Unpack] | None,
) -> Pack:
    start, end = memory.address, memory.address + memory.nbytes
    derived = bool(memory.dense)
    previous_pack, previous_unpack = previous or (None, None)

    def pack(tensor: torch.Tensor) -> Any:
        kind = type(tensor)
        if kind is torch.Tensor or kind is Parameter:
            if derived:
                geometry = memory.geometry(tensor)
            else:  # the common case, in line: this runs for every saved tensor
                try:
                    address = tensor.data_ptr()
                except RuntimeError:
                    address = 0
                geometry = (
                    Geometry(None, address - start, tensor.dtype, tensor.size(), tensor.stride())
                    if start <= address < end
                    else None
                )
            if geometry is not None:
                return SavedView(weights, call, geometry)
            if recorder is not None and not tensor.requires_grad:
                cast = recorder.find(tensor)
                if cast is not None:
                    return SavedCast(weights, call, cast, tensor)
        if previous_pack is not None and previous_unpack is not None:
            return _Foreign(previous_unpack, previous_pack(tensor))
        # Detached, since an operation may save its own result, which would keep its graph alive for ever. Under hooks
        # autograd no longer notices that a saved tensor was modified; so we do.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    return pack


def _unpack(packed: Any) -> torch.Tensor:
    if type(packed) is tuple:
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.dtype} {list(tensor.shape)} is at version {tensor._version}; expected version {version} "
                "instead"
            )
        return tensor  # type: ignore[no-any-return]
    if type(packed) is _Foreign:
        return packed.unpack(packed.packed)
    return packed.restore()  # type: ignore[no-any-return]


def unseen() -> AbstractContextManager[object]:
    """Our own tensor operations are no business of modes that watch the layer's, and outlive inference mode."""
    watched, inference = torch._C._len_torch_dispatch_stack(), torch.is_inference_mode_enabled()
    if not watched and not inference:
        return nullcontext()
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(False))
    if watched:
        stack.enter_context(_disable_current_modes())
    return stack


__all__ = [
    "Cast",
    "CastRecorder",
    "Geometry",
    "SavedCast",
    "SavedView",
    "SlotMemory",
    "Weights",
    "hooks_on_top",
    "saving",
    "unseen",
]
