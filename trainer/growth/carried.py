"""Carry the statistics of classes over to an expert that was changed since.

Images that are at hand have tokens of both experts. A linear map, fitted to these, takes the means
and scatters of classes whose images are gone. The mean of a class that has some images left is
moved by what the map misses on them.

N images, W channels of the token before the change and after it, R rows of a factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.embeddings.cache import Floats
from trainer.embeddings.statistics import SURE, ClassStatistics, Doubles, factor_of

RIDGE = 0.1
"""The penalty of the map, for channels of variance 1 and relative to the number of images: without
one the map would follow the few images that it is fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMap:
    """token after ≈ middle_after + (token before - middle_before) · (1 + change)."""

    before_W: Doubles
    after_W: Doubles
    linear_WW: Doubles

    @classmethod
    def fit(cls, before_NW: Floats, after_NW: Floats) -> TokenMap:
        """Fit the change of the tokens, which is penalised, and not the tokens: without images the
        map is the identity."""
        before, after = before_NW.astype(np.float64), after_NW.astype(np.float64)
        middle_before, middle_after = before.mean(axis=0), after.mean(axis=0)
        centred = before - middle_before
        change = after - middle_after - centred
        width = centred.shape[1]
        ridge = RIDGE * max(float(np.square(centred).sum(axis=0).mean()), 1e-12)
        gram_WW = centred.T @ centred + ridge * np.eye(width)
        linear_WW = np.eye(width) + np.linalg.solve(gram_WW, centred.T @ change)
        return cls(before_W=middle_before, after_W=middle_after, linear_WW=linear_WW)

    def __call__(self, token: Doubles) -> Doubles:
        """Map tokens, or a mean of tokens."""
        return np.asarray(self.after_W + (token - self.before_W) @ self.linear_WW)


def carry(
    statistics: Mapping[str, ClassStatistics],
    *,
    before_NW: Floats,
    after_NW: Floats,
    labels_N: NDArray[np.int64],
    classes: Sequence[str],
) -> dict[str, ClassStatistics]:
    """Give the statistics that these classes have after the change, as far as a map can tell."""
    width = min(before_NW.shape[1], *(len(one.mean_W) for one in statistics.values()))
    before_NW, after_NW = before_NW[:, :width], after_NW[:, :width]
    over = TokenMap.fit(before_NW, after_NW)
    carried = {}
    for name, one in statistics.items():
        rows = np.flatnonzero(labels_N == classes.index(name))
        mean_W = over(one.mean_W)
        if len(rows):
            missed_W = (after_NW[rows] - over(before_NW[rows].astype(np.float64))).mean(axis=0)
            mean_W = mean_W + missed_W * len(rows) / (len(rows) + SURE)
        factor_RW = factor_of(one.factor_RW @ over.linear_WW, count=one.count)
        carried[name] = ClassStatistics(count=one.count, mean_W=mean_W, factor_RW=factor_RW)
    return carried
