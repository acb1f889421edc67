"""The configuration of verb `mlperf`: workloads of MLPerf Storage, each a file of the group `workload`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from bench.config_base import BenchConfigError, ScenarioConfig, at_least, nearest

#: As they are chosen where none is named: the first one that a workload has.
ACCELERATORS = ("h100", "b200", "a100")


@dataclass(frozen=True, slots=True)
class AcceleratorTimes:
    """Seconds that an accelerator computes with a batch; None where MLPerf Storage has no such workload."""

    a100: float | None = None
    h100: float | None = None
    b200: float | None = None


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """A model's training as MLPerf Storage emulates it."""

    #: Bytes of a sample, and the standard deviation where samples differ in size.
    sample_bytes: int
    batch_size: int
    compute_s: AcceleratorTimes
    #: The accelerator utilisation that a submission has to reach.
    target_utilisation: float
    sample_bytes_std: int = 0
    #: Where these numbers are from.
    source: str = ""

    @property
    def accelerators(self) -> list[str]:
        """Those that it has seconds for, in the order of ACCELERATORS."""
        return [name for name in ACCELERATORS if getattr(self.compute_s, name) is not None]

    def seconds(self, accelerator: str) -> float:
        """Of a batch's compute."""
        return float(getattr(self.compute_s, accelerator))

    def check(self, where: str) -> None:
        """Raise BenchConfigError for a value that cannot be; `where` is the dotted path for messages."""
        # A sample begins with its number, of eight bytes.
        at_least(f"{where}.sample_bytes", self.sample_bytes, 16)
        at_least(f"{where}.sample_bytes_std", self.sample_bytes_std, 0)
        at_least(f"{where}.batch_size", self.batch_size, 1)
        if not 0 < self.target_utilisation <= 1:
            raise BenchConfigError(
                f"'{where}.target_utilisation' is {self.target_utilisation}; it is a share, such as 0.9"
            )
        if not self.accelerators:
            raise BenchConfigError(f"'{where}.compute_s' has no seconds; give them for {', '.join(ACCELERATORS)}")
        for name in self.accelerators:
            if self.seconds(name) <= 0:
                raise BenchConfigError(
                    f"'{where}.compute_s.{name}' is {self.seconds(name)}; it has to be positive, or null"
                )


@dataclass(frozen=True, slots=True)
class MlperfConfig(ScenarioConfig):
    """Parameters of verb `mlperf`: how much of its time an accelerator computes, and does not wait for samples."""

    #: Chosen with workload=[a,b]; each is a part of the run, with a dataset and rows of its own.
    workloads: dict[str, WorkloadConfig] = field(default_factory=dict)
    #: Whose seconds the compute takes; None: h100 where the workload has it, else b200, else a100.
    accelerator: str | None = None
    #: With compute: the utilisation. Without: how fast batches come, and so how many accelerators one loader feeds.
    #: Each is a part of the run.
    compute: list[bool] = field(default_factory=lambda: [True, False])
    #: Of the seconds; other than 1 for a try on a machine that is no such accelerator's host.
    compute_scale: float = 1.0
    #: How long a sample takes, about: as many steps; whole epochs, one of a cold cache, where they take less than twice
    #: that.
    sample_seconds: float = 2.0
    #: That a sample has at least, however long they take.
    least_steps: int = 8
    #: What a sample delivers at most, held on the device until it is verified; None: as EpochConfig.
    sample_bytes: int | None = None
    #: Of a dataset, at most; storage.files * storage.file_bytes limits it too.
    most_samples: int = 500_000

    def __post_init__(self) -> None:
        ScenarioConfig.__post_init__(self)
        if not self.workloads:
            raise BenchConfigError("no workload is chosen; choose with workload=[unet3d,resnet50]")
        at_least("scenario.most_samples", self.most_samples, 1)
        at_least("scenario.least_steps", self.least_steps, 2)
        if self.sample_bytes is not None:
            at_least("scenario.sample_bytes", self.sample_bytes, 1)
        for name in ("sample_seconds", "compute_scale"):
            if getattr(self, name) <= 0:
                raise BenchConfigError(f"'scenario.{name}' is {getattr(self, name)}; it has to be positive")
        if not self.compute or not all(isinstance(each, bool) for each in self.compute):
            raise BenchConfigError(f"'scenario.compute' is {self.compute}; it is a list of true and false")
        if self.accelerator not in (None, *ACCELERATORS):
            raise BenchConfigError(
                f"'scenario.accelerator' is {self.accelerator!r}; {nearest(str(self.accelerator), ACCELERATORS)}"
            )
        for name, workload in self.workloads.items():
            workload.check(f"scenario.workloads.{name}")
            if self.accelerator not in (None, *workload.accelerators):
                raise BenchConfigError(
                    f"'scenario.accelerator' is {self.accelerator!r}, and workload {name} has no seconds for it; it "
                    f"has: {', '.join(workload.accelerators)}"
                )

    def parts(self) -> list[ScenarioConfig]:
        return [
            dataclasses.replace(self, workloads={name: workload}, compute=[compute])
            for name, workload in self.workloads.items()
            for compute in self.compute
        ]

    @property
    def only(self) -> tuple[str, WorkloadConfig]:
        """Of a part: its workload, and what that is called."""
        ((name, workload),) = self.workloads.items()
        return name, workload

    @property
    def emulated(self) -> str:
        """Of a part: the accelerator."""
        return self.accelerator or self.only[1].accelerators[0]
