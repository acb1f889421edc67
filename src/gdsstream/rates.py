"""The rates that a plan is made with, each with where it comes from: given, measured here, or assumed. Pure.

A rate that a plan hangs on is never guessed: link and storage have to be given or measured. Compute may be assumed,
since a peak errs on the safe side: no GPU computes faster, so that a plan hides less with it than the machine will.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from gdsstream.errors import ConfigError

Station: TypeAlias = Literal["link", "storage", "host", "compute"]
Origin: TypeAlias = Literal["given", "measured", "assumed"]

OPTIONS: dict[Station, str] = {
    "link": "--link-gbps",
    "storage": "--storage-gbps",
    "host": "--host-gbps",
    "compute": "--tflops",
}
_WHAT: dict[Station, str] = {
    "link": "the link (host memory to GPU)",
    "storage": "the storage",
    "host": "the host tier",
    "compute": "compute",
}
# Dense bf16 peaks as published, rounded up, in TFLOP/s; the first name that the driver's contains counts.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("B300", 2500.0),
    ("B200", 2500.0),
    ("H200", 990.0),
    ("H100", 990.0),
    ("H800", 990.0),
    ("GH200", 990.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 363.0),
    ("RTX PRO 6000", 504.0),
)
_ASSUMED_GPU = "H200"


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate in units a second (bytes; floating-point operations), and where it comes from, in words."""

    value: float
    source: str
    origin: Origin

    def __post_init__(self) -> None:
        if not 0 < self.value < inf:
            raise ConfigError(f"a rate is {self.value!r} ({self.source}); it has to be positive and finite")


@dataclass(frozen=True, slots=True)
class Rates:
    """What each station does in a second: bytes by `link`, `storage` and `host`, operations by `compute`.

    A layer passes its tier and the link at once, so that the slower one counts.
    """

    link: Rate
    storage: Rate
    host: Rate
    compute: Rate

    @property
    def from_storage(self) -> float:
        """Bytes a second from storage to the GPU."""
        return min(self.storage.value, self.link.value)

    @property
    def from_host(self) -> float:
        """Bytes a second from the host tier to the GPU."""
        return min(self.host.value, self.link.value)


def rates_for(
    limits: Mapping[Station, Rate] | None = None,
    *,
    link_gbps: float | None = None,
    storage_gbps: float | None = None,
    host_gbps: float | None = None,
    tflops: float | None = None,
    gpu: str | None = None,
) -> Rates:
    """The rates to plan with: those given, and else those of a machine's `limits`, what was measured on it.

    The host tier is registered memory and has the link's rate unless something else is said. Without a rate of compute
    the peak of the GPU of that name counts (of an H200 for an unknown one). Raises ConfigError where link or storage is
    known from neither, and for rates that are not positive. GB/s are decimal gigabytes.
    """
    found: dict[Station, Rate] = dict(limits or {})
    given: dict[Station, float | None] = {
        "link": link_gbps,
        "storage": storage_gbps,
        "host": host_gbps,
        "compute": tflops,
    }
    for station, value in given.items():
        if value is not None:
            scale = 1e12 if station == "compute" else 1e9
            found[station] = Rate(value * scale, f"given by {OPTIONS[station]}", "given")
    needed: tuple[Station, ...] = ("link", "storage")
    lacking = [station for station in needed if station not in found]
    if lacking:
        raise ConfigError(
            f"the rate of {' and of '.join(_WHAT[station] for station in lacking)} is not known; give "
            f"{' and '.join(OPTIONS[station] for station in lacking)} in GB/s, or measure it: gdsstream limits PATH"
        )
    if "host" not in found:
        link = found["link"]
        found["host"] = Rate(link.value, "the link's: registered memory is read at its limit", link.origin)
    if "compute" not in found:
        found["compute"] = _peak(gpu)
    return Rates(found["link"], found["storage"], found["host"], found["compute"])


def measured_compute(flops_per_token: float, tokens: int, seconds: float) -> Rate:
    """The rate of compute that a measured time of one layer's forward pass means. Raises ConfigError."""
    rate = flops_per_token * tokens / seconds
    return Rate(rate, f"{seconds * 1e3:.4g} ms a layer at {tokens:,} tokens, given by --compute-ms", "given")


def _peak(gpu: str | None) -> Rate:
    name = next((known for known, _ in _PEAKS if gpu is not None and known in gpu), None)
    whose = f"{gpu}'s" if name is not None else f"no {'' if gpu is None else 'known '}GPU here: an {_ASSUMED_GPU}'s"
    peak = dict(_PEAKS)[name or _ASSUMED_GPU]
    return Rate(peak * 1e12, f"assumed, {whose} bf16 peak; real compute hides more. Give --tflops", "assumed")


__all__ = ["OPTIONS", "Origin", "Rate", "Rates", "Station", "measured_compute", "rates_for"]
