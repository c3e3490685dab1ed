"""Count answers by version and class, and their scores, for Prometheus.

The number of series is bounded. The classes after the first MAX_LABELS count as one, and beyond
MAX_VERSIONS the version that answered longest ago loses its counts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dne_serve.engines.base import Floats, Resident

MAX_VERSIONS = 8
MAX_LABELS = 100
OTHER = "(other)"
"""Stands for the classes after the first MAX_LABELS."""
MAX_SCORED = 50_000
"""Logits of a request whose scores are computed: about 0.6 ms. Of a larger request only the first
images are counted in the histogram of scores."""
SCORES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


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

    @classmethod
    def of(cls, resident: Resident) -> VersionCounts:
        labels = resident.labels[:MAX_LABELS]
        if len(resident.labels) > MAX_LABELS:
            labels = (*labels, OTHER)
        return cls(labels=labels, images=[0] * len(labels))

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts of scores as Prometheus wants them: each includes those below."""
        bounds = [*map(str, SCORES), "+Inf"]
        sums: list[float] = np.cumsum(self.scores).tolist()
        return list(zip(bounds, sums, strict=True))


class AnswerCounts(Collector):
    """Counts of the versions that answered last, safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: OrderedDict[int, VersionCounts] = OrderedDict()

    def count(self, resident: Resident, *, logits: Sequence[Floats], unknown: int) -> None:
        """Count the images of one request by their logits. `unknown` of them are like no class."""
        best = [int(one.argmax()) for one in logits]
        scored = max(1, MAX_SCORED // len(resident.labels))
        scores = [best_score(one, resident=resident) for one in logits[:scored]]
        with self._lock:
            row = self._row(resident)
            row.unknown += unknown
            for index in best:
                row.images[min(index, MAX_LABELS)] += 1
            for score in scores:
                row.scores[bisect_left(SCORES, score)] += 1
                row.score_sum += score

    def collect(self) -> Iterator[Metric]:
        """Make the metrics, when Prometheus asks."""
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
        with self._lock:
            for version, row in sorted(self._by_version.items()):
                for label, count in zip(row.labels, row.images, strict=True):
                    images.add_metric((str(version), label), count)
                unknown.add_metric((str(version),), row.unknown)
                scores.add_metric((str(version),), row.buckets(), row.score_sum)
        yield from (images, unknown, scores)

    def _row(self, resident: Resident) -> VersionCounts:
        row = self._by_version.get(resident.version)
        if row is None:
            row = self._by_version[resident.version] = VersionCounts.of(resident)
            if len(self._by_version) > MAX_VERSIONS:
                self._by_version.popitem(last=False)
        self._by_version.move_to_end(resident.version)
        return row


def best_score(logits: Floats, *, resident: Resident) -> float:
    """Compute the calibrated probability of the best class alone."""
    with np.errstate(over="ignore"):  # minus infinity, and e to its power is 0
        below = (logits - logits.max()) / resident.manifest.calibration.temperature
    return 1.0 / float(np.exp(below).sum())
