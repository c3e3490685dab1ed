"""What each version has answered since the server started, and where the time went.

Knows nothing of HTTP: the Open Inference Protocol reads it, the predictor and the batcher write it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dne_serve.engines.base import Query, Resident
from dne_serve.engines.batcher import Ticket


@dataclass(slots=True, kw_only=True)
class Duration:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


@dataclass(slots=True, kw_only=True)
class VersionStatistics:
    last_answer_ms: int = 0
    """Milliseconds since the epoch; 0 while there was no answer."""
    images: int = 0
    """Images answered."""
    success: Duration = field(default_factory=Duration)
    """Requests that were answered, from their version's choice to their logits."""
    fail: Duration = field(default_factory=Duration)
    """Requests that had a version and got no answer from it."""
    decode: Duration = field(default_factory=Duration)
    """By request: its images to pixels."""
    queue: Duration = field(default_factory=Duration)
    """By image: waiting for the engine."""
    run: Duration = field(default_factory=Duration)
    """By image: the batch that it was in."""
    batches: dict[int, Duration] = field(default_factory=dict)
    """Batches run, by how many of this version's images were in them."""


class Statistics:
    """Written from the event loop and the engine thread, read from any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: dict[int, VersionStatistics] = {}

    @property
    def versions(self) -> list[int]:
        """Those that were asked for anything."""
        with self._lock:
            return sorted(self._by_version)

    def of(self, version: int) -> VersionStatistics:
        """As they stand now; all zero for a version that nobody asked for."""
        with self._lock:
            return deepcopy(self._by_version.get(version, VersionStatistics()))

    @contextmanager
    def request(self, version: int, *, images: int) -> Iterator[None]:
        """Counts what happens inside as one request: answered unless it raises."""
        began = time.perf_counter_ns()
        try:
            yield
        except Exception:
            with self._lock:
                self._row(version).fail.add(time.perf_counter_ns() - began)
            raise
        with self._lock:
            row = self._row(version)
            row.success.add(time.perf_counter_ns() - began)
            row.images += images
            row.last_answer_ms = time.time_ns() // 1_000_000

    @contextmanager
    def decoding(self, version: int) -> Iterator[None]:
        began = time.perf_counter_ns()
        yield
        with self._lock:
            self._row(version).decode.add(time.perf_counter_ns() - began)

    def ran(
        self, tickets: Sequence[Ticket[Resident, Query, Any]], began_ns: int, ended_ns: int
    ) -> None:
        """A batch was run. Its tickets need not be of one version."""
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
