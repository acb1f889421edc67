"""Metrics for Prometheus, read back with its own parser."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stats_support import example, write_data
from test_stats import read

import gdsstream
from gdsstream.engine import open_engine
from gdsstream.metrics import Collector, to_prometheus
from gdsstream.stats import Operations, ProcessStats


@pytest.fixture
def client() -> Any:
    return pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (gdsstream[metrics])")


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset((k, v) for k, v in sample.labels.items() if v))
            assert key not in found
            found[key] = sample.value
    return found


def by(route: str, **more: str) -> frozenset[tuple[str, str]]:
    engine = {"save": "writer", "mapped": "mapped"}.get(route, "staged")
    labels = {"direction": "write" if route == "save" else "read", "engine": engine, "route": route}
    if route != "save":
        labels["device"] = "cuda:0"
    return frozenset({**labels, **more}.items())


def test_every_number_is_there(client: Any):
    stats = example()
    got = samples(to_prometheus(stats))
    for engine in stats.engines:
        for one in engine.routes:
            if not one.io.operations:
                continue
            for name in ("operations", "bytes", "errors", "retries"):
                assert got[f"gdsstream_{name}_total", by(one.route)] == getattr(one.io, name)
            assert got["gdsstream_latency_seconds_count", by(one.route)] == one.io.timed
            assert got["gdsstream_latency_seconds_sum", by(one.route)] == pytest.approx(one.io.latency_ns / 1e9)
            assert got["gdsstream_size_bytes_count", by(one.route)] == one.io.operations
            assert got["gdsstream_size_bytes_sum", by(one.route)] == one.io.bytes
    assert got["gdsstream_active_seconds_total", frozenset({("direction", "read")})] == 0.5
    assert got["gdsstream_active_seconds_total", frozenset({("direction", "write")})] == 0.25
    assert got["gdsstream_pinned_bytes", frozenset()] == 96 << 20
    assert got["gdsstream_registered_bytes", frozenset()] == 3 << 30
    assert got["gdsstream_stats_level", frozenset()] == 3


def test_histograms_are_cumulative_and_their_bounds_inclusive(client: Any):
    got = samples(to_prometheus(example()))

    def buckets(name: str, route: str) -> list[tuple[float, float]]:
        found = []
        for (sample, labels), value in got.items():
            if sample == f"gdsstream_{name}_bucket" and by(route) <= labels:
                found.append((float(dict(labels)["le"]), value))
        return sorted(found)

    # 100 reads of 0.1, 0.2, ... 10 ms.
    latencies = buckets("latency_seconds", "page cache")
    assert latencies[-1] == (float("inf"), 100)
    assert [count for _, count in latencies] == sorted(count for _, count in latencies)
    for bound, count in latencies[:-1]:
        assert count == sum(0.0001 * (number + 1) < bound for number in range(100))
    sizes = dict(buckets("size_bytes", "page cache"))
    assert (sizes[2 * 2**20 - 1], sizes[4 * 2**20 - 1], len(sizes)) == (0, 100, 16)
    assert dict(buckets("size_bytes", "mapped"))[2**26 - 1] == 0


def test_labels_are_added_and_lower_levels_have_less(client: Any):
    for level in (1, 2):
        got = samples(to_prometheus(example().at_level(level), {"pid": "7"}))
        assert all(("pid", "7") in labels for _, labels in got)
        key = frozenset({("pid", "7"), ("direction", "read")})
        assert got["gdsstream_operations_total", key] == example().reads.operations
        assert any(name.startswith("gdsstream_size_bytes") for name, _ in got) == (level == 2)
    nothing = samples(to_prometheus(ProcessStats(1, "", "", 0, 0.0, 0.0)))
    assert nothing["gdsstream_bytes_total", frozenset({("direction", "read")})] == 0


def test_engines_of_lower_levels_are_not_lost(client: Any):
    more = Operations(operations=5, bytes=50)
    got = samples(to_prometheus(replace(example(), reads=example().reads + more)))
    assert got["gdsstream_bytes_total", frozenset({("direction", "read")})] == 50
    every = sum(value for (name, labels), value in got.items() if name == "gdsstream_operations_total")
    assert every == example().reads.operations + 5 + example().writes.operations


def test_a_process_serves_its_own(client: Any, counting: Path, tmp_path: Path):
    path = write_data(tmp_path, 1 << 20)
    registry = client.CollectorRegistry()
    registry.register(Collector())
    for times in (1, 2):
        with open_engine("staged", direct_io=False, stats=3) as engine:
            read(engine, path)
        got = samples(client.generate_latest(registry).decode())
        labels = {"direction": "read", "engine": "staged", "device": "cpu", "route": "page cache"}
        assert got["gdsstream_bytes_total", frozenset(labels.items())] == times << 20


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for attempt in (lambda: to_prometheus(example()), Collector):
        with pytest.raises(gdsstream.BackendUnavailableError, match=r"pip install gdsstream\[metrics\]"):
            attempt()
