"""How long os.fsync took: what of a save is waiting for the storage.

Libraries call os.fsync where nobody sees it, so the function itself is watched for the time of a sample. Only calls
from Python are seen, which is all that the savers of this bench make. Calls of several threads at once count once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any


class Watch:
    """Watches os.fsync from `start` to `stop`."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._original: Any = None

    def start(self) -> None:
        """Begin anew."""
        self._spans = []
        self._original = original = os.fsync

        def timed(descriptor: Any) -> None:
            began = time.perf_counter()
            try:
                original(descriptor)
            finally:
                with self._lock:
                    self._spans.append((began, time.perf_counter()))

        os.fsync = timed  # type: ignore[assignment]

    def stop(self) -> None:
        """Put os.fsync back; can be called again."""
        if self._original is not None:
            os.fsync = self._original
            self._original = None

    @property
    def count(self) -> int:
        """How many calls there were."""
        return len(self._spans)

    @property
    def seconds(self) -> float:
        """In which at least one call was under way."""
        total, until = 0.0, 0.0
        for began, ended in sorted(self._spans):
            total += max(0.0, ended - max(began, until))
            until = max(until, ended)
        return total


def directory(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a directory are on the storage. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot do it, mostly of a network, and need not
            raise
    finally:
        os.close(descriptor)


def file(path: str | os.PathLike[str]) -> None:
    """Wait until a file's bytes are on the storage. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
