"""StreamConfig: every knob of an engine, checked, with one order of precedence.

argument > environment (`GDSSTREAM_<KNOB>`) > profile (`gdsstream tune`) > automatic. None stands for "automatic"
everywhere: the engine then decides from the machine and says what it chose. Unknown knobs are refused, with the nearest
known one named.

The values of a profile were measured together, and as a whole they give way: where an argument or the environment names
another route, or a size that does not go with them.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Self

from gdsstream.errors import ConfigError

log = logging.getLogger(__name__)

BACKENDS = ("auto", "staged", "mapped", "cufile", "traditional")
READERS = ("auto", "io_uring", "pread")
COMPAT_MODES = ("auto", "on", "off")
DEFAULT_CHUNK_BYTES = 2 * 2**20

# Variables with our prefix that are not knobs: the driver library's replacement is read by the native engine itself.
# GDSSTREAM_PROFILE=0 is for profile.py, GDSSTREAM_NVTX=1 for ranges.py.
_OTHER_VARIABLES = frozenset({"GDSSTREAM_LIBCUDA", "GDSSTREAM_NVTX", "GDSSTREAM_PROFILE"})
_PREFIX = "GDSSTREAM_"
_PAGE_BYTES = 4096
_SLOTS = 6
_CHUNKS_PER_SLOT = 8
_MIN_CHUNK_BYTES = 64 * 1024
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How an engine moves bytes. Sizes are bytes; from text (environment) also "4MiB", "256MB".

    Attributes:
        backend: "auto", or a route by name: "staged", "mapped", "cufile", "traditional". A named route never falls
            back to another: what it cannot do is an error.
        reader: what reads on the staged route: "io_uring", "pread", or "auto" (io_uring for O_DIRECT where allowed,
            pread through the page cache).
        direct_io: True reads with O_DIRECT, False through the page cache; None decides file by file: O_DIRECT for
            files on a disk that are mostly not in the page cache.
        chunk_size: the most bytes that one read takes. A multiple of 4096, at least 64 KiB. Default 2 MiB; 8 MiB for
            "cufile", whose task size it is.
        io_depth: reads that each io_uring thread keeps under way, within 16 MiB. Default 256; where all disks are
            virtual ones with a single queue, at most twice what that takes, and what the disk brings in a millisecond.
        num_threads: reader threads of the page-cache path. Default: one for each usable core, at most 12.
        direct_threads: reader threads of the O_DIRECT path. Default: num_threads where that is given, else 4 of
            io_uring (2 where its reads are held back, see io_depth), or 32 where it is forbidden.
        staging_bytes: the most pinned memory that the staging ring may grow to. Default 96 MiB. Reads with O_DIRECT
            that are held back (see io_depth) go through another ring, of that or 32 MiB, whichever is less.
        host_cache_bytes: how many bytes of files a mapped handle may keep registered (and so unevictable). Default 0.
        numa: whether threads and staging memory go to the GPU's NUMA node, and the reader of large reads for a GPU that
            are held back (see io_depth) to the CPU that takes the disk's interrupts. Default True.
        compat_mode, bounce_buffer_bytes, register_buffers: kvikio's, for "cufile" only; see CuFileSettings.
        stats: 1, 2 or 3 counts what the engine reads, in more detail each; see gdsstream.stats. Default 0: nothing.
        faults: for tests: faults injected under the readers ("eio@3", "short@2", "nomem@4", "delay_us=500",
            comma-separated).
    """

    backend: str = "auto"
    reader: str = "auto"
    direct_io: bool | None = None
    chunk_size: int | None = None
    io_depth: int | None = None
    num_threads: int | None = None
    direct_threads: int | None = None
    staging_bytes: int = 96 * 2**20
    host_cache_bytes: int = 0
    numa: bool = True
    compat_mode: str = "auto"
    bounce_buffer_bytes: int | None = None
    register_buffers: bool = False
    stats: int = 0
    faults: str = ""

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("reader", self.reader, READERS)
        _one_of("compat_mode", self.compat_mode, COMPAT_MODES)
        if self.chunk_size is not None:
            _whole("chunk_size", self.chunk_size, _MIN_CHUNK_BYTES, 2**30)
            if self.chunk_size % _PAGE_BYTES:
                raise ConfigError(f"chunk_size is {self.chunk_size} bytes; it has to be a multiple of {_PAGE_BYTES}")
        _whole("staging_bytes", self.staging_bytes, self.chunk_bytes, 2**40)
        for name in ("numa", "register_buffers"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is True or False")
        if self.bounce_buffer_bytes is not None:
            _whole("bounce_buffer_bytes", self.bounce_buffer_bytes, _PAGE_BYTES, 2**30)
        _whole("stats", self.stats, 0, 3)
        _whole("host_cache_bytes", self.host_cache_bytes, 0, 2**50)
        if self.io_depth is not None:
            _whole("io_depth", self.io_depth, 1, 4096)
        for name in ("num_threads", "direct_threads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, 1024)
        if self.direct_io not in (None, True, False):
            raise ConfigError(f"direct_io is {self.direct_io!r}; it is True, False or None (decide file by file)")

    @classmethod
    def resolve(
        cls,
        knobs: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        profile: Mapping[str, Any] | None = None,
    ) -> Self:
        """The configuration from keyword arguments (those that are not None) over the environment over a profile's
        knobs over defaults.

        Raises ConfigError for an unknown knob or variable, and for a value that cannot work.
        """
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in (os.environ if environ is None else environ).items():
            if not variable.startswith(_PREFIX) or variable in _OTHER_VARIABLES:
                continue
            name = variable.removeprefix(_PREFIX).lower()
            if name not in known:
                raise ConfigError(f"environment variable {variable} is no knob{nearest(name, known)}; unset it")
            try:
                values[name] = _PARSERS[name](text)
            except ValueError as error:
                raise ConfigError(f"environment variable {variable}={text!r}: {error}") from None
        for name, value in (knobs or {}).items():
            if name not in known:
                raise ConfigError(f"{name!r} is no knob{nearest(name, known)}")
            if value == "auto" and name not in ("backend", "reader"):
                value = None  # the word is accepted wherever a decision can be left to the engine
                values.pop(name, None)
            if value is not None:
                values[name] = value
        settings = cls(**values)
        return cls._over(profile, settings, values) if profile else settings

    @classmethod
    def _over(cls, profile: Mapping[str, Any], settings: Self, values: dict[str, Any]) -> Self:
        """`values`, which alone give `settings`, over a profile's knobs as far as those go with them."""
        tuned = dict(profile)
        route = tuned.get("backend", "auto")
        native = route in ("auto", "staged")
        if settings.backend != "auto" and not (native and settings.backend in ("staged", "mapped")):
            if settings.backend != route:
                return settings
        elif settings.host_cache_bytes:
            # A host tier is the native engine's; "auto" leads to it by itself.
            if not native:
                return settings
            tuned.pop("backend", None)
        chosen = {name: value for name, value in values.items() if (name, value) != ("backend", "auto")}
        try:
            return cls(**{**tuned, **chosen})
        except ConfigError as error:
            log.warning("the profile's settings do not go with those that were given, and are left out: %s", error)
            return settings

    @property
    def chunk_bytes(self) -> int:
        """The most that one read of the native engine takes."""
        return self.chunk_size or DEFAULT_CHUNK_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of one staging slot, and so of one copy to the GPU, which several reads fill together.

        Each copy costs about 4 us beside its bytes, so that one of 4 MiB reaches 0.95 of the link and one of 16 MiB
        0.99; but a ring of fewer than six slots leaves readers without one, and a larger ring leaves the cache.
        """
        share = self.staging_bytes // _SLOTS // _PAGE_BYTES * _PAGE_BYTES
        return max(self.chunk_bytes, min(_CHUNKS_PER_SLOT * self.chunk_bytes, share))

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, for records and logs."""
        return asdict(self)


def parse_bytes(text: str) -> int:
    """Bytes from "4194304", "4MiB" (binary) or "256MB" (decimal). Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b?\s*", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 4194304, 4MiB or 256MB")
    size = Fraction(match[1]) * _UNITS[match[2]]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_flag(text: str) -> bool:
    """Whether "1", "on", ... or "0", "off", ... was meant. Raises ValueError."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("it has to be 1 or 0")


def _optional_flag(text: str) -> bool | None:
    return None if text.strip().lower() == "auto" else parse_flag(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "backend": str,
    "reader": str,
    "direct_io": _optional_flag,
    "chunk_size": parse_bytes,
    "io_depth": int,
    "num_threads": int,
    "direct_threads": int,
    "staging_bytes": parse_bytes,
    "host_cache_bytes": parse_bytes,
    "numa": parse_flag,
    "compat_mode": str,
    "bounce_buffer_bytes": parse_bytes,
    "register_buffers": parse_flag,
    "stats": int,
    "faults": str,
}


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}{nearest(str(value), set(choices))}; it is one of {', '.join(choices)}")


def _whole(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; it has to be a whole number from {least} to {most}")


def nearest(name: str, known: set[str]) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
