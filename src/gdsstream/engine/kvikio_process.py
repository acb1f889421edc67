"""kvikio's process-wide settings and registered buffers, and the counters that prove which route its reads took.

kvikio has one set of settings for the process, not for a file or a call: engines that are open at the same time must
agree on them, and the values found before the first one are put back when the last one closes. cuFile falls back to
POSIX by itself without a word; only its own counters, or nvidia-fs's, tell whether reads went by DMA.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from gdsstream.config import StreamConfig
from gdsstream.errors import BackendUnavailableError, ConfigError

log = logging.getLogger(__name__)

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class CuFileSettings:
    """kvikio's settings, process-wide while an engine is open.

    Attributes:
        num_threads: kvikio's reader threads.
        task_size_bytes: what one thread reads at a time; a multiple of 4096.
        bounce_buffer_bytes: pinned memory a thread stages through on the POSIX path; a multiple of 4096.
        direct_io: O_DIRECT for the aligned part of each read on the POSIX path.
        compat_mode: "on" (always POSIX), "off" (always cuFile), or "auto": what KVIKIO_COMPAT_MODE says, without it
            cuFile where kvikio thinks that it works.
        register_buffers: register destinations with cuFile while they are read into; does nothing on the POSIX path.
    """

    num_threads: int = 12
    task_size_bytes: int = 8 << 20
    bounce_buffer_bytes: int = 16 << 20
    direct_io: bool = False
    compat_mode: str = "auto"
    register_buffers: bool = False

    def __post_init__(self) -> None:
        for knob, multiple in (("num_threads", 1), ("task_size_bytes", _PAGE), ("bounce_buffer_bytes", _PAGE)):
            value = getattr(self, knob)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value % multiple:
                raise ConfigError(f"{knob} must be a positive multiple of {multiple}, got {value!r}")
        for knob in ("direct_io", "register_buffers"):
            if not isinstance(getattr(self, knob), bool):
                raise ConfigError(f"{knob} must be True or False, got {getattr(self, knob)!r}")
        if self.compat_mode not in ("auto", "on", "off"):
            raise ConfigError(f'compat_mode must be "auto", "on" or "off", got {self.compat_mode!r}')

    @classmethod
    def of(cls, config: StreamConfig) -> CuFileSettings:
        """kvikio's share of an engine's knobs: a thread stages a chunk at a time, through a buffer of that size.

        By default what measured best, 12 threads of 8 MiB, as far as `staging_bytes` has room for their buffers.
        kvikio cannot choose O_DIRECT file by file: undecided means through the page cache.
        """
        chunk = config.chunk_size or min(cls().task_size_bytes, max(_PAGE, config.staging_bytes // _PAGE * _PAGE))
        threads = config.num_threads or max(1, min(cls().num_threads, config.staging_bytes // chunk))
        return cls(
            num_threads=threads,
            task_size_bytes=chunk,
            bounce_buffer_bytes=config.bounce_buffer_bytes or chunk,
            direct_io=bool(config.direct_io),
            compat_mode=config.compat_mode,
            register_buffers=config.register_buffers,
        )


def load_kvikio() -> Any:
    """The kvikio module with `kvikio.defaults`, or BackendUnavailableError that says what to install."""
    install = "pip install gdsstream[cu12] or gdsstream[cu13], whichever CUDA your torch was built for"
    try:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
    except ModuleNotFoundError as error:
        missing = "kvikio is not installed" if error.name == "kvikio" else f"kvikio needs the module {error.name}"
        raise BackendUnavailableError(f"the cufile backend cannot run: {missing}; {install}") from error
    except (ImportError, OSError, RuntimeError) as error:
        library = re.search(r"lib(cuda|cufile)\.so", str(error))
        cause = f"kvikio cannot be loaded: {error}"
        if library and library[1] == "cuda":
            cause = "libcuda.so.1, the NVIDIA driver's library, is missing; install the driver"
        elif library:
            cause = f"libcufile is missing; install nvidia-cufile ({install})"
        raise BackendUnavailableError(f"the cufile backend cannot run: {cause}") from error
    return kvikio


class ProcessSettings:
    """kvikio's process-wide settings, shared by the open engines and put back after the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: weakref.WeakKeyDictionary[object, CuFileSettings] = weakref.WeakKeyDictionary()
        self._before: dict[str, Any] = {}

    def claim(self, engine: object, settings: CuFileSettings, kvikio: Any) -> None:
        with self._lock:
            if any(other != settings for other in self._engines.values()):
                raise ConfigError(
                    "another cufile engine is open with other settings, and kvikio's settings hold for the whole "
                    "process; close it first or use the same settings"
                )
            wanted: dict[str, Any] = {
                "num_threads": settings.num_threads,
                "task_size": settings.task_size_bytes,
                "bounce_buffer_size": settings.bounce_buffer_bytes,
                "auto_direct_io_read": settings.direct_io,
            }
            if settings.compat_mode != "auto":
                wanted["compat_mode"] = getattr(kvikio.CompatMode, settings.compat_mode.upper())
            if not self._engines:
                before = {key: _get_default(kvikio, key) for key in wanted}
                if before["auto_direct_io_read"] is None and settings.direct_io:
                    raise BackendUnavailableError("this version of kvikio has no direct_io; install a newer kvikio")
                # An engine dropped without close() left its own values behind: the older ones are still kept.
                self._before = self._before or {key: value for key, value in before.items() if value is not None}
                kvikio.defaults.set({key: value for key, value in wanted.items() if before[key] is not None})
            self._engines[engine] = settings

    def release(self, engine: object, kvikio: Any) -> None:
        with self._lock:
            if self._engines.pop(engine, None) is not None and not self._engines:
                kvikio.defaults.set(self._before)
                self._before = {}


