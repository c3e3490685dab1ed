"""Gather the tokens that a classifier is fitted to: of images, and in the place of lost images.

Statistics are of the first expert's slice, the pre-trained one. Younger experts have none of
classes that are older than they are: a stand-in takes their channels from images of its class
that are left. N tokens, W channels, V of them used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainer.tokens.statistics import ClassStatistics, accumulate, merge, stand_ins

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """Tokens to fit a classifier to, and the statistics that follow from them."""

    tokens_NV: Floats
    labels_N: NDArray[np.int64]
    real_N: NDArray[np.bool_]
    """False for stand-ins."""
    rows_N: NDArray[np.int64]
    """The place of each token's image among those that were given; -1 for stand-ins."""
    narrow: bool
    """Only the first slice is there, because a class has no image left."""
    changed: Mapping[str, ClassStatistics]
    """The statistics of classes that have new images, or had none."""
    classes: tuple[str, ...]

    def without(self, retired: Collection[str]) -> Gathered:
        """Leave out classes that are not answered any more."""
        places = [place for place, name in enumerate(self.classes) if name in retired]
        stays_N = ~np.isin(self.labels_N, places)
        return replace(
            self,
            tokens_NV=self.tokens_NV[stays_N],
            labels_N=self.labels_N[stays_N],
            real_N=self.real_N[stays_N],
            rows_N=self.rows_N[stays_N],
            changed={name: one for name, one in self.changed.items() if name not in retired},
        )


def gather(
    tokens_NW: Floats,
    labels_N: NDArray[np.int64],
    *,
    classes: Sequence[str],
    new: int,
    width: int,
    known: Mapping[str, ClassStatistics],
) -> Gathered:
    """Put stand-ins beside the tokens of classes that have lost images.

    The first `new` tokens are of images that no statistics have seen; all others are exemplars,
    which the `known` statistics of their class have counted.
    """
    is_new_N = np.arange(len(labels_N)) < new
    uses_N = np.ones(len(labels_N), dtype=bool)
    changed: dict[str, ClassStatistics] = {}
    made: list[_Made] = []
    for place, name in enumerate(classes):
        of_class_N, statistics = labels_N == place, known.get(name)
        fresh_N = of_class_N & is_new_N if statistics else of_class_N
        if fresh_N.any():
            added = accumulate(tokens_NW[fresh_N, :width])
            changed[name] = merge(statistics, added) if statistics else added
        exemplars_N = of_class_N & ~fresh_N
        if statistics and exemplars_N.sum() < statistics.count:
            # Stand-ins have the exemplars in their mean, so the exemplars do not count twice.
            first = stand_ins(statistics, seed=place).astype(np.float32)
            made.append(_Made(place=place, first_MF=first, left_LW=tokens_NW[of_class_N]))
            uses_N &= ~exemplars_N
    narrow = any(not len(one.left_LW) for one in made)
    used = width if narrow else tokens_NW.shape[1]
    parts = [tokens_NW[uses_N, :used], *(one.tokens(used) for one in made)]
    labels = [labels_N[uses_N], *(np.full(len(one.first_MF), one.place) for one in made)]
    stand_in_rows = np.full(sum(map(len, parts[1:])), -1)
    return Gathered(
        tokens_NV=np.concatenate(parts),
        rows_N=np.concatenate([np.flatnonzero(uses_N), stand_in_rows]).astype(np.int64),
        labels_N=np.concatenate(labels),
        real_N=np.arange(sum(map(len, parts))) < int(uses_N.sum()),
        narrow=narrow,
        changed=changed,
        classes=tuple(classes),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    """Stand-ins for the images of a class: M of them, with the F channels of the first slice."""

    place: int
    first_MF: Floats
    left_LW: Floats
    """The tokens of images that are left of the class."""

    def tokens(self, used: int) -> Floats:
        """Return the first `used` channels; those of younger experts come from images in turn."""
        width = self.first_MF.shape[1]
        if used == width:
            return self.first_MF
        turns_M = np.arange(len(self.first_MF)) % len(self.left_LW)
        return np.concatenate([self.first_MF, self.left_LW[turns_M, width:used]], axis=1)
