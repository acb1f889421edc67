"""The bar is drawn on a terminal, between samples, and nowhere else."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from bench import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_steps_and_the_time_left() -> None:
    terminal = Terminal()
    with progress.bar("writing", 4, terminal) as step:
        step("round 1: pread")
        step(None)
        drawn = terminal.getvalue()
        assert "round 1: pread" in drawn
        assert "1/4" in drawn
        assert "time left" in drawn
        step.reach(3)
        assert "3/4" in terminal.getvalue()
        before = terminal.getvalue()
    assert len(terminal.getvalue()) > len(before)  # it is wiped at the end


def test_nothing_is_drawn_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    for where in (file, None):
        with progress.bar("writing", 4, where) as step:
            step("round 1: pread")
            step(None)
    assert file.getvalue().strip() == ""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == ""


def test_a_guarded_process_draws_on_the_descriptor_that_it_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = os.openpty()
    try:
        monkeypatch.setenv(progress.TERMINAL, str(inner))
        with progress.bar("writing", 4) as step:
            step("round 1: pread")
        os.fstat(inner)  # it is not this function's to close
        assert b"round 1: pread" in os.read(outer, 1 << 16)
    finally:
        os.close(outer)
        os.close(inner)
