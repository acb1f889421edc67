"""The command's frame: help without torch, exit codes, one line an error, output that fits."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import gdsstream
from gdsstream import cli
from gdsstream.cli import COMMANDS, main, output
from gdsstream.cli.output import Column, Lines, Marked, Report, Status, Table
from gdsstream.errors import ConfigError, ReadError

HERE = Path(cli.__file__).parent


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys; sys.argv = ['gdsstream', '--help']\n"
        "from gdsstream.cli import main\n"
        "try: main()\n"
        "except SystemExit as error: assert error.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'gdsstream.machine', 'gdsstream._native'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_every_command_has_a_schema():
    commands = {name for name in COMMANDS if (HERE / f"{name}.py").exists()}
    assert {path.stem for path in (HERE / "schemas").glob("*.json")} == commands


@pytest.mark.parametrize("name", [name for name in COMMANDS if (HERE / f"{name}.py").exists()])
def test_every_command_explains_itself(run: Callable[..., Result], name: str):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert result.stdout.startswith(f"Usage: gdsstream {name} ")
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_version_and_module():
    result = subprocess.run(
        [sys.executable, "-m", "gdsstream", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"gdsstream {gdsstream.__version__}\n"


def test_wrong_usage_is_2(run: Callable[..., Result]):
    assert run("tpoo").exit_code == 2
    assert "No such command 'tpoo'" in run("tpoo").stderr
    assert run("topo", "--colour").exit_code == 2
    assert run("topo", "--root", "/nowhere").exit_code == 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], Result]:
    """Run a command that raises."""

    def invoke(error: BaseException) -> Result:
        @click.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(main, "get_command", lambda ctx, name: command)
        return CliRunner().invoke(main, ["topo"])

    return invoke


def test_the_librarys_errors_are_3_in_one_line(failing: Callable[[BaseException], Result]):
    result = failing(ReadError("/data cannot be reached: no such file; check the path"))
    assert result.exit_code == 3
    assert result.stderr == "error: /data cannot be reached: no such file; check the path\n"
    assert result.stdout == ""
    assert failing(ConfigError("no")).exit_code == 3


def test_ctrl_c_is_130(failing: Callable[[BaseException], Result]):
    result = failing(KeyboardInterrupt())
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_mistake_of_ours_is_not_hidden(failing: Callable[[BaseException], Result]):
    assert isinstance(failing(ZeroDivisionError("ours")).exception, ZeroDivisionError)


# --- output ---------------------------------------------------------------------------------------------------------


def show(report: Report, *, as_json: bool = False) -> Result:
    @click.command()
    def command() -> None:
        output.emit(report, as_json=as_json)

    return CliRunner().invoke(command)


def test_a_problem_is_1_in_both_forms():
    for as_json in (False, True):
        assert show(Report("x", {}, problem=True), as_json=as_json).exit_code == 1
        assert show(Report("x", {}), as_json=as_json).exit_code == 0


def test_json_begins_with_its_version_and_keeps_what_it_was_given():
    document = json.loads(show(Report("x", {"a": [1, None], "ü": "[red]"}), as_json=True).stdout)
    assert list(document) == ["schema_version", "command", "a", "ü"]
    assert document == {"schema_version": 1, "command": "x", "a": [1, None], "ü": "[red]"}


def test_tables_fit_have_no_colour_and_no_blanks_at_the_end():
    columns = ["name", Column("what", wrap=True), Column("size", "right")]
    rows = [["[a]", Marked("word " * 60, Status.PROBLEM), "1"], ["b", "short", "1000"]]
    result = show(Report("x", {}, [Table(columns, rows, title="[T]", note="why"), Lines(["- " + "item " * 40])]))
    lines = result.stdout.splitlines()
    assert lines[0] == "[T]", "square brackets are no markup"
    assert lines[1].split() == ["name", "what", "size"]
    assert lines[2].startswith("[a]   word")
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)
    assert "\x1b" not in result.stdout
    assert result.stdout.count("word") == 60, "nothing is cut"
    assert lines[-1].startswith("  item"), "the second line of an item hangs below its first"


def test_a_table_without_rows_says_so_and_one_without_headings_has_none():
    result = show(Report("x", {}, [Table(["a"], [], title="T", empty="nothing here"), Table([""], [["row"]])]))
    assert result.stdout == "T\n  nothing here\n\nrow\n"


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch):
    report = Report("x", {}, [Table(["s"], [[Marked("problem", Status.PROBLEM)]])])
    terminal = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console", lambda **options: Console(file=terminal, force_terminal=True, width=200, **options)
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    show(report)
    assert "\x1b[" in terminal.getvalue()
    assert "problem" in terminal.getvalue()


def test_a_closed_pipe_ends_quietly(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gdsstream", "topo"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "Traceback" not in result.stderr
