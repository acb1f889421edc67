"""Parameters of verb `write`: a checkpoint of a language model, saved and read back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from bench.config_base import BenchConfigError, ScenarioConfig, StorageConfig, at_least, one_of

MODELS = ("8b", "70b")
#: The largest divisor of the widths: all of them are multiples of it.
MOST_SHRINK = 256


@dataclass(frozen=True, slots=True)
class CheckpointConfig(ScenarioConfig):
    """What is saved. Layers keep their shapes; there are fewer of them where the model is larger than the limit."""

    #: Shapes of Llama 3; each is a part of the run, with rows of its own.
    models: list[str] = field(default_factory=lambda: list(MODELS))
    #: Also what Adam needs in mixed precision: an fp32 master copy and two fp32 moments of every parameter, 14 bytes a
    #: parameter in all instead of 2.
    optimizer: bool = False
    #: Of a checkpoint at most, in bytes; less where the disk or the memory has less room.
    checkpoint_bytes: int = 10_000_000_000
    #: Files that it is split into, of about the same size.
    shards: int = 4
    #: Widths and vocabulary are divided by it, for tests that take seconds; 1: true shapes.
    shrink: int = 1

    def __post_init__(self) -> None:
        ScenarioConfig.__post_init__(self)
        if not self.models:
            raise BenchConfigError("'scenario.models' is empty; name a model, such as scenario.models=[8b]")
        for model in self.models:
            one_of("scenario.models", str(model), MODELS)
        at_least("scenario.checkpoint_bytes", self.checkpoint_bytes, 1)
        at_least("scenario.shards", self.shards, 1)
        if self.shrink not in [1 << power for power in range(MOST_SHRINK.bit_length())]:
            raise BenchConfigError(
                f"'scenario.shrink' is {self.shrink}; it has to be a power of two of at most {MOST_SHRINK}"
            )

    def parts(self) -> list[ScenarioConfig]:
        return [dataclasses.replace(self, models=[model]) for model in self.models]

    def check_storage(self, storage: StorageConfig) -> None:
        for name in ("files", "file_bytes", "tensors"):
            if getattr(storage, name) is not None:
                raise BenchConfigError(
                    f"'storage.{name}' has to be null: scenario.checkpoint_bytes and scenario.shards say how much is "
                    "written, and the model of what"
                )
