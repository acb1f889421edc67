"""gdsstream.LayerStreamer and gdsstream.offload: layers through a few slots, one backend a row.

Reads go as far ahead as the slots allow (`prefetch_depth` is one less than there are), so that each takes the slot of
the layer used longest ago: where layers are used in turn, none is found in its slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench import moments
from bench.loaders.base import Job, Unavailable, need
from bench.loaders.knobs import Knobs

if TYPE_CHECKING:
    import torch

    from bench.moments import Watch


@dataclass
class Layers(Knobs):
    """See Knobs; `host_cache_bytes` are for layers that stay in host memory."""

    backend: str | None = "staged"
    host_cache_bytes: int | None = None

    verbs: ClassVar[frozenset[str]] = frozenset({"pipeline", "train"})

    _streamer: Any = field(default=None, init=False, repr=False)
    _handle: Any = field(default=None, init=False, repr=False)
    _modules: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def prepare(self, job: Job) -> None:
        gdsstream = need("gdsstream", "gdsstream")
        request = job.layers
        assert request is not None
        self._job = job
        try:
            if request.modules is None:
                self._streamer = gdsstream.LayerStreamer(
                    list(job.paths),
                    layers=request.pattern,
                    device=job.device,
                    num_slots=request.num_slots,
                    prefetch_depth=request.num_slots - 1,
                    **self.knobs("host_cache_bytes"),
                )
            else:
                self._modules = request.modules()
                self._handle = gdsstream.offload(
                    self._modules,
                    _repeated(job.paths, request.pattern, len(self._modules)),
                    prefix=request.pattern,
                    device=job.device,
                    num_slots=request.num_slots,
                    order="training",
                    **self.knobs("host_cache_bytes"),
                )
                self._streamer = self._handle.streamer
        except gdsstream.BackendUnavailableError as error:
            raise Unavailable(str(error)) from error

    def stream(self, sequence: Sequence[int]) -> Iterator[Mapping[str, torch.Tensor]]:
        self._streamer.reset_stats()
        self._streamer.set_order(need("gdsstream", "gdsstream").Order.explicit(sequence))
        yield from self._streamer

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        # What every read of the streamer goes through; the library itself has no use for the moments.
        sources = self._streamer._sources
        submit = sources.submit
        on_stream = need("gdsstream.devices", "gdsstream").on_stream

        with moments.waiting(watch) as tell:

            def submitted(layer: int, experts: Any, memory: torch.Tensor, stream: int | None) -> Any:
                # On a GPU the read is submitted behind a stream that waits for the slot.
                with on_stream(self._streamer.device, stream):
                    begin = watch.clock.mark()
                transfer = submit(layer, experts, memory, stream)
                tell(begin, transfer.wait)
                return transfer

            sources.submit = submitted
            try:
                yield
            finally:
                del sources.submit

    def modules(self) -> Any:
        self._streamer.reset_stats()
        self._streamer.set_order("training")
        return self._modules

    def statistics(self) -> dict[str, float]:
        found = self._streamer.stats()
        leases = max(found.leases, 1)
        return {
            "leases": found.leases,
            "reads": found.reads,
            "order_misses": found.order_misses,
            "read_bytes": found.read_bytes,
            "host_bytes": found.host_bytes,
            "host_us": found.host_s / leases * 1e6,
            "blocked_us": found.blocked_s / leases * 1e6,
            "stall_s": found.stall_s,
            **{f"stall_{cause}_s": seconds for cause, seconds in found.stall_s_by_cause.items()},
        }

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove(load=False)
        elif self._streamer is not None:
            self._streamer.close()
        self._handle = self._streamer = self._modules = None

    def delivers(self) -> str:
        return "lease"

    def route(self) -> str | None:
        return str(self._streamer.route)

    def pinned_bytes(self) -> int | None:
        assert self._job is not None
        if not self._job.cuda:
            return 0  # its buffers are ordinary memory then
        found = self._streamer.engine_stats()
        held = [found[name] for name in ("staging_bytes", "mapped_bytes") if name in found]
        return int(sum(held)) if held else None


def _repeated(paths: Sequence[str], pattern: str, layers: int) -> Any:
    """The files as a checkpoint of `layers` layers, which has those of the files again and again.

    A model of many layers would not fit into memory beside its resident twin, nor add anything: each use is a read.
    """
    checkpoint = need("gdsstream.checkpoint", "gdsstream").Checkpoint
    opened = checkpoint.open(list(paths))
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        stored, name = (pattern.replace("{i}", str(i)) for i in (layer % len(paths), layer))
        for spec in opened.tensors.values():
            if spec.name.startswith(stored):
                again = spec._replace(name=name + spec.name.removeprefix(stored))
                tensors[again.name] = again
    return checkpoint(opened.path, opened.files, tensors)
