"""Tree: /sys, /proc and a few files of /etc, below a root that may be a recording of another machine.

Nothing else of this package opens them. What is not there is None, since trees differ between kernels and are cut
down in containers; what is there and cannot be read is kept in `failures`, so that a report can say so and go on.
"""

from __future__ import annotations

import errno
import os
import posixpath
from pathlib import Path

_ABSENT = (errno.ENOENT, errno.ENOTDIR)
# What sysfs answers for an attribute that the device at hand does not have: as good as absent.
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODATA, errno.ENODEV, errno.ENXIO)
_MAX_LINKS = 40


class Tree:
    """Files below `root`; paths are absolute ones of the machine it belongs to ("/sys/class/net").

    Attributes:
        root: "/" for this machine, else the folder with the recorded "sys", "proc", "etc".
        failures: (path, reason) of what is there and could not be read, each once, in the order of the attempts.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.path.realpath(root)
        self._failures: dict[str, str] = {}

    @property
    def live(self) -> bool:
        """Whether this is the machine we run on, which can be asked more than its files tell."""
        return self.root == "/"

    @property
    def failures(self) -> list[tuple[str, str]]:
        return list(self._failures.items())

    @property
    def sysfs(self) -> str:
        """Where /sys of the tree really lies, for functions that take it."""
        return self.real("/sys")

    @property
    def procfs(self) -> str:
        """Where /proc of the tree really lies, for functions that take it."""
        return self.real("/proc")

    def real(self, path: str) -> str:
        """Where `path` lies in the filesystem we run on, links not followed."""
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str | None:
        """The text of a file without blanks around it; None if it is absent or cannot be read (see `failures`)."""
        raw = self.read_bytes(path)
        return None if raw is None else raw.decode("utf-8", errors="surrogateescape").strip()

    def read_bytes(self, path: str) -> bytes | None:
        """The bytes of a file; None if it is absent or cannot be read (see `failures`)."""
        place = self._place(path)
        if place is None:
            return None
        try:
            return Path(place).read_bytes()
        except OSError as error:
            self._note(path, error)
            return None

    def read_int(self, path: str) -> int | None:
        """A whole number, decimal or with 0x; None if there is none, which is a failure where there is other text."""
        text = self.read(path)
        if not text:
            return None
        try:
            return int(text, 0)
        except ValueError:
            self._failures.setdefault(path, f"{text[:40]!r} is no number")
            return None

    def listdir(self, path: str) -> list[str]:
        """The names in a folder, sorted; empty if it is absent or cannot be read (see `failures`)."""
        place = self._place(path)
        if place is None:
            return []
        try:
            return sorted(os.listdir(place))
        except OSError as error:
            self._note(path, error)
            return []

    def exists(self, path: str) -> bool:
        """Whether something is there, links followed inside the tree."""
        place = self._place(path)
        return place is not None and os.path.lexists(place)

    def readlink(self, path: str) -> str | None:
        """Where `path` leads with all links followed, as a path of the tree; None if nothing is there.

        Absolute links, and those that climb above the root, stay inside the tree, as they would in a chroot.
        """
        done, todo, links = "/", path.strip("/").split("/"), 0
        while todo:
            name = todo.pop(0)
            if name in ("", "."):
                continue
            if name == "..":
                done = posixpath.dirname(done)
                continue
            here = posixpath.join(done, name)
            try:
                target = os.readlink(self.real(here))
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: no link
                    self._note(path, error)
                    return None
                done = here
                continue
            links += 1
            if links > _MAX_LINKS:
                self._failures.setdefault(path, "its links lead in a circle")
                return None
            if target.startswith("/"):
                done = "/"
            todo = [*target.strip("/").split("/"), *todo]
        return done

    def _place(self, path: str) -> str | None:
        """The real place of `path`; on the machine itself the kernel follows the links."""
        if self.live:
            return path
        inside = self.readlink(path)
        return None if inside is None else self.real(inside)

    def _note(self, path: str, error: OSError) -> None:
        if error.errno not in _ABSENT and error.errno not in _NOT_SUPPORTED:
            self._failures.setdefault(path, error.strerror or str(error))


__all__ = ["Tree"]
