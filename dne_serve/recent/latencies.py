"""Remember when the last predictions were answered, and how long each took."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

KEPT = 4096
RATE_S = 10.0
"""The time that the rate is taken over."""
TAIL_S = 60.0
"""The time that the percentiles are taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace at which predictions come and are answered. Times are None without an answer."""

    requests_per_second: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    failed: float | None = None
    """The share of requests that were answered with 5xx; None without a request."""


class Latencies:
    """The last KEPT predictions of all versions. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = array("d", bytes(8 * KEPT))
        self._took = array("d", bytes(8 * KEPT))
        self._failed = array("B", bytes(KEPT))
        self._added = 0

    def add(self, seconds: float, *, failed: bool) -> None:
        at = self._added % KEPT
        self._ended[at] = self._clock()
        self._took[at] = seconds
        self._failed[at] = failed
        self._added += 1

    def pace(self) -> Pace:
        """Sum up the last seconds. Where more than KEPT requests came in this time, the rate is
        that of the requests that are kept."""
        count = min(self._added, KEPT)
        ages = self._clock() - np.frombuffer(self._ended, count=count)
        if not count or ages.min() > TAIL_S:
            return Pace(requests_per_second=0.0)
        span = min(RATE_S, float(ages.max())) if count == KEPT else RATE_S
        failed = np.frombuffer(self._failed, dtype=np.bool_, count=count)[ages <= TAIL_S]
        took_ms = 1000 * np.frombuffer(self._took, count=count)[ages <= TAIL_S][~failed]
        p50, p99 = np.quantile(took_ms, (0.5, 0.99)).tolist() if len(took_ms) else (None, None)
        return Pace(
            requests_per_second=float((ages <= span).sum() / max(span, 1e-3)),
            p50_ms=p50,
            p99_ms=p99,
            failed=float(failed.mean()),
        )
