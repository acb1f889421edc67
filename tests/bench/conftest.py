from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The bench is run from the repository and not installed.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be opened with O_DIRECT."""
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
