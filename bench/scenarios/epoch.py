"""Verb `epoch`: a dataset's records, shuffled, in batches on the device (batches.py).

With `compute_ms` each batch is also followed by matrix products of about that time; the overhead is what the loop took
beyond compute alone, but for its first batch, which has its own figure.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import record_shards, slope
from bench.config import BenchConfigError, EpochConfig
from bench.files import BenchFiles, Plan
from bench.loaders.base import GatherRequest
from bench.record_shards import RecordShards
from bench.scenarios.batches import Batches, middle

if TYPE_CHECKING:
    from bench.measure import Sample

_LEAST_RECORDS = 4
# Single records are the disk's limit up to here, whole blocks of many threads above.
_LARGE_RECORD = 1 << 20
# Of the records that a ceiling may read: a second or so of a fast disk. In a tenth of one, filling and emptying the
# disk's queues is a good part.
_CEILING_BYTES = 2 << 30


def plan(scenario: EpochConfig, chosen: Plan, *, cold: bool) -> Plan:
    """As much for each size of a record as was chosen. Raises BenchConfigError where that is too little."""
    if chosen.tensors is not None:
        raise BenchConfigError("'storage.tensors' has to be null: a shard is one tensor of records")
    for size in scenario.sizes:
        if chosen.total_bytes // size < _LEAST_RECORDS:
            raise BenchConfigError(
                f"'storage.files' times 'storage.file_bytes' is {chosen.total_bytes} bytes, which is less than "
                f"{_LEAST_RECORDS} records of {size} bytes; raise storage.file_bytes or lower scenario.sizes"
            )
    return dataclasses.replace(chosen, by_part=True, cold=cold)


class Epoch(Batches):
    """One size of records."""

    verb = "epoch"

    def __init__(self, files: BenchFiles, device: str, scenario: EpochConfig) -> None:
        assert files.plan is not None
        (size,) = scenario.sizes
        directory = files.directory / f"records-{size}"
        directory.mkdir()
        count = min(files.plan.total_bytes // size, scenario.most_records or sys.maxsize)
        shards = record_shards.write(directory / "shards", files.pool, count, size, files.plan.files)
        super().__init__(
            shards,
            files.pool,
            device,
            batch_size=max(1, min(scenario.batch_bytes // size, count // 2)),
            seed=scenario.seed,
            sample_seconds=scenario.sample_seconds,
            sample_bytes=scenario.sample_bytes,
            compute_s=scenario.compute_ms / 1e3,
            one_epoch=files.plan.cold,
            request=request(shards, scenario.seed),
        )

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        found = self.described(samples)
        if not self.computes:
            return found
        # In full batches: the last one may be smaller, and its compute with it.
        loops = [(s.seconds - s.figures["first_batch_s"]) * self._batch / s.units for s in samples]
        beyond = slope.difference(loops, [sample.figures["compute_s"] for sample in samples])
        return {
            **found,
            "compute_s": beyond["predicted_s"],
            "step_s": beyond["measured_s"],
            "overhead": beyond["difference"],
            "overhead_ci95": beyond["difference_ci95"],
            "overhead_range": beyond["difference_range"],
            "stall_s": middle(samples, "stall_s"),
        }


def request(shards: RecordShards, seed: int) -> GatherRequest | None:
    """Records of the dataset, for a ceiling of single records; None where that is not what limits them."""
    if shards.sizes is not None or shards.record_bytes > _LARGE_RECORD or shards.record_bytes % 512:
        return None
    random = np.random.default_rng(seed)
    count = max(1, min(shards.num_records, _CEILING_BYTES // shards.record_bytes))
    chosen = random.permutation(shards.num_records)[:count]
    starts = np.concatenate(([0], np.cumsum(shards.rows)))
    file = np.searchsorted(starts, chosen, side="right") - 1
    offsets = record_shards.DATA_OFFSET + (chosen - starts[file]) * shards.record_bytes
    return GatherRequest(file.astype(np.int32), offsets.astype(np.int64), shards.record_bytes)
