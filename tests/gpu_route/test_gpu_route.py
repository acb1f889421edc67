"""The whole GPU route on the stand-in driver: pinned ring, copies, events, fences, registration, failures.

The stand-in's streams run late and read their sources late: a slot that is used again too early, memory that is let go
too early or an event that is missing turns into wrong bytes or into a counter that is not zero. Each scenario runs in
a process of its own, and ends with everything given back to the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_route.harness import SCENARIOS, load_scenarios
from refusals import write_data
from support import run_python

load_scenarios()


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, run_on_fake: Callable[..., str]) -> None:
    scenario = SCENARIOS[name]
    run_on_fake(name, scenario.env, scenario.limit_s)


# Most scenarios run against a driver without batched copies, so that they can count and fail single ones.
BATCHED = [name for name in SCENARIOS if name.startswith(("staged_", "mapped_", "a_slot_", "a_thousand_"))]


@pytest.mark.parametrize("name", BATCHED)
def test_scenario_with_batched_copies(name: str, run_on_fake: Callable[..., str]) -> None:
    scenario = SCENARIOS[name]
    run_on_fake(name, {**scenario.env, "FAKE_CUDA_BATCH": "1"}, scenario.limit_s)


@pytest.mark.parametrize("when", ["idle", "reads", "copies"])
def test_the_interpreter_exits_without_close(when: str, fake_cuda: Path, tmp_path: Path) -> None:
    code = "import sys; from gpu_route.exiting import leave; leave(*sys.argv[1:])"
    started = time.monotonic()
    out, err = run_python(
        code,
        when,
        tmp_path / "data",
        GDSSTREAM_LIBCUDA=str(fake_cuda),
        FAKE_CUDA_DELAY_US="20000" if when == "copies" else "200",
    )
    left_at = float(out)
    assert time.monotonic() - started < 30
    assert time.time() - left_at < 5, "the exit took long"
    assert err == ""


def test_any_allocation_is_refused(fake_cuda: Path, refuse_memory: Path, tmp_path: Path) -> None:
    code = "import sys, refusals; refusals.sweep_gpu(sys.argv[1])"
    environment = {"GDSSTREAM_LIBCUDA": str(fake_cuda), "FAKE_CUDA_DELAY_US": "100", "LD_PRELOAD": str(refuse_memory)}
    run_python(code, write_data(tmp_path), timeout_s=200, **environment)
