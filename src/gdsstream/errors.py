"""Every error gdsstream raises, in one tree.

GdsStreamError
├── ConfigError (ValueError)              a knob, argument or environment variable is wrong
├── CheckpointError                       a file is not what it has to be
│   ├── CheckpointNotFoundError (FileNotFoundError)
│   ├── HeaderError (ValueError)          the header breaks the format's promises
│   ├── TruncatedFileError                the file is shorter than its header promises
│   ├── ChecksumError                     bytes that are not those that were recorded
│   ├── TensorNotFoundError (KeyError)    no tensor of that name
│   └── DtypeError (TypeError)            a dtype that torch, or the file format, cannot hold
├── ReadError (OSError)                   the storage failed while bytes were read
│   ├── ShortReadError                    fewer bytes arrived than the file promised
│   └── FileChangedError                  replaced, truncated or rewritten since it was opened
├── WriteError (OSError)                  the storage refused what was to be written
├── EngineError (RuntimeError)            the engine cannot do what was asked
│   ├── BackendUnavailableError           a backend asked for by name cannot run here
│   ├── CudaError                         the CUDA driver refused
│   ├── ForkedProcessError                the engine belongs to the parent process
│   ├── EngineClosedError                 used after close()
│   └── TransferCancelledError            the transfer was cancelled before it was complete
├── LeaseError (RuntimeError)             a lease used after its release, or no slot left to lease
├── OffloadError (RuntimeError)           a module or an operation that cannot be offloaded, or not like this
├── DatasetError (ValueError)             the shards are no dataset: none, disagreeing, or not decodable
├── LoaderStateError (ValueError)         a loader's state that belongs to another dataset or order
├── TransformError (RuntimeError)         a transform or collate_fn of the caller raised
└── MemoryBudgetError (MemoryError)       staging, host cache or device memory does not suffice

Each message says what happened, where (file, tensor, offset) and what to do about it.
"""

from __future__ import annotations


class GdsStreamError(Exception):
    """Root of all errors raised by gdsstream."""


class ConfigError(GdsStreamError, ValueError):
    """A knob, an argument or an environment variable has a value that cannot work."""


class CheckpointError(GdsStreamError):
    """A checkpoint or one of its files is not what it has to be."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The path does not lead to a readable checkpoint file."""

    # FileNotFoundError formats (errno, text) pairs; a plain message is clearer here.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class HeaderError(CheckpointError, ValueError):
    """A header is not valid: length, JSON, offsets, shapes, dtypes or names."""


class TruncatedFileError(CheckpointError):
    """A file ends before the bytes that its header promises."""


class ChecksumError(CheckpointError):
    """Tensors are not what the checksums beside their file say; `tensors` has the names of all of them."""

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class TensorNotFoundError(CheckpointError, KeyError):
    """No tensor of that name is in the checkpoint."""

    # KeyError.__str__ is the repr of the key; ours is a sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DtypeError(CheckpointError, TypeError):
    """A dtype of the file has no counterpart in this version of torch, or one of torch none in the file format."""


class ReadError(GdsStreamError, OSError):
    """The storage failed while bytes were read; `errno` holds the system's reason where it gave one."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ShortReadError(ReadError):
    """Fewer bytes arrived than the file promised."""


class FileChangedError(ReadError):
    """A file was replaced, truncated or rewritten since it was opened."""


class WriteError(GdsStreamError, OSError):
    """The storage refused what was to be written; `errno` holds the system's reason where it gave one."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class EngineError(GdsStreamError, RuntimeError):
    """The engine cannot do what was asked."""


class BackendUnavailableError(EngineError):
    """A backend that was asked for by name cannot run on this machine."""


class CudaError(EngineError):
    """A call of the CUDA driver failed."""


class ForkedProcessError(EngineError):
    """The engine was opened in the parent process; open a new one in this process."""


class EngineClosedError(EngineError):
    """The engine or handle was used after close()."""


class TransferCancelledError(EngineError):
    """The transfer was cancelled before every byte was there."""


class LeaseError(GdsStreamError, RuntimeError):
    """A lease was used after its release, or every slot is leased."""


class OffloadError(GdsStreamError, RuntimeError):
    """A module or an operation cannot be offloaded, or not like this."""


class DatasetError(GdsStreamError, ValueError):
    """Shards that are no dataset: there are none, they disagree, or one cannot be decoded."""


class LoaderStateError(GdsStreamError, ValueError):
    """A loader's state that belongs to another dataset, seed or order."""


class TransformError(GdsStreamError, RuntimeError):
    """A transform or collate_fn raised; its own exception is the cause."""


class MemoryBudgetError(GdsStreamError, MemoryError):
    """Staging memory, host cache or device memory does not suffice for the request."""


__all__ = [
    "BackendUnavailableError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "ConfigError",
    "CudaError",
    "DatasetError",
    "DtypeError",
    "EngineClosedError",
    "EngineError",
    "FileChangedError",
    "ForkedProcessError",
    "GdsStreamError",
    "HeaderError",
    "LeaseError",
    "LoaderStateError",
    "MemoryBudgetError",
    "OffloadError",
    "ReadError",
    "ShortReadError",
    "TensorNotFoundError",
    "TransferCancelledError",
    "TransformError",
    "TruncatedFileError",
    "WriteError",
]
