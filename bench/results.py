"""Records read back from results.jsonl, and which of them belong into one table.

A record is taken as it is or refused: a line that is no JSON, or not valid by `record.problems`, is an error with its
file and line, since a report that leaves rows out would be believed. Records of earlier versions are read as well.
What those call a 95 % interval is from six samples on a bootstrap's, as good as the exact one of now; of fewer it is
the range of the samples, whatever the resampling, and is read as that.

A group is one table of the report: the rows of one run, or of one point of a sweep. Rows are of one group when they
agree in scenario, verb, cache, device, machine and every setting but the loader's own, the place of the files, and what
a run measures in parts (tokens, sizes of records); where a row comes back in such a group, a new run has begun.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import config_transfer, record, stats, table
from bench.config import BenchError
from bench.measure import NOT_COLD
from bench.record import Record

#: Of a run's records, in its directory.
NAME = "results.jsonl"

#: Version of the schema -> what it added, and what records from before it are given for that.
_ADDED: dict[int, dict[str, Any]] = {
    2: {"figures": {}, "derived": None},
    3: {"device_bytes": None},
    4: {"stopped": None},
}
#: From this version on no interval is of fewer than stats.LEAST_FOR_INTERVAL samples.
_EXACT = 4
#: Of the machine: what has to be equal for two figures to be of the same hardware and system.
MACHINE = ("gpu", "driver", "kernel", "cpu_model", "cores", "memory_bytes", "torch")
#: Settings that say how a run is made, and not what is measured.
_HOW = {
    "output",
    "resume",
    "isolate",
    "hang_seconds",
    "allow_busy_gpu",
    "storage.dir",
    "storage.keep_files",
    "scenario.rounds",
    "scenario.max_seconds",
    "scenario.target_spread",
}
#: Settings that a run goes through part by part (config.parts), and where those of a part's workload are.
_PARTS = {"scenario.tokens", "scenario.sizes", "scenario.models", "scenario.compute"} | {
    f"scenario.{name}" for name in config_transfer.PARTS
}
_WORKLOADS = "scenario.workloads."


class Group(NamedTuple):
    """Rows of one table, and those of the same run that were not measured."""

    measured: list[Record]
    rest: list[Record]

    @property
    def first(self) -> Record:
        return (self.measured or self.rest)[0]


def given(text: str) -> Path:
    """The file that an argument names, or that a run has left in the directory that it names."""
    path = Path(text)
    return path / NAME if path.is_dir() else path


def read(path: Path) -> list[Record]:
    """The records of a file, in its order. Raises BenchError for a file or line that cannot be read as records."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}; give the results.jsonl of a run") from error
    found = parse(text, path)
    if not found:
        raise BenchError(f"{path} holds no records; give the results.jsonl of a run")
    return found


