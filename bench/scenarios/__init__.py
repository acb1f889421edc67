"""The scenarios: parameters over a few verbs. `build` turns a configuration into the work of one sample."""

from __future__ import annotations

from bench.config import ScenarioConfig
from bench.files import BenchFiles
from bench.scenarios.base import Workload


def build(scenario: ScenarioConfig, files: BenchFiles, device: str) -> Workload:
    """The workload of `scenario.verb`; the verb has been checked by the configuration."""
    if scenario.verb == "gather":
        from bench.scenarios.gather import Gather

        return Gather(files, device, scenario.records, scenario.record_bytes, scenario.seed)
    from bench.scenarios.read import Read

    return Read(files, device)
