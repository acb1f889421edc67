"""The bench goes by the library's profiles, and says so in its records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import environment
from gdsstream.profile import Profile, here, store_profile


def test_a_profile_is_used_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert environment.collect(tmp_path, "cpu")["profile"] is None
    now = here(tmp_path, torch.device("cpu"))
    assert now is not None
    store_profile(Profile(now, {"num_threads": 3}))
    assert environment.collect(tmp_path, "cpu")["profile"] == {"num_threads": 3}
