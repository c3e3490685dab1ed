"""Count answers by version and class, and their scores, for Prometheus.

The number of series is bounded. The classes after the first MAX_LABELS count as one, and beyond
MAX_VERSIONS the version that answered longest ago loses its counts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dne_serve.engines.base import Resident
from dne_serve.observe.events import Answered
from dne_serve.observe.recent import Drift, RecentAnswers, Reference
from model_store.records.quality import SCORE_BOUNDS

MAX_VERSIONS = 8
MAX_LABELS = 100
OTHER = "(other)"
"""Stands for the classes after the first MAX_LABELS."""
MAX_SCORED = 50_000
"""Logits of a request whose probabilities are computed for the counts: about 0.6 ms. Of a larger
request, only the first images are counted in the histogram of scores."""
SCORES = SCORE_BOUNDS


@dataclass(slots=True, kw_only=True)
class VersionCounts:
    """Counts of one version."""

    labels: tuple[str, ...]
    images: list[int]
    """Images by their best class, in the order of `labels`."""
    unknown: int = 0
    scores: list[int] = field(default_factory=lambda: [0] * (len(SCORES) + 1))
    """Images by score: one count for each bound of SCORES, and one above the last bound."""
    score_sum: float = 0.0
    recent: RecentAnswers = field(default_factory=RecentAnswers)
    reference: Reference

    @property
    def drift(self) -> Drift:
        return self.reference.drift(self.recent)

    @classmethod
    def of(cls, resident: Resident) -> VersionCounts:
        labels = resident.labels[:MAX_LABELS]
        if len(resident.labels) > MAX_LABELS:
            labels = (*labels, OTHER)
        reference = Reference.of(resident.manifest.metrics, classes=resident.labels)
        return cls(labels=labels, images=[0] * len(labels), reference=reference)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts of scores as Prometheus wants them: each includes those below."""
        bounds = [*map(str, SCORES), "+Inf"]
        sums: list[float] = np.cumsum(self.scores).tolist()
        return list(zip(bounds, sums, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recently:
    """The last answers of one version."""

    images: int
    unknown: int
    classes: tuple[tuple[str, int], ...]
    """Images by their best class, without zeros, the most frequent first; OTHER stands for the
    classes after the first MAX_LABELS."""
    drift: Drift

    @classmethod
    def of(cls, row: VersionCounts) -> Recently:
        counts = row.recent.by_class(row.reference.size)
        named = [*counts[:MAX_LABELS].tolist(), int(counts[MAX_LABELS:].sum())]
        pairs = [(name, n) for name, n in zip(row.labels, named, strict=False) if n]
        return cls(
            images=len(row.recent),
            unknown=row.recent.unknown,
            classes=tuple(sorted(pairs, key=lambda pair: -pair[1])),
            drift=row.drift,
        )


class AnswerCounts(Collector):
    """Counts of the versions that answered last, safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: OrderedDict[int, VersionCounts] = OrderedDict()

    def answered(self, event: Answered) -> None:
        """Count the images of one request, unless it failed or was not ordinary traffic."""
        if event.error is not None or not event.is_traffic:
            return
        best = [int(image.logits.argmax()) for image in event.scored]
        few = max(1, MAX_SCORED // len(event.resident.labels))
        scores = [float(image.probabilities.max()) for image in event.scored[:few]]
        bins = [bisect_left(SCORES, score) for score in scores]
        with self._lock:
            row = self._row(event.resident)
            row.unknown += event.unknown
            for index in best:
                row.images[min(index, MAX_LABELS)] += 1
            for bin_ in bins:
                row.scores[bin_] += 1
            row.score_sum += sum(scores)
            row.recent.add(best, bins=bins, unknown=event.unknown)

    def look(self, version: int) -> Recently | None:
        """Sum up the last answers of a version; None if it has none."""
        with self._lock:
            row = self._by_version.get(version)
            return None if row is None else Recently.of(row)

    def collect(self) -> Iterator[Metric]:
        """Make the metrics for a scrape."""
        images = CounterMetricFamily(
            "dne_class_images",
            "Images by version and best class; the classes after the first hundred are one.",
            labels=("version", "label"),
        )
        unknown = CounterMetricFamily(
            "dne_unknown_images", "Images like no class of the version.", labels=("version",)
        )
        scores = HistogramMetricFamily(
            "dne_score", "Calibrated probabilities of the best classes.", labels=("version",)
        )
        drift = GaugeMetricFamily(
            "dne_drift_psi",
            "Population stability index of the last answers against the held-out images: of the "
            "mix of classes, or of scores.",
            labels=("version", "of"),
        )
        with self._lock:
            for version, row in sorted(self._by_version.items()):
                for label, count in zip(row.labels, row.images, strict=True):
                    images.add_metric((str(version), label), count)
                unknown.add_metric((str(version),), row.unknown)
                scores.add_metric((str(version),), row.buckets(), row.score_sum)
                for name, index in asdict(row.drift).items():
                    if index is not None:
                        drift.add_metric((str(version), name), index)
        yield from (images, unknown, scores, drift)

    def _row(self, resident: Resident) -> VersionCounts:
        row = self._by_version.get(resident.version)
        if row is None:
            row = self._by_version[resident.version] = VersionCounts.of(resident)
            if len(self._by_version) > MAX_VERSIONS:
                self._by_version.popitem(last=False)
        self._by_version.move_to_end(resident.version)
        return row
