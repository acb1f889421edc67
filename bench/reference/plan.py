"""What a part and a claim are, checked with the nearest valid name in each error, as the rest of the configuration is.

A claim has a figure of the document, in its unit, and a selector that picks ours from the records of a part; with a
second selector, ours is the one divided by the other. Bounds make a verdict possible: without, figures are only shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench import config
from bench.config import BenchConfigError, ReferenceConfig, nearest

#: unit of a claim -> what ours is multiplied with. Records have seconds, fractions and GB/s; x is a proportion.
UNITS = {"GB/s": 1.0, "x": 1.0, "%": 100.0, "ms": 1e3, "us": 1e6, "s": 1.0, "1/s": 1.0, "MB": 1e-6}
#: Conditions of a claim that a row shows itself, and how: a word of its route.
NEEDS = {"gpudirect": "bytes that go from storage into GPU memory by GPUDirect Storage"}


@dataclass(frozen=True, slots=True)
class Part:
    """An experiment with overrides, and its share of the time in proportion to the others'. `grows`: a transfer whose
    claims are of rates, so that samples may be as long and as large as time and machine say (fit.py)."""

    name: str
    experiment: str
    overrides: list[str] = field(default_factory=list)
    share: float = 1.0
    grows: bool = False

    def __post_init__(self) -> None:
        if self.share <= 0:
            raise BenchConfigError(f"'reference.parts.{self.name}.share' is {self.share}; it has to be positive")


@dataclass(frozen=True, slots=True)
class Selector:
    """A figure of the records: of the row of `loader`, or of several rows the one whose median rate is highest.

    `where` holds settings of the row by their dotted names, and `derived.NAME`. `figure` is a field of the record with
    samples or a number (gb_per_s, units_per_s, samples_s, startup_s, first_s, pct_ceiling), `derived.NAME`,
    `figures.NAME`, or `layer_s`, the seconds that each further layer of a pipeline takes.
    """

    part: str
    loader: str | list[str] | None = None
    where: dict[str, Any] = field(default_factory=dict)
    figure: str = "gb_per_s"
    #: What makes seconds, fractions or GB/s of it, where it is something else.
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a document says: in our own words, as a figure, and for which hardware."""

    name: str
    document: str
    hardware: str
    says: str
    unit: str
    theirs: float | None = None
    ours: Selector | None = None
    over: Selector | None = None
    #: Of our proportion (or figure) for the claim to hold.
    at_least: float | None = None
    at_most: float | None = None
    #: One of NEEDS, without which the figures are of different things.
    needs: str | None = None
    #: Why there is nothing to compare it with on any machine of this kind.
    never: str | None = None

    def __post_init__(self) -> None:
        where = f"claim {self.name}"
        if self.unit not in UNITS:
            raise BenchConfigError(f"'unit' of {where} is {self.unit!r}; {nearest(self.unit, UNITS)}")
        if self.needs is not None and self.needs not in NEEDS:
            raise BenchConfigError(f"'needs' of {where} is {self.needs!r}; {nearest(self.needs, NEEDS)}")
        if (self.ours is None) == (self.never is None):
            raise BenchConfigError(
                f"{where} has to have either 'ours', the figure to compare with, or 'never', the reason"
            )
        if self.over is not None and self.unit != "x":
            raise BenchConfigError(f"'unit' of {where} is {self.unit!r}; of a figure over another it has to be 'x'")


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it; `chosen` are the parts to make, and `max_seconds` is for all of them together."""

    parts: list[Part]
    claims: list[Claim]
    chosen: frozenset[str]
    max_seconds: float

    def claims_of(self, made: Collection[str]) -> list[Claim]:
        """Those to show where these parts were made; those that never can be measured too, where all are chosen."""
        found = []
        for claim in self.claims:
            named = {selector.part for selector in (claim.ours, claim.over) if selector is not None}
            if named <= set(made) and (named or len(self.chosen) == len(self.parts)):
                found.append(claim)
        return found


def build(reference: ReferenceConfig) -> Plan:
    """Check the configuration. Raises BenchConfigError."""
    if reference.max_seconds <= 0:
        raise BenchConfigError(f"'reference.max_seconds' is {reference.max_seconds}; it has to be positive")
    for name in reference.only:
        if name not in reference.parts:
            raise BenchConfigError(f"'reference.only' names part {name!r}; {nearest(name, reference.parts)}")
    parts = [_item(Part, "parts", name, values) for name, values in reference.parts.items()]
    every = [claim for name, values in reference.documents.items() for claim in _claims(name, values)]
    for claim in every:
        for selector in (claim.ours, claim.over):
            if selector is not None and selector.part not in reference.parts:
                near = nearest(selector.part, reference.parts)
                raise BenchConfigError(f"claim {claim.name} is of part {selector.part!r}; {near}")
    return Plan(parts, every, frozenset(reference.only or reference.parts), reference.max_seconds)


def _claims(name: str, values: Any) -> list[Claim]:
    """Those of one document on one hardware."""
    where = f"reference.documents.{name}"
    known = ("document", "hardware", "claims")
    for key in _mapping(values, where):
        if key not in known:
            raise BenchConfigError(f"unknown key '{where}.{key}'; {nearest(str(key), known)}")
    shared = {key: value for key, value in values.items() if key != "claims"}
    claims = _mapping(values.get("claims"), f"{where}.claims")
    return [_item(Claim, f"documents.{name}.claims", key, each, shared) for key, each in claims.items()]


def _item(cls: type[Any], group: str, name: str, values: Any, shared: Mapping[str, Any] | None = None) -> Any:
    where = f"reference.{group}.{name}"
    plain = dict(_mapping(values, where))
    for key in ("ours", "over"):
        if isinstance(plain.get(key), Mapping):
            plain[key] = config.from_mapping(Selector, plain[key], f"{where}.{key}")
    return config.from_mapping(cls, {"name": name, **(shared or {}), **plain}, where)


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise BenchConfigError(f"'{where}' is {values!r}; it has to be a mapping")
    return values
