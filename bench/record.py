"""One JSON line for each loader of a run: the schema, and a validator written by hand.

Sizes are bytes, times seconds, rates decimal GB/s (1e9). `samples_s` holds every steady sample in the order taken,
with `sample_labels` and `ceiling.samples` beside it; the statistics are over those that count (measure.py). `figures`
holds what a scenario measured beside each sample, a list for each name, and `derived` what it made of them: its
parameters and statistics; ratios such as an overhead are fractions there, times seconds. `device_bytes` is what disks
and GPU say that they moved during each sample (device_bytes.py), beside what the samples delivered. `stopped` says
why there were no more rounds.

`record_schema.json` says the same to others, as far as a JSON schema can; the tests hold the two together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import stats
from bench.config import ScenarioConfig
from bench.device_bytes import Moved
from bench.measure import NOT_COLD, STOPPED, Outcome
from bench.scenarios.base import Workload

SCHEMA_VERSION = 4
#: Per cent of the ceiling that noise explains.
MOST_SHARE = 105.0
STATUSES = ("ok", "skipped", "failed")


@dataclass(slots=True)
class Record:
    """One row. Lists are empty and figures None where the row was skipped or failed before they were taken."""

    status: str
    reason: str | None
    scenario: str
    verb: str
    loader: str
    cache: str
    device: str
    config: dict[str, Any]
    bytes: int
    unit: str
    units: int
    samples_s: list[float] = field(default_factory=list)
    sample_labels: list[list[str]] = field(default_factory=list)
    lazy_return_s: list[float] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    derived: dict[str, Any] | None = None
    first_s: float | None = None
    startup_s: float | None = None
    gb_per_s: dict[str, float] | None = None
    units_per_s: dict[str, float] | None = None
    ceiling: dict[str, Any] = field(default_factory=dict)
    pct_ceiling: float | None = None
    pct_ceiling_ci95: list[float] | None = None
    cpu_s_per_gb: float | None = None
    verified: bool | None = None
    cold_verified: bool | None = None
    delivers: str | None = None
    route: str | None = None
    peak_pinned_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    device_bytes: dict[str, Any] | None = None
    stopped: str | None = None
    env: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line, without a newline."""
        return json.dumps(asdict(self), allow_nan=False)


def make(
    name: str,
    outcome: Outcome,
    workload: Workload,
    *,
    scenario: str,
    cold: bool,
    ceiling: Mapping[str, Any],
    config: dict[str, Any],
    env: dict[str, Any],
    devices: str | None = None,
    stopped: str | None = None,
) -> Record:
    """The record of one loader. `ceiling` holds kind, detail and samples (GB/s, one a round); `devices` says which
    were counted for their bytes, or why none, and `stopped` why there were no more rounds (measure.STOPPED)."""
    record = Record(
        status=outcome.status,
        reason=outcome.reason,
        scenario=scenario,
        verb=workload.verb,
        loader=name,
        cache="cold" if cold else "warm",
        device=workload.job.device,
        config=config,
        bytes=workload.sample_bytes,
        unit=workload.unit,
        units=workload.units,
        startup_s=outcome.startup_s,
        verified=outcome.verified,
        delivers=outcome.delivers,
        route=outcome.route,
        peak_pinned_bytes=outcome.pinned_bytes,
        stopped=stopped,
        env=env,
    )
    limits = [float(value) for value in ceiling["samples"]]
    record.ceiling = {**ceiling, "samples": limits, "gb_per_s": stats.median(limits) if limits else None}
    samples = outcome.samples
    # A first load of another size than the samples cannot be compared with them.
    if (first := outcome.first) is not None and (first.counts or not cold):
        record.first_s = first.seconds if all(sample.bytes == first.bytes for sample in samples) else None
    record.samples_s = [sample.seconds for sample in samples]
    record.lazy_return_s = [sample.lazy_return_s for sample in samples]
    names = samples[0].figures if samples else {}
    record.figures = {name: [sample.figures[name] for sample in samples] for name in names}
    record.peak_gpu_bytes = max((s.peak_gpu_bytes for s in samples if s.peak_gpu_bytes is not None), default=None)
    if devices is not None and samples:
        record.device_bytes = {"source": devices, **_moved([sample.moved for sample in samples])}
    counted = [sample for sample in samples if sample.counts]
    if cold and samples:
        record.cold_verified = len(counted) == len(samples)
    if counted:
        record.bytes, record.units = counted[0].bytes, counted[0].units
        rates = [sample.bytes / 1e9 / sample.seconds for sample in counted]
        for sample, outlier in zip(counted, stats.outliers(rates), strict=True):
            if outlier:
                sample.labels.append("outlier")
        record.gb_per_s = stats.summarise(rates)._asdict()
        record.units_per_s = stats.summarise([sample.units / sample.seconds for sample in counted])._asdict()
        record.cpu_s_per_gb = stats.median([sample.cpu_s / (sample.bytes / 1e9) for sample in counted])
        derived = workload.derive(counted)
        record.derived = {**derived, **outcome.details} if derived is not None else None
        ratios = stats.paired_ratios(rates, [limits[sample.round] for sample in counted])
        record.pct_ceiling = 100 * stats.median(ratios)
        interval = stats.median_ci95(ratios)
        record.pct_ceiling_ci95 = [100 * bound for bound in interval] if interval else None
    elif record.status == "ok":
        record.status = "failed"
        record.reason = "every sample is not_cold: pages stayed in memory" if samples else "no sample was taken"
    record.sample_labels = [list(sample.labels) for sample in samples]
    return record


