"""Count requests, images and times for each version since the server started.

Knows nothing of HTTP: predictor and batcher write, the Open Inference Protocol reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dne_serve.engines.base import Query, Resident
from dne_serve.engines.batcher import Ticket

OnDecoded = Callable[[int, int], None]
"""Told when the decoding of a request began and ended, by `time.perf_counter_ns`."""


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

    def __init__(self, *, on_decoded: OnDecoded = lambda began_ns, ended_ns: None) -> None:
        self._on_decoded = on_decoded
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

    @contextmanager
    def request(self, version: int, *, images: int) -> Iterator[None]:
        """Count the work inside as one request: failed if it raises, answered otherwise."""
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
        ended = time.perf_counter_ns()
        self._on_decoded(began, ended)
        with self._lock:
            self._row(version).decode.add(ended - began)

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
