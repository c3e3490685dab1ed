"""Which images an epoch visits, so that classes with many images do not drown the others."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from trainer.data.folders import LabelledImages
from trainer.learning.fit import DrawEpoch

ENOUGH_A_CLASS = 20
"""A class with fewer does not make balanced epochs shorter still: its images come again."""


def can_be_balanced(images: LabelledImages, *, retired: Collection[str] = ()) -> bool:
    """Whether every class has images: without exemplars of the old ones there is no balance."""
    return all(len(rows) for rows in _by_class(images, retired))


def balanced(
    images: LabelledImages, *, retired: Collection[str] = (), most: int | None = None
) -> DrawEpoch:
    """An epoch is as many images of every class as the smallest class has, drawn anew each time,
    and not many more than `most` in all.

    Undoes the bias against old classes, which have only exemplars.
    """
    by_class = _by_class(images, retired)
    counts = [len(rows) for rows in by_class]
    size = max(min(counts), min(ENOUGH_A_CLASS, round(sum(counts) / len(counts))))
    if most is not None:
        size = max(1, min(size, round(most / len(counts))))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        return order.permutation(np.concatenate([_drawn(rows, size, order) for rows in by_class]))

    return draw


def evened(images: LabelledImages, *, among: Collection[str]) -> DrawEpoch:
    """An epoch is as long as if every image came once; the classes `among` have equal shares of
    theirs, drawn anew each time, and all other images come once."""
    by_class = [rows for name in among if len(rows := images.rows_of(name))]
    places = [images.classes.index(name) for name in among]
    others = np.flatnonzero(~np.isin(images.labels_N, places)).astype(np.int64)
    size = round(sum(map(len, by_class)) / max(1, len(by_class)))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        drawn = [_drawn(rows, size, order) for rows in by_class]
        return order.permutation(np.concatenate([others, *drawn]))

    return draw


def side_by_side(images: LabelledImages, *, among: Collection[str]) -> DrawEpoch:
    """An epoch is the images of the classes `among`, in equal shares, and as many others: it does
    not grow with what was learnt before."""
    by_class = [rows for name in among if len(rows := images.rows_of(name))]
    places = [images.classes.index(name) for name in among]
    others = np.flatnonzero(~np.isin(images.labels_N, places)).astype(np.int64)
    size = round(sum(map(len, by_class)) / max(1, len(by_class)))
    beside = min(len(others), sum(map(len, by_class)))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        drawn = [_drawn(rows, size, order) for rows in by_class]
        return order.permutation(np.concatenate([order.permutation(others)[:beside], *drawn]))

    return draw


def _drawn(rows: NDArray[np.int64], size: int, order: np.random.Generator) -> NDArray[np.int64]:
    """`size` of the rows: none comes again before all others have come."""
    rounds = -(-size // len(rows))
    return np.concatenate([order.permutation(rows) for _ in range(rounds)])[:size]


def _by_class(images: LabelledImages, retired: Collection[str]) -> list[NDArray[np.int64]]:
    return [images.rows_of(name) for name in images.classes if name not in retired]