def ceiling_believed(row: Record) -> bool:
    """Whether the ceiling that a row was held against can be the hardware's: nothing is much faster than that. False
    above MOST_SHARE, but for a warm row that ends before what the ceiling is of: in mapped files or host memory."""
    if row.pct_ceiling is None or row.pct_ceiling <= MOST_SHARE:
        return True
    return row.cache == "warm" and row.delivers in ("file mapping", "host memory")


def _moved(moved: Sequence[Moved | None]) -> dict[str, list[int] | None]:
    """Lists by what was counted, one number a sample; None for what is not counted in every sample."""
    lists: dict[str, list[int] | None] = {}
    for name in Moved._fields:
        values = [getattr(each, name) for each in moved if each is not None]
        known = [value for value in values if value is not None]
        lists[name] = known if len(known) == len(moved) else None
    return lists


def unmeasured(
    name: str,
    reason: str,
    scenario: ScenarioConfig,
    *,
    cold: bool,
    config: dict[str, Any],
    env: dict[str, Any],
    status: str = "skipped",
) -> Record:
    """The row of a loader that could not begin, or that left nothing behind."""
    return Record(
        status=status,
        reason=reason,
        scenario=scenario.name,
        verb=scenario.verb,
        loader=name,
        cache="cold" if cold else "warm",
        device="none",
        config=config,
        bytes=0,
        unit="none",
        units=0,
        ceiling={"kind": "none", "detail": reason, "gb_per_s": None, "samples": []},
        env=env,
    )


_NUMBER = (int, float)
_SUMMARY = ("n", "median", "mad", "iqr", "min", "max")
_TYPES: dict[str, tuple[type, ...]] = {
    "schema_version": (int,),
    "status": (str,),
    "reason": (str, type(None)),
    "scenario": (str,),
    "verb": (str,),
    "loader": (str,),
    "cache": (str,),
    "device": (str,),
    "config": (dict,),
    "bytes": (int,),
    "unit": (str,),
    "units": (int,),
    "samples_s": (list,),
    "sample_labels": (list,),
    "lazy_return_s": (list,),
    "figures": (dict,),
    "derived": (dict, type(None)),
    "first_s": (*_NUMBER, type(None)),
    "startup_s": (*_NUMBER, type(None)),
    "gb_per_s": (dict, type(None)),
    "units_per_s": (dict, type(None)),
    "ceiling": (dict,),
    "pct_ceiling": (*_NUMBER, type(None)),
    "pct_ceiling_ci95": (list, type(None)),
    "cpu_s_per_gb": (*_NUMBER, type(None)),
    "verified": (bool, type(None)),
    "cold_verified": (bool, type(None)),
    "delivers": (str, type(None)),
    "route": (str, type(None)),
    "peak_pinned_bytes": (int, type(None)),
    "peak_gpu_bytes": (int, type(None)),
    "device_bytes": (dict, type(None)),
    "stopped": (str, type(None)),
    "env": (dict,),
}
_ENV = ("commit", "gpu", "driver", "kernel", "cpu_model", "cores", "filesystem", "python", "torch", "versions")
_DEVICE_BYTES = ("source", *Moved._fields)
_CEILING = ("kind", "detail", "gb_per_s", "samples")


