"""Class-balanced tuning: undoes the bias against old classes, which have only exemplars."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from trainer.data import LabelledImages
from trainer.fit import DrawEpoch


def can_be_balanced(images: LabelledImages, *, retired: Collection[str] = ()) -> bool:
    """Whether every class has images: without exemplars of the old ones there is no balance."""
    return all(len(rows) for rows in _by_class(images, retired))


def balanced(images: LabelledImages, *, retired: Collection[str] = ()) -> DrawEpoch:
    """An epoch is as many images of every class as the smallest class has, drawn anew each time."""
    by_class = _by_class(images, retired)
    fewest = min(map(len, by_class))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        chosen = [order.choice(rows, size=fewest, replace=False) for rows in by_class]
        return order.permutation(np.concatenate(chosen))

    return draw


def _by_class(images: LabelledImages, retired: Collection[str]) -> list[NDArray[np.int64]]:
    return [images.rows_of(name) for name in images.classes if name not in retired]
