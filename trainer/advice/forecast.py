"""Forecast what more images of a class would bring, from its errors with fewer.

With few images the mean of a class is uncertain. Its errors fall with the number of images to what
can be reached. Two numbers describe a class: error(n) = reached + slope / n^0.75. See ADR 71.

C classes, S sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

EXPONENT = 0.75
"""From 20 images on, forecasts with 1 are a third too low on average, and with 0.5 a quarter too
high."""
FEWEST_MORE, MOST_MORE, STEP = 5, 50, 5


def slopes(sizes_CS: Doubles, errors_CS: Doubles) -> Doubles:
    """Fit the slope of each class by least squares; 0 where errors do not fall, NaN without any."""
    inverse_CS = np.maximum(sizes_CS, 1) ** -EXPONENT
    centred_CS = inverse_CS - inverse_CS.mean(axis=1, keepdims=True)
    spread_C = np.square(centred_CS).sum(axis=1)
    found_C = (centred_CS * errors_CS).sum(axis=1) / np.where(spread_C > 0, spread_C, np.inf)
    return np.asarray(np.maximum(found_C, 0.0))


def gain(slope: float, *, error: float, images: int, more: int) -> float:
    """Return what `more` images beside the `images` of a class take from its error."""
    fall = float(images**-EXPONENT - (images + more) ** -EXPONENT)
    return min(slope * fall, error)


def how_many_more(images_by_class: list[int]) -> int:
    """Choose one number for all classes: half of what a class has, so that they can be compared."""
    half = float(np.median(images_by_class)) / 2
    return int(min(MOST_MORE, max(FEWEST_MORE, STEP * round(half / STEP))))
