"""Where processes put their statistics for others to see: one small file each, in memory, readable by its owner only.

The folder is $XDG_RUNTIME_DIR/gdsstream, or /dev/shm/gdsstream-UID where there is no such directory. A file is called
NAMESPACE-PID-START.json, after the process's PID namespace, number and start time: that says whether the process still
lives, even if its number has been given to another one since. Files of dead processes are removed by whoever looks.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gdsstream.errors import ConfigError
from gdsstream.stats import ProcessStats, parse_report

# Of a process in another container only the file's age tells whether it lives: written every second or so.
_SILENT_S = 10.0
_FORGOTTEN_S = 24 * 3600.0
_NAME = re.compile(r"(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)\.json(?P<unfinished>\.tmp)?")


@dataclass(frozen=True, slots=True)
class StatsFile:
    """A process's file: its path, the process's number, and whether it is of our PID namespace."""

    path: Path
    pid: int
    start: int
    ours: bool

    def alive(self) -> bool:
        """Whether the process that wrote it still runs."""
        if self.ours:
            return _start_of(self.pid) == self.start
        return self._age_s() < _SILENT_S

    def read(self) -> ProcessStats | None:
        """What it says; None where it is gone by now. Raises ConfigError for what is no report."""
        try:
            return parse_report(self.path.read_text(encoding="utf-8"), str(self.path))
        except (FileNotFoundError, ProcessLookupError):
            return None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path} is no report of statistics: {error}; remove it") from error

    def forgotten(self) -> bool:
        """Whether nobody will write to it again."""
        return not self.alive() if self.ours else self._age_s() > _FORGOTTEN_S

    def _age_s(self) -> float:
        try:
            return time.time() - self.path.stat().st_mtime
        except OSError:
            return float("inf")


def own_file() -> Path:
    """Where this process's statistics go; the folder is made.

    Raises OSError where it cannot be, and PermissionError where somebody else's folder is in its place.
    """
    folder = _folders(os.getuid())[0]
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # In a directory that all may write to, somebody could have made it to see or to replace what we write.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a directory of this user's alone")
    return folder / f"{_namespace()}-{os.getpid()}-{_start_of(os.getpid()) or 0}.json"


def write_file(path: Path, text: str) -> None:
    """Replace the file: a reader sees the old text or the new one. Raises OSError."""
    unfinished = path.with_name(path.name + ".tmp")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    os.replace(unfinished, path)


def published(pid: int | None = None) -> list[StatsFile]:
    """The files of living processes, or of one of them; those of this PID namespace first. Removes the dead ones'.

    Without a number, those of this user; with one, those of the user whose process it is.
    """
    found = []
    for one in _scan(_folders(_owner_of(pid))):
        if one.forgotten():
            with suppress(OSError):  # somebody else's, or removed meanwhile
                one.path.unlink()
        elif one.path.suffix != ".tmp" and one.alive() and pid in (None, one.pid):
            found.append(one)
    return sorted(found, key=lambda one: (not one.ours, one.pid))


def running(pid: int) -> bool:
    """Whether a process of that number runs."""
    return _start_of(pid) is not None


def _scan(folders: list[Path]) -> Iterator[StatsFile]:
    for folder in folders:
        with suppress(OSError):
            for path in sorted(folder.iterdir()):
                if match := _NAME.fullmatch(path.name):
                    ours = int(match["namespace"]) == _namespace()
                    yield StatsFile(path, int(match["pid"]), int(match["start"]), ours)


def _folders(uid: int) -> list[Path]:
    """Where a user's processes may have put their files; a new one goes to the first."""
    own = os.environ.get("XDG_RUNTIME_DIR", "") if uid == os.getuid() else ""
    # The process that is looked for may have been started without our variable, or with it where we have none.
    candidates = [own, f"/run/user/{uid}"]
    shared = next((place for place in ("/dev/shm", tempfile.gettempdir()) if os.access(place, os.W_OK)), "/tmp")
    folders = [Path(place) / "gdsstream" for place in candidates if place and os.access(place, os.W_OK | os.X_OK)]
    if not own or not os.access(own, os.W_OK | os.X_OK):
        folders.insert(0, Path(shared) / f"gdsstream-{uid}")
    else:
        folders.append(Path(shared) / f"gdsstream-{uid}")
    return list(dict.fromkeys(folders))


def _owner_of(pid: int | None) -> int:
    if pid is not None:
        with suppress(OSError):
            return os.stat(f"/proc/{pid}").st_uid
    return os.getuid()


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; None where there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in front is in brackets and may hold any character, brackets too.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


__all__ = ["StatsFile", "own_file", "published", "running", "write_file"]
