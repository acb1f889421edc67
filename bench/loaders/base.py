"""What a loader is, and the rules of the timed region, the same for all.

A sample starts before the call that loads and ends when the caller can use every byte:

- GPU: after `torch.cuda.synchronize()`; all tensors are then on the device, in memory that the caller owns.
- CPU: after one pass in which a consumer has read every byte once (a wrap-around sum of 64-bit words, torch's own
  multi-threaded loop). Without it a loader that returns a lazy file mapping would be timed for doing nothing; with it
  every loader pays for the same pass, and mapping or copying is the loader's own choice. The time until the call
  returned is recorded beside it (`lazy_return_s`), and `delivers` says whether the caller owns the memory at the end
  or still shares the file's pages. The CPU ceilings include the same pass.

Layers of a pipeline and of a training step are leased instead: usable on the current stream until the next is asked
for. Their samples end when the device has done everything that was queued.

Ios of a transfer land in memory that exists before, on the device or, where a route ends there, on the host, and there
is no pass of a consumer: nothing of them can be lazy, since every byte is in a place of its own.

Batches of an epoch are copied, by the current stream, into memory that is verified later, as a training step would use
them: the sample ends when the last of these copies has been made. That is the consumer's pass on the CPU.

What happens once (imports, driver, engine, registration) belongs into `prepare` and becomes the start-up column; the
first load after it is a column of its own too. Reading the headers belongs to every load. Bytes are verified after the
clock has stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from bench.moments import Watch
    from bench.record_shards import RecordShards
    from bench.transfer_memory import Memory
    from bench.transfer_ops import Ops


class Unavailable(Exception):
    """The loader cannot run here; the message is the reason shown in its row."""


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """Records to fetch: record i is `length` bytes at `offsets[i]` of file `file_index[i]`."""

    file_index: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    length: int

    @property
    def total_bytes(self) -> int:
        return len(self.offsets) * self.length


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """Layers to stream through `num_slots` slots. Each file holds one, whose names begin with `pattern`.

    With `modules`, which makes new ones, these are to be offloaded: module i has the weights of file i modulo the
    number of files.
    """

    pattern: str
    num_slots: int
    modules: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class EpochRequest:
    """Records to deliver in batches, all of them once an epoch, in an order drawn from `seed` and the epoch's number.

    A loader that needs another format writes it into a folder of its own in `directory`.
    """

    shards: RecordShards
    directory: Path
    batch_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Ios to make: `ops` gives them for a size that a row asks for (None: the scenario's). The other figures are the
    scenario's, for rows that have none of their own."""

    op: str
    io_bytes: int
    threads: int
    depth: int
    registered: bool
    ops: Callable[[int | None], Ops]
    memory: Memory

    @property
    def write(self) -> bool:
        return self.op.endswith("write")


@dataclass(frozen=True, slots=True)
class Job:
    """What every loader of a run gets: the files and where their tensors shall be."""

    paths: tuple[str, ...]
    data_bytes: int
    device: str
    request: GatherRequest | None = None
    layers: LayerRequest | None = None
    epoch: EpochRequest | None = None
    #: Where the folders lie that verb `write` saves into.
    saves_to: Path | None = None
    transfer: TransferRequest | None = None

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


class Saving(ABC):
    """A checkpoint on its way to the storage; the tensors are no longer needed."""

    @abstractmethod
    def wait(self) -> None:
        """Return when fsync has returned for every file and for the folder. Where it raises, nothing writes any more.

        Timed.
        """


class Done(Saving):
    """Of a saver that returns when all is over."""

    def wait(self) -> None:
        return None


