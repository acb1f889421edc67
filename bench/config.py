"""The configuration: plain YAML under configs/, checked against the dataclasses here.

An unknown key or value is an error that names the nearest valid one. Overrides of the command line are checked before
Hydra composes them (`check_overrides`), since Hydra's own message does not say what was meant; the composed
configuration is checked again as a whole (`build`), which also covers the YAML files and keys added with `+`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.config_base import VERBS as VERBS
from bench.config_base import BenchConfigError as BenchConfigError
from bench.config_base import BenchError as BenchError
from bench.config_base import ScenarioConfig as ScenarioConfig
from bench.config_base import StorageConfig as StorageConfig
from bench.config_base import at_least, byte_size, one_of, whole_numbers
from bench.config_base import nearest as nearest
from bench.config_checkpoint import CheckpointConfig as CheckpointConfig
from bench.config_mlperf import MlperfConfig as MlperfConfig
from bench.config_transfer import TransferConfig as TransferConfig

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
CACHE_STATES = ("warm", "cold")
DEVICES = ("auto", "cpu", "cuda")
#: Keys of bytes that are not called so.
_SIZES = ("sizes", "io_range")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture-of-experts layer's widths, in elements: the shared expert, and the experts that each token uses."""

    hidden: int = 5120
    shared: int = 12288
    expert: int = 1536
    active: int = 8

    def __post_init__(self) -> None:
        for name in ("hidden", "shared", "expert"):
            at_least(f"scenario.moe.{name}", getattr(self, name), 16)
            # Keeps every matrix aligned to what matrix kernels load at once, wherever it begins.
            if getattr(self, name) % 16:
                raise BenchConfigError(f"'scenario.moe.{name}' is {getattr(self, name)}; it has to be a multiple of 16")
        at_least("scenario.moe.active", self.active, 1)


@dataclass(frozen=True, slots=True)
class LayersConfig(ScenarioConfig):
    """What the scenarios that stream layers share. A file is a layer."""

    #: How many tokens a layer computes with; each number is a part of the run, with rows of its own.
    tokens: list[int] = field(default_factory=lambda: [8192])
    num_slots: int = 2
    moe: MoeConfig = field(default_factory=MoeConfig)

    def __post_init__(self) -> None:
        ScenarioConfig.__post_init__(self)
        whole_numbers("scenario.tokens", self.tokens, 1)
        at_least("scenario.num_slots", self.num_slots, 1)


@dataclass(frozen=True, slots=True)
class PipelineConfig(LayersConfig):
    """Parameters of verb `pipeline`. The slope is taken between runs of `short` and of `long` layers."""

    short: int = 20
    long: int = 60
    #: A route whose two runs would take longer gets shorter ones; its record says how many layers.
    sample_seconds: float = 4.4
    #: Whether compute uses the streamed bytes, or weights that are resident.
    consume: bool = True
    #: Whether a layer is the backward pass with recomputation, in falling order, or the forward pass.
    backward: bool = False

    def __post_init__(self) -> None:
        LayersConfig.__post_init__(self)
        at_least("scenario.short", self.short, 1)
        at_least("scenario.long", self.long, self.short + 1)
        if self.sample_seconds <= 0:
            raise BenchConfigError(f"'scenario.sample_seconds' is {self.sample_seconds}; it has to be positive")


