"""Processes that begin their samples at the same moment.

Each meets the others before and after everything that is timed, and nobody goes on before all have come: so no process
empties a cache, compares bytes or measures its ceiling while another one's clock runs. Whoever ends is not waited for.
The process that started them serves the meetings on a socket, and tells all of them one time to go on at: the clock of
a Linux machine is the same in all processes.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

_TIME = struct.Struct("d")
#: Until all have heard of it.
_SOON_S = 0.01


class Gate(Protocol):
    """What one process has of the meetings."""

    def meet(self) -> None:
        """Go on when all others have come here too."""

    def turn(self) -> AbstractContextManager[None]:
        """A context in which the others, once all have come, wait for their turn."""


class Alone:
    """There are no others."""

    def meet(self) -> None:
        return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield


ALONE = Alone()


class Together:
    """One of several processes. `say` is told while this one waits, for whoever looks after those that hang."""

    def __init__(self, path: Path, say: Callable[..., None]) -> None:
        self._say = say
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.connect(str(path))
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def meet(self) -> None:
        self._say(waiting=True)
        self._socket.sendall(b"m")
        told = self._socket.recv(_TIME.size, socket.MSG_WAITALL)
        if len(told) < _TIME.size:
            raise KeyboardInterrupt  # whoever serves the meetings is gone
        self._say(waiting=False)
        time.sleep(max(0.0, _TIME.unpack(told)[0] - time.perf_counter()))

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.meet()
        self._say(waiting=True)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._say(waiting=False)
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Meetings:
    """Those of processes that connect to a socket at `path`."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(str(path))
        self._listener.listen()

    def serve(
        self,
        ended_fds: Sequence[int],
        look: Callable[[int], None],
        ended: Callable[[int], None],
        every_s: float,
    ) -> None:
        """Until all processes have ended: `ended_fds` become readable then, and `ended` is called with the number of
        each, once, which may close its descriptor. `look` is called with the others' now and then."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        running = dict(zip(ended_fds, range(len(ended_fds)), strict=True))
        for descriptor in running:
            poll.register(descriptor, select.POLLIN)
        connected: dict[int, socket.socket] = {}
        waiting: set[int] = set()
        looked = time.monotonic()
        while running:
            for descriptor, _ in poll.poll(every_s * 1e3):
                if descriptor == self._listener.fileno():
                    one, _ = self._listener.accept()
                    connected[one.fileno()] = one
                    poll.register(one, select.POLLIN)
                elif descriptor in running:
                    poll.unregister(descriptor)
                    ended(running.pop(descriptor))
                elif connected[descriptor].recv(1):
                    waiting.add(descriptor)
                else:
                    poll.unregister(descriptor)
                    connected.pop(descriptor).close()
                    waiting.discard(descriptor)
            if waiting and len(waiting) == len(running):
                soon = _TIME.pack(time.perf_counter() + _SOON_S)
                for descriptor in waiting:
                    connected[descriptor].sendall(soon)
                waiting.clear()
            if time.monotonic() - looked > every_s:
                looked = time.monotonic()
                for number in running.values():
                    look(number)
        for one in connected.values():
            one.close()

    def close(self) -> None:
        self._listener.close()
