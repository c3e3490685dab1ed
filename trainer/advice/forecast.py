"""Forecast what more images of a class would bring, from its errors with fewer.

With few images the mean of a class is uncertain, and its errors fall with one over the number of
images to what can be reached. So two numbers describe a class: error(n) = reached + slope / n. A
power law forecasts more than images bring (ADR 71).

C classes, S sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

FEWEST_MORE, MOST_MORE, STEP = 5, 50, 5


def slopes(sizes_CS: Doubles, errors_CS: Doubles) -> Doubles:
    """Fit the slope of each class by least squares; 0 where errors do not fall, NaN without any."""
    inverse_CS = 1 / np.maximum(sizes_CS, 1)
    centred_CS = inverse_CS - inverse_CS.mean(axis=1, keepdims=True)
    spread_C = np.square(centred_CS).sum(axis=1)
    found_C = (centred_CS * errors_CS).sum(axis=1) / np.where(spread_C > 0, spread_C, np.inf)
    return np.asarray(np.maximum(found_C, 0.0))


def gain(slope: float, *, error: float, images: int, more: int) -> float:
    """Return what `more` images beside the `images` of a class take from its error."""
    return min(slope * (1 / images - 1 / (images + more)), error)


def how_many_more(images_by_class: list[int]) -> int:
    """Choose one number for all classes: half of what a class has, so that they can be compared."""
    half = float(np.median(images_by_class)) / 2
    return int(min(MOST_MORE, max(FEWEST_MORE, STEP * round(half / STEP))))
