"""Which file of a packed checkpoint a tensor goes to, and where in it: a checkpoint -> PackedFiles. Pure: no I/O.

One file for each layer, and one for everything else. What is aligned, and what is not: a header ends with blanks, so
that the data of its file, and with it the first tensor, begins at a multiple of 4 KiB. The format forbids holes between
tensors, so that no other tensor can be brought to a multiple of 4 KiB. Those whose size is not a multiple of 16 bytes
come last, larger dtypes first: all before them begin at multiples of 16 bytes, and they at multiples of their dtype's.

Otherwise tensors come as they are used: in a layer what is before the attention, attention, what is behind it, router,
shared experts, MLP; then the matrices of single experts as the stacks that `LayerStreamer(fuse="auto")` makes of them
(gate and up of each expert, then all downs), so that a stack is one run. What is not known keeps the source's order,
between attention and MLP. A layer is one file, and so one run for a streamer, in any order; the order is for those
who read it in groups, or only parts of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gdsstream.checkpoint import Checkpoint
from gdsstream.dtypes import DTYPES
from gdsstream.errors import ConfigError
from gdsstream.header import TensorSpec
from gdsstream.layout import WEIGHT_ALIGNMENT_BYTES, Layers, find_pattern, fused_experts, numbered_layers
from gdsstream.save import build_header

REST_NAME = "model-rest.safetensors"

_DIGITS = 5  # of a layer's number in its file's name, so that names sort as layers do
# (patterns of names, rank in the order of use); the first that matches counts, and rank 3 where none does.
_LAYER_RANKS = (
    (("*post_feedforward*", "*post_mlp*"), 8),
    (("*post_attention*norm*", "*pre_feedforward*", "*ffn_norm*", "*ln_2*", "*norm2*"), 4),
    (("*input_layernorm*", "*attention_norm*", "*ln_1*", "*norm1*"), 1),
    (("*attn*", "*attention*"), 2),
    (("*mlp.gate.*", "*moe.gate.*", "*router*"), 5),
    (("*shared_expert*",), 6),
    (("*mlp*", "*experts*", "*feed_forward*", "*ffn*"), 7),
)
_REST_RANKS = ((("*embed*", "*wte*", "*wpe*"), 1), (("*lm_head*", "*output.weight"), 5), (("*norm*", "*ln_f*"), 4))
_UNKNOWN_RANK = 3


@dataclass(frozen=True, slots=True, eq=False)
class PackedFile:
    """A file that is to be written.

    Attributes:
        name: inside the packed directory.
        layer: which layer it holds; None for the file with all the rest.
        specs: its tensors in their order, as they lie in the source.
        header: the bytes before the data.
        nbytes: of the whole file.
    """

    name: str
    layer: int | None
    specs: tuple[TensorSpec, ...]
    header: bytes
    nbytes: int


def arrange(checkpoint: Checkpoint, layers: Layers = None) -> tuple[str, list[PackedFile]]:
    """The files of the packed checkpoint, layers first, and the pattern that layers were found by ("" without one).

    `layers` is a pattern with "{i}", or names for each layer number, or None to find a pattern; a checkpoint without
    numbers in its names then is one file. Raises ConfigError for a pattern that selects nothing, TensorNotFoundError
    for names that the checkpoint lacks.
    """
    pattern, members = _members(checkpoint, layers)
    metadata = checkpoint.metadata()
    taken = {spec.name for each in members.values() for spec in each.values()}
    rest = [spec for name, spec in checkpoint.tensors.items() if name not in taken]
    width = max([_DIGITS, *(len(str(layer)) for layer in members)])
    files = [
        _file(f"model-layer-{layer:0{width}d}.safetensors", layer, _ordered_layer(members[layer]), metadata)
        for layer in sorted(members)
    ]
    if rest or not files:
        files.append(_file(REST_NAME, None, _ordered_rest(rest), metadata))
    return pattern, files


def _file(name: str, layer: int | None, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> PackedFile:
    header = build_header(((spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in specs), metadata)
    return PackedFile(name, layer, tuple(specs), header, len(header) + sum(spec.nbytes for spec in specs))


def _members(checkpoint: Checkpoint, layers: Layers) -> tuple[str, dict[int, dict[str, TensorSpec]]]:
    """The tensors of each layer by their names inside it."""
    if isinstance(layers, Mapping):
        return "", {number: {spec.name: spec for spec in checkpoint.select(names)} for number, names in layers.items()}
    try:
        pattern = find_pattern(checkpoint.tensors) if layers is None else layers
    except ConfigError:
        return "", {}
    return pattern, numbered_layers(checkpoint, pattern)


def _ordered_layer(stored: Mapping[str, TensorSpec]) -> list[TensorSpec]:
    stacks = [name for whole in fused_experts(stored).values() for name in whole.names]
    stacked = frozenset(stacks)
    single = sorted((name for name in stored if name not in stacked), key=lambda name: _rank(name, _LAYER_RANKS))
    return _aligned(stored[name] for name in (*single, *stacks))


def _ordered_rest(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    return _aligned(sorted(specs, key=lambda spec: _rank(spec.name, _REST_RANKS)))


def _rank(name: str, ranks: Iterable[tuple[tuple[str, ...], int]]) -> int:
    return next((rank for patterns, rank in ranks if any(fnmatchcase(name, each) for each in patterns)), _UNKNOWN_RANK)


def _aligned(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """In the same order, but for those behind which nothing could be aligned."""
    return sorted(
        specs, key=lambda spec: -DTYPES[spec.dtype].bits if spec.nbytes % WEIGHT_ALIGNMENT_BYTES else -(1 << 10)
    )


__all__ = ["REST_NAME", "PackedFile", "arrange"]
