"""Snapshots of statistics as values: buckets, percentiles, levels, and reports in files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stats_support import example, operations

from gdsstream import _native
from gdsstream.errors import ConfigError, ReadError, WriteError
from gdsstream.histograms import (
    LATENCY_BUCKETS,
    SIZE_BUCKETS,
    latency_from_ns,
    percentile_ns,
    size_from,
    size_label,
)
from gdsstream.stats import Operations, load_report

MIB = 1 << 20

# --- buckets ----------------------------------------------------------------------------------------------------------


def test_sizes_have_the_buckets_of_gds_stats():
    guide = "0-4 4-8 8-16 16-32 32-64 64-128 128-256 256-512 512-1024 1024-2048 2048-4096 4096-8192 8192-16384"
    guide += " 16384-32768 32768-65536 65536-..."
    assert [size_label(bucket) for bucket in range(SIZE_BUCKETS)] == [f"{one}(KiB)" for one in guide.split()]
    # The guide's own: 78193 reads of 1 MiB are in 1024-2048, 1279109 of 4 KiB in 4-8.
    assert size_label(_native.size_bucket(MIB)) == "1024-2048(KiB)"
    assert size_label(_native.size_bucket(4096)) == "4-8(KiB)"


@given(st.integers(0, 2**63))
def test_the_native_engine_counts_in_these_buckets(value: int):
    size, latency = _native.size_bucket(value), _native.latency_bucket(value)
    assert size_from(size) <= value
    assert size == SIZE_BUCKETS - 1 or value < size_from(size + 1)
    assert latency_from_ns(latency) <= value
    assert latency == LATENCY_BUCKETS - 1 or value < latency_from_ns(latency + 1)


@given(st.lists(st.integers(2_000, 10**10), min_size=1, max_size=300), st.sampled_from([1, 50, 90, 99, 99.9, 100]))
def test_percentiles_are_right_to_a_bucket(durations: list[int], percent: float):
    counts = [0] * LATENCY_BUCKETS
    for ns in durations:
        counts[_native.latency_bucket(ns)] += 1
    found = percentile_ns(counts, percent, max(durations))
    exact = float(np.percentile(durations, percent, method="inverted_cdf"))
    assert found is not None
    assert abs(found - exact) <= exact / 8
    assert found <= max(durations)


def test_percentiles_of_nothing_and_of_the_last_bucket():
    assert percentile_ns([0] * LATENCY_BUCKETS, 50, 0) is None
    counts = [0] * LATENCY_BUCKETS
    counts[-1] = 2
    assert percentile_ns(counts, 100, 90 * 10**9) == 90 * 10**9


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_is_read_as_it_was_saved(tmp_path: Path):
    example().save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == example()
    with pytest.raises(WriteError, match="cannot be written"):
        example().save(tmp_path / "missing" / "report.json")


@given(st.integers(0, 50), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 3))
def test_what_was_counted_survives_json(count: int, nbytes: int, errors: int, seed: int):
    io = operations(count, nbytes, seed=seed, errors=errors, retries=errors)
    assert Operations.of(json.loads(json.dumps(io.as_dict()))) == io
    assert io + Operations() == io
    assert (io + io) - io == io


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "no report"),
        ("{}", "no 'report_version'"),
        (json.dumps({**example().as_dict(), "report_version": 2}), "report_version is 2, not 1"),
        (json.dumps({**example().as_dict(), "engines": [{}]}), "no 'routes'"),
        (json.dumps({**example().as_dict(), "reads": {**Operations().as_dict(), "bytes": -1}}), "-1 is no count"),
        (json.dumps({**example().as_dict(), "pid": "many"}), "invalid literal"),
        ("\xff\xfe", "no report"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"report.json is no report of statistics: .*{re.escape(reason)}|{reason}"):
        load_report(path)
    with pytest.raises(ReadError, match="cannot be read: No such file"):
        load_report(tmp_path / "other.json")


def test_a_lower_level_shows_less():
    whole = example()
    assert whole.at_level(3) is whole
    two, one = whole.at_level(2), whole.at_level(1)
    assert (two.level, two.engines, two.reads) == (2, (), whole.reads)
    assert (one.level, sum(one.reads.sizes), one.reads.percentile_s(50)) == (1, 0, None)
    assert one.reads.average_s == whole.reads.average_s
