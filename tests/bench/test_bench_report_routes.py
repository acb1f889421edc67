"""What a report says of a row besides its figures: by which ways its bytes went, and which ios it made."""

from __future__ import annotations

from record_rows import H200, REFERENCE

from bench import report_md, results, sweeps
from bench.plots import sweep

EVERY = results.read(REFERENCE)


def test_ways_are_told_once_each() -> None:
    said = report_md._routes([each for each in EVERY if each.scenario == "alignment"])
    first = said.index("- `storage_cpu`:")
    assert said[first + 1].startswith("  - O_DIRECT, pread x16 native threads")
    assert said[first + 2].startswith("  - page cache, since O_DIRECT refuses 1048576 bytes at offset 1")
    assert any(line.startswith("- `engine_staged`: O_DIRECT") for line in said)


def test_ways_that_differ_in_a_number_only_are_one() -> None:
    rows = [each for each in EVERY if each.loader == "storage_cpu" and each.config["scenario"]["depth"] == [1]]
    rows = [each for each in rows if each.config["scenario"]["ops"] == ["randread"]]
    assert len({each.route for each in rows}) > 3
    (said,) = report_md._routes(rows)
    assert said.startswith("- `storage_cpu`: O_DIRECT, pread xN native threads")


def test_a_sweep_names_its_ios_where_they_are_all_the_same() -> None:
    known = {each.knob: sweep._what(each) for each in sweeps.find(EVERY)}
    assert known["scenario.threads"] == "random_io, randread of 4 KiB"
    assert known["scenario.io_bytes"] == "transfer_sizes"
    assert results.ios(results.read(H200 / "pipeline.jsonl")[0]) == ""


def test_a_sample_with_a_time_says_its_most_bytes() -> None:
    row = next(each for each in EVERY if each.scenario == "alignment")
    assert "at most 256 MiB a sample" in results.part(row)
