"""Count requests, images and times for each version since the server started.

The Open Inference Protocol reports these statistics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dne_serve.engines.base import Query, Resident
from dne_serve.engines.batcher import Ticket
from dne_serve.observe.events import Answered


@dataclass(slots=True, kw_only=True)
class Duration:
    """A number of events, and the time of all of them together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


@dataclass(slots=True, kw_only=True)
class VersionStatistics:
    """Counts and times of one version."""

    last_answer_ms: int = 0
    """Milliseconds since the epoch; 0 before the first answer."""
    images: int = 0
    """Images answered."""
    success: Duration = field(default_factory=Duration)
    """Requests answered, timed from the choice of the version to the logits."""
    fail: Duration = field(default_factory=Duration)
    """Requests that failed after the choice of the version."""
    decode: Duration = field(default_factory=Duration)
    """Decoding of all images, by request."""
    queue: Duration = field(default_factory=Duration)
    """Waiting for the engine, by image."""
    run: Duration = field(default_factory=Duration)
    """Run of the batch, by image."""
    batches: dict[int, Duration] = field(default_factory=dict)
    """Batches run, by the number of this version's images in them."""


class Statistics:
    """Statistics of all versions, safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: dict[int, VersionStatistics] = {}

    @property
    def versions(self) -> list[int]:
        """List the versions that had a request."""
        with self._lock:
            return sorted(self._by_version)

    def of(self, version: int) -> VersionStatistics:
        """Copy the statistics of a version; all zero for one without requests."""
        with self._lock:
            return deepcopy(self._by_version.get(version, VersionStatistics()))

    def answered(self, event: Answered) -> None:
        """Count a request, which may have failed."""
        with self._lock:
            row = self._row(event.version)
            if event.decoding is not None:
                row.decode.add(event.decoding.ns)
            if event.error is not None:
                row.fail.add(event.times.ns)
                return
            row.success.add(event.times.ns)
            row.images += event.images
            row.last_answer_ms = time.time_ns() // 1_000_000

    def ran(
        self, tickets: Sequence[Ticket[Resident, Query, Any]], began_ns: int, ended_ns: int
    ) -> None:
        """Count a batch. Its tickets need not be of one version."""
        sizes: dict[int, int] = {}
        with self._lock:
            for ticket in tickets:
                version = ticket.item.residents[0].version
                sizes[version] = sizes.get(version, 0) + 1
                row = self._row(version)
                row.queue.add(began_ns - ticket.arrived_ns)
                row.run.add(ended_ns - began_ns)
            for version, size in sizes.items():
                self._row(version).batches.setdefault(size, Duration()).add(ended_ns - began_ns)

    def _row(self, version: int) -> VersionStatistics:
        return self._by_version.setdefault(version, VersionStatistics())
