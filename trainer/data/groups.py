"""Find images that belong together: the data says so, or the pictures are nearly the same.

Frames of one film, or pictures of one thing from one place, must stand on one side of a split:
judged by a twin of what it learnt from, a classifier looks better than it is (ADR 92). Know
nothing of torch.

N images of a class, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.data.folders import LabelledImages
from trainer.data.pictures import in_threads

_FINE, _COARSE = 16, 8
"""Sides of the two thumbnails by which images are compared."""
_LEAST_LIKENESS = 0.6
"""The least mean cosine between the thumbnails of two groups that are joined (ADR 92)."""
LIKE = "like image "
"""Begins the name of a group of images that are nearly the same."""
SAME = 2.0
"""The largest difference of numbers in the thumbnails of two copies."""
_LEAST_DETAIL = 0.04
"""The least share of an image's variance that its coarse thumbnail does not show (ADR 125)."""
AT_ONCE = 512
"""Images of a class that are compared with each other, in the order of their names."""

Doubles = NDArray[np.float64]
Groups = NDArray[np.int64]


def with_groups(images: LabelledImages) -> LabelledImages:
    """Give images that belong together the name of a group. An image that is like no other stays
    without one.

    Where the data says groups, these count, and images without one are compared.
    """
    groups = list(images.groups)
    for name in images.classes:
        rows = np.array([row for row in images.rows_of(name) if not groups[row]], dtype=np.int64)
        *thumbnails, detail_N = _thumbnails(images, rows)
        join = _copies if len(rows) and np.median(detail_N) < _LEAST_DETAIL else _near_duplicates
        for start in range(0, len(rows), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            first_N = join([thumbnail[part] for thumbnail in thumbnails])
            for row, first in zip(rows[part], first_N, strict=True):
                if (first_N == first).sum() > 1:
                    groups[row] = f"{LIKE}{rows[part][first]}"
    return images.grouped(groups)


def numbers_of(images: LabelledImages) -> Groups:
    """Number the groups of images; an image without a group is one by itself."""
    first: dict[tuple[int, str], int] = {}
    return np.array(
        [
            first.setdefault((int(label), group), row) if group else row
            for row, (label, group) in enumerate(zip(images.labels_N, images.groups, strict=True))
        ],
        dtype=np.int64,
    )


def _near_duplicates(thumbnails: Sequence[Doubles]) -> Groups:
    """Join images of a class that are far more alike than the class is: [N], the first of each
    group.

    The mean of the class is taken from its thumbnails: pictures of one sign are alike in the sign.
    """
    likeness_NN = np.mean([_cosines(one - one.mean(axis=0)) for one in thumbnails], axis=0)
    likeness_NN[_are_copies(thumbnails[-1])] = 1.0
    return _joined(likeness_NN, least=_LEAST_LIKENESS)


def _copies(thumbnails: Sequence[Doubles]) -> Groups:
    """Join copies alone: [N], the first of each group. For images without more detail than their
    thumbnails, among which a near duplicate looks like any picture of a similar thing."""
    return _joined(_are_copies(thumbnails[-1]).astype(np.float64), least=_LEAST_LIKENESS)


def _are_copies(coarse_NV: Doubles) -> NDArray[np.bool_]:
    """Compare each two images: [N, N]."""
    return np.array([np.abs(coarse_NV - one).max(axis=1) <= SAME for one in coarse_NV])


def _joined(likeness_NN: Doubles, *, least: float) -> Groups:
    """Join the two groups that are most alike on average, while they are `least` alike."""
    between_NN = likeness_NN.copy()
    np.fill_diagonal(between_NN, -np.inf)
    count = len(between_NN)
    first_N, size_N = np.arange(count), np.ones(count)
    while count > 1:
        one, other = divmod(int(between_NN.argmax()), len(between_NN))
        if between_NN[one, other] < least:
            break
        one, other = min(one, other), max(one, other)
        share = size_N[one] / (size_N[one] + size_N[other])
        both_N = share * between_NN[one] + (1 - share) * between_NN[other]
        between_NN[one], between_NN[:, one] = both_N, both_N
        between_NN[other], between_NN[:, other] = -np.inf, -np.inf
        between_NN[one, one] = -np.inf
        size_N[one] += size_N[other]
        first_N[first_N == other] = one
        count -= 1
    return first_N.astype(np.int64)


def _thumbnails(images: LabelledImages, rows: NDArray[np.int64]) -> list[Doubles]:
    """Make two thumbnails of each image: a fine one of even light, and a coarse one as it is. The
    third row is the detail that the coarse one does not show."""

    def shrunk(row: int) -> tuple[Doubles, Doubles, float]:
        picture = Image.fromarray(images.pictures.pixels_of(int(row)))
        fine, coarse = (
            picture.resize((side, side), Image.Resampling.BOX) for side in (_FINE, _COARSE)
        )
        enlarged = coarse.resize(picture.size, Image.Resampling.BICUBIC)
        return _even(_numbers(fine)), _numbers(coarse), _unseen(picture, enlarged)

    made = list(in_threads(lambda place: shrunk(rows[place]), len(rows)))
    return [np.array([one[part] for one in made]) for part in range(3)]


def _numbers(picture: Image.Image) -> Doubles:
    return np.asarray(picture, dtype=np.float64).ravel()


def _unseen(picture: Image.Image, enlarged: Image.Image) -> float:
    """Return the share of a picture's variance that its enlarged thumbnail does not show."""
    pixels = np.asarray(picture, dtype=np.float64)
    missed = np.square(pixels - np.asarray(enlarged, dtype=np.float64)).mean()
    return float(missed / max(pixels.var(axis=(0, 1)).mean(), 1e-9))


def _even(thumbnail: Doubles) -> Doubles:
    centred = thumbnail - thumbnail.mean()
    return np.asarray(centred / max(float(np.linalg.norm(centred)), 1e-9))


def _cosines(vectors_NV: Doubles) -> Doubles:
    length_N1 = np.linalg.norm(vectors_NV, axis=1, keepdims=True)
    unit_NV = vectors_NV / np.maximum(length_N1, 1e-9)
    return np.asarray(unit_NV @ unit_NV.T)
