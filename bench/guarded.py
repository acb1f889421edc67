"""The measuring process: `python -m bench.guarded FOLDER PARENT`, started by guard.py and by nobody else."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from bench import config, gate, guard, report
from bench.config import BenchError

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_DYING_S = 0.2
# Less than what guard.py waits before it says it again.
_SAME_S = 3.0


def main() -> None:
    """Measure what the task says, and say what is being done. Exit status: 0, 2 for a BenchError, 130 interrupted."""
    from bench import run

    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, _Interrupt())
    # Killed with its parent, it still removes its test files.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    say = guard.Log(folder / "said")
    try:
        if os.getppid() != parent:
            raise KeyboardInterrupt
        task = guard.task_of(folder)
        if task.cpus is not None:
            for thread in os.listdir("/proc/self/task"):  # a library that was imported may have started some
                os.sched_setaffinity(int(thread), task.cpus)
        crashed = {int(part): reasons for part, reasons in task.crashed.items()}
        settings = config.build(task.settings)
        output = Path(task.output)
        others = gate.Together(Path(task.gate), say) if task.gate is not None else gate.Alone()
        run.measure(settings, output, report.console(), say=say, finished=task.finished, crashed=crashed, others=others)
    except BenchError as error:
        say(error=str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(end="interrupted")
        _remove_of_the_dead(folder, parent)
        raise SystemExit(130) from None
    say(end="measured")


class _Interrupt:
    """A handler of SIGTERM that takes those which follow each other at once for one: the kernel sends one for each
    thread of a parent that dies, and the second must not interrupt the removing of files."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > _SAME_S:
            self._last = now
            raise KeyboardInterrupt


def _remove_of_the_dead(folder: Path, parent: int) -> None:
    """Nobody else removes the folder of a parent that was killed. Its threads end one after the other, so that it may
    still be there for a moment after the signal that says it died."""
    deadline = time.monotonic() + _DYING_S
    while os.getppid() == parent:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    shutil.rmtree(folder)
    above = folder.parent
    if above.name.startswith(guard.PREFIX) and not any(path.is_dir() for path in above.iterdir()):
        shutil.rmtree(above, ignore_errors=True)  # of several that measured at once, the last


if __name__ == "__main__":
    main()