def _get_default(kvikio: Any, key: str) -> Any:
    try:
        value = kvikio.defaults.get(key)
    except KeyError:
        return None
    # The getter hands out a plain integer, which the setter does not take back.
    return kvikio.CompatMode(value) if key == "compat_mode" else value


class Counters:
    """cuFile's own counts of reads by DMA: per-GPU statistics where cuda.bindings has them, else nvidia-fs's."""

    def __init__(self, procfs: str = "/proc") -> None:
        self._stats_path = os.path.join(procfs, "driver/nvidia-fs/stats")
        self._cufile: Any = None
        try:
            self._cufile = importlib.import_module("cuda.bindings.cufile")
            if self._cufile.get_stats_level() < 3:
                self._cufile.set_stats_level(3)
                self._cufile.stats_start()
        except Exception:  # an older cuFile or none: each fails in its own way, and the other counter remains
            self._cufile = None
        self._start = self._read()

    def _read(self) -> dict[str, int]:
        if self._cufile is not None:
            try:
                level3 = self._cufile.StatsLevel3()
                self._cufile.get_stats_l3(level3.ptr)
                gpus = level3.per_gpu_stats
                return {key: int(getattr(gpus, f"n_{key}_reads").sum()) for key in ("nvfs", "p2p", "posix")}
            except Exception:
                self._cufile = None
        try:
            with open(self._stats_path, encoding="ascii", errors="replace") as file:
                # Only with IO statistics enabled does nvidia-fs count ("n="); a zero without them says nothing.
                found = re.search(r"^Reads\s*:\s*n=(\d+)", file.read(), re.MULTILINE)
        except OSError:
            return {}
        return {"nvidia-fs (machine-wide)": int(found[1])} if found else {}

    def delta(self) -> dict[str, int]:
        """Reads by their way since this object was made; all but "posix" went by DMA. Empty without any counter."""
        # Only what the same counter said at the start: the two kinds count from different beginnings.
        return {key: value - self._start[key] for key, value in self._read().items() if key in self._start}

    def verdict(self) -> str:
        """What the counters prove about the reads since this object was made."""
        delta = self.delta()
        if not delta:
            return "unproven: neither cuFile's statistics nor nvidia-fs's counters can be read"
        counted = ", ".join(f"{value} {key}" for key, value in delta.items())
        if sum(value for key, value in delta.items() if key != "posix") <= 0:
            return f"unproven: cuFile counted no direct read ({counted})"
        return f"proven by cuFile's counters of reads: {counted}"


class Registrations:
    """The allocations that cuFile knows of, each registered once however many buffers and submissions share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, tuple[Any, torch.Tensor, int]] = {}

    def add(self, kvikio: Any, buffer: torch.Tensor) -> int:
        """Register `buffer`'s allocation unless it is; what to call `remove` with. Raises what kvikio does."""
        base = _allocation_base(buffer)
        with self._lock:
            module, tensor, users = self._users.get(base, (kvikio, buffer, 0))
            if not users:
                kvikio.memory_register(buffer)
            self._users[base] = (module, tensor, users + 1)
        return base

    def nbytes(self) -> int:
        """Bytes of the buffers that are registered, as they were given."""
        with self._lock:
            return sum(tensor.numel() for _, tensor, _ in self._users.values())

    def remove(self, base: int) -> None:
        """Take back one `add`; never raises."""
        with self._lock:
            kvikio, tensor, users = self._users.pop(base)
            if users > 1:
                self._users[base] = (kvikio, tensor, users - 1)
                return
            try:
                kvikio.memory_deregister(tensor)
            except Exception as error:
                log.warning("cuFile cannot deregister a buffer of %d bytes: %s", tensor.numel(), error)


def _allocation_base(buffer: torch.Tensor) -> int:
    """Where the driver's allocation around `buffer` starts: what kvikio registers, shared by torch's small tensors."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    pointer = ctypes.c_uint64(buffer.data_ptr())
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
    except OSError:
        failed = 1
    return buffer.data_ptr() if failed else base.value


__all__ = ["Counters", "CuFileSettings", "ProcessSettings", "Registrations", "load_kvikio"]