def problems(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a parsed line; empty when it is valid."""
    found = [f"{key}: missing" for key in _TYPES if key not in row]
    found += [f"{key}: unknown" for key in row if key not in _TYPES]
    for key, accepted in _TYPES.items():
        value = row.get(key)
        if key in row and (not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted)):
            found.append(f"{key}: {type(value).__name__} is not one of {[item.__name__ for item in accepted]}")
    if found:
        return found
    if row["schema_version"] != SCHEMA_VERSION:
        found.append(f"schema_version: {row['schema_version']} is not {SCHEMA_VERSION}")
    if row["status"] not in STATUSES:
        found.append(f"status: {row['status']!r} is not one of {STATUSES}")
    if row["stopped"] not in (None, *STOPPED):
        found.append(f"stopped: {row['stopped']!r} is not one of {STOPPED}")
    if (row["status"] == "ok") != (row["reason"] is None):
        found.append("reason: has to be given exactly when the status is not ok")
    if not len(row["samples_s"]) == len(row["sample_labels"]) == len(row["lazy_return_s"]):
        found.append("samples_s, sample_labels and lazy_return_s differ in length")
    moved = {name: values for name, values in (row["device_bytes"] or {}).items() if isinstance(values, list)}
    found += [f"device_bytes.{k}: has no value for each sample" for k in _short(moved, len(row["samples_s"]))]
    if row["device_bytes"] is not None:
        found += [f"device_bytes.{key}: missing" for key in _DEVICE_BYTES if key not in row["device_bytes"]]
    found += [f"figures.{k}: has no value for each sample" for k in _short(row["figures"], len(row["samples_s"]))]
    if any(not isinstance(value, _NUMBER) or not 0 < value < math.inf for value in row["samples_s"]):
        found.append("samples_s: every sample has to be positive")
    found += [f"env.{key}: missing" for key in _ENV if key not in row["env"]]
    found += [f"ceiling.{key}: missing" for key in _CEILING if key not in row["ceiling"]]
    if (moments := (row["derived"] or {}).get("moments")) is not None:
        found += [f"derived.moments: {wrong}" for wrong in _wrong_moments(moments)]
    for key in ("gb_per_s", "units_per_s"):
        summary = row[key]
        if summary is not None and set(summary) != set(_SUMMARY):
            found.append(f"{key}: has to hold {', '.join(_SUMMARY)}")
    if row["status"] == "ok":
        found += [f"{key}: has to be given for an ok row" for key in _NEEDED_WHEN_OK if row[key] is None]
        if row["verb"] in _DERIVING and row["derived"] is None:
            found.append(f"derived: has to be given for an ok row of verb {row['verb']!r}")
        counted = [labels for labels in row["sample_labels"] if NOT_COLD not in labels]
        if row["gb_per_s"] is not None and row["gb_per_s"].get("n") != len(counted):
            found.append("gb_per_s.n: is not the number of samples that count")
    return found


def _wrong_moments(moments: Any) -> list[str]:
    if not isinstance(moments, Mapping) or set(moments) != {"transfer", "compute"}:
        return ["has to hold transfer and compute"]
    spans = [span for lane in moments.values() for span in lane]
    if not spans or len(moments["transfer"]) != len(moments["compute"]):
        return ["both have to hold every layer"]
    if not all(len(span) == 2 and all(isinstance(at, _NUMBER) for at in span) for span in spans):
        return ["every layer has to have a begin and an end"]
    return [] if all(0 <= begin <= end for begin, end in spans) else ["a layer ends before it begins"]


def _short(figures: Mapping[str, Any], count: int) -> list[str]:
    return [name for name, values in figures.items() if not isinstance(values, list) or len(values) != count]


_DERIVING = ("pipeline", "train", "epoch", "mlperf", "transfer", "write")
_NEEDED_WHEN_OK = ("gb_per_s", "units_per_s", "pct_ceiling", "cpu_s_per_gb", "startup_s", "verified")
