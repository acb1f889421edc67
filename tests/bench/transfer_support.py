"""What the tests of transfers share: small files, a run of rows, and loaders by the names of their configurations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from steady import Steady

from bench import files, loaders, measure, record, scenarios
from bench.config import TransferConfig
from bench.loaders.base import Loader
from bench.scenarios.transfer import Transfer

MIB, KIB = 1 << 20, 1 << 10
BASE = TransferConfig(
    "transfer", "transfer", io_bytes=[64 * KIB], total_bytes=[MIB], threads=[2], depth=[2], registered=[False]
)
POOL = np.random.default_rng(0).integers(0, 256, 99_998, dtype=np.uint8)


@contextmanager
def workload(directory: Path, scenario: TransferConfig, count: int = 2) -> Iterator[Transfer]:
    plan = scenarios.plan(scenario, files.Plan(directory, count, MIB, "a test"), cold=False)
    with files.written(plan) as written:
        made = scenarios.build(scenario, written, "cpu")
        assert isinstance(made, Transfer)
        yield made
        made.close()


def run(
    directory: Path, scenario: TransferConfig, rows: dict[str, Loader], rounds: int = 2, count: int = 2
) -> dict[str, Any]:
    """Rows by name, as records; `count` are the files."""
    with workload(directory, scenario, count) as made:
        runner = measure.Runner(made, rows, Steady(), cold=False, fresh_memory=False)
        with mock.patch("bench.measure.gc.collect"):  # costs more than all the rest here
            found = runner.run(rounds, 60.0)
        limit = {"kind": "steady", "detail": "", "samples": found.ceilings}
        # What config.parts and run.py put there.
        config = {"scenario": {**plain(scenario)}, "storage": {}, "cache": {"state": "warm"}}
        env = dict.fromkeys(record._ENV) | {"versions": {}}
        return {
            name: record.make(
                name, outcome, made, scenario="transfer", cold=False, ceiling=limit, env=env,
                config={**config, "loaders": {name: {"kind": name}}},
            )
            for name, outcome in found.outcomes.items()
        }  # fmt: skip


def plain(scenario: TransferConfig) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in TransferConfig.__dataclass_fields__}


def built(name: str, **options: Any) -> Loader:
    from omegaconf import OmegaConf

    from bench.config import CONFIG_DIR

    plain = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "loader" / f"{name}.yaml"))
    assert isinstance(plain, dict)
    return loaders.build(name, {**{str(key): value for key, value in plain.items()}, **options})
