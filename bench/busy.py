"""Is another process using the GPU? Figures taken beside one are of no use, and so the run is refused.

The question is asked before this process starts CUDA, so that every process that is found is another one. A container
may not be shown the processes of others; memory that is in use nevertheless gives them away. A process that has just
been killed may hold its memory for a moment, which is waited for.
"""

from __future__ import annotations

import time

from bench import nvml
from bench.config import BenchError

_PATIENCE_S, _STEP_S = 5.0, 0.5
# An idle GPU has a few MiB in use, and with an older way of counting some hundred.
_IDLE_BYTES = 2 << 30


def check(*, allow: bool) -> str:
    """What was found, for the record. Raises BenchError where the GPU is busy, unless `allow`."""
    try:
        gpu = nvml.open_device()
        deadline = time.monotonic() + (0.0 if allow else _PATIENCE_S)
        while (found := _found(gpu)) and time.monotonic() < deadline:
            time.sleep(_STEP_S)
    except nvml.NvmlError as error:
        return f"not found out: {error}"
    if not found:
        return "no other process"
    if not allow:
        raise BenchError(
            f"the GPU is in use by {found}; figures taken beside other work say nothing: wait for it to end, choose "
            "another GPU with CUDA_VISIBLE_DEVICES, or measure nevertheless with allow_busy_gpu=true"
        )
    return f"allowed beside {found}"


def _found(gpu: nvml.Device) -> str:
    """Who uses it, for people; empty where nobody does."""
    processes = gpu.processes()
    if processes:
        return ", ".join(
            f"process {each.pid} ({'memory unknown' if each.nbytes is None else f'{each.nbytes / 1e9:.2f} GB'})"
            for each in processes
        )
    used = gpu.used_bytes()
    return f"processes that cannot be seen from here ({used / 1e9:.2f} GB)" if used > _IDLE_BYTES else ""
