"""The stand-in driver, built once, and a way to run scenarios against it in processes of their own."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_route.harness import SKIPPED
from support import SOURCE, build_library

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libfakecuda.so: what GDSSTREAM_LIBCUDA names in the processes that need a GPU. See fake_cuda.h."""
    sources = [path for path in sorted((TESTS / "fake_cuda").glob("*.cpp")) if path.name != "selftest.cpp"]
    return build_library(tmp_path_factory.mktemp("fake_cuda") / "libfakecuda.so", sources)


@pytest.fixture(scope="session")
def _scenario_server(fake_cuda: Path) -> Iterator[subprocess.Popen[str]]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("GDSSTREAM_", "FAKE_CUDA_"))}
    server = subprocess.Popen(
        [sys.executable, "-c", "from gpu_route.server import serve; serve()"],
        env={**outside, "PYTHONPATH": os.pathsep.join([SOURCE, str(TESTS)]), "GDSSTREAM_LIBCUDA": str(fake_cuda)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield server
    assert server.stdin is not None
    server.stdin.close()
    server.wait(10)


@pytest.fixture
def run_on_fake(_scenario_server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., str]:
    """run_on_fake(name, env, limit_s) runs a scenario of `harness.SCENARIOS` and returns what it printed."""

    def run(name: str, env: dict[str, str], limit_s: float) -> str:
        log = tmp_path / "log.txt"
        folder = tmp_path / "files"
        folder.mkdir()
        request = {"name": name, "env": env, "folder": str(folder), "log": str(log), "limit_s": limit_s}
        assert _scenario_server.stdin is not None
        assert _scenario_server.stdout is not None
        _scenario_server.stdin.write(json.dumps(request) + "\n")
        _scenario_server.stdin.flush()
        # The scenario ends itself, with all stacks in the log; this is for a server that is gone.
        ready, _, _ = select.select([_scenario_server.stdout], [], [], limit_s + 30)
        answer = _scenario_server.stdout.readline().strip() if ready else "no answer"
        text = log.read_text() if log.exists() else ""
        shutil.rmtree(folder)
        if answer == str(SKIPPED):
            pytest.skip(text.strip().splitlines()[-1])
        assert answer == "0", f"exit status {answer}\n{text}"
        return text

    return run