class Loader(ABC):
    """One way to bring bytes from files into tensors. Subclasses are dataclasses; their fields are the options.

    Modules of loaders import torch and the library that they wrap inside functions only.
    """

    verbs: ClassVar[frozenset[str]] = frozenset({"read"})
    #: Whether there are bytes to compare at the end.
    delivers_bytes: ClassVar[bool] = True

    @property
    def pins_page_cache(self) -> bool:
        """Whether pages of the files stay in memory between loads, so that no load can be cold."""
        return False

    def check(self, job: Job) -> None:
        """Raise Unavailable when this cannot run, before anything is imported. Untimed."""
        del job

    def convert(self, job: Job) -> None:
        """Write the data in the format that this loader needs. Untimed, before `prepare`."""
        del job

    @abstractmethod
    def prepare(self, job: Job) -> None:
        """Everything that happens once. Timed as start-up."""

    def arm(self) -> None:
        """Make process-wide settings this loader's own. Untimed, before every load and before the cache is emptied."""
        return None

    def disarm(self) -> None:
        """Put process-wide settings back as `arm` found them. Untimed, after every load, also after a failed one."""
        return None

    def load(self) -> dict[str, torch.Tensor]:
        """Verb `read`: every tensor of the checkpoint, on the device."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'read'")

    def gather(self) -> torch.Tensor:
        """Verb `gather`: the requested records as a uint8 tensor [records, length], on the device."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'gather'")

    def stream(self, sequence: Sequence[int]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Verbs `pipeline` and `train`: these layers one after the other, each a mapping whose look-ups can be used on
        the current stream, until the next one is asked for. The statistics begin anew."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'pipeline'")

    def watched(self, watch: Watch) -> AbstractContextManager[None] | None:
        """Verb `pipeline`: within, `watch` is told of every transfer of a `stream`, in the order of the layers. None
        where the loader cannot tell."""
        del watch
        return None

    def modules(self) -> Any:
        """Verb `train`: the offloaded modules, to be used forward, then backward. The statistics begin anew."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'train'")

    def epochs(self, count: int) -> Iterator[Any]:
        """Verbs `epoch` and `mlperf`: `count` epochs one after the other, each shuffled anew, as batches that can be
        used on the current stream, until the next one is asked for: [B, record_bytes], or values and offsets where the
        records differ in size (ragged.py)."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'epoch'")

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        """Verb `write`: a checkpoint into an empty folder, each shard into a file of that name and the format's ending,
        or in a way of its own. Returns when the tensors may be changed on the current stream."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'write'")

    def restore(self, folder: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
        """Verb `write`: every tensor of a checkpoint that `save` wrote, on the device. `tensors` are their shapes and
        dtypes (safetensors' names), for formats that ask for them."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'write'")

    def transfer(self, ops: Ops) -> npt.NDArray[np.float64] | None:
        """Verb `transfer`: make these ios. Returns the seconds of each, or of whatever was timed, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no verb 'transfer'")

    def statistics(self) -> dict[str, float]:
        """Verbs `pipeline` and `train`: what streaming did since its statistics began, by name, once it is done."""
        raise NotImplementedError(f"{type(self).__name__} streams nothing")

    def close(self) -> None:
        """Give everything back."""
        return None

    def paths(self, job: Job) -> Sequence[str]:
        """The files that it reads, once it is prepared: those whose pages are in memory or not."""
        return job.paths

    def delivers(self) -> str:
        """`owned`, or `file mapping` where the tensors share the file's pages (on the CPU)."""
        return "owned"

    def route(self) -> str | None:
        """What really moves the bytes, where the loader can tell."""
        return None

    def details(self) -> dict[str, Any]:
        """What the row really used, by name, where a scenario derives figures."""
        return {}

    def pinned_bytes(self) -> int | None:
        """Page-locked host bytes held, where known."""
        return None


def need_cuda(job: Job, library: str) -> None:
    """Raise Unavailable unless the run has a CUDA device."""
    if not job.cuda:
        raise Unavailable(f"{library} loads to CUDA devices only, and this run is on the CPU")


def need(module: str, package: str) -> Any:
    """Import a library that may be missing, or raise Unavailable with the reason."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The package itself: others may live in the namespace that it is a part of.
        missing = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
        if missing:
            raise Unavailable(f"not installed: pip install {package}") from error
        raise Unavailable(f"{module} cannot be imported: {error}") from error
