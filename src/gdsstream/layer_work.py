"""What computing with a layer costs, from the shapes of its tensors and the model's config.json. Headers only.

Each value of a matrix is multiplied and added once for each token that reaches it: 2 FLOPs. All tokens reach dense
matrices and shared experts; of E routed experts a token reaches those that the router chooses, `active_experts`.
Whatever else a layer computes (attention scores, norms, activations) is left out. So compute is rather longer than what
follows from this, and hides more; a plan that is made with it promises too little, not too much.

Packed weights count with the values that they stand for, where a known format says how many: the last dimension of a
4-bit matrix of bytes is half of what it multiplies.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gdsstream.checkpoint import Checkpoint, TensorSpec
from gdsstream.dtypes import DTYPES
from gdsstream.errors import ConfigError
from gdsstream.layout import LayerLayout

CONFIG_NAME = "config.json"

_NUMBERED = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_STACKED = re.compile(r"(?:^|\.)experts\.(?!\d)")
# What lies beside packed weights and biases: no product runs over it.
_BESIDE = re.compile(
    r"(?:\.absmax|\.quant_map|\.nested_\w+|\.quant_state\.\w+|_scales?|_scale_inv|_scale_2|\.scales?|\.zeros|\.qzeros|"
    r"\.g_idx|\.SCB|_zero_point|_shape|bias)$"
)
# The names that published models give to the number of experts a token is sent to.
_ACTIVE_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "top_k")
# A multimodal model keeps its language model's settings one level down.
_NESTED_KEYS = ("text_config", "language_config", "llm_config", "thinker_config")
_MAX_CONFIG_BYTES = 16 * 2**20
_LEAST_PACKED_BITS = 8  # packed into 32-bit words, with nothing that says how: the fewest values there can be


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says of the compute; None where it does not say. `path` is None without a usable one."""

    path: str | None
    reason: str  # why there is none
    active_experts: int | None = None
    packed_bits: int | None = None


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer: what is moved for it, and what is computed with it.

    Attributes:
        index: which layer.
        nbytes: what reading it moves.
        slot_nbytes: what it takes of a slot.
        dense_values: weights that every token is multiplied with.
        expert_values: weights of all routed experts together.
        num_experts, active_experts: how many there are, and how many a token is sent to; 0 for a dense layer.
    """

    index: int
    nbytes: int
    slot_nbytes: int
    dense_values: int
    expert_values: int
    num_experts: int
    active_experts: int

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of the layer's matrix products in the forward pass, for one token."""
        share = self.active_experts / self.num_experts if self.num_experts else 0.0
        return 2.0 * (self.dense_values + self.expert_values * share)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """All layers, and in words what was taken for granted about them."""

    layers: tuple[LayerWork, ...]
    assumptions: tuple[str, ...]


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config.json beside a checkpoint's first file. One that cannot be read or understood is a reason, no error."""
    path = os.path.join(os.path.dirname(checkpoint.files[0].path), CONFIG_NAME)
    try:
        with open(path, "rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return ModelConfig(None, f"there is no {CONFIG_NAME} beside the checkpoint")
    except OSError as error:
        return ModelConfig(None, f"{path} cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        return ModelConfig(None, f"{path} is not valid JSON ({error})")
    if not isinstance(config, dict):
        return ModelConfig(None, f"{path} is not a JSON object")
    parts = [config, *(part for key in _NESTED_KEYS if isinstance(part := config.get(key), dict))]
    return ModelConfig(path, "", _first_count(parts, _ACTIVE_KEYS), _packed_bits(parts))


def model_work(layouts: Sequence[LayerLayout], config: ModelConfig, *, active_experts: int | None = None) -> ModelWork:
    """The work of each layer. `active_experts` (a token's) goes before what `config` says.

    Raises ConfigError where no layer has a matrix, and for `active_experts` beyond the experts that there are.
    """
    unexplained: list[str] = []
    assumed_bits = False
    layers: list[LayerWork] = []
    source = ""
    for layout in layouts:
        dense = expert = 0
        for name, spec in layout.stored.items():
            values, known = _values(name, spec, layout.stored, config.packed_bits or _LEAST_PACKED_BITS)
            if not known:
                unexplained.append(layout.prefix + name)
            assumed_bits |= known and config.packed_bits is None and spec.dtype == "I32" and values > 0
            if _NUMBERED.search(name) or (_STACKED.search(name) and len(spec.shape) > 2):
                expert += values
            else:
                dense += values
        count = _num_experts(layout) if expert else 0
        active = 0
        if count:
            active, source = _active(count, config, active_experts)
        layers.append(LayerWork(layout.index, layout.plan.total_bytes, layout.nbytes, dense, expert, count, active))
    if not any(layer.flops_per_token for layer in layers):
        raise ConfigError(
            f"no layer of {layouts[0].prefix or 'the mapping'} and its like has a matrix, so that there is nothing to "
            "compute with; pass layers= as the pattern of the model's layers"
        )
    said = [
        "Compute: 2 FLOPs for each weight and token that meet. Attention scores, norms, and what is outside of the "
        "layers are left out: they would hide more."
    ]
    if source:
        said.append(source)
    if assumed_bits:
        said.append(
            f"Weights packed into 32-bit words count as {_LEAST_PACKED_BITS}-bit values, the fewest there can be: "
            f"{config.reason or f'{config.path} does not tell their bits'}."
        )
    if unexplained:
        said.append(
            f"{len(unexplained)} tensors of bytes, such as {unexplained[0]}, are of no known packing; they count as "
            "one value a byte."
        )
    return ModelWork(tuple(layers), tuple(said))


def _active(count: int, config: ModelConfig, given: int | None) -> tuple[int, str]:
    """How many of `count` experts a token is sent to, and where that comes from."""
    if given is not None:
        if not 1 <= given <= count:
            raise ConfigError(f"a token is sent to {given} experts, but a layer has {count}; give 1 to {count}")
        return given, f"A token is sent to {given} of {count} experts, as given; all of them are read."
    if config.active_experts is not None:
        active = min(config.active_experts, count)
        return active, f"A token is sent to {active} of {count} experts ({CONFIG_NAME}); all of them are read."
    why = config.reason or f"{config.path} does not tell"
    return 1, f"A token is sent to 1 of {count} experts, the least there can be: {why}. Give --active-experts."


def _num_experts(layout: LayerLayout) -> int:
    numbered = {int(match[1]) for name in layout.stored if (match := _NUMBERED.search(name))}
    if numbered:
        return len(numbered)
    return max(spec.shape[0] for name, spec in layout.stored.items() if _STACKED.search(name) and len(spec.shape) > 2)


def _values(name: str, spec: TensorSpec, stored: Mapping[str, TensorSpec], packed_bits: int) -> tuple[int, bool]:
    """How many weights a tensor multiplies with, and whether its format is known."""
    if len(spec.shape) < 2 or _BESIDE.search(name):
        return 0, True
    count = prod(spec.shape)
    if spec.dtype.startswith(("F", "BF")):
        return count, True
    if spec.dtype == "I32" and name.endswith(("qweight", "weight_packed")):
        return count * (32 // packed_bits), True
    if DTYPES[spec.dtype].bits != 8 or spec.dtype == "BOOL":
        return 0, True  # tables of indices, masks
    base = name.removesuffix("_packed")
    four_bits = (
        f"{name}.absmax" in stored  # bitsandbytes
        or name.endswith("_blocks")  # MXFP4
        or name.endswith("weight_packed")  # compressed-tensors, NVFP4
        or f"{base}_scale_2" in stored  # NVFP4
    )
    if four_bits:
        return 2 * count, True
    return count, f"{base}_scale" in stored or f"{name.rpartition('.')[0]}.SCB" in stored


def _first_count(parts: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int | None:
    for part in parts:
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _packed_bits(parts: Sequence[Mapping[str, Any]]) -> int | None:
    """Bits of a weight packed into 32-bit words, as GPTQ, AWQ and compressed-tensors write it down."""
    for part in parts:
        quantization = part.get("quantization_config")
        if not isinstance(quantization, dict):
            continue
        found = [quantization]
        groups = quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            if isinstance(group, dict) and isinstance(group.get("weights"), dict):
                found.append(group["weights"])
        bits = _first_count(found, ("bits", "w_bit", "num_bits"))
        if bits is not None and bits <= 32:
            return bits
    return None


__all__ = ["CONFIG_NAME", "LayerWork", "ModelConfig", "ModelWork", "model_work", "read_model_config"]
