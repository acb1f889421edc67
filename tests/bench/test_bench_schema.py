"""The published JSON schema of a record, the golden record, and the validator written by hand agree."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import record_rows
from conftest import ROOT
from rich.console import Console

from bench import config, record, run

SCHEMA: dict[str, Any] = json.loads((ROOT / "bench" / "record_schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def wrong(row: object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(row)]


def test_the_schema_is_valid_and_names_every_field_of_a_record() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    fields = {item.name for item in dataclasses.fields(record.Record)}
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == fields == set(record._TYPES)
    assert SCHEMA["additionalProperties"] is False
    assert SCHEMA["properties"]["schema_version"] == {"const": record.SCHEMA_VERSION}
    assert tuple(SCHEMA["properties"]["status"]["enum"]) == record.STATUSES
    assert set(SCHEMA["properties"]["env"]["required"]) == set(record._ENV)
    assert set(SCHEMA["properties"]["ceiling"]["required"]) == set(record._CEILING)
    assert set(SCHEMA["$defs"]["summary"]["required"]) == set(record._SUMMARY)
    assert set(SCHEMA["then"]["if"]["properties"]["verb"]["enum"]) == set(record._DERIVING)
    needed = {key for key, rule in SCHEMA["then"]["properties"].items() if rule.get("type") not in (None, "null")}
    assert needed == set(record._NEEDED_WHEN_OK)


@pytest.mark.parametrize("key", sorted(record._TYPES))
def test_the_schema_takes_the_types_that_the_validator_takes(key: str) -> None:
    rule = jsonschema.Draft202012Validator({"$defs": SCHEMA["$defs"], **SCHEMA["properties"][key]})
    golden = record_rows.golden()[key]
    for value in ("x", 1, 1.5, True, [], {}, None):
        accepted = type(value) in record._TYPES[key]
        # What is in the golden record stands for its type: some strings and objects have more to them than that.
        tried = golden if type(value) is type(golden) and accepted else value
        assert rule.is_valid(tried) == accepted, tried


def test_the_golden_record_is_valid_and_survives_a_round_trip() -> None:
    row = record_rows.golden()
    assert wrong(row) == []
    assert record.problems(row) == []
    assert json.loads(record.Record(**row).to_json()) == row


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*/*.jsonl")), ids=lambda path: path.name)
def test_published_records_of_this_version_are_valid(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    current = [row for row in rows if row["schema_version"] == record.SCHEMA_VERSION]
    assert [wrong(row) for row in current] == [[]] * len(current)
    older = [row for row in rows if row not in current]
    assert all(wrong(row) for row in older)


def test_what_a_run_writes_is_valid(tmp_path: Path) -> None:
    settings = config.BenchConfig(
        scenario=config.ScenarioConfig("load_model", "read", rounds=3, max_seconds=20.0),
        storage=config.StorageConfig(str(tmp_path), 1, 1 << 20),
        loaders={"pread": {"kind": "pread"}, "instanttensor": {"kind": "instanttensor"}},
        device="cpu",
    )
    output = tmp_path / "out" / "results.jsonl"
    run.measure(settings, output, Console(file=io.StringIO()))
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["status"] for row in rows] == ["ok", "skipped"]
    assert [wrong(row) for row in rows] == [[], []]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 1),
        ("schema_version", 99),
        ("status", "fine"),
        ("reason", "why"),
        ("samples_s", [1.0, -1.0, 1.0]),
        ("verified", "yes"),
        ("verified", None),
        ("bytes", True),
        ("gb_per_s", {"median": 1.0}),
        ("gb_per_s", None),
        ("pct_ceiling", None),
        ("derived", None),
        ("derived", {"moments": {"transfer": [[0.0, 1.0]]}}),
        ("derived", {"moments": {"transfer": [[0.0]], "compute": [[0.0, 1.0]]}}),
        ("env", {}),
        ("ceiling", {}),
        ("surprise", 1),
    ],
)
def test_both_find_what_is_wrong(key: str, value: object) -> None:
    row = record_rows.golden() | {key: value}
    assert wrong(row)
    assert record.problems(row)


@pytest.mark.parametrize("status", ["skipped", "failed"])
def test_a_row_that_was_not_measured_needs_a_reason(status: str) -> None:
    row = json.loads(record_rows.unmeasured("x", status, "there is no GPU").to_json())
    assert wrong(row) == record.problems(row) == []
    assert wrong(row | {"reason": None})
    assert record.problems(row | {"reason": None})


@pytest.mark.parametrize("key", sorted(record._TYPES))
def test_no_key_may_be_missing(key: str) -> None:
    row = record_rows.golden()
    del row[key]
    assert any("is a required property" in found for found in wrong(row))
    assert record.problems(row) == [f"{key}: missing"]
