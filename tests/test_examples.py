"""The examples run as they stand."""

from __future__ import annotations

from pathlib import Path

from support import run_python

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_load_checkpoint() -> None:
    out, err = run_python(
        f"import runpy; runpy.run_path({str(EXAMPLES / 'load_checkpoint.py')!r}, run_name='__main__')"
    )
    assert err == ""
    assert "32 tensors, 0.07 GB to" in out
    assert "layer.0.w0: [1024, 1024], its first row on" in out
