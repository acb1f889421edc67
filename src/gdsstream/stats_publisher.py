"""The one thread that lets other processes see our statistics; it exists only where statistics are on.

Once a second it writes the process's snapshot to its file (`stats_files`), and removes it when the interpreter exits.
A process that is killed leaves its file behind, which whoever looks next removes. A forked child has neither the thread
nor the file, and gets both of its own when it opens an engine.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from gdsstream import stats_files
from gdsstream.stats import ProcessStats

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
_JOIN_S = 2.0


class Publisher(threading.Thread):
    """Writes what `snapshot` says to a file, until it is stopped."""

    def __init__(self, snapshot: Callable[[], ProcessStats], interval_s: float = INTERVAL_S) -> None:
        super().__init__(name="gdsstream-stats", daemon=True)
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._warned = False

    def run(self) -> None:
        while True:
            self._write()
            if self._ended.wait(self._interval_s):
                return

    def stop(self) -> None:
        """End the thread and remove the file. Does nothing in a forked child: they are the parent's."""
        if self._pid != os.getpid():
            return
        self._ended.set()
        if self.is_alive():
            self.join(_JOIN_S)
        with suppress(OSError):
            path = stats_files.own_file()
            path.unlink(missing_ok=True)
            path.with_name(path.name + ".tmp").unlink(missing_ok=True)

    def _write(self) -> None:
        try:
            text = json.dumps(self._snapshot().as_dict(), separators=(",", ":"))
            stats_files.write_file(stats_files.own_file(), text)
        except Exception as error:
            # Whatever it is, reading must not end because of it.
            if not self._warned:
                self._warned = True
                log.warning("statistics cannot be shown to other processes: %s", error)


_lock = threading.Lock()
_publisher: Publisher | None = None


def publish(snapshot: Callable[[], ProcessStats]) -> None:
    """Start the thread, unless it runs."""
    global _publisher
    with _lock:
        if _publisher is None:
            _publisher = Publisher(snapshot)
            _publisher.start()


def stop_publishing() -> None:
    """End the thread, and remove the file; the next engine with statistics starts anew. Runs at exit by itself."""
    global _publisher
    with _lock:
        publisher, _publisher = _publisher, None
    if publisher is not None:
        publisher.stop()


def _after_fork_in_child() -> None:
    global _lock, _publisher
    _lock = threading.Lock()
    _publisher = None


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(stop_publishing)

__all__ = ["Publisher", "publish", "stop_publishing"]
