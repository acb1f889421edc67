"""cuFile's own API through cuda.bindings.cufile: the driver, files and memory registered with it.

Raises loaders.base.Unavailable with the reason where the bindings, libcufile or its driver refuse. cuFile falls back to
POSIX by itself where its cufile.json allows that; `description` says what the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.loaders.base import Unavailable, need

_LIBRARY = "cuda-bindings nvidia-cufile"


class CuFileSession:
    """Files open with O_DIRECT and registered; `close` gives them back."""

    def __init__(self, paths: Sequence[str], *, write: bool) -> None:
        self.api: Any = need("cuda.bindings.cufile", _LIBRARY)
        self._descriptors: list[int] = []
        self.handles: list[int] = []
        try:
            # Opened once a process and left open: cuFile counts, and closing under other users would end them.
            self.api.driver_open()
        except Exception as error:  # the bindings raise their own errors, and others where libcufile is missing
            raise Unavailable(f"cuFile's driver cannot be opened: {_line(error)}") from error
        try:
            for path in paths:
                descriptor = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC)
                self._descriptors.append(descriptor)
                self.handles.append(self._register(descriptor))
        except Exception as error:
            self.close()
            raise Unavailable(f"cuFile refuses the files: {_line(error)}") from error

    def _register(self, descriptor: int) -> int:
        told = self.api.Descr()
        told.type = int(self.api.FileHandleType.OPAQUE_FD)
        told.handle.fd = descriptor
        told.fs_ops = 0
        return int(self.api.handle_register(told.ptr))

    def register(self, address: int, nbytes: int) -> None:
        """Register device memory. Raises Unavailable."""
        try:
            self.api.buf_register(address, nbytes, 0)
        except Exception as error:
            raise Unavailable(f"cuFile refuses to register {nbytes} bytes: {_line(error)}") from error

    def deregister(self, address: int) -> None:
        """Undo `register`."""
        self.api.buf_deregister(address)

    def close(self) -> None:
        for handle in self.handles:
            self.api.handle_deregister(handle)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.handles, self._descriptors = [], []


def description() -> str:
    """Which path cuFile can take on this machine."""
    if Path("/proc/driver/nvidia-fs").exists():
        return "cuFile with nvidia-fs; whether it is GDS only its own counters prove"
    return "cuFile without nvidia-fs: its POSIX path, or PCI peer to peer where cuFile has that; not proven to be GDS"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
