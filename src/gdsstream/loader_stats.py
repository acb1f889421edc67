"""What a loader did: counters and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LoaderStats:
    """Sums since the loader was made. Seconds are wall time of the thread that iterates.

    Attributes:
        batches, records, bytes: handed out; bytes as read, padding excluded.
        epochs: that came to their end.
        failed_batches: that could not be handed out, because of an error that was raised.
        skipped_records: left out with on_error="skip"; `skipped_by_shard` counts them by the shard's path.
        stall_s: how long `next` stood still for reads that had not landed. Near 0 where reads keep up.
        host_s: the rest of the time inside `next`: what the loader itself costs, transforms included.
        first_batch_s: from the last `iter` to its first batch.
    """

    batches: int = 0
    records: int = 0
    bytes: int = 0
    epochs: int = 0
    failed_batches: int = 0
    skipped_records: int = 0
    skipped_by_shard: dict[str, int] = field(default_factory=dict)
    stall_s: float = 0.0
    host_s: float = 0.0
    first_batch_s: float = 0.0

    def summary(self) -> str:
        """One line."""
        each = 1e6 / self.batches if self.batches else 0.0
        skipped = f", {self.skipped_records} records skipped" if self.skipped_records else ""
        return (
            f"{self.batches} batches, {self.records} records, {self.bytes / 1e9:.3f} GB{skipped}; first after "
            f"{self.first_batch_s * 1e3:.1f} ms, stalled {self.stall_s * each:.0f} us and host "
            f"{self.host_s * each:.0f} us a batch"
        )


__all__ = ["LoaderStats"]
