"""Find images to judge by that are nearly the same as images to learn from.

They make a version look better than it is. Tokens find candidates, and perceptual hashes decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from model_store.preprocess import dhash
from trainer.advice.left_out import Doubles
from trainer.data.folders import LabelledImages

LEAST_COSINE = 0.9
"""The least cosine of tokens of which hashes are compared: copies after JPEG, scaling and light
have more, and hashes of other images agree by chance."""
MOST_BITS = 6
"""The most bits in which the hashes of copies differ (ADR 66)."""
ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    judged: int
    learnt: int
    bits: int


def find_copies(
    judged: LabelledImages,
    learnt: LabelledImages,
    *,
    judged_MW: Doubles,
    learnt_NW: Doubles,
) -> list[Pair]:
    """Pair each image to judge by with the nearest image to learn from, if it is a copy. Two images
    that the store keeps are left out: an earlier version had advice on them, and both would have to
    be decoded."""
    if not len(judged) or not len(learnt):
        return []
    # A mean in common makes all tokens look alike.
    shift_W = learnt_NW.mean(axis=0)
    ours_MW, theirs_NW = _unit(judged_MW - shift_W), _unit(learnt_NW - shift_W)
    found = []
    for start in range(0, len(judged), ROWS_AT_ONCE):
        alike_PN = ours_MW[start : start + ROWS_AT_ONCE] @ theirs_NW.T
        nearest_P = alike_PN.argmax(axis=1)
        for row in np.flatnonzero(alike_PN.max(axis=1) >= LEAST_COSINE):
            found.append((start + int(row), int(nearest_P[row])))
    pairs = []
    for ours, theirs in found:
        if judged.pictures.is_stored(ours) and learnt.pictures.is_stored(theirs):
            continue
        bits = (_hash(judged, ours) ^ _hash(learnt, theirs)).bit_count()
        if bits <= MOST_BITS:
            pairs.append(Pair(judged=ours, learnt=theirs, bits=bits))
    return sorted(pairs, key=lambda pair: (pair.bits, pair.judged))


def _hash(images: LabelledImages, row: int) -> int:
    pixels_1HWC = images.take(np.array([row], dtype=np.int64)).pixels_NHWC
    return dhash(Image.fromarray(pixels_1HWC[0]))


def _unit(tokens_NW: Doubles) -> Doubles:
    length_N1 = np.linalg.norm(tokens_NW, axis=1, keepdims=True)
    return np.asarray(tokens_NW / np.maximum(length_N1, 1e-12))