@dataclass(frozen=True, slots=True)
class TrainingConfig(LayersConfig):
    """Parameters of verb `train`: forward and backward through an offloaded model."""

    layers: int = 20
    #: How many steps a sample times, one after the other.
    steps: int = 3
    #: Activation checkpointing of each layer: the backward pass computes it once more.
    recompute: bool = True
    #: Of the trained adapters.
    rank: int = 16

    def __post_init__(self) -> None:
        LayersConfig.__post_init__(self)
        for name in ("layers", "steps", "rank"):
            at_least(f"scenario.{name}", getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class EpochConfig(ScenarioConfig):
    """Parameters of verb `epoch`: shuffled batches of a dataset's records on the device."""

    #: Bytes of a record; each number is a part of the run, with a dataset and rows of its own.
    sizes: list[int] = field(default_factory=lambda: [4096, 65536, 1 << 20, 150_000_000])
    #: Of a batch, at most, but for one record where that is larger.
    batch_bytes: int = 16 << 20
    #: How long a sample takes, about: as many whole epochs, one where the cache is cold, or a part of one where that
    #: takes more than twice as long.
    sample_seconds: float = 1.0
    #: What a sample delivers at most, held on the device until it is verified; None: 32 GiB on
    #: a GPU, or a quarter of its memory; 1 GiB on the CPU.
    sample_bytes: int | None = None
    #: Of compute for each batch, real kernels; 0 measures how fast batches come instead.
    compute_ms: float = 0.0
    #: Of a dataset, at most, where small ones would make too many; None: as many as fill the files.
    most_records: int | None = None

    def __post_init__(self) -> None:
        ScenarioConfig.__post_init__(self)
        whole_numbers("scenario.sizes", self.sizes, 512)
        at_least("scenario.batch_bytes", self.batch_bytes, 1)
        if self.sample_bytes is not None:
            at_least("scenario.sample_bytes", self.sample_bytes, 1)
        if self.most_records is not None:
            at_least("scenario.most_records", self.most_records, 4)
        at_least("scenario.compute_ms", self.compute_ms, 0)
        if self.sample_seconds <= 0:
            raise BenchConfigError(f"'scenario.sample_seconds' is {self.sample_seconds}; it has to be positive")


#: verb -> what describes its scenario, where it has more parameters than ScenarioConfig
_SCENARIOS: dict[str, type[ScenarioConfig]] = {
    "pipeline": PipelineConfig,
    "train": TrainingConfig,
    "epoch": EpochConfig,
    "mlperf": MlperfConfig,
    "transfer": TransferConfig,
    "write": CheckpointConfig,
}


def parts(scenario: ScenarioConfig) -> list[ScenarioConfig]:
    """What a run measures one after the other: the scenario with each number of tokens, size of a record, workload or
    kind of transfer, or the scenario itself."""
    if isinstance(scenario, LayersConfig):
        return [dataclasses.replace(scenario, tokens=[count]) for count in scenario.tokens]
    if isinstance(scenario, EpochConfig):
        return [dataclasses.replace(scenario, sizes=[size]) for size in scenario.sizes]
    return list(scenario.parts())


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The page cache before every sample: warm, or empty and verified to be empty."""

    state: str = "warm"

    def __post_init__(self) -> None:
        one_of("cache.state", self.state, CACHE_STATES)


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Experiments to make one after the other instead of a run, and the documents that they are laid beside. What a
    part and a document hold is checked in reference/plan.py. Without parts there is nothing of this."""

    #: Of all parts together; those for which no time is left are rows that say so.
    max_seconds: float = 1200.0
    #: The directory of an earlier call, whose finished parts are kept; None: a new one.
    resume: str | None = None
    #: The parts to make; empty: all.
    only: list[str] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One run."""

    scenario: ScenarioConfig
    storage: StorageConfig = field(default_factory=StorageConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    #: Name of the row -> `kind` of the loader and its options.
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    device: str = "auto"
    #: Where the JSON lines go; None: results.jsonl in Hydra's output directory.
    output: str | None = None
    #: Records of an interrupted run, or its directory: what they hold is kept, and the rest is added to them.
    resume: str | None = None
    #: Measure in a process of its own, so that a library that crashes is a row and not the end of the run.
    isolate: bool = True
    #: With `isolate`, a row that is at one step for longer is ended and failed; None: never.
    hang_seconds: float | None = 600.0
    #: Measure although another process uses the GPU.
    allow_busy_gpu: bool = False
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    def __post_init__(self) -> None:
        one_of("device", self.device, DEVICES)
        if self.hang_seconds is not None and self.hang_seconds <= 0:
            raise BenchConfigError(f"'hang_seconds' is {self.hang_seconds}; it has to be positive, or null")
        self.scenario.check_storage(self.storage)
        if self.output is not None and self.resume is not None:
            raise BenchConfigError("'output' and 'resume' both name a file of records; a resumed run adds to its own")


def build(config: Mapping[str, Any]) -> BenchConfig:
    """Check a composed configuration as a whole. Raises BenchConfigError."""
    checked: BenchConfig = from_mapping(BenchConfig, config, "")
    if not checked.loaders:
        raise BenchConfigError(f"no loader is chosen; choose with loader=[a,b] from: {', '.join(options('loader'))}")
    return checked


def from_mapping(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass `cls` from `values`; `where` is the dotted path for messages."""
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls) if item.init}
    known: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise BenchConfigError(f"unknown key '{_join(where, str(key))}'; {nearest(str(key), fields)}")
        known[key] = _check(_in_bytes(key, value), hints[key], _join(where, key))
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in known:
            raise BenchConfigError(f"key '{_join(where, name)}' is missing")
    return cls(**known)


def options(group: str, config_dir: Path = CONFIG_DIR) -> list[str]:
    """The names in a config group, such as `loader`."""
    return sorted(path.stem for path in (config_dir / group).glob("*.yaml"))


def groups(config_dir: Path = CONFIG_DIR) -> list[str]:
    """The config groups."""
    return sorted(path.name for path in config_dir.iterdir() if path.is_dir())


def check_overrides(overrides: Sequence[str], config_dir: Path = CONFIG_DIR) -> None:
    """Check `key=value` arguments of the command line. Raises BenchConfigError with the nearest valid name.

    Keys that start with `+`, `~`, `hydra.` or `hydra/` are Hydra's business, and so is everything that it cannot parse.
    """
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key.startswith(("+", "~", "-", "hydra.", "hydra/")) or "@" in key:
            continue
        if key in groups(config_dir):
            for choice in value.strip("[]").split(","):
                name = choice.strip().strip("'\"")
                valid = options(key, config_dir)
                if name not in ("", "null", *valid) and name.isidentifier():
                    raise BenchConfigError(f"unknown {key} '{name}'; {nearest(name, valid)}")
            continue
        _check_key(key, config_dir)


