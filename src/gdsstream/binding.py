"""Which parameters of which layers stream, and what stays on the device. Planning only: nothing is read or changed, so
that a refusal leaves the modules as they were.

Frozen parameters that the checkpoint has are streamed. Trainable ones stay, and so do buffers, those that the user
names, and those that somebody else uses too: another layer, or a module outside of the list.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from gdsstream.checkpoint import Checkpoint, TensorSpec
from gdsstream.errors import OffloadError, TensorNotFoundError
from gdsstream.matching import Options, Source, StoredLayer, bare
from gdsstream.plan import Fused


class Place(NamedTuple):
    """An entry of a module's `_parameters` or `_buffers`."""

    module: nn.Module
    key: str

    def put(self, tensor: torch.Tensor) -> None:
        entries = self.module._parameters if isinstance(tensor, nn.Parameter) else self.module._buffers
        entries[self.key] = tensor  # type: ignore[assignment]


# The attribute of an offloaded layer's forward: its lending, which knows whether the layer still is offloaded.
MARK = "_gdsstream"


@dataclass(eq=False)
class Streamed:
    """A parameter to be served from slots; all names are those inside the layer."""

    parameter: nn.Parameter
    places: list[Place]
    names: list[str]  # the module's
    stored: str  # the checkpoint's, perhaps fused; and those of what belongs to it, None for a weight used as stored
    companions: dict[str, str] | None


@dataclass(eq=False)
class Resident:
    """A tensor that stays on the device: moved there, or read if it is on the meta device."""

    tensor: torch.Tensor
    places: list[Place]
    source: Source | None = None
    refusal: Exception | None = None  # why there is no source, though it needs one


@dataclass(eq=False)
class Bound:
    """A layer: what is streamed of it, and which of the checkpoint's tensors that takes."""

    index: int
    prefix: str
    streamed: list[Streamed] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)  # the checkpoint's names, by name inside the layer
    fused: dict[str, Fused] = field(default_factory=dict)


@dataclass(eq=False)
class Binding:
    layers: list[Bound]
    residents: list[Resident]
    shared: list[str]  # frozen parameters that stay because somebody else uses them too


class _Entry(NamedTuple):
    tensor: torch.Tensor
    places: list[Place]
    names: list[str]


def check_modules(layers: Sequence[nn.Module]) -> None:
    """Raise OffloadError for what is no list of separate modules, none of them offloaded."""
    if not layers:
        raise OffloadError("there is no module to offload; pass the model's list of layers")
    seen: dict[int, int] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise OffloadError(f"item {index} of modules is a {type(layer).__name__}, not a torch.nn.Module")
        for part in layer.modules():
            lending = getattr(part.__dict__.get("forward"), MARK, None)
            if lending is not None and lending.active:
                raise OffloadError(
                    f"layer {index} is offloaded already, or has a part that is; remove that handle first"
                )
            other = seen.setdefault(id(part), index)
            if other != index and (part is layer or part is layers[other]):
                raise OffloadError(
                    f"layers {other} and {index} are one module, or one inside the other; give each module once"
                )


