"""Class-balanced tuning: undoes the bias against old classes, which have only exemplars."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.data import LabelledImages
from trainer.fit import DrawEpoch


def can_be_balanced(images: LabelledImages) -> bool:
    """Whether every class has images: without exemplars of the old ones there is no balance."""
    return bool(np.bincount(images.labels_N, minlength=len(images.classes)).min() > 0)


def balanced(images: LabelledImages) -> DrawEpoch:
    """An epoch is as many images of every class as the smallest class has, drawn anew each time."""
    by_class = [images.rows_of(name) for name in images.classes]
    fewest = min(map(len, by_class))

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        chosen = [order.choice(rows, size=fewest, replace=False) for rows in by_class]
        return order.permutation(np.concatenate(chosen))

    return draw
