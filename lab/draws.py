"""Draw epochs, and choose rates, as the authors of DNE and DyTox do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainer.data.sampling import DrawEpoch


def constant(steps: int) -> Callable[[int], float]:
    """Keep the learning rate in all steps."""
    return lambda step: 1.0


def repeated(draw_epoch: DrawEpoch, times: int) -> DrawEpoch:
    """Repeat the first images of an epoch side by side, until it is as long as it was.

    Repeated augmentation: copies of an image come in one batch, each changed in its own way.
    """

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        rows = draw_epoch(order)
        return np.repeat(rows[: -(-len(rows) // times)], times)[: len(rows)]

    return draw
