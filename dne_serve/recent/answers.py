"""Remember the last answers of one version: class, bin of the score, whether unknown."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

WINDOW = 2000
"""Images that are remembered of a version: 12 KB."""
UNSCORED = 255
"""Stands for the bin of an image whose score was not computed."""

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
        for place, (index, found) in enumerate(zip_longest(classes, bins, fillvalue=UNSCORED)):
            at = self._added % WINDOW
            self._classes[at] = index
            self._bins[at] = found
            self._unknown[at] = place < unknown
            self._added += 1

    @property
    def unknown(self) -> int:
        """Count the images that were like no class."""
        return sum(self._unknown[: len(self)])

    def by_class(self, classes: int) -> Counts:
        """Count the images by their best class."""
        found = np.frombuffer(self._classes, dtype=np.uint32, count=len(self))
        return np.bincount(found, minlength=classes)

    def by_bin(self, bins: int) -> Counts:
        """Count the images whose score was computed by the bin of the score."""
        found = np.frombuffer(self._bins, dtype=np.uint8, count=len(self))
        return np.bincount(found[found != UNSCORED], minlength=bins)
