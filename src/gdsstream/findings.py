"""Status and Finding: one thing that was looked at, how it is to be taken, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a line is to be taken: fine, worth a look, in the way, or neither."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it is about, in a word or two that scripts can rely on.
        status: how it is to be taken.
        found: what was found.
        remedy: what to do about it; empty where there is nothing to do.
    """

    topic: str
    status: Status
    found: str
    remedy: str = ""


__all__ = ["Finding", "Status"]
