"""A run in a process of its own, so that a library that crashes costs one row and not the run.

A loader that raises is a failed row already (measure.py). One whose library aborts, faults or ends the process takes
everything down with it. Running each loader in a process of its own would be the other remedy; but then every sample
would go through a pipe between processes, the clock, the ceilings and the memory of the rows would be of different
processes, and each would hold a CUDA context beside the measured one. So what is measured stays as it is, in one
process, and this one only watches. When that one dies, the row that was under way becomes a failed one, with the
signal and the last words of the library, and the run begins anew with the part that was lost, without the row; parts
that were complete are kept. A library that crashes later than it is at work, from a thread of its own, can bring the
blame on another row; the words in the reason tell.

One that never returns is ended as well: when a loader has been at one step for `hang_seconds`, the process gets the
signal at which Python says where it is, and the row is a failed one.

It also makes every run of a multirun start in a fresh process, and takes the test files away where a run was killed.
`isolate=false` measures in this process, for a debugger or a profiler.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from bench import files, progress, results
from bench.config import BenchConfig, BenchError
from bench.record import Record

_ROOT = Path(__file__).resolve().parent.parent
_ENDING_S, _ENDING_TIMES = 5.0, 12
#: How often is looked whether a loader hangs.
_LOOK_S = 2.0
#: Of the folder that a process that guards and one that measures share.
PREFIX = "gdsstream-bench-guard-"
_SAID = "said"
_WORDS = 3
_LENGTH = 400
#: As faulthandler writes them.
_FAULT, _CURRENT = "Fatal Python error", "Current thread"


@dataclass(slots=True)
class Task:
    """What the measuring process gets: everything but what earlier attempts have done."""

    settings: dict[str, Any]
    output: str
    #: Numbers of the parts that are complete.
    finished: list[int] = field(default_factory=list)
    #: Number of a part -> loader -> why it is not measured again.
    crashed: dict[str, dict[str, str]] = field(default_factory=dict)
    #: The socket of processes that measure at once with this one (gate.py), and the cores that it may use.
    gate: str | None = None
    cpus: list[int] | None = None


@dataclass(slots=True)
class Told:
    """What the measuring process has said of itself."""

    loader: str | None = None
    step: str = ""
    #: For others that measure at once.
    waiting: bool = False
    part: int | None = None
    finished: list[int] = field(default_factory=list)
    #: Where the test files are made, in a folder that is called after the process.
    directory: str | None = None
    error: str | None = None
    end: str | None = None


class Log:
    """Where the measuring process says what it does: lines that are in the file as soon as they are said."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, **said: Any) -> None:
        os.write(self._descriptor, json.dumps(said).encode() + b"\n")

    @staticmethod
    def read(path: Path) -> Told:
        """What was said until now; half a line at the end does not count."""
        told = Told()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            for name, value in json.loads(line).items():
                if name == "finished":
                    told.finished.append(value)
                else:
                    setattr(told, name, value)
        return told


class Attempt:
    """A measuring process, and what it writes to its error output. `extra` are variables of its environment; without
    `bar` it draws none on the terminal."""

    def __init__(self, task: Task, folder: Path, extra: Mapping[str, str] | None = None, *, bar: bool = True) -> None:
        self._folder, self._keep = folder, bool(task.settings["storage"]["keep_files"])
        self._limit_s: float | None = task.settings["hang_seconds"]
        self._hung: str | None = None
        (folder / _SAID).unlink(missing_ok=True)
        (folder / "task").write_text(json.dumps(asdict(task)), encoding="utf-8")
        environment = {**os.environ, **(extra or {})}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
        terminal = os.dup(2) if bar and os.isatty(2) else None
        if terminal is not None:
            environment[progress.TERMINAL] = str(terminal)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "bench.guarded", str(folder), str(os.getpid())],
                env=environment,
                stderr=subprocess.PIPE,
                pass_fds=() if terminal is None else (terminal,),
                # Ctrl-C comes to this process only, which passes it on once.
                process_group=0,
            )
        finally:
            if terminal is not None:
                os.close(terminal)
        assert self._process.stderr is not None
        self._last: deque[str] = deque(maxlen=200)
        self._reader = threading.Thread(target=_pass_on, args=(self._process.stderr, self._last), daemon=True)
        self._reader.start()
        #: Readable once the process has ended.
        self.ended_fd = os.pidfd_open(self._process.pid)
        self._heard, self._heard_at = 0, time.monotonic()

    def told(self) -> Told:
        """What it has said of itself until now."""
        return Log.read(self._folder / _SAID)

    def wait(self) -> None:
        """Until it has ended, by itself or because it hung."""
        poll = select.poll()
        poll.register(self.ended_fd, select.POLLIN)
        while not poll.poll(_LOOK_S * 1e3):
            self.watch()

    def watch(self) -> None:
        """End it where a loader has been at one step for too long."""
        now, place = time.monotonic(), self._folder / _SAID
        size = place.stat().st_size if place.exists() else 0
        if size != self._heard:
            self._heard, self._heard_at = size, now
        if self._limit_s is None or now - self._heard_at < self._limit_s:
            return
        told = self.told()
        if told.loader is None or told.waiting:
            return
        self._hung = f"it was at one step for more than hang_seconds={self._limit_s:g} and was ended"
        self._process.send_signal(signal.SIGABRT)
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def outcome(self) -> tuple[int, str]:
        """How the process that has ended did so (as subprocess says it), and why, with its last words."""
        ended = self._process.wait()
        os.close(self.ended_fd)
        told = self.told()
        if told.end is None and told.error is None:
            _take_away(self._folder, self._process.pid)
        self._reader.join(1.0)  # a worker that outlived the process may hold its end open
        words = _last_words(list(self._last)) or "it said nothing"
        return ended, f"{self._hung or f'it ended the process by {_how(ended)}'} ({told.step}): {words}"

    def end(self) -> None:
        """Let it remove its files and end; a second Ctrl-C ends it at once."""
        os.close(self.ended_fd)
        _end(self._process, self._folder, keep=self._keep)


