"""The examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_python

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_load_checkpoint() -> None:
    out, err = run_python(
        f"import runpy; runpy.run_path({str(EXAMPLES / 'load_checkpoint.py')!r}, run_name='__main__')"
    )
    assert err == ""
    assert "32 tensors, 0.07 GB to" in out
    assert "layer.0.w0: [1024, 1024], its first row on" in out


def test_train_lora_moe() -> None:
    pytest.importorskip("peft", reason="the example needs the extra `examples`")
    path = EXAMPLES / "train_lora_moe.py"
    arguments = ["train_lora_moe.py", "--steps", "11", "--layers", "3", "--device", "cpu"]
    out, _ = run_python(
        f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path({str(path)!r}, run_name='__main__')",
        timeout_s=240,
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.1
    # Two of three layers fit: a step reads the third twice.
    assert "66 layers in" in out
    assert ": 24 read" in out or ": 23 read" in out
    assert "written whole or not at all" in out
