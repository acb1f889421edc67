"""What is said once in a process: choices, fallbacks, files that are left out."""

from __future__ import annotations

import logging

_said: set[str] = set()


def say_once(log: logging.Logger, text: str, *, about: str | None = None) -> None:
    """Log a warning, unless one about the same thing was logged before; None: unless this very one was."""
    key = text if about is None else about
    if key not in _said:
        _said.add(key)
        log.warning("%s", text)


__all__ = ["say_once"]
