"""What a checkpoint of Llama 3 holds: names as transformers has them, shapes as Meta published them, bf16.

A model that is larger than the limit keeps the shapes of its layers and has fewer of them. Embeddings and output head
stay as long as one layer fits beside them, since they are its largest tensors; where they do not, layers alone are
left. So a few layers stand for many, which a checkpoint's speed depends on only by the size of its tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.config import BenchConfigError
from bench.files import Shaped

_BF16, _F32 = 2, 4
#: Of every parameter, in fp32: what mixed-precision Adam keeps beside the bf16 weights.
_OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's widths, in elements."""

    hidden: int
    intermediate: int
    heads: int
    layers: int
    kv_heads: int = 8
    vocabulary: int = 128256

    def shrunk(self, divisor: int) -> Shape:
        """The same number of layers and heads with narrower ones."""
        return dataclasses.replace(
            self,
            hidden=self.hidden // divisor,
            intermediate=self.intermediate // divisor,
            vocabulary=self.vocabulary // divisor,
        )


SHAPES = {
    "8b": Shape(hidden=4096, intermediate=14336, heads=32, layers=32),
    "70b": Shape(hidden=8192, intermediate=28672, heads=64, layers=80),
}


class Scaled(NamedTuple):
    """A checkpoint that fits: `layers` of the model's, and what it holds."""

    layers: int
    #: Whether embeddings, final norm and output head are in it.
    whole: bool
    tensors: list[Shaped]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.layers} layers{'' if self.whole else ' without embeddings'}, {self.nbytes / 1e9:.3f} GB"


def layer(shape: Shape, number: int) -> list[Shaped]:
    """The bf16 tensors of a layer."""
    prefix, hidden, keys = f"model.layers.{number}", shape.hidden, shape.hidden * shape.kv_heads // shape.heads
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    return [(f"{prefix}.{name}.weight", "BF16", size) for name, size in found.items()]


def rest(shape: Shape) -> list[Shaped]:
    """The bf16 tensors that belong to no layer."""
    table = (shape.vocabulary, shape.hidden)
    return [
        ("model.embed_tokens.weight", "BF16", table),
        ("model.norm.weight", "BF16", (shape.hidden,)),
        ("lm_head.weight", "BF16", table),
    ]


def scaled(model: str, limit_bytes: int, *, optimizer: bool, shrink: int) -> Scaled:
    """As much of the model as has room in `limit_bytes`. Raises BenchConfigError where one layer has none."""
    shape = SHAPES[model].shrunk(shrink)
    of_layer, of_rest = (nbytes(with_state(found, optimizer)) for found in (layer(shape, 0), rest(shape)))
    whole = of_rest + of_layer <= limit_bytes
    layers = min(shape.layers, (limit_bytes - (of_rest if whole else 0)) // of_layer)
    if layers < 1:
        state = " with its optimizer state" if optimizer else ""
        raise BenchConfigError(
            f"a layer of Llama 3 {model}{state} takes {of_layer / 1e9:.3f} GB, and a checkpoint may have "
            f"{limit_bytes / 1e9:.3f} GB here (scenario.checkpoint_bytes, free disk space and a quarter of the free "
            "memory, whichever is least); raise it, choose another storage.dir, or narrower layers with scenario.shrink"
        )
    tensors = [each for number in range(layers) for each in layer(shape, number)]
    if whole:
        embeddings, *others = rest(shape)
        tensors = [embeddings, *tensors, *others]
    tensors = with_state(tensors, optimizer)
    return Scaled(layers, whole, tensors, nbytes(tensors))


def full_bytes(model: str, *, optimizer: bool) -> int:
    """Of the published model's checkpoint."""
    shape = SHAPES[model]
    return nbytes(with_state(rest(shape), optimizer)) + shape.layers * nbytes(with_state(layer(shape, 0), optimizer))


def with_state(tensors: Sequence[Shaped], optimizer: bool) -> list[Shaped]:
    """Weights, each followed by its optimizer state where that is wanted."""
    found = []
    for name, dtype, size in tensors:
        found.append((name, dtype, size))
        if optimizer:
            found += [(f"optimizer.{kind}.{name}", "F32", size) for kind in _OPTIMIZER]
    return found


def nbytes(tensors: Sequence[Shaped]) -> int:
    """Of all of them."""
    return sum(math.prod(size) * (_F32 if dtype == "F32" else _BF16) for _, dtype, size in tensors)


def shards(tensors: Sequence[Shaped], count: int) -> list[list[Shaped]]:
    """The tensors in their order in at most `count` groups of about the same size, none of them empty."""
    total, done = nbytes(tensors), 0
    found: list[list[Shaped]] = [[] for _ in range(count)]
    for each in tensors:
        # By where its middle lies, so that a large tensor goes where most of it belongs.
        size = nbytes([each])
        found[min(count - 1, (2 * done + size) * count // (2 * total))].append(each)
        done += size
    return [group for group in found if group]
