"""A layer's parameters in the checkpoint's terms: names, fused stacks, and what belongs to a quantised weight. Pure.

Names differ in known ways. peft puts ".base_layer" in, transformers calls Mixtral's `block_sparse_moe` `mlp`, and holds
all experts in two stacks where checkpoints hold three matrices for each. What is not known here is told by `rename`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from gdsstream.checkpoint import TensorSpec, torch_dtype
from gdsstream.errors import ConfigError
from gdsstream.layout import Fuse, expert_sets, fused_experts
from gdsstream.plan import Fused

Rename = Callable[[str], str | None]

# peft wraps what it adapts, and the model.
_WRAPPERS = re.compile(r"(^|\.)(?:base_layer|original_module)(?=\.)")
_ROOT = "base_model.model."
_ALIASES = (("mlp.", "block_sparse_moe."), ("block_sparse_moe.", "mlp."))
# A quantised weight's companions are named "weight.absmax", or "weight_scale".
_JOINTS = (".", "_")
_STACKS = (
    ("gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    ("down_proj", ("down_proj.weight",)),
    ("gate_up_proj", ("w1.weight", "w3.weight")),
    ("down_proj", ("w2.weight",)),
)


class Options(NamedTuple):
    """The user's wishes; see `gdsstream.offload`."""

    resident: Sequence[str] = ()
    rename: Rename | None = None
    fuse: Fuse = "auto"
    quantised: bool = False


class Source(NamedTuple):
    """What a tensor is read from: stored tensors, end to end."""

    names: tuple[str, ...]  # the checkpoint's
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredLayer:
    """What the checkpoint has of one layer: tensors, and what they could be fused to; by names inside the layer."""

    def __init__(self, stored: Mapping[str, TensorSpec], options: Options) -> None:
        self.stored = stored
        self._rename = options.rename
        specs = {name: spec._replace(name=name) for name, spec in stored.items()}
        self.fused = _fused(specs, options.fuse, options.quantised)
        self.names = {*self.stored, *self.fused}

    def find(self, names: Sequence[str]) -> str | None:
        """The name here of a parameter that goes by `names` in its module."""
        for name in names:
            renamed = None if self._rename is None else self._rename(name)
            for candidate in _candidates(name) if renamed is None else (renamed,):
                if candidate in self.names:
                    return candidate
        return None

    def source(self, name: str) -> Source:
        """Raises DtypeError for a dtype that torch lacks."""
        if name in self.stored:
            spec = self.stored[name]
            return Source((spec.name,), torch_dtype(spec.dtype), spec.torch_shape)
        members = self.members(name)
        return Source(tuple(spec.name for spec in members), torch_dtype(members[0].dtype), self.fused[name].shape)

    def members(self, name: str) -> list[TensorSpec]:
        """The stored tensors that make up `name`."""
        parts = (name,) if name in self.stored else self.fused[name].names
        return [self.stored[part] for part in parts]

    def companions(self, name: str, others: set[str]) -> dict[str, str]:
        """What belongs to the weight `name`, by what follows it; `others` are parameters themselves."""
        starts = tuple(name + joint for joint in _JOINTS)
        found = (each for each in sorted(self.names - others) if each.startswith(starts))
        return {each[len(name) + 1 :]: each for each in found}


def bare(name: str) -> str:
    """A parameter's name without what peft put into it."""
    return _WRAPPERS.sub("", name).lstrip(".").removeprefix(_ROOT)


def _candidates(name: str) -> Iterator[str]:
    yield name
    plain = bare(name)
    yield plain
    for old, new in _ALIASES:
        if plain.startswith(old):
            yield new + plain.removeprefix(old)


def _fused(specs: Mapping[str, TensorSpec], fuse: Fuse, quantised: bool) -> Mapping[str, Fused]:
    if fuse is None:
        return {}
    if isinstance(fuse, Mapping):
        return {name: whole for name, whole in fuse.items() if all(part in specs for part in whole.names)}
    if callable(fuse):
        return fuse(specs)
    if fuse != "auto":
        raise ConfigError(f'fuse is {fuse!r}; it is "auto", None, a mapping or a callable')
    return {**(fused_quantised_experts(specs) if quantised else {}), **fused_experts(specs)}


def fused_quantised_experts(stored: Mapping[str, TensorSpec]) -> dict[str, Fused]:
    """As `layout.fused_experts`, where matrices have companions: a stack of the packed weights, and one with a row for
    each matrix of every companion that all of them have."""
    result: dict[str, Fused] = {}
    for base, experts in expert_sets(stored).items():
        for stack, matrices in _STACKS:
            starts = tuple(matrices[0] + joint for joint in _JOINTS)
            suffixes = [rest.removeprefix(matrices[0]) for rest in experts.get(0, {}) if rest.startswith(starts)]
            parts = {suffix: _rows(base, experts, [m + suffix for m in matrices]) for suffix in ("", *suffixes)}
            if suffixes and parts[""] is not None:
                result.update((f"{base}.{stack}{suffix}", part) for suffix, part in parts.items() if part is not None)
    return result


def _rows(base: str, experts: Mapping[int, Mapping[str, TensorSpec]], names: Sequence[str]) -> Fused | None:
    """The tensors of these names, expert by expert: a row for each, or end to end where their shapes differ."""
    every = [(f"{base}.{e}.{name}", experts.get(e, {}).get(name)) for e in range(len(experts)) for name in names]
    members = [spec for _, spec in every if spec is not None]
    if len(members) < len(every) or len({spec.dtype for spec in members}) > 1:
        return None
    shapes = {spec.shape for spec in members}
    rows = (len(members), *members[0].shape) if len(shapes) == 1 else (sum(prod(spec.shape) for spec in members),)
    return Fused(tuple(name for name, _ in every), rows)


__all__ = ["Options", "Rename", "Source", "StoredLayer", "bare", "fused_quantised_experts"]
