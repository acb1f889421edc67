"""Small files of the user's: where they are kept, and how they are replaced. Readers see the old one or the new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where what can be made again is kept: $XDG_CACHE_HOME (else ~/.cache)/gdsstream."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Where settings are kept: $XDG_CONFIG_HOME (else ~/.config)/gdsstream."""
    return _user_folder("XDG_CONFIG_HOME", ".config")


def _user_folder(variable: str, below_home: str) -> Path:
    return Path(os.environ.get(variable) or os.path.join(os.path.expanduser("~"), below_home)) / "gdsstream"


def replace_text(path: Path, text: str) -> None:
    """Make `path` a file with this text, and the folders above it. Raises OSError, and leaves the old one then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


__all__ = ["cache_folder", "config_folder", "replace_text"]
