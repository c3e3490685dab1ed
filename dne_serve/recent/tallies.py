"""Hold figures that people look at and that Prometheus' own counters do not give back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSwap:
    """The last change of the served version."""

    version: int
    count: int
    """Changes since the server started."""
    time: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class Agreement:
    """Images on which a version beside the served one gives the same label as it, or another."""

    same: int = 0
    other: int = 0
    answered: int = 0
    """Images that the version answered."""
