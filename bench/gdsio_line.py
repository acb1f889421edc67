"""A record of verb `transfer` as gdsio prints its result: KiB and binary GiB a second, average latency in microseconds.

    IoType: READ XferType: GPUD Threads: 8 DataSetSize: 818796544/4096000(KiB) IOSize: 1024(KiB) Throughput: 6.524658
    GiB/sec, Avg_Latency: 1197.370995 usecs ops: 799606 total_time 119.679102 secs

on one line. DataSetSize is what all samples that count moved, and what the files hold; total_time is theirs together.
Batches have IoDepth behind Threads. The line of jobs that ran at once adds them up, with plus signs between what they
differ in; a sample of it lasts from the common start to the last end. Two things gdsio does not print: `n/a` where a
route cannot tell what an io took, or sizes differ, and `ROUTE` as XferType for a row that is none of gdsio's types.
Everywhere else in this bench GB/s are decimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.config_base import BenchError
from bench.measure import NOT_COLD
from bench.record import Record

#: In the order of -x.
XFER_NAMES = (
    "GPUD",
    "CPUONLY",
    "CPU_GPU",
    "CPU_ASYNC_GPU",
    "CPU_CACHED_GPU",
    "GPUD_ASYNC",
    "GPU_BATCH",
    "GPU_BATCH_STREAM",
)
_BATCHES = ("GPU_BATCH", "GPU_BATCH_STREAM")
_KIB, _GIB = 1 << 10, 1 << 30


class Result(NamedTuple):
    """What a line says. Sizes are bytes, times seconds, but for the latency in microseconds."""

    io_type: str
    xfer_name: str
    threads: int | None
    depth: int
    moved_bytes: int
    dataset_bytes: int
    #: None where ios of several sizes are added up.
    io_bytes: int | None
    latency_us: float | None
    ops: int
    seconds: float


def text(result: Result) -> str:
    """The line."""
    depth = f" IoDepth: {result.depth}" if result.xfer_name in _BATCHES else ""
    size = "n/a" if result.io_bytes is None else _kib(result.io_bytes)
    latency = "n/a" if result.latency_us is None else f"{result.latency_us:.6f} usecs"
    return (
        f"IoType: {result.io_type} XferType: {result.xfer_name} Threads: {result.threads or 'n/a'}{depth} "
        f"DataSetSize: {_kib(result.moved_bytes)}/{_kib(result.dataset_bytes)}(KiB) "
        f"IOSize: {size}(KiB) Throughput: {result.moved_bytes / _GIB / result.seconds:.6f} GiB/sec, "
        f"Avg_Latency: {latency} ops: {result.ops} total_time {result.seconds:.6f} secs"
    )


def of(record: Record) -> Result:
    """What a measured row of verb `transfer` says. Raises BenchError for any other."""
    found = record.derived
    if record.verb != "transfer" or record.status != "ok" or found is None:
        raise BenchError(f"{record.loader}: gdsio's line is for measured rows of verb 'transfer'")
    counted = [number for number, labels in enumerate(record.sample_labels) if NOT_COLD not in labels]
    means = record.figures.get("latency_mean_us")
    # Of a batch's time gdsio's average is not made.
    single = means is not None and found["latency_of"] == "io"
    kind = found["xfer_type"]
    return Result(
        found["op"].upper(),
        "ROUTE" if kind is None else XFER_NAMES[kind],
        found["threads"],
        found["depth"] or 1,
        record.bytes * len(counted),
        found["dataset_bytes"],
        found["io_bytes"],
        sum(means[number] for number in counted) / len(counted) if means is not None and single else None,
        record.units * len(counted),
        sum(record.samples_s[number] for number in counted),
    )


def total(records: Sequence[Record]) -> Result:
    """The sum of jobs that were measured at once, over the rounds in which every sample counts. Raises BenchError."""
    parts = [of(record) for record in records]
    rounds = min(len(record.samples_s) for record in records)
    counted = [
        number for number in range(rounds) if not any(NOT_COLD in record.sample_labels[number] for record in records)
    ]
    if not counted:
        raise BenchError("there is no round in which the samples of all jobs count")
    ops = [record.units * len(counted) for record in records]
    latencies = [part.latency_us for part in parts]
    known = [each * count for each, count in zip(latencies, ops, strict=True) if each is not None]
    sizes = {part.io_bytes for part in parts}
    return Result(
        "+".join(dict.fromkeys(part.io_type for part in parts)),
        "+".join(dict.fromkeys(part.xfer_name for part in parts)),
        None if any(part.threads is None for part in parts) else sum(part.threads or 0 for part in parts),
        max(part.depth for part in parts),
        sum(record.bytes for record in records) * len(counted),
        sum(part.dataset_bytes for part in parts),
        sizes.pop() if len(sizes) == 1 else None,
        sum(known) / sum(ops) if len(known) == len(parts) else None,
        sum(ops),
        sum(max(record.samples_s[number] for record in records) for number in counted),
    )


def _kib(nbytes: int) -> str:
    return f"{nbytes // _KIB}" if nbytes % _KIB == 0 else f"{nbytes / _KIB:.3f}"
