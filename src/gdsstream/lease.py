"""Lease: a layer's tensors, borrowed from its slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from gdsstream.devices import current_stream
from gdsstream.engine.base import Transfer
from gdsstream.errors import LeaseError
from gdsstream.layout import LayerLayout
from gdsstream.slots import Slot
from gdsstream.telemetry import Cause


class Owner(Protocol):
    """What a lease asks of its streamer."""

    device: torch.device

    def wait_for(
        self, slot: Slot, transfer: Transfer, group: int | None, stream: int, cause: Cause | None, layer: int
    ) -> None: ...
    def release(self, lease: Lease) -> None: ...


class Lease(Mapping[str, torch.Tensor]):
    """A layer's tensors, borrowed: views into its slot, by their names inside the layer, until `release`.

    Looking a tensor up makes the current stream wait for its group (the whole layer, unless groups were asked for).
    A context manager. After `release` every use raises LeaseError; views taken before must not be used any more.
    """

    def __init__(self, owner: Owner, slot: Slot, layout: LayerLayout, cause: Cause | None) -> None:
        assert slot.transfer is not None
        self._owner = owner
        self._slot = slot
        self._layout = layout
        self._cause = cause
        self._transfer = slot.transfer
        self._views = slot.views_of(layout)
        self._ready: int | None = None  # the stream that has been made to wait for all of it
        self.layer = layout.index
        self.slot = slot.index
        self.generation = slot.generation
        self.experts = slot.experts
        self.address = slot.address
        self.nbytes = layout.nbytes
        self.released = False

    def __getitem__(self, name: str) -> torch.Tensor:
        self.check()
        group = self._layout.group_of.get(name)
        if group is None:
            raise KeyError(name)
        self.wait(group if self._layout.plan.num_groups > 1 else None)
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def wait(self, group: int | None = None) -> None:
        """Return when the bytes (of one group) can be used on the current stream, which is made to wait for them.

        Raises LeaseError after release, ConfigError for a group that the layer lacks, and what the read failed with:
        ReadError and its kinds. The slot is then free again, and the layer can be leased anew.
        """
        self.check()
        stream = current_stream(self._owner.device)
        if self._ready == stream:
            return
        slot = self._slot
        if (stream, group) not in slot.ordered and (stream, None) not in slot.ordered:
            self._owner.wait_for(slot, self._transfer, group, stream, self._cause, self.layer)
            slot.ordered.add((stream, group))
        # Counted for the fence even where an earlier lease did the waiting.
        slot.streams.add(stream)
        if group is None:
            self._ready = stream

    def use(self) -> None:
        """As `wait` for the whole layer: for streams that use it without looking anything up."""
        self.wait()

    def restore(self, byte_offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A view of the slot by geometry: `byte_offset` from the layer's first byte, `stride` in elements."""
        self.wait()
        whole = self._slot.typed_memory(dtype)
        return whole.as_strided(size, stride, byte_offset // dtype.itemsize)

    def storage_use_count(self) -> int:
        """How many tensors share the slot's memory now, its own views included."""
        return self._slot.use_count()

    @property
    def baseline_use_count(self) -> int:
        """What `storage_use_count` is when nobody but the streamer has views."""
        return self._slot.baseline_use_count

    def release(self) -> None:
        """Give the layer back; its slot can be read into again behind what is queued now. Idempotent."""
        self._owner.release(self)

    def check(self) -> None:
        """Raise LeaseError unless the lease is held."""
        if self.released or self.generation != self._slot.generation:
            raise LeaseError(
                f"the lease of layer {self.layer} (slot {self.slot}, generation {self.generation}) was released; "
                "its tensors are gone: lease the layer again, or clone what you keep"
            )

    @property
    def held(self) -> Slot:
        """The slot; for the streamer."""
        return self._slot

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<Lease of layer {self.layer}, slot {self.slot}, {len(self)} tensors, {state}>"


__all__ = ["Lease", "Owner"]
