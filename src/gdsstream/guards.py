"""What an offloaded layer must not do behind the streamer's back: be saved, loaded, moved or copied as if its weights
were there. Each is made to do the sensible thing, or refused."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from gdsstream.binding import Place
from gdsstream.errors import OffloadError

log = logging.getLogger(__name__)

Undo = Callable[[], None]


def guard_state_dict(module: nn.Module, keys: Sequence[str], checkpoint: str, said: set[str]) -> list[Undo]:
    """Streamed weights are left out of the module's state dict, not missed in one that is loaded, and refused in it.

    `said` is shared by all guards of a handle: what is left out is logged once.
    """
    loading = ""  # the prefix of the names while a state dict is loaded

    def saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in keys:
            state_dict.pop(prefix + key, None)
        if checkpoint not in said:
            said.add(checkpoint)
            log.warning("state_dict() leaves streamed frozen weights out: they are in %s", checkpoint)

    def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        nonlocal loading
        loading = prefix
        brought = next((key for key in keys if prefix + key in state_dict), None)
        if brought is not None:
            raise OffloadError(
                f"the state dict has values for {prefix + brought!r}, which is streamed from {checkpoint}; leave "
                "streamed weights out of it, or take the handle off first"
            )

    def loaded(module: nn.Module, incompatible: Any) -> None:
        ours = {loading + key for key in keys}
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in ours]

    hooks: list[Any] = [
        module.register_state_dict_post_hook(saved),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(before_load),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(loaded),  # type: ignore[no-untyped-call]
    ]
    return [hook.remove for hook in hooks]


def guard(
    layer: nn.Module,
    places: Sequence[Place],
    empty: Sequence[torch.Tensor],
    checkpoint: str,
    said: set[str],
    is_active: Callable[[], bool],
) -> list[Undo]:
    """Guard a layer whose streamed parameters are at `places`; `empty` are tensors like them in dtype and device, and
    `is_active` tells whether the layer is still offloaded.

    Returns what takes the guards off again.
    """
    keys: dict[int, tuple[nn.Module, list[str]]] = {}
    for place in places:
        keys.setdefault(id(place.module), (place.module, []))[1].append(place.key)
    undo: list[Undo] = []
    for module, names in keys.values():
        undo += guard_state_dict(module, names, checkpoint, said)
    undo.append(set_attribute(layer, "_apply", _guarded_apply(layer, places, empty, is_active)))
    undo.append(set_attribute(layer, "__reduce_ex__", functools.partial(_refuse_copy, checkpoint)))
    return undo


def set_attribute(module: nn.Module, name: str, value: Any) -> Undo:
    """Set an attribute on the instance. What it returns puts back what was there, unless somebody set it anew."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value

    def undo() -> None:
        if module.__dict__.get(name) is not value:
            return  # somebody wrapped it again; ours passes everything through
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before

    return undo


def _guarded_apply(
    layer: nn.Module, places: Sequence[Place], empty: Sequence[torch.Tensor], is_active: Callable[[], bool]
) -> Callable[..., nn.Module]:
    original: Callable[..., nn.Module] = layer._apply
    parameters = [(place, place.module._parameters[place.key]) for place in places]

    @functools.wraps(original)
    def apply(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        if not is_active():
            return original(fn, *args, **kwargs)
        for each in empty:
            changed = fn(each.new_empty(1))
            if changed.dtype != each.dtype or changed.device != each.device:
                raise OffloadError(
                    f"an offloaded layer's streamed weights are {each.dtype} on {each.device} and cannot become "
                    f"{changed.dtype} on {changed.device}; take the handle off first, or offload with that device "
                    "and a checkpoint of that dtype"
                )
        result = original(fn, *args, **kwargs)
        for place, parameter in parameters:  # torch may be set to replace parameters
            place.module._parameters[place.key] = parameter
        return result

    return apply


def _refuse_copy(checkpoint: str, *_: Any) -> NoReturn:
    raise OffloadError(
        f"an offloaded layer cannot be copied or pickled: its weights are in {checkpoint}. Save its state_dict(), or "
        "take the handle off first"
    )


__all__ = ["Undo", "guard", "set_attribute"]
