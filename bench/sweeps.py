"""Which knobs were swept, found in the settings of records. Pure: records in, lines of points out.

A knob is any setting with a number: an option of a loader (chunk_size, io_depth, num_threads, ...), of the files, or of
the scenario. It was swept where rows of one kind of loader differ in it, and in nothing else that is held fixed along
the line; what else differs makes other lines. Rows that leave the knob to the library (null) have no place on its axis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bench import config_transfer, results, table
from bench.record import Record

#: Numbers that say how a sample is made, and not what it is made of.
_NO_KNOBS = {
    "scenario.sample_seconds",
    "scenario.sample_bytes",
    "scenario.compute_ms",
    "scenario.seed",
    "loader.xfer_type",
    "loader.gpu_dev_id",
}
#: Another layer, number of tokens or workload is other work for these verbs, and no throughput to compare.
_LAYERS = ("pipeline", "train", "mlperf")


_NAMES = {
    "scenario.sizes": "size of a record",
    "storage.tensors": "tensors in each file",
    "loader.num_workers": "worker processes",
    "scenario.io_bytes": "size of an io",
    "scenario.depth": "ios in flight in each thread",
    "scenario.total_bytes": "bytes of a sample",
    "scenario.shift_bytes": "shift of the offsets",
}


class Line(NamedTuple):
    """The records at each value of the knob, ascending: of `loader`, a name or kind, and what else tells it apart, for
    people; `beside` has all other settings in which rows of this kind differ."""

    loader: str
    fixed: str
    points: list[tuple[float, list[Record]]]
    beside: Mapping[str, Any] = MappingProxyType({})


class Sweep(NamedTuple):
    """All lines of one scenario over one knob, a dotted setting; `loader.` is an option of the loader."""

    scenario: str
    knob: str
    lines: list[Line]


def find(records: Sequence[Record]) -> list[Sweep]:
    """The sweeps in the order in which their scenarios come; empty where nothing was swept."""
    families: dict[tuple[str, ...], list[tuple[Record, dict[str, Any]]]] = {}
    for record in records:
        if record.status == "ok":
            flat = _own_over_scenario(results.settings(record), record)
            machine = json.dumps([record.env.get(key) for key in results.MACHINE], default=str)
            kind = str(flat.pop("loader.kind", record.loader))
            family: tuple[str, ...] = (record.scenario, record.verb, record.cache, record.device, machine, kind)
            families.setdefault(family, []).append((record, flat))
    found: dict[tuple[str, ...], Sweep] = {}
    for family, rows in families.items():
        varying = _varying([flat for _, flat in rows])
        for knob in varying:
            if knob in _NO_KNOBS or (family[1] in _LAYERS and not knob.startswith("loader.")):
                continue
            lines = _lines(rows, knob, varying, family[-1])
            if lines:
                sweep = found.setdefault((*family[:-1], knob), Sweep(family[0], knob, []))
                sweep.lines.extend(lines)
    return list(found.values())


def _own_over_scenario(flat: dict[str, Any], record: Record) -> dict[str, Any]:
    """A row of transfers may have settings of its own instead of its part's: what it was measured with is the knob.
    One that decides itself what is in flight has no such knob, however its parts differ."""
    if record.verb != "transfer":
        return flat
    own = {name: flat.pop(f"loader.{name}", None) for name in config_transfer.ROW_SETTINGS}
    for name in ("threads", "depth"):
        if (record.derived or {}).get(name, 0) is None:
            flat.pop(f"scenario.{name}", None)
    return {**flat, **{f"scenario.{name}": value for name, value in own.items() if value is not None}}


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for flat in settings for key in flat)
    return [key for key in keys if len({json.dumps(flat.get(key), default=str) for flat in settings}) > 1]


def _lines(
    rows: Sequence[tuple[Record, Mapping[str, Any]]], knob: str, varying: Sequence[str], kind: str
) -> list[Line]:
    others = [key for key in varying if key != knob]
    lines: dict[str, dict[float, list[Record]]] = {}
    fixed: dict[str, dict[str, Any]] = {}
    for record, flat in rows:
        given = flat.get(knob)
        if isinstance(given, bool) or not isinstance(given, int | float):
            continue
        beside = {key: flat.get(key) for key in others}
        line = json.dumps(beside, sort_keys=True, default=str)
        fixed[line] = beside
        lines.setdefault(line, {}).setdefault(given, []).append(record)
    kept = {line: points for line, points in lines.items() if len(points) > 1}
    told = [key for key in others if len({json.dumps(fixed[line].get(key), default=str) for line in kept}) > 1]
    # Where one name says it all, the settings behind it need not be spelled out.
    names = {line: {record.loader for found in points.values() for record in found} for line, points in kept.items()}
    result = []
    for line, points in kept.items():
        alone = len(names[line]) == 1 and all(names[line] != names[other] for other in kept if other != line)
        loader = next(iter(names[line])) if len(names[line]) == 1 else kind
        said = "" if alone else ", ".join(f"{short(key)} {value(key, fixed[line].get(key))}" for key in told)
        result.append(Line(loader, said, sorted(points.items()), fixed[line]))
    return result


def short(knob: str) -> str:
    """A setting's own name, for people."""
    return _NAMES.get(knob) or knob.rpartition(".")[2].replace("_", " ")


def value(knob: str, given: Any) -> str:
    """A setting's value, for people: bytes in binary units where they are whole ones."""
    if given is None:
        return "auto"
    if isinstance(given, bool) or not isinstance(given, int | float):
        return str(given)
    return table.block(given) if knob.endswith(("bytes", "size", "sizes")) else f"{given:,g}"
