"""gdsstream.load_file and gdsstream.read_many, one backend a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders.base import Job, Unavailable, need
from bench.loaders.knobs import Knobs

if TYPE_CHECKING:
    import torch


@dataclass
class LoadFile(Knobs):
    """See Knobs; `copy` False maps the files instead."""

    backend: str | None = "auto"
    copy: bool = True

    verbs: ClassVar[frozenset[str]] = frozenset({"read", "gather"})

    _gdsstream: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        if job.request is not None and self.backend in ("traditional", "cufile"):
            raise Unavailable("read_many runs on the native engine only")

        if not self.copy and job.cuda:
            raise Unavailable("copy=False maps files into CPU memory")
        if not self.copy and job.request is not None:
            raise Unavailable("read_many copies")

    def prepare(self, job: Job) -> None:
        self._gdsstream = need("gdsstream", "gdsstream")
        self._job = job
        if not self.copy:
            return
        # Loading no tensor opens the engine that every later call uses; its refusal becomes the row's reason.
        try:
            self._gdsstream.load_file(list(job.paths), device=job.device, names=[], **self.knobs())
        except self._gdsstream.BackendUnavailableError as error:
            raise Unavailable(str(error)) from error
        engine = self._engine()
        if hasattr(engine, "prepare"):
            engine.prepare()  # threads and pinned memory are start-up, not a part of the first load

    def load(self) -> dict[str, torch.Tensor]:
        assert self._job is not None
        tensors: dict[str, torch.Tensor] = self._gdsstream.load_file(
            list(self._job.paths), device=self._job.device, copy=self.copy, **self.knobs()
        )
        return tensors

    def gather(self) -> torch.Tensor:
        assert self._job is not None
        assert self._job.request is not None
        request = self._job.request
        records: torch.Tensor = self._gdsstream.read_many(
            list(self._job.paths),
            request.file_index,
            request.offsets,
            request.length,
            device=self._job.device,
            **self.knobs(),
        )
        return records

    def close(self) -> None:
        if self._gdsstream is not None:
            self._gdsstream.release_engines()  # all of them: loaders are closed together

    def delivers(self) -> str:
        return "owned" if self.copy else "file mapping"

    def route(self) -> str | None:
        if not self.copy:
            return "mapped files, nothing read"
        return str(self._engine().route)

    def pinned_bytes(self) -> int | None:
        if self._job is None or not self._job.cuda or not self.copy:
            return 0  # its buffers are ordinary memory then
        found: int | None = self._engine().stats().get("staging_bytes")
        return found

    def _engine(self) -> Any:
        """The engine that load_file uses: it is the process's, and knows what it did."""
        assert self._job is not None
        load, engine = need("gdsstream.load", "gdsstream"), need("gdsstream.engine", "gdsstream")
        device = need("gdsstream.devices", "gdsstream").parse_device(self._job.device)
        gathers = self._job.request is not None
        settings = engine.merge(None, self.knobs(), path=self._job.paths, device=device, native=gathers)
        return load.shared_engine(device, settings)
