"""One interpreter that has imported everything, forked for each scenario.

The engine chooses its driver once a process, and by environment, so that each scenario needs a process of its own;
starting one anew takes seconds for torch's import, forking it milliseconds. The server itself opens no driver and
starts no thread.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import traceback
from pathlib import Path

import pytest
from gpu_route.device_memory import DeviceMemory
from gpu_route.harness import SCENARIOS, SKIPPED, check_nothing_left, load_scenarios
from gpu_route.stand_in import StandIn


def serve() -> None:
    """Run requests, one JSON object a line, and answer each with the scenario's exit status."""
    load_scenarios()
    # Nothing of this is garbage: children would copy its pages to find out.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = _run(**request)
            sys.stdout.flush()
            sys.stderr.flush()
            # Taking the interpreter down takes longer than most scenarios; tests of their own cover it.
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(name: str, env: dict[str, str], folder: str, log: str, limit_s: float) -> int:
    with open(log, "w") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    os.environ.update(env)
    scenario = SCENARIOS[name]
    fake = StandIn()
    memory = DeviceMemory(fake)
    memory.install()
    try:
        scenario.run(fake, Path(folder))
        check_nothing_left(fake, scenario.leaves)
        memory.check()
    except pytest.skip.Exception as reason:
        print(reason)
        return SKIPPED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
