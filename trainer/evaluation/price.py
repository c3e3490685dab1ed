"""Estimate what it costs old classes that there are more classes to choose among (ADR 93).

An old and a new class that look alike cost each other images, however well they are learnt. How
many images of old classes this takes, cross-validation tells: of images that were left out of the
fit, whose answer is right among the old classes, and a new class among all. A fall of that size is
no fault of a version. A fall beyond it is.

A new class with the pictures of an old one would pass so for a hard neighbour. Where left-out
images of a new class are taken for one old class too often, nothing is allowed for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.evaluation.judged import Judged

FEWEST = 20
"""The fewest left-out images of old classes that tell a price."""
_TOO_OFTEN = 1 / 3
"""The share of images of a new class from which on an old class is no neighbour, but its twin:
half would be a guess between the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The left-out images of old classes, and how many of them fairly go to new ones."""

    taken: int = 0
    images: int = 0

    @property
    def share(self) -> float:
        return self.taken / self.images if self.images else 0.0

    def each_counting(self, share: float) -> Price:
        """Count each image as this share of one: images that belong together are not several."""
        return Price(taken=round(self.taken * share), images=round(self.images * share))

    def chance_of(self, taken: int, *, of: int) -> float:
        """Return the chance that so many of other images go to new classes, or more, if the price
        of both is the same: Fisher's exact test."""
        both, found = self.images + of, self.taken + taken
        ways = math.comb(both, found)
        most = min(found, of)
        tail = sum(
            math.comb(of, count) * math.comb(self.images, found - count)
            for count in range(taken, most + 1)
        )
        return tail / ways


NO_PRICE = Price()


def price_of(left_out: Judged | None, *, newest: Collection[str]) -> Price:
    """Estimate the price from images that were left out; none where too few were."""
    if left_out is None:
        return NO_PRICE
    new = [place for place, name in enumerate(left_out.classes) if name in set(newest)]
    old_N = ~np.isin(left_out.labels_N, new)
    if old_N.sum() < FEWEST or not new:
        return NO_PRICE
    answers_N = left_out.logits_NC.argmax(axis=1)
    taken_N = old_N & taken(left_out, newest=newest)
    for place in new:
        own = answers_N[left_out.labels_N == place]
        counts = np.bincount(own, minlength=len(left_out.classes)).astype(np.float64)
        counts[new] = 0
        for twin in np.flatnonzero(counts >= max(1, len(own)) * _TOO_OFTEN):
            taken_N[(left_out.labels_N == twin) & (answers_N == place)] = False
    return Price(taken=int(taken_N.sum()), images=int(old_N.sum()))


def taken(judged: Judged, *, newest: Collection[str]) -> NDArray[np.bool_]:
    """Mark images that are answered with one of the newest classes, and would be right without
    them: [N]."""
    new = [place for place, name in enumerate(judged.classes) if name in set(newest)]
    among_old_NC = without(judged, newest).logits_NC
    right_N = among_old_NC.argmax(axis=1) == judged.labels_N
    return np.asarray(right_N & np.isin(judged.logits_NC.argmax(axis=1), new))


def without(judged: Judged, newest: Collection[str]) -> Judged:
    """Let none of the newest classes be answered."""
    new = [place for place, name in enumerate(judged.classes) if name in set(newest)]
    logits_NC = judged.logits_NC.copy()
    logits_NC[:, new] = -np.inf
    return Judged(classes=judged.classes, labels_N=judged.labels_N, logits_NC=logits_NC)
