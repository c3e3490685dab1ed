"""Leave out parts of the images of each class, and judge them by the others.

The classifier is cheap: a normal distribution around the mean of each class, with one covariance
for all (LDA). Fewer images of one class change its mean only, so the errors with a quarter, half
and all of its images cost hardly more than one fit.

N images, W channels of the embedding, C classes, S sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.evaluation.unknown import Gaussians, fit_gaussians

Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]
Flags = NDArray[np.bool_]

SHARES = (0.25, 0.5, 1.0)
"""The shares of its images that a class is learnt from."""
FOLDS = 5
DRAWS = 8
"""The choices of a share: each image of a small share matters much."""
FEWEST_IMAGES = 8
"""The fewest different images of a class that are left out: a quarter of fewer is one image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The answers of classifiers to images that they had not seen."""

    logits_NC: Doubles
    judged_N: Flags
    """False: the image was never left out, and its logits mean nothing."""
    sizes_CS: Doubles
    """The images a class was learnt from, on average over the folds."""
    errors_CS: Doubles
    """The share of its left-out images that were wrong then; NaN for a class that has none."""


def leave_out(
    embeddings_NW: Doubles, labels_N: Labels, *, may_judge_N: Flags, seed: int = 0
) -> LeftOut | None:
    """Judge images of classes with enough of them. Every class below the largest label has images.

    Return None where embeddings do not differ, where there is one class, and where no class has
    enough images. Images that may not be judged are learnt from in every fold.
    """
    classes = int(labels_N.max(initial=-1)) + 1
    folds_N = _folds(embeddings_NW, labels_N, may_judge_N, seed=seed)
    judged_N = folds_N >= 0
    if classes < 2 or not judged_N.any():
        return None
    draw = np.random.default_rng(seed)
    logits_NC = np.zeros((len(labels_N), classes))
    wrong_CS, sizes_CS = np.zeros((classes, len(SHARES))), np.zeros((classes, len(SHARES)))
    for fold in range(FOLDS):
        out_N = folds_N == fold
        gaussians = fit_gaussians(embeddings_NW[~out_N], labels_N[~out_N])
        if gaussians is None:
            return None
        part = _Part(
            gaussians=gaussians,
            seen_NW=gaussians.whitened(embeddings_NW[~out_N]),
            seen_N=labels_N[~out_N],
            out_MW=gaussians.whitened(embeddings_NW[out_N]),
            out_M=labels_N[out_N],
        )
        logits_NC[out_N] = part.logits_MC()
        for place in np.unique(part.out_M):
            wrong_S, sizes_S = part.wrong_by_share(int(place), draw=draw)
            wrong_CS[place] += wrong_S
            sizes_CS[place] += sizes_S / FOLDS
    images_C = np.bincount(labels_N[judged_N], minlength=classes).astype(np.float64)
    with np.errstate(invalid="ignore"):
        errors_CS = wrong_CS / np.where(images_C > 0, images_C, np.nan)[:, None]
    return LeftOut(logits_NC=logits_NC, judged_N=judged_N, sizes_CS=sizes_CS, errors_CS=errors_CS)


def distinct(embeddings_NW: Doubles) -> Labels:
    """Number the images so that those with the same embedding have the same number."""
    _, number_N = np.unique(embeddings_NW, axis=0, return_inverse=True)
    return number_N.reshape(-1).astype(np.int64)


def _folds(embeddings_NW: Doubles, labels_N: Labels, may_judge_N: Flags, *, seed: int) -> Labels:
    """Spread the different images of each class over the folds; -1 is in none.

    Images that are the same are in the same fold: otherwise a copy would tell the label.
    """
    draw = np.random.default_rng(seed)
    number_N = distinct(embeddings_NW)
    folds_N = np.full(len(labels_N), -1, dtype=np.int64)
    for place in np.unique(labels_N):
        rows = np.flatnonzero((labels_N == place) & may_judge_N)
        numbers, which = np.unique(number_N[rows], return_inverse=True)
        if len(numbers) >= FEWEST_IMAGES:
            fold = draw.permutation(len(numbers)) % FOLDS
            folds_N[rows] = fold[which.reshape(-1)]
    return folds_N


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One fold: images that are seen and M that are left out, in the whitened space."""

    gaussians: Gaussians
    seen_NW: Doubles
    seen_N: Labels
    out_MW: Doubles
    out_M: Labels

    def logits_MC(self) -> Doubles:
        return discriminants(self.out_MW, self.gaussians.means_YW)

    def wrong_by_share(
        self, place: int, *, draw: np.random.Generator
    ) -> tuple[Doubles, NDArray[np.float64]]:
        """Count the wrong ones of a class, with its mean from a part of its images."""
        mine_MW = self.out_MW[self.out_M == place]
        others_MC = discriminants(mine_MW, self.gaussians.means_YW)
        others_MC[:, place] = -np.inf
        rival_M = others_MC.max(axis=1)
        seen_KW = self.seen_NW[self.seen_N == place]
        wrong, sizes = [], []
        for share in SHARES:
            size = max(1, round(share * len(seen_KW)))
            chosen_D = [draw.permutation(len(seen_KW))[:size] for _ in range(DRAWS)]
            means_DW = np.stack([seen_KW[rows].mean(axis=0) for rows in chosen_D])
            own_MD = discriminants(mine_MW, means_DW)
            wrong.append(float((own_MD <= rival_M[:, None]).sum()) / DRAWS)
            sizes.append(float(size))
        return np.array(wrong), np.array(sizes)


def discriminants(embeddings_MW: Doubles, means_CW: Doubles) -> Doubles:
    """Score whitened embeddings: the larger, the nearer to the mean."""
    return np.asarray(embeddings_MW @ means_CW.T - np.square(means_CW).sum(axis=1) / 2)