def run(settings: BenchConfig, output: Path, out: Console) -> list[Record]:
    """Measure in a process of its own, however often it has to begin, and return the records. Raises BenchError, and
    KeyboardInterrupt when interrupted, once the test files are removed."""
    begin = output.stat().st_size if output.exists() and settings.resume is None else 0
    task = Task(asdict(settings), str(output))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        while True:
            attempt = Attempt(task, Path(folder))
            try:
                attempt.wait()
            except KeyboardInterrupt:
                attempt.end()
                raise
            ended, reason = attempt.outcome()
            told = attempt.told()
            if told.end == "interrupted":
                raise KeyboardInterrupt
            if told.error is not None:
                raise BenchError(told.error)
            if told.end == "measured":
                if ended:
                    said = f"the measuring process was ended by {_how(ended)} when everything was measured"
                    out.print(said, style="yellow", highlight=False)
                break
            if told.loader is None or told.part is None:
                if ended > 0:
                    raise SystemExit(ended)  # an error of the bench itself, whose traceback was shown
                raise BenchError(f"the measuring process was lost while no loader was at work: {reason}")
            out.print(f"{told.loader}: {reason}; going on without it", style="yellow", markup=False, highlight=False)
            task.crashed.setdefault(str(told.part), {})[told.loader] = reason
            task.finished += told.finished
    text = output.read_bytes()[begin:].decode("utf-8") if output.exists() else ""
    return results.parse(text, output)


def _end(process: subprocess.Popen[bytes], folder: Path, *, keep: bool) -> None:
    """Let it remove its files and end; a second Ctrl-C ends it at once.

    An interrupt that comes while Python runs a finaliser is dropped by it, and so it is said again.
    """
    try:
        for _ in range(_ENDING_TIMES):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_ENDING_S)
                break
            except subprocess.TimeoutExpired:
                continue
    except KeyboardInterrupt:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if not keep:
        _take_away(folder, process.pid)


def _pass_on(lines: IO[bytes], last: deque[str]) -> None:
    """What the process writes to its error output is shown as it comes, and its end is kept."""
    for line in lines:
        sys.stderr.buffer.write(line)
        sys.stderr.flush()
        last.append(line.decode("utf-8", "replace").rstrip())


def _last_words(lines: Sequence[str]) -> str:
    """What was said right before the end, and the innermost line of Python where the fault was."""
    fault = next((number for number, line in enumerate(lines) if line.startswith(_FAULT)), len(lines))
    said = [line.strip() for line in lines[:fault] if line.strip()][-_WORDS:]
    current = next((number for number, line in enumerate(lines) if line.startswith(_CURRENT)), len(lines))
    where = next((line.strip() for line in lines[max(fault, current) :] if line.strip().startswith('File "')), "")
    return "; ".join(filter(None, [*said, where]))[-_LENGTH:]


def _how(ended: int) -> str:
    if ended >= 0:
        return f"exit status {ended}"
    name = signal.Signals(-ended).name
    return f"{name}, as the kernel does when memory runs out" if name == "SIGKILL" else name


def _take_away(folder: Path, process: int) -> None:
    """The test files of a process that could not remove them itself."""
    directory = Log.read(folder / _SAID).directory
    for path in Path(directory).glob(f"{files.PREFIX}{process}-*") if directory is not None else ():
        shutil.rmtree(path)


def task_of(folder: Path) -> Task:
    """What the process that guards this one has left for it."""
    found: Mapping[str, Any] = json.loads((folder / "task").read_text(encoding="utf-8"))
    return Task(**found)
