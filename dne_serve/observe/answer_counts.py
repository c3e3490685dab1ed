"""Count answers by version and class, and compare the last ones with the held-out images.

The number of series is bounded. The classes after the first MAX_LABELS count as one, and beyond
MAX_VERSIONS the version that answered longest ago loses its counts.

The population stability index (PSI) of two mixes p and q is Σ (q − p) ln(q / p). By custom, 0.1 is
a small shift and 0.25 a large one. Chance alone adds about (bins − 1) × (1 / images + 1 / held-out
images), so the number of bins is limited by the number of held-out images, and a short window gives
no index.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dne_serve.engines.base import Resident
from dne_serve.observe.events import Answered
from model_store.records.quality import SCORE_BOUNDS, Metrics

WINDOW = 2000
"""Images that are remembered of a version: 12 KB."""
UNSCORED = 255
"""Stands for the bin of an image whose score was not computed."""
FEWEST = 500
"""Answers in the window before there is an index: chance then adds 0.04 at most."""
IMAGES_A_BIN = 20
"""Held-out images for each bin: chance then adds 0.05 at most."""
_MOST_BINS = 20
SCORE_BINS = len(SCORE_BOUNDS) + 1
_EMPTY = 0.5
"""Added to the count of every bin, so that an empty one has a logarithm."""
KEPT = 4096
"""Requests whose times are remembered."""
MINUTES = 30
_RATE_S = 10.0
"""The time over which the rate is taken."""
_TAIL_S = 60.0
"""The time over which the percentiles are taken."""

Counts = NDArray[np.int64]


class RecentAnswers:
    """The last WINDOW answers of a version, the oldest overwritten first. Adding one takes three
    stores; counting is left to the reader."""

    def __init__(self) -> None:
        self._classes = array("I", bytes(4 * WINDOW))
        self._bins = array("B", bytes(WINDOW))
        self._unknown = array("B", bytes(WINDOW))
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, WINDOW)

    def add(self, classes: Sequence[int], *, bins: Sequence[int], unknown: int) -> None:
        """Add the images of one request. `bins` may be of the first images only. Which images of a
        request are the `unknown` ones makes no difference to the share."""
        for place, (index, bin_) in enumerate(zip_longest(classes, bins, fillvalue=UNSCORED)):
            at = self._added % WINDOW
            self._classes[at] = index
            self._bins[at] = bin_
            self._unknown[at] = place < unknown
            self._added += 1

    @property
    def unknown(self) -> int:
        """Count the images that were like no class."""
        return sum(self._unknown[: len(self)])

    def by_class(self, classes: int) -> Counts:
        """Count the images by their best class."""
        indexes = np.frombuffer(self._classes, dtype=np.uint32, count=len(self))
        return np.bincount(indexes, minlength=classes)

    def by_bin(self, bins: int) -> Counts:
        """Count the images whose score was computed by the bin of the score."""
        known = np.frombuffer(self._bins, dtype=np.uint8, count=len(self))
        return np.bincount(known[known != UNSCORED], minlength=bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Population stability indexes; None where there is too little to compare."""

    classes: float | None = None
    scores: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix:
    """The mix of held-out answers over groups of bins."""

    group_of: NDArray[np.intp]
    """The group of each bin."""
    counts: Counts
    """Held-out answers of each group."""

    @classmethod
    def of(cls, counts: ArrayLike) -> Mix | None:
        """Take the counts of the bins. None where they are too few to compare with."""
        bins = np.asarray(counts, dtype=np.int64)
        most = min(_MOST_BINS, int(bins.sum()) // IMAGES_A_BIN)
        if most < 2:
            return None
        group_of = grouped(bins, most=most)
        return cls(group_of=group_of, counts=summed(bins, group_of)) if group_of[-1] else None

    def drift(self, now: Counts) -> float | None:
        """Compare with the counts of the bins in the window."""
        if now.sum() < FEWEST:
            return None
        return stability_index(self.counts, summed(now, self.group_of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The answers of a version to its held-out images, as far as its manifest has them."""

    classes: Mix | None
    scores: Mix | None
    size: int
    """The number of classes."""

    @classmethod
    def of(cls, metrics: Metrics, *, classes: Sequence[str]) -> Reference:
        """Sum up the confusion table by answer. Metrics without the table, or without counts of
        scores, give no index. They are older, or a class was retired since."""
        answered = dict.fromkeys(classes, 0)
        for taken_for in metrics.confusion.values():
            for name, count in taken_for.items():
                if name in answered:
                    answered[name] += count
        return cls(
            classes=Mix.of(list(answered.values())),
            scores=Mix.of(metrics.scores) if metrics.scores else None,
            size=len(classes),
        )

    def drift(self, recent: RecentAnswers) -> Drift:
        return Drift(
            classes=self.classes.drift(recent.by_class(self.size)) if self.classes else None,
            scores=self.scores.drift(recent.by_bin(SCORE_BINS)) if self.scores else None,
        )


def stability_index(expected: ArrayLike, seen: ArrayLike) -> float:
    """Compute the population stability index of two lists of counts."""
    p, q = _shares(expected), _shares(seen)
    return float(((q - p) * np.log(q / p)).sum())


def grouped(counts: Counts, *, most: int) -> NDArray[np.intp]:
    """Give each bin a group: itself where there are few bins, else neighbours together. A bin that
    holds twice its share stands alone, so that a mix with one heavy bin has two groups."""
    if len(counts) <= most:
        return np.arange(len(counts))
    enough = 2 * counts.sum() / most
    groups, group, held = [], 0, 0
    for place, count in enumerate(counts):
        if place and (held >= enough or count >= enough):
            group, held = group + 1, 0
        groups.append(group)
        held += count
    return np.array(groups, dtype=np.intp)


def summed(counts: Counts, group_of: NDArray[np.intp]) -> Counts:
    """Sum the counts of the bins of each group."""
    sums = np.zeros(int(group_of[-1]) + 1, dtype=np.int64)
    np.add.at(sums, group_of, counts)
    return sums


def _shares(counts: ArrayLike) -> NDArray[np.float64]:
    smoothed = np.asarray(counts, dtype=np.float64) + _EMPTY
    return np.asarray(smoothed / smoothed.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The rate and the latency of predictions. Times are None without an answer."""

    requests_per_second: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    failed: float | None = None
    """The share of requests that were answered with 5xx; None without a request."""


class Latencies:
    """The last predictions of all versions. Used on the event loop only."""

    def __init__(self, kept: int = KEPT, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept = kept
        self._ended = array("d", bytes(8 * kept))
        self._took = array("d", bytes(8 * kept))
        self._failed = array("B", bytes(kept))
        self._added = 0

    def add(self, seconds: float, *, failed: bool) -> None:
        at = self._added % self._kept
        self._ended[at] = self._clock()
        self._took[at] = seconds
        self._failed[at] = failed
        self._added += 1

    def pace(self) -> Pace:
        """Sum up the last seconds. If more requests came in this time than are kept, the rate is
        the rate of those that are kept."""
        count = min(self._added, self._kept)
        ages = self._clock() - np.frombuffer(self._ended, count=count)
        if not count or ages.min() > _TAIL_S:
            return Pace(requests_per_second=0.0)
        span = min(_RATE_S, float(ages.max())) if count == self._kept else _RATE_S
        failed = np.frombuffer(self._failed, dtype=np.bool_, count=count)[ages <= _TAIL_S]
        took_ms = 1000 * np.frombuffer(self._took, count=count)[ages <= _TAIL_S][~failed]
        p50, p99 = np.quantile(took_ms, (0.5, 0.99)).tolist() if len(took_ms) else (None, None)
        return Pace(
            requests_per_second=float((ages <= span).sum() / max(span, 1e-3)),
            p50_ms=p50,
            p99_ms=p99,
            failed=float(failed.mean()),
        )


class Minutes:
    """Requests of each of the last MINUTES minutes. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = array("L", bytes(array("L").itemsize * MINUTES))
        self._minute = int(clock() // 60)

    def add(self) -> None:
        self._turn()
        self._counts[self._minute % MINUTES] += 1

    def counts(self) -> tuple[int, ...]:
        """Return the counts, the oldest minute first."""
        self._turn()
        at = self._minute % MINUTES + 1
        return (*self._counts[at:], *self._counts[:at])

    def _turn(self) -> None:
        """Forget the minutes that are over for so long."""
        now = int(self._clock() // 60)
        for minute in range(self._minute + 1, min(now, self._minute + MINUTES) + 1):
            self._counts[minute % MINUTES] = 0
        self._minute = now


MAX_VERSIONS = 8
MAX_LABELS = 100
OTHER = "(other)"
"""Stands for the classes after the first MAX_LABELS."""
_MAX_SCORED = 50_000
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


class AnswerCounts:
    """Counts of the versions that answered last, safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: OrderedDict[int, VersionCounts] = OrderedDict()

    def answered(self, event: Answered) -> None:
        """Count the images of one request, unless it failed or was not ordinary traffic."""
        if event.error is not None or not event.is_traffic:
            return
        best = [int(image.logits.argmax()) for image in event.scored]
        few = max(1, _MAX_SCORED // len(event.resident.labels))
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

    def add_to(self, families: Families, labels: tuple[str, ...]) -> None:
        """Add what a scrape shows, with these labels before those of each family."""
        with self._lock:
            for version, row in sorted(self._by_version.items()):
                own = (*labels, str(version))
                for label, count in zip(row.labels, row.images, strict=True):
                    families.images.add_metric((*own, label), count)
                families.unknown.add_metric(own, row.unknown)
                families.scores.add_metric(own, row.buckets(), row.score_sum)
                for name, index in asdict(row.drift).items():
                    if index is not None:
                        families.drift.add_metric((*own, name), index)

    def _row(self, resident: Resident) -> VersionCounts:
        row = self._by_version.get(resident.version)
        if row is None:
            row = self._by_version[resident.version] = VersionCounts.of(resident)
            if len(self._by_version) > MAX_VERSIONS:
                self._by_version.popitem(last=False)
        self._by_version.move_to_end(resident.version)
        return row


class Families:
    """The metrics of answers, without values."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        own = (*labels, "version")
        self.images = CounterMetricFamily(
            "dne_class_images",
            "Images by version and best class; the classes after the first hundred are one.",
            labels=(*own, "label"),
        )
        self.unknown = CounterMetricFamily(
            "dne_unknown_images", "Images like no class of the version.", labels=own
        )
        self.scores = HistogramMetricFamily(
            "dne_score", "Calibrated probabilities of the best classes.", labels=own
        )
        self.drift = GaugeMetricFamily(
            "dne_drift_psi",
            "Population stability index of the last answers against the held-out images: of the "
            "mix of classes, or of scores.",
            labels=(*own, "of"),
        )


class AnswerFamilies(Collector):
    """Makes the metrics of the answers of all models for a scrape."""

    def __init__(
        self, counts: Callable[[], Iterable[tuple[str, AnswerCounts]]], *, by_model: bool
    ) -> None:
        self._counts = counts
        self._by_model = by_model

    def collect(self) -> Iterator[Metric]:
        families = Families(("model",) if self._by_model else ())
        for model, counts in self._counts():
            counts.add_to(families, (model,) if self._by_model else ())
        yield from (families.images, families.unknown, families.scores, families.drift)
