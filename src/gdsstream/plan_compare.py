"""Predicted against measured: what a plan's rates say of the runs in a bench's records, and what those runs took.

Records are lines of JSON as `python -m bench.run` writes them. Two scenarios stream layers: `pipeline`, whose figure is
what each further layer takes, and `training_step`, whose figure is a step. Each gets two predictions:

    planned   from the plan's rates: the record's bytes, tokens and matrices by link, storage, host tier and compute.
              Where the rate of compute is only assumed, the compute that the run measured alone stands in for it
    alone     from the compute and the transfer of a layer that the same run measured, each alone: how good the model
              of the schedule is, whatever the rates

The difference is how much longer the measured time is. A layer that the run read from host memory counts with the rate
of the host tier. A rate of storage is one route's: rows of kvikio and of the traditional route, which have other rates,
are shown and not judged, unless they are asked for by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from gdsstream.errors import CheckpointNotFoundError, ConfigError
from gdsstream.makespan import simulate, steady_cycle_s
from gdsstream.rates import Rates
from gdsstream.schedule import Order

# A prediction within this of what was measured is good.
AIM = 0.10
SCHEMA_VERSION = 2
_MAX_BYTES = 256 * 2**20
_MOST_LAYERS = 10_000
_OTHER_ROUTES = ("cufile", "traditional")

Scenario: TypeAlias = Literal["pipeline", "training_step"]
_Predict: TypeAlias = Callable[[float, float, float], float]  # forward_s, backward_s, transfer_s of a layer -> seconds


class Row(NamedTuple):
    """One record, predicted and measured.

    Attributes:
        line: of the file, from 1.
        what: "forward", "backward" (a layer of a pipeline) or "step" (a training step).
        loader: the record's name for how layers arrived.
        judged: whether the difference counts against the aim.
        measured_s: seconds of a layer or step; the median of the rounds.
        planned_s, alone_s: predicted, see the module.
        planned_difference, alone_difference: 0.05 is measured 5 % longer than predicted; of `alone` the median over
            rounds, each with its own times.
        compute_measured: whether `planned_s` has the run's own compute in it.
        gpu: what it was measured on.
    """

    line: int
    scenario: Scenario
    what: Literal["forward", "backward", "step"]
    tokens: int
    loader: str
    judged: bool
    measured_s: float
    planned_s: float
    planned_difference: float
    alone_s: float
    alone_difference: float
    compute_measured: bool
    gpu: str | None

    @property
    def within(self) -> bool:
        """Whether the planned time is as good as it is to be."""
        return abs(self.planned_difference) <= AIM


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of a file; `skipped` says of every other line why it has none."""

    path: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]

    @property
    def within(self) -> bool:
        """Whether every row that is judged is within the aim."""
        return all(row.within for row in self.rows if row.judged)


class _Unusable(Exception):
    """A record that cannot be compared; the reason is its message."""


class _Round(NamedTuple):
    """Seconds of one round: a layer's compute in each direction, its transfer, each alone, and the measured time."""

    forward_s: float
    backward_s: float
    transfer_s: float
    measured_s: float


