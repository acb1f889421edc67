"""Records that were never measured, for tests of what is made of records."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT

from bench import results, stats
from bench.measure import NOT_COLD
from bench.record import Record

GOLDEN = Path(__file__).with_name("golden_record.json")
H200 = ROOT / "docs" / "results" / "h200-2026-11-21"
REFERENCE = ROOT / "docs" / "results" / "h200-2026-11-22" / "reference" / "results.jsonl"
CPU = ROOT / "docs" / "results" / "cpu-2026-11-21"
_BYTES = 10**9


def golden() -> dict[str, Any]:
    row: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return row


def row(
    loader: str,
    rates: Sequence[float],
    *,
    kind: str = "gdsstream",
    options: Mapping[str, Any] | None = None,
    labels: Sequence[list[str]] | None = None,
    ceiling: Sequence[float] | None = None,
    storage: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """A row of load_model with one sample for each rate in GB/s; the ceiling is 50 GB/s in every round."""
    limits = list(ceiling or [50.0] * len(rates))
    names = list(labels or [[] for _ in rates])
    counted = [number for number, found in enumerate(names) if NOT_COLD not in found]
    shares = [100 * rates[number] / limits[number] for number in counted]
    made = copy.deepcopy(golden())
    made |= {
        "scenario": "load_model",
        "verb": "read",
        "loader": loader,
        "config": {
            "scenario": {"name": "load_model", "verb": "read", "rounds": len(rates)},
            "storage": {"dir": "/somewhere", "files": 1, "tensors": None, **(storage or {})},
            "cache": {"state": "warm"},
            "loaders": {loader: {"kind": kind, **(options or {})}},
            "device": "auto",
        },
        "bytes": _BYTES,
        "unit": "tensors",
        "units": 7,
        "samples_s": [_BYTES / 1e9 / rate for rate in rates],
        "sample_labels": names,
        "lazy_return_s": [0.001] * len(rates),
        "figures": {},
        "derived": None,
        "gb_per_s": stats.summarise([rates[number] for number in counted])._asdict(),
        "units_per_s": stats.summarise([7 * rates[number] for number in counted])._asdict(),
        "ceiling": {"kind": "steady", "detail": "", "samples": limits, "gb_per_s": stats.median(limits)},
        "pct_ceiling": stats.median(shares),
        "pct_ceiling_ci95": None,
    }
    return Record(**{**made, **changes})


def unmeasured(loader: str, status: str, reason: str, *, kind: str = "gdsstream") -> Record:
    return row(
        loader, [1.0], kind=kind, status=status, reason=reason, samples_s=[], sample_labels=[], lazy_return_s=[],
        gb_per_s=None, units_per_s=None, pct_ceiling=None,
    )  # fmt: skip


def write(path: Path, rows: Sequence[Record]) -> Path:
    path.write_text("".join(each.to_json() + "\n" for each in rows), encoding="utf-8")
    assert len(results.read(path)) == len(rows)
    return path
