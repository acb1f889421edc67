"""Job files of gdsio: sections [global] and [job1], [job2], ..., lines key=value, comments after '#'. Pure: text in,
jobs out.

A job has what [global] says and its own keys over it. Sizes are binary: 4k, 1M, 500M, 1G; `bs` may be a range
least:most:step. Every error names file and line, and the nearest key or value that is valid. What gdsio knows and this
bench does not apply is told by `Job.not_applied`, and never passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.config_base import BenchConfigError, byte_size, nearest

RW = ("read", "write", "randread", "randwrite")
#: gdsio's -x: 0 to 7.
XFER_TYPES = range(8)
#: Known to gdsio, and without a meaning here.
_NOT_APPLIED = {
    "enable_nvlinks": "cuFile decides about NVLink by its own settings",
    "mem_type": "memory is cudaMalloc's, or the host's where the route ends there",
    "fill_random": "what is written is random bytes already",
    "refill_buffer": "the buffer is filled anew before every sample, untimed",
    "filename": "files are made for the run in the directory, and removed at its end",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One job. Sizes are bytes, times seconds."""

    name: str
    rw: str
    io_bytes: int
    #: (least, most, step) where the size of an io varies.
    io_range: tuple[int, int, int] | None
    #: Of each file; gdsio makes one for each thread.
    size: int
    directory: str | None
    filename: str | None = None
    xfer_type: int = 0
    runtime: float = 0.0
    num_threads: int = 1
    gpu_dev_id: int = 0
    #: Whose cores it uses; None: all.
    numa_node: int | None = None
    start_offset: int = 0
    random_seed: int = 0
    do_verify: bool = False
    skip_bufregister: bool = False
    unaligned_random: bool = False
    #: Key -> what to do instead.
    not_applied: dict[str, str] = field(default_factory=dict)


def parse(text: str, where: str) -> list[Job]:
    """The jobs of a file's text; `where` is its path, for messages. Raises BenchConfigError."""
    common: dict[str, tuple[str, int]] = {}
    jobs: dict[str, dict[str, tuple[str, int]]] = {}
    lines: dict[str, int] = {}
    current: dict[str, tuple[str, int]] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        at = f"{where}:{number}"
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        if line.startswith("["):
            section = _section(line, at)
            if section in jobs or (section == "global" and current is not None):
                raise BenchConfigError(f"{at}: section [{section}] comes twice or too late; [global] is the first")
            current = common if section == "global" else jobs.setdefault(section, {})
            lines[section] = number
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            raise BenchConfigError(f"{at}: {line!r} is neither a section such as [job1] nor key=value")
        if key not in _KEYS:
            raise BenchConfigError(f"{at}: unknown key {key!r}; {nearest(key, _KEYS)}")
        if current is None:
            raise BenchConfigError(f"{at}: {key!r} stands before the first section; begin with [global] or [job1]")
        if key in current:
            raise BenchConfigError(
                f"{at}: {key!r} comes twice in its section, first in line {current[key][1]}; keep one"
            )
        current[key] = (value, number)
    if not jobs:
        raise BenchConfigError(f"{where}: there is no job; add a section [job1]")
    return [_job(name, {**common, **own}, where, lines[name]) for name, own in jobs.items()]


def _section(line: str, at: str) -> str:
    match = re.fullmatch(r"\[\s*([\w-]+)\s*\]", line)
    if match is None:
        raise BenchConfigError(f"{at}: {line!r} is no section; write [global] or [job1]")
    name = match[1]
    if name != "global" and not re.fullmatch(r"job\w*", name):
        raise BenchConfigError(f"{at}: unknown section [{name}]; {nearest(name, ('global', 'job1'))}")
    return name


def _job(name: str, given: dict[str, tuple[str, int]], where: str, line: int) -> Job:
    values: dict[str, Any] = {}
    not_applied = {}
    for key, (text, number) in given.items():
        try:
            parsed = _KEYS[key](text)
        except ValueError as error:
            raise BenchConfigError(f"{where}:{number}: {key}={text}: {error}") from None
        if key in _NOT_APPLIED:
            not_applied[key] = f"{key}={text} ({where}:{number}) is not applied: {_NOT_APPLIED[key]}"
        if key == "bs":
            values["io_bytes"], values["io_range"] = parsed
        elif key not in ("name", *_NOT_APPLIED) or key == "filename":
            values[key] = parsed
    for key, says in (("bs", "bs=1M"), ("size", "size=1G"), ("rw", "rw=read")):
        if key not in given:
            raise BenchConfigError(f"{where}:{line}: [{name}] has no {key!r}; add {says} to it or to [global]")
    values.setdefault("directory", None)
    if values["directory"] is None and values.get("filename") is None:
        raise BenchConfigError(f"{where}:{line}: [{name}] has no 'directory'; add directory=/path to it or to [global]")
    if values["size"] < values["io_bytes"]:
        raise BenchConfigError(
            f"{where}:{given['size'][1]}: size={given['size'][0]} is less than an io of bs={given['bs'][0]}; raise it"
        )
    return Job(name=name, not_applied=not_applied, **values)


def _positive_size(text: str) -> int:
    if (size := byte_size(text)) < 1:
        raise ValueError("it has to be at least 1")
    return size


def _block(text: str) -> tuple[int, tuple[int, int, int] | None]:
    parts = [_positive_size(part) for part in text.split(":")]
    if len(parts) == 1:
        return parts[0], None
    if len(parts) != 3 or parts[0] > parts[1]:
        raise ValueError("it has to be a size or a range least:most:step, such as 1M:4M:1M")
    return parts[1], (parts[0], parts[1], parts[2])


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not valid; {nearest(text, names)}")
        return text

    return parsed


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least or (most is not None and int(text) > most):
            span = f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(f"it has to be a whole number, {span}")
        return int(text)

    return parsed


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it has to be 0 or 1")
    return text == "1"


_KEYS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "xfer_type": _number(XFER_TYPES.start, XFER_TYPES.stop - 1),
    "rw": _one_of(RW),
    "bs": _block,
    "size": _positive_size,
    "runtime": _number(0),
    "do_verify": _flag,
    "skip_bufregister": _flag,
    "start_offset": byte_size,
    "num_threads": _number(1),
    "gpu_dev_id": _number(0),
    "numa_node": _number(0),
    "directory": str,
    "random_seed": _number(0),
    "unaligned_random": _flag,
    **dict.fromkeys(_NOT_APPLIED, str),
}
