"""Measure how far the last answers of a version are from those to its held-out images.

The population stability index of two mixes p and q is Σ (q − p) ln(q / p). By custom, 0.1 is a
small shift and 0.25 a large one. Chance alone adds about (bins − 1) × (1 / images + 1 / held-out
images), so the number of bins is limited by the number of held-out images, and a short window gives
no index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dne_serve.recent.answers import Counts, RecentAnswers
from model_store.records.quality import SCORE_BOUNDS, Metrics

FEWEST = 500
"""Answers in the window before there is an index: chance then adds 0.04 at most."""
IMAGES_A_BIN = 20
"""Held-out images for each bin: chance then adds 0.05 at most."""
MOST_BINS = 20
SCORE_BINS = len(SCORE_BOUNDS) + 1
EMPTY = 0.5
"""Added to the count of every bin, so that an empty one has a logarithm."""


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
        most = min(MOST_BINS, int(bins.sum()) // IMAGES_A_BIN)
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
    """The answers of a version to its held-out images, as far as its manifest tells them."""

    classes: Mix | None
    scores: Mix | None
    size: int
    """The number of classes."""

    @classmethod
    def of(cls, metrics: Metrics, *, classes: Sequence[str]) -> Reference:
        """Sum up the confusion table by answer. Metrics without the table, or without counts of
        scores, give no index: they are older, or a class was retired since."""
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


def stability_index(expected: ArrayLike, found: ArrayLike) -> float:
    """Compute the population stability index of two lists of counts."""
    p, q = _shares(expected), _shares(found)
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
    smoothed = np.asarray(counts, dtype=np.float64) + EMPTY
    return np.asarray(smoothed / smoothed.sum())
