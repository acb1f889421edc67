"""What the scenarios that stream layers share: what a file of a layer looks like, and transfer alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from bench import moe
from bench.clock import Clock
from bench.config import BenchConfigError, LayersConfig, PipelineConfig
from bench.files import BenchFiles, Plan, TensorInfo
from bench.loaders.base import Loader


def plan(scenario: LayersConfig, chosen: Plan, *, cold: bool) -> Plan:
    """The files of the scenario. Raises BenchConfigError where these cannot be what was chosen."""
    if cold:
        raise BenchConfigError(
            "layers are read again and again, so that only the first turn could be cold: use cache=warm, and a "
            "loader's direct_io=true to read a disk past the page cache"
        )
    if chosen.tensors is not None:
        raise BenchConfigError("'storage.tensors' has to be null: the scenario decides what a layer holds")
    # What a run leaves in the slots must not be what the next one begins with.
    if isinstance(scenario, PipelineConfig) and chosen.files < 2 * scenario.num_slots:
        raise BenchConfigError(
            f"'storage.files' is {chosen.files}; with scenario.num_slots={scenario.num_slots} it has to be at least "
            f"{2 * scenario.num_slots}, or layers would be found in their slots instead of being read"
        )
    return dataclasses.replace(chosen, shapes=partial(moe.shapes, scenario.moe), weights=True)


def tensors_of(files: BenchFiles, file: int) -> dict[str, TensorInfo]:
    """The tensors of a file by their names inside the layer."""
    prefix = moe.PATTERN.replace("{i}", str(file))
    return {info.name.removeprefix(prefix): info for info in files.tensors.values() if info.file == file}


def transfer_alone(loader: Loader, clock: Clock, sequence: Sequence[int], skip: int) -> float:
    """Seconds that a layer takes to arrive with no compute beside it, once the first `skip` layers have arrived."""
    clock.synchronize()
    marks = []
    for layer in loader.stream(sequence):
        layer[next(iter(layer))]  # its look-up waits for the layer
        marks.append(clock.mark())
    clock.synchronize()
    return clock.seconds(marks[skip - 1], marks[-1]) / (len(marks) - skip)
