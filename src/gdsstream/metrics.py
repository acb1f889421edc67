"""Statistics for Prometheus, through prometheus_client (the extra `metrics`).

In a process that serves metrics already, one line is enough:

    prometheus_client.REGISTRY.register(gdsstream.metrics.Collector())

`gdsstream stats PID --prometheus` prints the same of another process, for node_exporter's textfile collector, say.
At level 3 each engine, device and route has series of its own; below, the labels are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gdsstream.errors import BackendUnavailableError
from gdsstream.histograms import SIZE_BUCKETS, latency_from_ns, size_from
from gdsstream.stats import Direction, Operations, ProcessStats, process_stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_BY = ("direction", "engine", "device", "route")
# Percentiles are taken from these on the other side: a bucket for each power of two is what it needs.
_LATENCY_STEP = 8
_COUNTERS = {
    "operations": "Reads and writes that came to their end.",
    "bytes": "Bytes that they moved.",
    "errors": "Reads and writes that failed.",
    "retries": "System calls beyond an operation's first.",
}


def to_prometheus(stats: ProcessStats, labels: Mapping[str, str] | None = None) -> str:
    """A snapshot in Prometheus' text format; each series also has `labels`.

    Raises BackendUnavailableError without prometheus_client.
    """
    registry = _client().CollectorRegistry()
    registry.register(Collector(lambda: stats, labels))
    text: bytes = _client().generate_latest(registry)
    return text.decode()


class Collector:
    """What prometheus_client's registries collect from: this process's statistics, or those that `source` gives.

    Raises BackendUnavailableError without prometheus_client.
    """

    def __init__(
        self, source: Callable[[], ProcessStats] = process_stats, labels: Mapping[str, str] | None = None
    ) -> None:
        self._core = _client().core
        self._source = source
        self._names, self._values = tuple(labels or {}), tuple((labels or {}).values())

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        stats = self._source()
        series = list(_series(stats))
        for name, text in _COUNTERS.items():
            counter = self._core.CounterMetricFamily(f"gdsstream_{name}", text, labels=self._labels(*_BY))
            for by, io in series:
                counter.add_metric(self._with(*by), getattr(io, name))
            yield counter
        if stats.level >= 2:
            yield self._histogram("latency_seconds", "How long they took.", series, _latencies)
            yield self._histogram("size_bytes", "How large they were.", series, _sizes)
        yield from self._process(stats)

    def describe(self) -> list[Metric]:
        """Nothing: a registry then need not take a snapshot to learn the names."""
        return []

    def _process(self, stats: ProcessStats) -> Iterator[Metric]:
        active = self._core.CounterMetricFamily(
            "gdsstream_active_seconds", "Wall time with something to move.", labels=self._labels("direction")
        )
        active.add_metric(self._with("read"), stats.read_active_s)
        active.add_metric(self._with("write"), stats.write_active_s)
        yield active
        for name, text, value in (
            ("pinned_bytes", "Staging memory that is pinned.", stats.pinned_bytes),
            ("registered_bytes", "Files held in host memory, and buffers registered.", stats.registered_bytes),
            ("stats_level", "How much is counted: 0 to 3.", stats.level),
        ):
            gauge = self._core.GaugeMetricFamily(f"gdsstream_{name}", text, labels=self._labels())
            gauge.add_metric(self._with(), value)
            yield gauge

    def _histogram(
        self,
        name: str,
        text: str,
        series: Sequence[tuple[tuple[str, ...], Operations]],
        of: Callable[[Operations], tuple[list[tuple[str, float]], float]],
    ) -> Metric:
        histogram: Metric = self._core.HistogramMetricFamily(f"gdsstream_{name}", text, labels=self._labels(*_BY))
        for by, io in series:
            buckets, total = of(io)
            histogram.add_metric(self._with(*by), buckets, total)  # type: ignore[attr-defined]
        return histogram

    def _labels(self, *names: str) -> tuple[str, ...]:
        return self._names + names

    def _with(self, *values: str) -> tuple[str, ...]:
        return self._values + values


def _series(stats: ProcessStats) -> Iterator[tuple[tuple[str, ...], Operations]]:
    """Everything once: what each route of level 3 moved, and without labels what the others did."""
    if stats.level < 3:
        yield ("read", "", "", ""), stats.reads
        yield ("write", "", "", ""), stats.writes
        return
    for engine in stats.engines:
        for one in engine.routes:
            yield (one.direction, engine.engine, engine.device, one.route), one.io
    for direction, rest in _uncounted(stats).items():
        if rest.operations or rest.errors:
            yield (direction, "", "", ""), rest


def _uncounted(stats: ProcessStats) -> dict[Direction, Operations]:
    """What engines of levels 1 and 2 did beside those of level 3."""
    rest: dict[Direction, Operations] = {"read": stats.reads, "write": stats.writes}
    for engine in stats.engines:
        for one in engine.routes:
            rest[one.direction] = rest[one.direction] - one.io
    return rest


def _latencies(io: Operations) -> tuple[list[tuple[str, float]], float]:
    # The first bucket and each power of two behind it; the last of all has no upper bound.
    sums = list(accumulate(io.latencies))
    ends = range(0, len(sums) - 1, _LATENCY_STEP)
    buckets = [(repr(latency_from_ns(end + 1) / 1e9), float(sums[end])) for end in ends]
    return [*buckets, ("+Inf", float(sums[-1]))], io.latency_ns / 1e9


def _sizes(io: Operations) -> tuple[list[tuple[str, float]], float]:
    # Prometheus' upper bounds belong to the bucket, ours to the next.
    sums = list(accumulate(io.sizes))
    buckets = [(str(size_from(bucket + 1) - 1), float(sums[bucket])) for bucket in range(SIZE_BUCKETS - 1)]
    return [*buckets, ("+Inf", float(sums[-1]))], float(io.bytes)


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise BackendUnavailableError(
            f"metrics for Prometheus need prometheus_client, which cannot be imported ({error}); "
            "pip install gdsstream[metrics]"
        ) from error
    return prometheus_client


__all__ = ["Collector", "to_prometheus"]
