"""Verb `mlperf`: training workloads of MLPerf Storage, and what share of its time an accelerator computes.

MLPerf Storage's figure is the accelerator utilisation, by its rules (mlcommons/storage, "Training Workloads")

    AU = total_compute_time / total_benchmark_running_time
    total_compute_time = records / accelerators / batch_size x computation_time

where the first step is excluded from both, but not from the samples per second; DLIO, its engine, does so in every
epoch. DLIO sleeps for the computation time and has the samples in host memory. Here there is one accelerator, and each
batch

- arrives on it, in a tensor that the current stream can use, and is copied by it; every byte is verified later;
- is followed by matrix products, so that both take about the computation time (compute.py), by fewer where a batch is
  not full, as some loaders' are. So a loader that slows the kernels down loses utilisation by that too.

The computation time of the formula is that of the same step on a resident batch, measured right before each sample, or
in the sample itself where that is less; `compute_s` beside `table_compute_s` says how near the calibration came. The
running time of an epoch goes from the end of its first step to the end of its last one, both on the device.

The second part of a workload has no compute: how fast batches come, and so how many accelerators one loader would
keep at the target, as far as the bytes go: its rate over what one of them needs.

A dataset holds as many samples of the workload's size as `storage` has room for, in whole batches. So it is smaller
than the rules' (500 steps, and five times the memory), and its record says what it was. A sample of few steps can live
on what was read ahead while its first batch was waited for: a utilisation beyond what the rate without compute
sustains is marked in the table, and more storage or more `least_steps` make it go.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench import ragged, record_shards, stats
from bench.config import BenchConfigError
from bench.config_mlperf import MlperfConfig, WorkloadConfig
from bench.files import BenchFiles, Plan
from bench.loaders.base import Loader
from bench.scenarios.batches import Batches, middle
from bench.scenarios.epoch import request
from bench.scenarios.sinks import Pass

if TYPE_CHECKING:
    from bench.measure import Sample

#: Two, so that no epoch is a single batch.
_LEAST_BATCHES = 2
_COPIES = 10


def plan(scenario: MlperfConfig, chosen: Plan, *, cold: bool) -> Plan:
    """As much for each workload as was chosen. Raises BenchConfigError where that is too little."""
    if chosen.tensors is not None:
        raise BenchConfigError("'storage.tensors' has to be null: a shard is one tensor of samples")
    for name, workload in scenario.workloads.items():
        if num_samples(scenario, workload, chosen.total_bytes) == 0:
            batch_bytes = workload.batch_size * workload.sample_bytes
            raise BenchConfigError(
                f"'storage.files' times 'storage.file_bytes' is {chosen.total_bytes} bytes, and "
                f"'scenario.most_samples' is {scenario.most_samples}; workload {name} needs {_LEAST_BATCHES} batches "
                f"of {workload.batch_size} samples, about {_LEAST_BATCHES * batch_bytes} bytes; raise the lower one"
            )
    return dataclasses.replace(chosen, by_part=True, cold=cold)


def drawn(scenario: MlperfConfig, workload: WorkloadConfig, nbytes: int) -> npt.NDArray[np.int64]:
    """Sizes of the samples that `nbytes` have room for, in whole batches; none where that is no two of them."""
    mean, batch = workload.sample_bytes, workload.batch_size
    # Some more than there may be, as the first ones can be small ones.
    most = min(2 * (nbytes // mean) + 16, scenario.most_samples)
    if workload.sample_bytes_std:
        sizes = ragged.sizes(mean, workload.sample_bytes_std, most, scenario.seed)
    else:
        sizes = np.full(most, mean, dtype=np.int64)
    batches = int(np.searchsorted(np.cumsum(sizes), nbytes, side="right")) // batch
    return sizes[: batches * batch if batches >= _LEAST_BATCHES else 0]


def num_samples(scenario: MlperfConfig, workload: WorkloadConfig, nbytes: int) -> int:
    """How many samples `nbytes` have room for, as `drawn`."""
    return len(drawn(scenario, workload, nbytes))


class Step(NamedTuple):
    """One step of a sample: the share of a full batch that it had, and moments of its beginning and end in seconds."""

    share: float
    begin_s: float
    end_s: float


def utilisation(epochs: Sequence[Sequence[Step]], compute_s: float) -> float:
    """AU as a share: the compute of all steps but the first of each epoch, `compute_s` for a full batch or what they
    took themselves where that is less, over the time from the end of an epoch's first step to the end of its last one.
    0 where no epoch has a second step."""
    counted = [step for steps in epochs for step in steps[1:]]
    if not counted:
        return 0.0
    ideal_s = compute_s * sum(step.share for step in counted)
    running_s = sum(steps[-1].end_s - steps[0].end_s for steps in epochs)
    return min(ideal_s, sum(step.end_s - step.begin_s for step in counted)) / running_s


class Mlperf(Batches):
    """One workload, with its compute or without."""

    verb = "mlperf"
    unit = "samples"
    first_samples = 1

    def __init__(self, files: BenchFiles, device: str, scenario: MlperfConfig) -> None:
        assert files.plan is not None
        self._name, self._workload = scenario.only
        self._accelerator = scenario.emulated
        self._table_s = self._workload.seconds(self._accelerator) * scenario.compute_scale
        self._scale = scenario.compute_scale
        (compute,) = scenario.compute
        directory = files.directory / f"{self._name}-{'compute' if compute else 'rate'}"
        directory.mkdir()
        self._sizes = drawn(scenario, self._workload, files.plan.total_bytes)
        where, count = directory / "shards", files.plan.files
        if self._workload.sample_bytes_std:
            shards = ragged.write(where, files.pool, self._sizes, count)
        else:
            shards = record_shards.write(where, files.pool, len(self._sizes), self._workload.sample_bytes, count)
        self.least_batches = scenario.least_steps
        super().__init__(
            shards,
            files.pool,
            device,
            batch_size=self._workload.batch_size,
            seed=scenario.seed,
            sample_seconds=scenario.sample_seconds,
            sample_bytes=scenario.sample_bytes,
            compute_s=self._table_s if compute else 0.0,
            one_epoch=files.plan.cold,
            request=request(shards, scenario.seed),
        )

    def products_s(self, compute_s: float) -> float:
        """The workload's seconds less those of the copy, which uses the bytes: both together are the step."""
        copies = self._sink.resident(self._batch)
        for _ in range(2):  # the first time warms up
            self._clock.synchronize()
            began = time.perf_counter()
            for _ in range(_COPIES):
                for room, part in copies:
                    room.copy_(part, non_blocking=True)
            self._clock.synchronize()
            copy_s = (time.perf_counter() - began) / _COPIES
        return max(compute_s - copy_s, 0.0)

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        figures = super().before(loader, number)
        self._alone_s = figures.get("compute_s", self._table_s)
        return figures

    def after(self, loader: Loader, delivered: Pass) -> dict[str, float]:
        figures = super().after(loader, delivered)
        if delivered.steps:
            figures["utilisation"] = utilisation(self._epochs(delivered), self._alone_s)
        return figures

    def _epochs(self, delivered: Pass) -> list[list[Step]]:
        """The steps of each epoch."""
        found: list[list[Step]] = []
        began, before = delivered.steps[0][0], 0
        for (samples, _), marks in zip(delivered.batches, delivered.steps, strict=True):
            if before % self.units == 0:
                found.append([])
            found[-1].append(Step(samples / self._batch, *(self._clock.seconds(began, mark) for mark in marks)))
            before += samples
        return found

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        workload, batch_bytes = self._workload, self._batch * float(self._sizes.mean())
        needed = workload.target_utilisation * batch_bytes / self._table_s / 1e9
        rates = [sample.bytes / 1e9 / sample.seconds for sample in samples]
        found = {
            **self.described(samples),
            "workload": self._name,
            "accelerator": self._accelerator,
            "compute_scale": self._scale,
            "sample_bytes_std": float(self._sizes.std()),
            "target_utilisation": workload.target_utilisation,
            "table_compute_s": self._table_s,
            # Of one accelerator at the target.
            "needed_gb_per_s": needed,
            "samples_per_s": stats.median([sample.units / sample.seconds for sample in samples]),
        }
        if not self.computes:
            # The rate over the need of one of them.
            return {**found, "accelerators_fed": stats.median(rates) / needed}
        shares = [sample.figures["utilisation"] for sample in samples]
        interval = stats.median_ci95(shares)
        middle_share = stats.median(shares)
        return {
            **found,
            "compute_s": middle(samples, "compute_s"),
            "stall_s": middle(samples, "stall_s"),
            "utilisation": middle_share,
            "utilisation_mad": stats.mad(shares),
            "utilisation_ci95": None if interval is None else list(interval),
            "utilisation_range": [min(shares), max(shares)],
            "passes": int(middle_share >= workload.target_utilisation),
        }
