"""What stays on the device: moved there, or read from the checkpoint if it has no values yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from gdsstream.binding import Resident
from gdsstream.checkpoint import Checkpoint
from gdsstream.config import StreamConfig
from gdsstream.devices import memory_of
from gdsstream.load import load_file


def load_residents(
    residents: Sequence[Resident], checkpoint: Checkpoint, device: torch.device, settings: StreamConfig
) -> list[torch.Tensor]:
    """Their values on the device, one for each; the modules are not changed. Raises as load_file."""
    names = [name for each in residents if each.tensor.is_meta and each.source for name in each.source.names]
    stored = {}
    if names:
        paths = [file.path for file in checkpoint.files]
        stored = load_file(paths, device, names=names, config=replace(settings, host_cache_bytes=0))
    values = []
    for each in residents:
        if each.source is None or not each.tensor.is_meta:
            values.append(each.tensor.detach().to(memory_of(device)))
            continue
        parts = [stored[name] for name in each.source.names]
        whole = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        values.append(whole.view(each.source.shape).to(each.tensor.dtype))
    return values


def settle(resident: Resident, value: torch.Tensor) -> None:
    """Give a resident tensor its value; a parameter that had none is replaced, any other stays the same object."""
    tensor = resident.tensor
    if not tensor.is_meta:
        if tensor.device != value.device:
            tensor.data = value
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(value.device)
        return
    settled = nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    for place in resident.places:
        place.put(settled)


__all__ = ["load_residents", "settle"]
