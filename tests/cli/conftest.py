"""Running the command in this process, at 100 columns and without colour, and checking its JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "machine"))

import trees

from gdsstream.cli import main

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No colour, no settings of this machine, and no proofs of this user."""
    for variable in ("FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    for variable in [name for name in os.environ if name.startswith(("CUFILE_", "KVIKIO_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run() -> Callable[..., Result]:
    """run("topo", "--root", ...) -> the result, with `exit_code`, `stdout` and `stderr`."""

    def invoke(*arguments: object) -> Result:
        result = CliRunner().invoke(main, [str(one) for one in arguments], prog_name="gdsstream")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., Any]:
    """As `run` with --json: the document, checked against the command's schema."""
    import jsonschema

    def invoke(*arguments: object) -> Any:
        document = json.loads(run(*arguments, "--json").stdout)
        schema = json.loads((files("gdsstream.cli") / "schemas" / f"{arguments[0]}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
        return document

    return invoke


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """machine("dgx2", more="") -> the root of that recorded machine, with further lines of text."""

    def make(name: str, more: str = "") -> Path:
        return trees.build(name, tmp_path / name, more)

    return make


@pytest.fixture
def snapshot() -> Callable[[str, str], None]:
    """snapshot(name, text): the text is that of snapshots/<name>.txt. SNAPSHOTS=write in the environment renews it."""
    renew = _RENEW

    def compare(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        if renew:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; renew it with SNAPSHOTS=write and read what changed"
        assert max(map(len, text.splitlines())) <= 100

    return compare


_RENEW = os.environ.get("SNAPSHOTS") == "write"
