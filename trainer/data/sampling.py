"""Draw the images of an epoch, so that classes with many images do not drown the others."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from trainer.data.folders import LabelledImages

DrawEpoch = Callable[[np.random.Generator], NDArray[np.int64]]
"""Draw the rows of the training images that an epoch visits, in this order."""

_ENOUGH_A_CLASS = 20
"""Images a class at which balanced epochs stop getting shorter: rarer images come again."""


def epoch_size(draw_epoch: DrawEpoch) -> int:
    """Count the images of an epoch."""
    return len(draw_epoch(np.random.default_rng(0)))


def can_be_balanced(images: LabelledImages, *, retired: Collection[str] = ()) -> bool:
    """Return whether every class has images: old classes without exemplars cannot be balanced."""
    return all(len(rows) for rows in _by_class(images, retired))


def balanced(images: LabelledImages, *, retired: Collection[str] = ()) -> DrawEpoch:
    """Draw as many images of every class as the smallest class has.

    Undo the bias against old classes, which have only exemplars.
    """
    by_class = _by_class(images, retired)
    counts = [len(rows) for rows in by_class]
    size = max(min(counts), min(_ENOUGH_A_CLASS, round(sum(counts) / len(counts))))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        return order.permutation(np.concatenate([_drawn(rows, size, order) for rows in by_class]))

    return draw


def evened(images: LabelledImages, *, among: Collection[str]) -> DrawEpoch:
    """Draw equal shares of the classes `among`, and every other image once.

    An epoch is as long as if every image came once.
    """
    by_class = [rows for name in among if len(rows := images.rows_of(name))]
    places = [images.classes.index(name) for name in among]
    others = np.flatnonzero(~np.isin(images.labels_N, places)).astype(np.int64)
    size = round(sum(map(len, by_class)) / max(1, len(by_class)))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        drawn = [_drawn(rows, size, order) for rows in by_class]
        return order.permutation(np.concatenate([others, *drawn]))

    return draw


def _drawn(rows: NDArray[np.int64], size: int, order: np.random.Generator) -> NDArray[np.int64]:
    """Draw `size` of the rows; none comes again before all others have come."""
    rounds = -(-size // len(rows))
    return np.concatenate([order.permutation(rows) for _ in range(rounds)])[:size]


def _by_class(images: LabelledImages, retired: Collection[str]) -> list[NDArray[np.int64]]:
    return [images.rows_of(name) for name in images.classes if name not in retired]