def bind(
    modules: Sequence[nn.Module], model: nn.Module | None, checkpoint: Checkpoint, prefix: str, options: Options
) -> Binding:
    """Decide for every parameter and buffer of `modules` (and of `model` around them) where its values come from.

    Raises OffloadError and TensorNotFoundError, which name the parameter, its layer and the checkpoint's name for it.
    """
    stored = _by_layer(checkpoint, prefix, len(modules))
    shared = _shared(modules, model)
    binding = Binding([], [], [])
    residents: list[Resident] = []
    for index, module in enumerate(modules):
        bound = Bound(index, prefix.replace("{i}", str(index)))
        side = _Side(checkpoint, f"layer {index}", bound.prefix, StoredLayer(stored[index], options))
        parts = list(module.named_modules(remove_duplicate=False))
        parameters = _entries(parts, "_parameters")
        others = {name for entry in parameters if (name := side.layer.find(entry.names)) is not None}
        for entry in parameters:
            if _stays(entry, shared, options.resident):
                residents.append(side.keep(entry))
                if not entry.tensor.requires_grad and id(entry.tensor) in shared:
                    binding.shared.append(f"{index}.{entry.names[0]}")
                continue
            streamed = side.stream(entry, others, options.quantised)
            bound.streamed.append(streamed)
            for name in (streamed.stored, *(streamed.companions or {}).values()):
                members = side.layer.members(name)
                bound.stored.update((spec.name.removeprefix(bound.prefix), spec.name) for spec in members)
                if name not in side.layer.stored:
                    bound.fused[name] = side.layer.fused[name]
        residents += map(side.keep, _entries(parts, "_buffers"))
        binding.layers.append(bound)
    if model is not None:
        inside = {id(part) for module in modules for part in module.modules()}
        around = [(name, part) for name, part in model.named_modules(remove_duplicate=False) if id(part) not in inside]
        side = _Side(checkpoint, "the model", "", StoredLayer(checkpoint.tensors, options._replace(fuse=None)))
        residents += [side.keep(entry) for kind in ("_parameters", "_buffers") for entry in _entries(around, kind)]
    binding.residents = _merged(residents)
    return binding


class _Side(NamedTuple):
    """A layer's side of the checkpoint, with the words to speak of it."""

    checkpoint: Checkpoint
    where: str
    prefix: str
    layer: StoredLayer

    def stream(self, entry: _Entry, others: set[str], quantised: bool) -> Streamed:
        name, parameter = entry.names[0], entry.tensor
        path, where = self.checkpoint.path, self.where
        _refuse_kind(name, where, entry)
        assert isinstance(parameter, nn.Parameter)
        stored = self.layer.find(entry.names)
        if stored is None:
            raise TensorNotFoundError(
                f"{path}: parameter {name!r} of {where} is frozen and not in the checkpoint as "
                f"{self.prefix + bare(name)!r}; give its name there with rename=, or keep it on the device with "
                f"resident=[{name!r}]"
            )
        source = self.layer.source(stored)
        fits = (source.dtype, source.shape) == (parameter.dtype, tuple(parameter.shape))
        companions = self.layer.companions(stored, others)
        if source.dtype.is_complex:
            raise OffloadError(f"parameter {name!r} of {where} is complex; keep it on the device, resident=[{name!r}]")
        if quantised and (companions or not fits):
            return Streamed(parameter, entry.places, entry.names, stored, companions)
        if not fits:
            raise OffloadError(
                f"parameter {name!r} of {where} is {tuple(parameter.shape)} {parameter.dtype}, but "
                f"{self.prefix + stored!r} in {path} is {source.shape} {source.dtype}; "
                + (
                    f"it is quantised (with {', '.join(companions.values())}): pass dequantize="
                    if companions
                    else f"make the module with that shape and dtype, or keep it with resident=[{name!r}]"
                )
            )
        return Streamed(parameter, entry.places, entry.names, stored, None)

    def keep(self, entry: _Entry) -> Resident:
        name, tensor = entry.names[0], entry.tensor
        path, where = self.checkpoint.path, self.where
        if not tensor.is_meta:
            return Resident(tensor, entry.places)
        stored = self.layer.find(entry.names)
        if stored is None:
            frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            trained = "trainable " if tensor.requires_grad else ""
            refusal = (TensorNotFoundError if frozen else OffloadError)(
                f"{path}: {trained}{kind} {name!r} of {where} is on the meta device and not in the checkpoint as "
                f"{self.prefix + bare(name)!r}; give it values first (adapters: add them "
                "after offload(); buffers: make them on a real device), or its name there with rename="
            )
            return Resident(tensor, entry.places, refusal=refusal)
        source = self.layer.source(stored)
        if source.shape != tuple(tensor.shape):
            raise OffloadError(
                f"{name!r} of {where} has shape {tuple(tensor.shape)}, but {self.prefix + stored!r} in {path} has "
                f"{source.shape}; make the module with that shape"
            )
        return Resident(tensor, entry.places, source)