def parse(text: str, path: Path) -> list[Record]:
    """The records of these lines of the file `path`. Raises BenchError for a line that is no record."""
    lines = enumerate(text.splitlines(), 1)
    return [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _parse(line: str, where: str) -> Record:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BenchError(
            f"{where} is no JSON ({error}); a run that was killed leaves half a line: remove it"
        ) from error
    if not isinstance(row, dict):
        raise BenchError(f"{where} is a {type(row).__name__}; every line has to be a record")
    version = row.get("schema_version")
    if isinstance(version, int) and 0 < version < record.SCHEMA_VERSION:
        for later in range(version + 1, record.SCHEMA_VERSION + 1):
            row = {**_ADDED.get(later, {}), **row}
        if version < _EXACT:
            row = _without_intervals_of_few(row)
        row["schema_version"] = record.SCHEMA_VERSION
    elif isinstance(version, int) and version > record.SCHEMA_VERSION:
        raise BenchError(
            f"{where} has schema_version {version}, and {record.SCHEMA_VERSION} is the newest known here; read it with "
            "the bench that wrote it"
        )
    wrong = record.problems(row)
    if wrong:
        raise BenchError(f"{where} is no valid record: {'; '.join(wrong)}")
    return Record(**row)


def _without_intervals_of_few(row: dict[str, Any]) -> dict[str, Any]:
    rates = row.get("gb_per_s")
    if not isinstance(rates, dict) or rates.get("n", 0) >= stats.LEAST_FOR_INTERVAL:
        return row
    derived = dict(row["derived"]) if isinstance(row.get("derived"), dict) else None
    for name in [key for key in derived or {} if key.endswith("_ci95")]:
        assert derived is not None
        derived[name.removesuffix("_ci95") + "_range"], derived[name] = derived[name], None
    return {**row, "pct_ceiling_ci95": None, "derived": derived}


def groups(records: Sequence[Record]) -> list[Group]:
    """What belongs into one table each, in the order of the records."""
    found: dict[str, list[Group]] = {}
    rows: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for each in records:
        key = _group_key(each)
        runs = found.setdefault(key, [])
        row = (each.loader, json.dumps(_parts_of(each)))
        if not runs or row in rows[key, len(runs)]:
            runs.append(Group([], []))
            rows[key, len(runs)] = set()
        rows[key, len(runs)].add(row)
        (runs[-1].measured if each.status == "ok" else runs[-1].rest).append(each)
    return [group for runs in found.values() for group in runs]


def settings(each: Record) -> dict[str, Any]:
    """What was measured, as a flat mapping: dotted names of the configuration, and the options of the loader itself as
    `loader.<option>`. What only says how the run was made is left out."""
    flat = _flatten({key: value for key, value in each.config.items() if key not in ("loaders", "device")})
    for name, options in each.config.get("loaders", {}).items():
        flat |= _flatten(options, "loader." if name == each.loader else f"loaders.{name}.")
    return {key: value for key, value in flat.items() if key not in _HOW}


def part(each: Record) -> str:
    """Which part of its run a row is of, for people; empty where a run has one part only."""
    flat = settings(each)
    tokens, sizes = flat.get("scenario.tokens"), flat.get("scenario.sizes")
    if each.verb == "mlperf":
        names = dict.fromkeys(key.split(".")[2] for key in flat if key.startswith(_WORKLOADS))
        return ", ".join([*names, *([] if flat.get("scenario.compute") else ["without compute"])])
    if each.verb == "transfer":
        return _transfer_part(flat)
    if isinstance(tokens, int):
        return f"{tokens} tokens"
    if isinstance(model := flat.get("scenario.models"), str):
        return f"Llama 3 {model}"
    return f"records of {table.block(sizes)}" if isinstance(sizes, int) else ""


def ios(each: Record) -> str:
    """What the ios of a transfer are, for people: "randread of 4 KiB"; empty for what is none."""
    return _ios(settings(each)) if each.verb == "transfer" else ""


def _ios(flat: Mapping[str, Any]) -> str:
    spread, size = flat.get("scenario.io_range"), flat["scenario.io_bytes"]
    sizes = spread[:2] if isinstance(spread, list) else [size]
    return f"{flat['scenario.ops']} of {'-'.join(map(table.block, sizes))}"


def _transfer_part(flat: Mapping[str, Any]) -> str:
    if any(isinstance(flat[f"scenario.{name}"], list) for name in config_transfer.PARTS):
        return ""  # a run that could not begin has no parts
    # With a time for a sample, slow rows move less.
    most = "at most " if flat.get("scenario.sample_seconds") else ""
    words = [
        _ios(flat),
        f"{flat['scenario.threads']} x {flat['scenario.depth']} in flight",
        f"{most}{table.block(flat['scenario.total_bytes'])} a sample",
    ]
    if flat["scenario.shift_bytes"]:
        words.append(f"shifted by {flat['scenario.shift_bytes']} B")
    return ", ".join(words if flat["scenario.registered"] else [*words, "unregistered"])


def rates(each: Record) -> list[float]:
    """GB/s of the samples that count, in the order taken."""
    return [rate for rate, labels in zip(all_rates(each), each.sample_labels, strict=True) if NOT_COLD not in labels]


def all_rates(each: Record) -> list[float]:
    """GB/s of every sample, in the order taken; of its own bytes where samples differ in them."""
    sizes = each.figures.get("bytes") or [each.bytes] * len(each.samples_s)
    return [nbytes / 1e9 / seconds for nbytes, seconds in zip(sizes, each.samples_s, strict=True)]


def shares(each: Record) -> list[float]:
    """Fractions of the ceiling of their round that the samples which count reach, in the order taken."""
    # A row that was measured has a sample in every round.
    pairs = zip(all_rates(each), each.ceiling["samples"], each.sample_labels, strict=True)
    return [rate / ceiling for rate, ceiling, labels in pairs if NOT_COLD not in labels]


def _group_key(each: Record) -> str:
    shared = {key: value for key, value in settings(each).items() if not _is_part(key) and key[:6] != "loader"}
    machine = {key: each.env.get(key) for key in (*MACHINE, "filesystem")}
    return json.dumps([each.scenario, each.verb, each.cache, each.device, shared, machine], sort_keys=True, default=str)


def _parts_of(each: Record) -> list[Any]:
    return sorted((key, value) for key, value in settings(each).items() if _is_part(key))


def _is_part(key: str) -> bool:
    return key in _PARTS or key.startswith(_WORKLOADS)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            # A list of one is a part of a run, or a sweep's point.
            flat[f"{prefix}{key}"] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return flat
