"""The scenarios: parameters over a few verbs. `build` turns a configuration into the work of one sample."""

from __future__ import annotations

from bench.config import (
    CheckpointConfig,
    EpochConfig,
    LayersConfig,
    MlperfConfig,
    PipelineConfig,
    ScenarioConfig,
    TrainingConfig,
    TransferConfig,
)
from bench.files import BenchFiles, Plan
from bench.scenarios.base import Workload


def plan(scenario: ScenarioConfig, chosen: Plan, *, cold: bool) -> Plan:
    """The files that the scenario needs, where files.choose decided how many and how large they are."""
    if isinstance(scenario, LayersConfig):
        from bench.scenarios import layers

        return layers.plan(scenario, chosen, cold=cold)
    if isinstance(scenario, EpochConfig):
        from bench.scenarios import epoch

        return epoch.plan(scenario, chosen, cold=cold)
    if isinstance(scenario, CheckpointConfig):
        from bench.scenarios import checkpoint

        return checkpoint.plan(scenario, chosen, cold=cold)
    if isinstance(scenario, MlperfConfig):
        from bench.scenarios import mlperf

        return mlperf.plan(scenario, chosen, cold=cold)
    if isinstance(scenario, TransferConfig):
        from bench.scenarios import transfer

        return transfer.plan(scenario, chosen)
    return chosen


def build(scenario: ScenarioConfig, files: BenchFiles, device: str) -> Workload:
    """The workload of `scenario.verb`; the verb has been checked by the configuration."""
    if isinstance(scenario, PipelineConfig):
        from bench.scenarios.pipeline import Pipeline

        return Pipeline(files, device, scenario)
    if isinstance(scenario, TrainingConfig):
        from bench.scenarios.training import TrainingStep

        return TrainingStep(files, device, scenario)
    if isinstance(scenario, EpochConfig):
        from bench.scenarios.epoch import Epoch

        return Epoch(files, device, scenario)
    if isinstance(scenario, CheckpointConfig):
        from bench.scenarios.checkpoint import Checkpoint

        return Checkpoint(files, device, scenario)
    if isinstance(scenario, MlperfConfig):
        from bench.scenarios.mlperf import Mlperf

        return Mlperf(files, device, scenario)
    if isinstance(scenario, TransferConfig):
        from bench.scenarios.transfer import Transfer

        return Transfer(files, device, scenario)
    if scenario.verb == "gather":
        from bench.scenarios.gather import Gather

        return Gather(files, device, scenario.records, scenario.record_bytes, scenario.seed)
    from bench.scenarios.read import Read

    return Read(files, device)
