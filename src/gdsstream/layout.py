"""Which tensors make up a layer, and where each lies in a slot: a checkpoint -> LayerLayouts. Pure: no I/O, no torch.

A layer is a set of tensors that are needed together: those whose names begin with "model.layers.7.", say. Inside it a
tensor goes by the rest of its name. All tensors of a layer are packed into one slot, always in the same places, so
that a layer's views can be made once for each slot, and a saved reference is a layer and an offset.

Groups part a layer into pieces that become usable one by one, in their order. Fusing lays the matrices of single
experts end to end, as `gate_up_proj [experts, 2 x intermediate, hidden]` and `down_proj [experts, hidden,
intermediate]`: what grouped matrix products take, at no cost, since only offsets change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeAlias

from gdsstream.checkpoint import Checkpoint, TensorSpec
from gdsstream.errors import CheckpointError, ConfigError, TensorNotFoundError
from gdsstream.plan import Fused, Placement, ReadPlan, Row, build_plan, plan_packed
from gdsstream.regular_files import quote

Layers: TypeAlias = str | Mapping[int, Iterable[str]] | None
Fuse: TypeAlias = str | Callable[[Mapping[str, TensorSpec]], Mapping[str, Fused]] | Mapping[str, Fused] | None

# What matrix kernels load at once; a weight that lies otherwise takes a slower kernel, with other rounding.
WEIGHT_ALIGNMENT_BYTES = 16

_NUMBER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"^(?P<base>.*experts)\.(?P<index>\d+)\.(?P<rest>.+)$")
# The names of an expert's three matrices, as (gate, up, down): Qwen and DeepSeek write the first, Mixtral the second.
_EXPERT_MATRICES = (
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    ("w1.weight", "w3.weight", "w2.weight"),
)


@dataclass(frozen=True, eq=False)
class LayerLayout:
    """A layer's tensors, by the names they have inside it, and the plan that reads all of them into one slot.

    Attributes:
        index: which layer.
        prefix: what the stored names begin with; "" where the layer is a list of names.
        stored: the checkpoint's tensors, by name inside the layer.
        placements: what a slot holds, fused tensors under their new names.
        plan: reads everything into buffer 0.
        nbytes: how much of a slot the layer takes.
    """

    index: int
    prefix: str
    stored: Mapping[str, TensorSpec]
    placements: Mapping[str, Placement]
    plan: ReadPlan
    nbytes: int
    group_of: Mapping[str, int]  # by name in `placements`: the last group that the tensor has bytes of
    _rows: tuple[tuple[str, Row], ...]

    @cached_property
    def signature(self) -> tuple[Placement, ...]:
        """Equal for layers whose views are the same."""
        return tuple(self.placements.values())

    @cached_property
    def num_experts(self) -> int:
        """How many experts the layer has: by numbered names, or by the first dimension of stacked ones; 0 for none."""
        numbered = [int(match["index"]) for name in self.stored if (match := _EXPERT.match(name))]
        if numbered:
            return max(numbered) + 1
        stacked = {spec.shape[0] for name, spec in self.stored.items() if _is_stack(name, spec)}
        return stacked.pop() if len(stacked) == 1 else 0

    def plan_experts(self, experts: frozenset[int]) -> ReadPlan:
        """The plan that leaves out every expert but `experts`; their memory is not written. Raises ConfigError."""
        bad = sorted(expert for expert in experts if not 0 <= expert < self.num_experts)
        if bad:
            raise ConfigError(
                f"layer {self.index} has no expert {bad[0]}: "
                + (f"its experts count from 0 to {self.num_experts - 1}" if self.num_experts else "it has no experts")
            )
        rows: list[Row] = []
        for name, row in self._rows:
            match = _EXPERT.match(name)
            spec = self.stored[name]
            if match is not None:
                if int(match["index"]) in experts:
                    rows.append(row)
            elif _is_stack(name, spec) and spec.shape[0] == self.num_experts:
                file, offset, nbytes, buffer, target, group = row
                each = nbytes // self.num_experts
                rows += [(file, offset + e * each, each, buffer, target + e * each, group) for e in sorted(experts)]
            else:
                rows.append(row)
        # Empty rows keep the number of groups as it is.
        rows += [(0, 0, 0, 0, 0, group) for group in range(self.plan.num_groups)]
        return build_plan(rows, self.plan.buffer_bytes, tuple(self.placements.values()))


def find_pattern(names: Iterable[str], inside: Iterable[str] = ()) -> str:
    """The pattern, such as "model.layers.{i}.", whose layers have the most of the names `inside`; of several (or
    without such names) the one under which most of the tensors lie. Raises ConfigError."""
    counts: Counter[str] = Counter()
    alike: Counter[str] = Counter()
    wanted = frozenset(inside)
    indices: dict[str, set[int]] = {}
    for name in names:
        match = _NUMBER.search(name)
        if match is not None:
            pattern = name[: match.start()] + ".{i}."
            counts[pattern] += 1
            indices.setdefault(pattern, set()).add(int(match[1]))
            if name[match.end() :] in wanted:
                alike[pattern] += 1
    if not counts:
        raise ConfigError(
            'no tensor name has a number in it, as "model.layers.0.weight" has; pass layers= as a pattern with {i}, or '
            "as a mapping of layer numbers to names"
        )
    return max(counts, key=lambda each: (alike[each] / len(indices[each]), counts[each], len(indices[each])))


def layer_layouts(
    checkpoint: Checkpoint, layers: Layers = None, *, groups: Sequence[str] = (), fuse: Fuse = None
) -> tuple[str, tuple[LayerLayout, ...]]:
    """All layers of a checkpoint, and the pattern that they were found by ("" for a mapping).

    `layers` is a pattern with "{i}", or names for each layer number, or None to find the pattern. `groups` are
    patterns (fnmatch) of names inside a layer; a tensor belongs to the first that matches, and to one more group at
    the end if none does. `fuse` is "auto", None, a mapping of new names (inside the layer) to what they are made of,
    or a callable that gives that mapping for the layer's tensors.

    Raises ConfigError for patterns that select nothing, CheckpointError where the numbers have a gap, and
    TensorNotFoundError for a name in a mapping that the checkpoint lacks.
    """
    prefix, members = _members(checkpoint, layers)
    return prefix, tuple(
        _layout(index, prefix.replace("{i}", str(index)), stored, groups, fuse) for index, stored in enumerate(members)
    )


def _members(checkpoint: Checkpoint, layers: Layers) -> tuple[str, list[dict[str, TensorSpec]]]:
    if isinstance(layers, Mapping):
        _check_numbers(checkpoint, sorted(layers), "the mapping")
        return "", [{spec.name: spec for spec in checkpoint.select(list(layers[i]))} for i in range(len(layers))]
    pattern = find_pattern(checkpoint.tensors) if layers is None else layers
    found = numbered_layers(checkpoint, pattern)
    _check_numbers(checkpoint, sorted(found), repr(pattern))
    return pattern, [found[index] for index in range(len(found))]


def numbered_layers(checkpoint: Checkpoint, pattern: str) -> dict[int, dict[str, TensorSpec]]:
    """The tensors of each layer, by number and by their names inside it. Raises ConfigError where there are none."""
    if pattern.count("{i}") != 1:
        raise ConfigError(f'layers={pattern!r} has to contain {{i}} once, as "model.layers.{{i}}." does')
    before, after = pattern.split("{i}")
    expression = re.compile(re.escape(before) + r"(\d+)" + re.escape(after), re.ASCII)
    found: dict[int, dict[str, TensorSpec]] = {}
    for name, spec in checkpoint.tensors.items():
        match = expression.match(name)
        if match is not None:
            found.setdefault(int(match[1]), {})[name[match.end() :]] = spec
    if not found:
        example = next(iter(checkpoint.tensors), None)
        raise ConfigError(
            f"{checkpoint.path}: no tensor's name begins with {quote(pattern)}; "
            + (f"one is named {quote(example)}" if example is not None else "it has no tensors at all")
        )
    return found


def _check_numbers(checkpoint: Checkpoint, numbers: Sequence[int], what: str) -> None:
    lacking = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    if not numbers or lacking or min(numbers) < 0:
        raise CheckpointError(
            f"{checkpoint.path}: {what} has layers {list(numbers)[:8]}{' ...' if len(numbers) > 8 else ''}, without "
            f"{lacking[0] if lacking else 'any'}; layers count from 0 without a gap, or pass them as a mapping"
        )


def _layout(
    index: int, prefix: str, stored: Mapping[str, TensorSpec], groups: Sequence[str], fuse: Fuse
) -> LayerLayout:
    specs = [spec._replace(name=name) for name, spec in stored.items()]
    fused = _fused({spec.name: spec for spec in specs}, fuse)

    def group_of(name: str) -> int:
        return next((n for n, pattern in enumerate(groups) if fnmatchcase(name, pattern)), len(groups))

    plan = plan_packed(specs, group_of, fused, align_bytes=WEIGHT_ALIGNMENT_BYTES)
    placements = {placement.name: placement for placement in plan.placements}
    group = {name: group_of(name) for name in placements}
    group.update({name: max(map(group_of, whole.names)) for name, whole in fused.items()})
    by_name = {spec.name: spec for spec in specs}
    rows: list[tuple[str, Row]] = []
    for name, placement in placements.items():
        target = placement.offset
        for part in fused[name].names if name in fused else (name,):
            spec = by_name[part]
            rows.append((part, (spec.file, spec.offset, spec.nbytes, 0, target, group_of(part))))
            target += spec.nbytes
    return LayerLayout(index, prefix, by_name, placements, plan, plan.buffer_bytes[0], group, tuple(rows))


def _fused(stored: Mapping[str, TensorSpec], fuse: Fuse) -> Mapping[str, Fused]:
    if fuse is None:
        return {}
    if isinstance(fuse, Mapping):
        lacking = [part for whole in fuse.values() for part in whole.names if part not in stored]
        if lacking:
            raise TensorNotFoundError(f"fuse names {lacking[0]!r}, which is in none of the layers it was given for")
        return fuse
    if callable(fuse):
        return fuse(stored)
    if fuse != "auto":
        raise ConfigError(f'fuse is {fuse!r}; it is "auto", None, a mapping or a callable')
    return fused_experts(stored)


def expert_sets(stored: Mapping[str, TensorSpec]) -> dict[str, dict[int, dict[str, TensorSpec]]]:
    """The tensors of numbered experts: by what their names begin with, by number, and by the rest of the name."""
    sets: dict[str, dict[int, dict[str, TensorSpec]]] = {}
    for name, spec in stored.items():
        match = _EXPERT.match(name)
        if match is not None:
            sets.setdefault(match["base"], {}).setdefault(int(match["index"]), {})[match["rest"]] = spec
    return sets


def fused_experts(stored: Mapping[str, TensorSpec]) -> dict[str, Fused]:
    """Per-expert matrices as two stacks for each set of experts: `<base>.gate_up_proj` and `<base>.down_proj`.

    Only whole sets are fused: experts 0 to E-1, each with its three matrices of one shape and dtype.
    """
    result: dict[str, Fused] = {}
    for base, experts in expert_sets(stored).items():
        for gate, up, down in _EXPERT_MATRICES:
            if _is_whole(experts, (gate, up, down)):
                count = len(experts)
                rows, columns = experts[0][gate].shape
                halves = tuple(f"{base}.{e}.{half}" for e in range(count) for half in (gate, up))
                result[f"{base}.gate_up_proj"] = Fused(halves, (count, 2 * rows, columns))
                downs = tuple(f"{base}.{e}.{down}" for e in range(count))
                result[f"{base}.down_proj"] = Fused(downs, (count, columns, rows))
    return result


def _is_whole(experts: Mapping[int, Mapping[str, TensorSpec]], matrices: tuple[str, str, str]) -> bool:
    if sorted(experts) != list(range(len(experts))) or any(set(each) != set(matrices) for each in experts.values()):
        return False
    gate, up, down = matrices
    kinds = {(each[name].dtype, each[name].shape) for each in experts.values() for name in (gate, up)}
    turned = {(each[down].dtype, each[down].shape[::-1]) for each in experts.values()}
    return len(kinds) == 1 and kinds == turned and len(next(iter(kinds))[1]) == 2


def _is_stack(name: str, spec: TensorSpec) -> bool:
    return "experts." in name and len(spec.shape) == 3


__all__ = [
    "Fuse",
    "LayerLayout",
    "Layers",
    "expert_sets",
    "find_pattern",
    "fused_experts",
    "layer_layouts",
    "numbered_layers",
]
