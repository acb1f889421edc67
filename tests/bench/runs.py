"""Runs of the bench that tests interrupt."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from conftest import ROOT


@contextmanager
def running(
    command: Sequence[str], ready: Callable[[], object], otherwise: str, *, limit_s: float = 60
) -> Iterator[subprocess.Popen[str]]:
    """A process that is `ready`, with both outputs in one pipe; it is killed at the end where it still runs."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        deadline = time.monotonic() + limit_s
        while not ready():
            assert time.monotonic() < deadline, otherwise
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
