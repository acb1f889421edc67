"""gdsstream.load_file to several GPUs at once: a thread for each, which loads its share of the files.

File i goes to device i modulo their number. The ceiling of its row is one GPU's link, so that a share above 100 % is
what the others add. On the CPU all of them are the CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.config import BenchConfigError
from bench.loaders.base import Job, Unavailable, need
from bench.loaders.knobs import Knobs

if TYPE_CHECKING:
    import torch


@dataclass
class Devices(Knobs):
    """See Knobs; `devices` are CUDA's numbers, each once."""

    backend: str | None = "staged"
    devices: list[int] = field(default_factory=lambda: [0])

    verbs: ClassVar[frozenset[str]] = frozenset({"read"})

    _gdsstream: Any = field(default=None, init=False, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    #: The device and the files of each thread.
    _shares: list[tuple[str, list[str]]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise BenchConfigError(
                f"'devices' is {self.devices}; it has to name CUDA devices, each once, such as [0, 1]"
            )

    def prepare(self, job: Job) -> None:
        import torch

        self._gdsstream = need("gdsstream", "gdsstream")
        there = torch.cuda.device_count() if job.cuda else len(self.devices)
        if job.cuda and max(self.devices) >= there:
            raise Unavailable(f"there is no cuda:{max(self.devices)}: the machine has {there} CUDA devices")
        if len(job.paths) < len(self.devices):
            raise Unavailable(f"{len(job.paths)} files are too few for {len(self.devices)} devices")
        names = [f"cuda:{number}" if job.cuda else job.device for number in self.devices]
        self._shares = [(name, list(job.paths[turn :: len(names)])) for turn, name in enumerate(names)]
        self._pool = ThreadPoolExecutor(len(names))
        try:
            # Loading no tensor opens the engine that every later call uses.
            list(self._pool.map(lambda share: self._load(*share, names=[]), self._shares))
        except self._gdsstream.BackendUnavailableError as error:
            raise Unavailable(str(error)) from error

    def load(self) -> dict[str, torch.Tensor]:
        assert self._pool is not None
        found: dict[str, torch.Tensor] = {}
        for tensors in self._pool.map(lambda share: self._load(*share), self._shares):
            found |= tensors
        return found

    def _load(self, device: str, paths: list[str], **which: Any) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = self._gdsstream.load_file(paths, device=device, **which, **self.knobs())
        if device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(device)  # the sample's end waits for the run's own device only
        return tensors

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self._gdsstream is not None:
            self._gdsstream.release_engines()
        self._pool, self._shares = None, []

    def route(self) -> str | None:
        return f"{self.backend}, to {' and '.join(f'{device}: {len(paths)} files' for device, paths in self._shares)}"
