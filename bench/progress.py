"""The bar with the time left, on the error output and only where that is a terminal.

It is drawn between samples: a thread that draws meanwhile would take the interpreter from the one that is timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

#: Names the descriptor of the terminal in a process whose error output is collected (guard.py).
TERMINAL = "BENCH_TERMINAL"


class Steps:
    """`total` steps of which each is announced with a text and then counted."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, text: str | None) -> None:
        """Announce the next step, or count the one that was announced where `text` is None."""
        if text is not None:
            self._bar.update(self._task, description=text)
        else:
            self._bar.advance(self._task)
        self._bar.refresh()

    def reach(self, done: int) -> None:
        """Count to `done`, whatever was counted before."""
        self._bar.update(self._task, completed=done)
        self._bar.refresh()


@contextmanager
def bar(text: str, total: int, terminal: TextIO | None = None) -> Iterator[Steps]:
    """A bar of `total` steps on the terminal, which vanishes at the end; nothing is drawn where there is none."""
    with _terminal(terminal) as file:
        out = Console(file=file)
        columns = (
            TextColumn("{task.description:<40}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("time left"),
            TimeLeftColumn(),
        )
        with Progress(*columns, auto_refresh=False, console=out, transient=True, disable=not out.is_terminal) as drawn:
            yield Steps(drawn, drawn.add_task(text, total=total))


@contextmanager
def _terminal(given: TextIO | None) -> Iterator[TextIO]:
    inherited = os.environ.get(TERMINAL)
    if given is not None or inherited is None:
        yield given or sys.stderr
        return
    with open(int(inherited), "w", encoding="utf-8", closefd=False) as file:
        yield file