def compare(path: str | os.PathLike[str], rates: Rates, loaders: Collection[str] = ()) -> Comparison:
    """Read a file of bench records, and predict each of them; only those of `loaders`, where any are named.

    Raises CheckpointNotFoundError for a file that cannot be read, and ConfigError for one that is no file of records or
    has none that can be compared.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError as error:
        raise CheckpointNotFoundError(f"{name} cannot be read: {error.strerror}; give a run of the bench") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is no text ({error.reason}); give a run of the bench, a file of JSON lines"
        ) from error
    rows: list[Row] = []
    skipped: list[str] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number}: not JSON ({error}); give a run of the bench") from None
        try:
            rows.append(_row(number, record, rates, loaders))
        except _Unusable as error:
            skipped.append(f"line {number}: {error}")
    if not rows:
        why = f": {skipped[0]}" if skipped else ", it is empty"
        raise ConfigError(
            f"{name} has no record to compare with{why}; run the bench with experiment=pipeline or "
            "experiment=training_step"
        )
    return Comparison(name, tuple(rows), tuple(skipped))


def _row(line: int, record: Any, rates: Rates, loaders: Collection[str]) -> Row:
    if not isinstance(record, dict) or "scenario" not in record:
        raise _Unusable("it is not a record of the bench")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise _Unusable(f"its schema_version is {record.get('schema_version')!r}, not {SCHEMA_VERSION}")
    scenario = record["scenario"]
    if scenario not in ("pipeline", "training_step"):
        raise _Unusable(f"scenario {scenario!r} streams no layers")
    loader = str(record.get("loader"))
    if loaders and loader not in loaders:
        raise _Unusable(f"its loader is {loader}")
    if record.get("status") != "ok":
        raise _Unusable(f"{loader} has no times ({record.get('status')}: {record.get('reason')})")
    derived = _part(record, "derived")
    tokens, layer_bytes = _count(derived, "tokens"), _count(derived, "layer_bytes")
    backward = scenario == "pipeline" and derived.get("pass") == "backward"
    rounds, predict = (_pipeline if scenario == "pipeline" else _training)(record)
    if not rounds:
        raise _Unusable("it has no samples")
    # A pipeline's backward pass recomputes the forward one: twice the products.
    factor = 2.0 if backward or derived.get("recompute") else 1.0
    forward_s, backward_s = (median(getattr(each, name) for each in rounds) for name in ("forward_s", "backward_s"))
    compute_measured = rates.compute.origin == "assumed"
    if not compute_measured:
        products_s = 2.0 * tokens * _weights(_part(record, "config", "scenario", "moe")) / rates.compute.value
        forward_s, backward_s = products_s * (factor if backward else 1.0), products_s * factor
    share = _host_share(record)
    transfer_s = layer_bytes * (share / rates.from_host + (1 - share) / rates.from_storage)
    measured_s = median(each.measured_s for each in rounds)
    planned_s = predict(forward_s, backward_s, transfer_s)
    alone = [predict(each.forward_s, each.backward_s, each.transfer_s) for each in rounds]
    if min(measured_s, planned_s, *alone) <= 0:
        raise _Unusable("it has times that are not positive")
    return Row(
        line=line,
        scenario=scenario,
        what="step" if scenario == "training_step" else "backward" if backward else "forward",
        tokens=tokens,
        loader=loader,
        judged=bool(loaders) or _settings(record).get("backend") not in _OTHER_ROUTES,
        measured_s=measured_s,
        planned_s=planned_s,
        planned_difference=measured_s / planned_s - 1,
        alone_s=median(alone),
        alone_difference=median(each.measured_s / s for each, s in zip(rounds, alone, strict=True)) - 1,
        compute_measured=compute_measured,
        gpu=_part(record, "env").get("gpu"),
    )


def _pipeline(record: Mapping[str, Any]) -> tuple[list[_Round], _Predict]:
    """The slope between a short and a long run through the same few layers."""
    derived, figures = _part(record, "derived"), _part(record, "figures")
    short, long, slots = (_count(derived, name) for name in ("short_layers", "long_layers", "num_slots"))
    distinct = _count(derived, "distinct_bytes") // _count(derived, "layer_bytes")
    if not short < long <= _MOST_LAYERS or distinct < 1:
        raise _Unusable(f"runs of {short} and {long} layers, {distinct} of them distinct, have no slope")

    def run_s(length: int, compute_s: float, transfer_s: float) -> float:
        order = Order.explicit([step % distinct for step in range(length)])
        return simulate(order, slots, [compute_s] * length, [transfer_s] * distinct, prefetch_depth=slots // 2).total_s

    def predict(forward_s: float, backward_s: float, transfer_s: float) -> float:
        return (run_s(long, forward_s, transfer_s) - run_s(short, forward_s, transfer_s)) / (long - short)

    columns = (_numbers(figures, name) for name in ("compute_s", "transfer_s", "short_s"))
    rounds = [
        _Round(compute_s, 0.0, transfer_s, (long_s - short_s) / (long - short))
        for compute_s, transfer_s, short_s, long_s in zip(*columns, _numbers(record, "samples_s"), strict=False)
    ]
    return rounds, predict


def _training(record: Mapping[str, Any]) -> tuple[list[_Round], _Predict]:
    """A step in the steady state."""
    derived, figures = _part(record, "derived"), _part(record, "figures")
    layers, slots, steps = (_count(derived, name) for name in ("layers", "num_slots", "steps"))
    if layers > _MOST_LAYERS:
        raise _Unusable(f"its layers are {layers}")
    order = Order.training(layers)

    def predict(forward_s: float, backward_s: float, transfer_s: float) -> float:
        compute_s = [forward_s] * layers + [backward_s] * layers
        return steady_cycle_s(order, slots, compute_s, [transfer_s] * layers, prefetch_depth=slots // 2)

    columns = (_numbers(figures, name) for name in ("forward_s", "resident_s", "transfer_s"))
    rounds = [
        _Round(forward_s / layers, (resident_s - forward_s) / layers, transfer_s, sample_s / steps)
        for forward_s, resident_s, transfer_s, sample_s in zip(*columns, _numbers(record, "samples_s"), strict=False)
    ]
    return rounds, predict


def _host_share(record: Mapping[str, Any]) -> float:
    """How much of what a run read came from host memory, 0 to 1."""
    if _settings(record).get("kind") == "pinned_copies":
        return 1.0
    figures = _part(record, "figures")
    read, host = (sum(_numbers(figures, name)) for name in ("read_bytes", "host_bytes"))
    return min(host / read, 1.0) if read else 0.0


def _settings(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return _part(record, "config", "loaders", str(record.get("loader")))


def _weights(moe: Mapping[str, Any]) -> int:
    """Weights of one layer of the bench's compute: gate, up and down of a shared expert and of those that are used."""
    hidden, shared, expert, active = (_count(moe, name) for name in ("hidden", "shared", "expert", "active"))
    return 3 * hidden * (shared + active * expert)


def _part(record: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for depth, key in enumerate(keys, 1):
        found = record.get(key)
        if not isinstance(found, dict):
            raise _Unusable(f"it lacks {'.'.join(keys[:depth])}")
        record = found
    return record


def _count(part: Mapping[str, Any], name: str) -> int:
    value = part.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _Unusable(f"its {name} is {value!r}")
    return value


def _numbers(part: Mapping[str, Any], name: str) -> Sequence[float]:
    values = part.get(name)
    if not isinstance(values, list) or not all(isinstance(one, int | float) and 0 <= one < inf for one in values):
        raise _Unusable(f"its {name} are {values!r}")
    return values


__all__ = ["AIM", "Comparison", "Row", "compare"]