def _check_key(key: str, config_dir: Path) -> None:
    head, _, rest = key.partition(".")
    top = _hints([BenchConfig])
    if head == "loader" and rest:
        said = (
            f"unknown key '{key}': rows are chosen with loader=, and their options are keys of 'loaders'; did you mean "
        )
        try:
            _check_loader_key(f"loaders.{rest}", rest, config_dir)
        except BenchConfigError as error:
            raise BenchConfigError(f"{said}'loaders.{rest}'? That is an {error}") from None
        raise BenchConfigError(f"{said}'loaders.{rest}'?")
    if head not in top:
        raise BenchConfigError(f"unknown key '{key}'; {nearest(head, set(top) | set(groups(config_dir)))}")
    if head == "loaders" and rest:
        _check_loader_key(key, rest, config_dir)
        return
    valid = top
    # Which verb the scenario has is not known yet, so that a key of any of them passes here.
    found = list({ScenarioConfig, *_SCENARIOS.values()}) if head == "scenario" else top[head]
    for name in rest.split(".") if rest else ():
        named = [typing.get_args(hint)[1] for hint in found if typing.get_origin(hint) is dict]
        valid = dict.fromkeys(options("workload", config_dir), named) if named else _hints(found)
        if name not in valid:
            raise BenchConfigError(f"unknown key '{key}'; {nearest(name, valid)}")
        found = valid[name]
        if any(typing.get_origin(hint) is dict and typing.get_args(hint)[1] is Any for hint in found):
            return  # whatever a part or a document is called; what it holds is checked where it is composed


def _hints(types_: Iterable[Any]) -> dict[str, list[Any]]:
    """The fields of dataclasses, and the types that each has in them."""
    found: dict[str, list[Any]] = {}
    for cls in types_:
        if dataclasses.is_dataclass(cls):
            for name, hint in typing.get_type_hints(cls).items():
                found.setdefault(name, []).append(hint)
    return found


def own_rows(experiment: str, config_dir: Path = CONFIG_DIR) -> dict[str, str]:
    """The rows that an experiment describes itself, by name, and the kind of each."""
    from omegaconf import OmegaConf

    found = OmegaConf.select(OmegaConf.load(config_dir / "experiment" / f"{experiment}.yaml"), "loaders") or {}
    return {str(name): str(row.kind) for name, row in found.items()}


def _check_loader_key(key: str, rest: str, config_dir: Path) -> None:
    from omegaconf import OmegaConf

    from bench import loaders

    name, _, option = rest.partition(".")
    if name in options("loader", config_dir):
        kind = OmegaConf.load(config_dir / "loader" / f"{name}.yaml").kind
    else:
        own = {
            row: kind for each in options("experiment", config_dir) for row, kind in own_rows(each, config_dir).items()
        }
        if name not in own:
            raise BenchConfigError(
                f"unknown loader in '{key}'; {nearest(name, [*options('loader', config_dir), *own])}"
            )
        kind = own[name]
    valid = set(loaders.option_names(str(kind)))
    if option and option not in valid | {"kind"}:
        raise BenchConfigError(f"unknown option '{key}'; {nearest(option, valid)}")


def _in_bytes(key: str, value: Any) -> Any:
    """Sizes that are given with a unit, alone or in a list, as bytes; what is none stays, to be refused by its type."""
    if not key.endswith("_bytes") and key not in _SIZES:
        return value
    if isinstance(value, list):
        return [_in_bytes(key, item) for item in value]
    try:
        return byte_size(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise BenchConfigError(f"'{where}' is {value!r}; it has to be a mapping")
        if hint is ScenarioConfig:
            hint = _SCENARIOS.get(str(value.get("verb")), ScenarioConfig)
        return from_mapping(typing.cast("type[Any]", hint), value, where)
    if typing.get_origin(hint) is dict and dataclasses.is_dataclass(of := typing.get_args(hint)[1]):
        if not isinstance(value, Mapping):
            raise BenchConfigError(f"'{where}' is {value!r}; it has to be a mapping")
        return {str(name): _check(item, of, _join(where, str(name))) for name, item in value.items()}
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [typing.get_origin(item) or item for item in accepted]
    if value is None and type(None) in plain:
        return None
    if isinstance(value, bool):
        if bool in plain:
            return value
    elif any(isinstance(value, item) for item in plain):
        return value
    elif float in plain and isinstance(value, int):
        return float(value)
    expected = " or ".join("null" if item is type(None) else item.__name__ for item in plain)
    raise BenchConfigError(f"'{where}' is {value!r} ({type(value).__name__}); it has to be {expected}")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
