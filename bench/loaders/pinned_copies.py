"""Layers copied from pinned memory into slots by one large copy each: what no loader of files can beat.

The files are read into pinned memory once, at start-up. From then on a layer is one copy on a stream of its own, as far
ahead as the slots allow, ordered against the compute by events. Its overhead is therefore the hardware's: a copy and a
matrix product that run at once share the GPU's memory and its power. What another route has above it is the route's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders import headers
from bench.loaders.base import Job, Loader, need_cuda

if TYPE_CHECKING:
    import torch

    from bench.moments import Watch


@dataclass
class PinnedCopies(Loader):
    """No options."""

    verbs: ClassVar[frozenset[str]] = frozenset({"pipeline"})

    _sources: list[Any] = field(default_factory=list, init=False, repr=False)
    _slots: list[Any] = field(default_factory=list, init=False, repr=False)
    #: [slot][layer]: the layer's tensors in that slot, by their names inside the layer
    _views: list[list[dict[str, Any]]] = field(default_factory=list, init=False, repr=False)
    _held: list[int | None] = field(default_factory=list, init=False, repr=False)
    _ready: list[Any] = field(default_factory=list, init=False, repr=False)
    _free: list[Any] = field(default_factory=list, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)
    _watch: Any = field(default=None, init=False, repr=False)
    _reads: int = field(default=0, init=False, repr=False)
    _leases: int = field(default=0, init=False, repr=False)

    def check(self, job: Job) -> None:
        need_cuda(job, "a copy from pinned memory")

    def prepare(self, job: Job) -> None:
        import torch

        assert job.layers is not None
        found = [headers.read(path) for path in job.paths]
        for header in found:
            data = torch.empty(header.data_bytes, dtype=torch.uint8, pin_memory=True)
            with open(header.path, "rb", buffering=0) as file:
                file.seek(header.data_start)
                left = data.numpy().data
                while len(left):
                    left = left[file.readinto(left) :]
            self._sources.append(data)
        largest = max(header.data_bytes for header in found)
        count = job.layers.num_slots
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=job.device) for _ in range(count)]
        prefixes = [job.layers.pattern.replace("{i}", str(number)) for number in range(len(found))]
        self._views = [
            [
                {name.removeprefix(prefix): view for name, view in headers.views(header, slot).items()}
                for header, prefix in zip(found, prefixes, strict=True)
            ]
            for slot in self._slots
        ]
        self._held = [None] * count
        self._ready = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._free = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(job.device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(job.device)

    def stream(self, sequence: Sequence[int]) -> Iterator[Mapping[str, torch.Tensor]]:
        import torch

        self._reads = self._leases = 0
        count = len(self._slots)
        placed: list[int] = []  # the slots of the uses that are brought in, in the order of the sequence
        for step, layer in enumerate(sequence):
            ahead = sequence[len(placed) : step + count]
            for later in ahead:
                placed.append(self._bring(later, placed[step:]))
            slot = placed[step]
            current = torch.cuda.current_stream()
            current.wait_event(self._ready[slot])
            self._leases += 1
            yield self._views[slot][layer]
            self._free[slot].record(current)

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def _bring(self, layer: int, in_use: Sequence[int]) -> int:
        """The slot in which the layer is, or will be once the copies that are queued have been made."""
        import torch

        if layer in self._held:
            return self._held.index(layer)
        # Slots are taken in turn, so that the first that is not in use is the one used longest ago.
        last = in_use[-1] if in_use else -1
        slot = next(i % len(self._slots) for i in range(last + 1, last + 1 + len(self._slots)) if i not in in_use)
        source = self._sources[layer]
        self._stream.wait_event(self._free[slot])
        with torch.cuda.stream(self._stream):
            begin = self._watch.clock.mark() if self._watch is not None else None
            self._slots[slot][: len(source)].copy_(source, non_blocking=True)
            self._ready[slot].record(self._stream)
            if self._watch is not None:
                self._watch.moved(begin, self._watch.clock.mark())
        self._held[slot] = layer
        self._reads += 1
        return slot

    def statistics(self) -> dict[str, float]:
        return {"leases": self._leases, "reads": self._reads}  # it does not time its own waits

    def close(self) -> None:
        self._sources, self._slots, self._views, self._held = [], [], [], []
        self._ready, self._free, self._stream = [], [], None

    def delivers(self) -> str:
        return "lease"

    def route(self) -> str | None:
        return "pinned memory -> GPU, no files"

    def pinned_bytes(self) -> int | None:
        return sum(map(len, self._sources))
