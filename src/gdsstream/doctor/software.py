"""What only the running process can say: torch, the CUDA driver, libcufile, kvikio, io_uring.

Every question is answered with a value or with the reason why there is none; nothing here raises. A recorded tree has
no process to ask: there, `Software` is absent as a whole.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from importlib import metadata

from gdsstream.errors import GdsStreamError

_CUFILE_PACKAGES = ("nvidia-cufile", "nvidia-cufile-cu12", "nvidia-cufile-cu13")
_KVIKIO_PACKAGES = ("kvikio-cu12", "kvikio-cu13", "kvikio")


@dataclass(frozen=True, slots=True)
class Software:
    """Versions and answers; a reason is empty where there is nothing to explain.

    Attributes:
        torch: its version; None without torch.
        torch_cuda: the CUDA version that it was built for; None for a build without.
        driver_cuda: the newest CUDA version that the driver can do, (12, 8).
        driver_reason: why the CUDA driver cannot be used.
        cufile: libcufile's version, (1, 13).
        cufile_source: the package or library that says so.
        kvikio: its version; None where it is not installed.
        kvikio_posix: whether kvikio keeps to its own POSIX path; None where it cannot be asked.
        kvikio_reason: why it cannot be asked.
        io_uring_reason: why io_uring cannot be used; None where it was not asked.
    """

    torch: str | None = None
    torch_cuda: str | None = None
    driver_cuda: tuple[int, int] | None = None
    driver_reason: str = ""
    cufile: tuple[int, ...] | None = None
    cufile_source: str = ""
    kvikio: str | None = None
    kvikio_posix: bool | None = None
    kvikio_reason: str = ""
    io_uring_reason: str | None = None


def ask() -> Software:
    """Ask this process."""
    torch, torch_cuda = _torch()
    driver, driver_reason = _driver()
    cufile, source = _cufile()
    kvikio = _version(_KVIKIO_PACKAGES)
    posix, reason = _kvikio() if kvikio else (None, "not installed")
    return Software(
        torch=torch,
        torch_cuda=torch_cuda,
        driver_cuda=driver,
        driver_reason=driver_reason,
        cufile=cufile,
        cufile_source=source,
        kvikio=kvikio[1] if kvikio else None,
        kvikio_posix=posix,
        kvikio_reason=reason,
        io_uring_reason=_io_uring(),
    )


def _torch() -> tuple[str | None, str | None]:
    try:
        import torch
    except (ImportError, OSError):
        return None, None
    return str(torch.__version__), torch.version.cuda


def _driver() -> tuple[tuple[int, int] | None, str]:
    library = os.environ.get("GDSSTREAM_LIBCUDA") or "libcuda.so.1"
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return None, str(error)
    if failed:
        return None, f"cuDriverGetVersion failed with {failed}"
    return (version.value // 1000, version.value % 1000 // 10), ""


def _cufile() -> tuple[tuple[int, ...] | None, str]:
    """From the library that would be loaded; else from the package that brings one."""
    for name in ("libcufile.so.0", "libcufile.so"):
        version = ctypes.c_int()
        try:
            failed = ctypes.CDLL(name).cuFileGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
        if not failed and version.value:
            return (version.value // 1000, version.value % 1000 // 10), name
    found = _version(_CUFILE_PACKAGES)
    if found is None:
        return None, ""
    return tuple(int(part) for part in found[1].split(".")[:2] if part.isdigit()), f"package {found[0]}"


def _kvikio() -> tuple[bool | None, str]:
    try:
        from gdsstream.engine.kvikio_process import load_kvikio

        return bool(load_kvikio().defaults.is_compat_mode_preferred()), ""
    except (GdsStreamError, ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, str(error)


def _io_uring() -> str | None:
    try:
        from gdsstream import _native

        return _native.io_uring_reason()
    except (ImportError, OSError) as error:
        return f"the native engine cannot be loaded: {error}"


def _version(packages: tuple[str, ...]) -> tuple[str, str] | None:
    for package in packages:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


__all__ = ["Software", "ask"]