def _stays(entry: _Entry, shared: set[int], patterns: Sequence[str]) -> bool:
    if entry.tensor.requires_grad or id(entry.tensor) in shared:
        return True
    names = {*entry.names, *map(bare, entry.names)}
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _merged(residents: Iterable[Resident]) -> list[Resident]:
    """Each tensor once, however many modules use it. Raises what stands against the first that has no values."""
    merged: dict[int, Resident] = {}
    for each in residents:
        known = merged.setdefault(id(each.tensor), each)
        if known is not each:
            known.places += each.places
            known.source = known.source or each.source
    for each in merged.values():
        if each.source is None and each.refusal is not None:
            raise each.refusal
    return list(merged.values())


def _by_layer(checkpoint: Checkpoint, prefix: str, count: int) -> list[dict[str, TensorSpec]]:
    """Each layer's tensors, by what follows the prefix."""
    if prefix.count("{i}") != 1:
        raise OffloadError(f'prefix={prefix!r} has to contain {{i}} once, as "model.layers.{{i}}." does')
    before, after = prefix.split("{i}")
    expression = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    layers: list[dict[str, TensorSpec]] = [{} for _ in range(count)]
    for name, spec in checkpoint.tensors.items():
        match = expression.match(name)
        if match is not None and int(match[1]) < count:
            layers[int(match[1])][name[match.end() :]] = spec
    lacking = next((index for index, layer in enumerate(layers) if not layer), None)
    if lacking is not None:
        raise TensorNotFoundError(
            f"{checkpoint.path}: no tensor's name begins with {prefix.replace('{i}', str(lacking))!r}, for layer "
            f"{lacking} of {count}; pass the right prefix="
        )
    return layers


def _entries(modules: Iterable[tuple[str, nn.Module]], kind: str) -> list[_Entry]:
    """Every tensor once, with all its names and places."""
    entries: dict[int, _Entry] = {}
    for prefix, module in modules:
        for key, tensor in getattr(module, kind).items():
            if tensor is not None:
                entry = entries.setdefault(id(tensor), _Entry(tensor, [], []))
                entry.places.append(Place(module, key))
                entry.names.append(f"{prefix}.{key}" if prefix else key)
    return list(entries.values())


def _shared(modules: Sequence[nn.Module], model: nn.Module | None) -> set[int]:
    """Parameters (by id) that more than one layer uses, or a layer and any other module that is alive."""
    users: dict[int, set[int]] = {}
    inside: set[int] = set()
    for index, module in enumerate(modules):
        inside.update(map(id, module.modules()))
        for parameter in module.parameters():
            users.setdefault(id(parameter), set()).add(index)

    def used_outside(others: Iterable[object]) -> set[int]:
        return {
            id(parameter)
            for other in others
            if issubclass(type(other), nn.Module) and id(other) not in inside
            for parameter in other.__dict__.get("_parameters", {}).values()
            if id(parameter) in users
        }

    outside = used_outside(gc.get_objects())
    if outside:  # perhaps by what only waits for the collector
        gc.collect()
        outside = used_outside(gc.get_objects())
    if model is not None:  # what gc.freeze() hides
        outside |= used_outside(model.modules())
    return outside | {parameter for parameter, layers in users.items() if len(layers) > 1}


def _refuse_kind(name: str, where: str, entry: _Entry) -> None:
    for place in entry.places:
        module = type(place.module)
        if module.__module__.split(".")[0] == "bitsandbytes":
            raise OffloadError(
                f"{name!r} of {where} belongs to a {module.__module__}.{module.__name__}, whose product keeps the "
                "weight where autograd's hooks cannot see it. Use a torch.nn.Linear with dequantize= "
                "(gdsstream.dequantize_nf4 for NF4), or keep these weights on the device with resident=[...]"
            )
    kind = type(entry.tensor) if type(entry.tensor) is not nn.Parameter else type(entry.tensor.data)
    if kind is not torch.Tensor:
        raise OffloadError(
            f"{name!r} of {where} is a {kind.__module__}.{kind.__name__}, not a plain tensor: what it is made of "
            f"cannot be streamed. Use a plain parameter with dequantize=, or keep it with resident=[{name!r}]"
        )


__all__ = ["MARK", "Binding", "Bound", "Place", "Resident", "Streamed", "bind", "check_modules"]
