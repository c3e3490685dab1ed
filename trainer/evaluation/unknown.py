"""Tell images of no known class by a score, set its threshold, and measure how well that works.

On a pre-trained start the score reads embeddings (ADR 53). A normal distribution around the mean of
each class, with one covariance for all, gives two signs of an image that is known: the largest
discriminant (LDA) and the distance to the nearest mean. The score is their sum, each in standard
deviations of known images. Cross-validation leaves out whole classes, takes their images for
unknown ones, and turns the score into log-odds.

N images, W channels of the oldest expert's slice of the embedding, Y classes, F images that are
scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.inference.doubt import LEAST_NORM, Doubt, none_of_these
from model_store.records.quality import Histogram, ScoreName, Unknown

Floats = NDArray[np.float32]
Scores = NDArray[np.float64]
_MOST_SCORE_BINS = 24
_FEWEST_REFUSED = 5
"""Known images that a threshold refuses of those that it stands on, if it is to be steady."""


def scores_of(logits_NC: Floats, embeddings_NW: Floats, *, doubt: Doubt | None) -> Scores:
    """Score each image as the server does: by its embedding, or else by its largest logit."""
    scores = logits_NC.max(axis=1) if doubt is None else doubt.log_odds(embeddings_NW)
    return np.asarray(scores, dtype=np.float64)


def fit_threshold(
    scores_N: Scores, *, score: ScoreName, rate: float, left_out_N: Scores | None = None
) -> Unknown | None:
    """Find the score that about `rate` of known images fall below; None without images.

    `scores_N` are of held-out images, `left_out_N` of training images that the score was not fitted
    to. The lower threshold of the two counts: each is too high where images have twins, held-out
    ones among the training images, and left-out ones in what an expert was adapted to.
    """
    if not len(scores_N):
        return None
    threshold = _threshold(scores_N, rate=rate)
    if left_out_N is not None and len(left_out_N):
        threshold = min(threshold, _threshold(left_out_N, rate=rate))
    return Unknown(
        score=score,
        threshold=threshold,
        rate=rate,
        images=len(scores_N),
        scores=_histogram(scores_N),
    )


def _threshold(scores_N: Scores, *, rate: float) -> float:
    """With n images the share of the next ones below the k-th smallest score is k / (n + 1) on
    average (conformal prediction), and between two scores it is interpolated. Fewer than
    1 / rate - 1 images allow no k: then the smallest score is the threshold."""
    scores = np.sort(scores_N)
    place = rate * (len(scores) + 1) + 1e-9
    if place < 1:
        return float(scores[0])
    # Lies between two scores, so that another machine's rounding does not decide about an image.
    between = math.floor(place) + np.clip(place % 1, 0.1, 0.9)
    return float(np.interp(between, np.arange(1, len(scores) + 1), scores))


def is_few(images: int, *, rate: float) -> bool:
    """Return whether so few images are held out that their threshold would be a matter of luck."""
    return rate * (images + 1) < _FEWEST_REFUSED


def _histogram(scores_N: Scores) -> Histogram:
    bins = min(_MOST_SCORE_BINS, math.ceil(2 * len(scores_N) ** (1 / 3)))  # Rice's rule
    counts, edges = np.histogram(scores_N, bins=bins)
    return Histogram(low=float(edges[0]), high=float(edges[-1]), counts=tuple(counts.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Doubted:
    """The scores of images, and the class that each is most like."""

    scores_N: Scores
    nearest: Sequence[str]

    def refused(self, detector: Unknown) -> float:
        """Return the share that a server calls unknown. It compares probabilities with thresholds
        of classes, and scores with the fitted one."""
        called = [
            none_of_these(score) > detector.by_class[name].above
            if name in detector.by_class
            else score < detector.threshold
            for score, name in zip(self.scores_N.tolist(), self.nearest, strict=True)
        ]
        return float(np.mean(called))


def tell_apart(
    known: Doubted, unknown: Doubted | None, *, detector: Unknown | None
) -> dict[str, Any]:
    """Measure how known and unknown images are told apart, as `dne-train evaluate` reports it.

    Refused means called unknown; accepted means not. A figure is null where there is no threshold
    or no unknown image.
    """
    return {
        "score": detector.score if detector else None,
        "threshold": detector.threshold if detector else None,
        "rate": detector.rate if detector else None,
        "refused_known": known.refused(detector) if detector else None,
        "auroc": auroc(known.scores_N, unknown.scores_N) if unknown else None,
        "false_accept_rate": 1 - unknown.refused(detector) if unknown and detector else None,
        "images": len(unknown.scores_N) if unknown else 0,
    }


def auroc(known: Scores, unknown: Scores) -> float:
    """Return how often a known image scores higher than an unknown one; ties count half."""
    ordered = np.sort(unknown)
    below = np.searchsorted(ordered, known, side="left")
    not_above = np.searchsorted(ordered, known, side="right")
    return float((below + not_above).mean() / 2 / len(unknown))


Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]
Tensors = dict[str, NDArray[np.float32]]
"""The tensors of a doubt shard, by their names in it."""

FOLDS = 5
_MORE_FOLDS, _FOLDED_IMAGES = 20, 2000
"""With few images more parts cost little, and leave a score nearly all of them."""
_UNSHIFTED_CLASSES = 5
"""The mean of so few classes says nothing of the mean of all photos."""
FEWEST_CLASSES = 4
"""The fewest classes with two images or more: one is left out, and the others tell it."""
_NEWTON_STEPS = 50
_LEAST_SHARE = 1e-9
"""The least share of the identity in a covariance: it has an inverse, whatever the images are."""
TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussians:
    """Classes as normal distributions of one covariance, in the space where it is the identity."""

    shift_W: Doubles
    centre_W: Doubles
    whiten_WW: Doubles
    means_YW: Doubles

    def whitened(self, embeddings_FW: Doubles) -> Doubles:
        return (_normalised(embeddings_FW - self.shift_W) - self.centre_W) @ self.whiten_WW

    def signs(self, embeddings_FW: Doubles) -> tuple[Doubles, Doubles]:
        """Return the largest discriminant of each image, and its squared length."""
        z_FW = self.whitened(embeddings_FW)
        halves_Y = np.square(self.means_YW).sum(axis=1) / 2
        return (z_FW @ self.means_YW.T - halves_Y).max(axis=1), np.square(z_FW).sum(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeftOutSigns:
    """The signs of images that were left out, and whether their class was there."""

    discriminant_F: Doubles
    square_F: Doubles
    known_F: NDArray[np.bool_]

    def score(self, weight: float) -> Doubles:
        """Score the images: 1 is the Mahalanobis distance, more counts the discriminant more."""
        return weight * self.discriminant_F - self.square_F / 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DoubtFit:
    """The tensors of a doubt shard, and the log-odds of images that were left out of the fit."""

    tensors: Tensors
    left_out_F: Scores
    knows_held_out: bool = False
    """Held-out images are among those of the fit, each of them left out once."""


def fit_doubt(
    embeddings_NW: NDArray[np.float32],
    labels_N: NDArray[np.int64],
    *,
    classes: int,
    answered: Sequence[int],
    groups_N: Labels | None = None,
) -> DoubtFit | None:
    """Fit the score for images of the `answered` ones of `classes`. Images of one of the `groups_N`
    are left out together, and those of -1 never.

    Return None where an answered class has no images, where too few classes have two, and where
    the embeddings do not tell classes that were left out from the others.
    """
    images_Y = np.bincount(labels_N, minlength=classes)[list(answered)]
    if not images_Y.all() or (images_Y > 1).sum() < FEWEST_CLASSES:
        return None
    embeddings, labels = embeddings_NW.astype(np.float64), _places(labels_N, answered)
    often_N = (images_Y > 1)[labels]  # an only image cannot be left out
    left_out = leave_out(
        embeddings[often_N], _places(labels[often_N], np.flatnonzero(images_Y > 1))
    )
    gaussians = fit_gaussians(embeddings, labels)
    if gaussians is None or left_out is None:
        return None
    weight = 1 + _trust(len(images_Y)) * (discriminant_weight(left_out) - 1)
    slope, intercept = fit_log_odds(left_out.score(weight), left_out.known_F)
    if slope <= 0:
        return None
    folded = _folded(gaussians, weight=weight, slope=slope, intercept=intercept)
    left_out_F = np.zeros(0)
    if groups_N is not None:
        crossed = _cross_fitted(embeddings, labels, groups_N)
        left_out_F = slope * crossed.score(weight) + intercept
    return DoubtFit(
        tensors=_among_all(folded, classes=classes, answered=answered), left_out_F=left_out_F
    )


def _cross_fitted(embeddings_NW: Doubles, labels_N: Labels, groups_N: Labels) -> _LeftOutSigns:
    """Leave out one part of the groups of each class after the other, and no class whole."""
    folds = max(FOLDS, min(_MORE_FOLDS, _FOLDED_IMAGES // len(labels_N)))
    part_N = np.full(len(labels_N), -1)
    for place in range(int(labels_N.max()) + 1):
        rows = np.flatnonzero((labels_N == place) & (groups_N >= 0))
        _, group_of_row = np.unique(groups_N[rows], return_inverse=True)
        part_N[rows] = (group_of_row + place) % folds
    signs = [(np.zeros(0), np.zeros(0))]
    for part in range(folds):
        seen_N = part_N != part
        scored_N = ~seen_N & np.isin(labels_N, labels_N[seen_N])
        among, places_N = np.unique(labels_N[seen_N], return_inverse=True)
        gaussians = fit_gaussians(embeddings_NW[seen_N], places_N) if len(among) > 1 else None
        if gaussians is not None and scored_N.any():
            signs.append(gaussians.signs(embeddings_NW[scored_N]))
    discriminants, squares = (np.concatenate(one) for one in zip(*signs, strict=True))
    known_F = np.ones(len(squares), dtype=bool)
    return _LeftOutSigns(discriminant_F=discriminants, square_F=squares, known_F=known_F)


def _trust(classes: int) -> float:
    """Return the share of what the classes have in common that counts: their mean, and the
    discriminant. Few classes have much in common that strange photos share."""
    return max(0.0, 1 - _UNSHIFTED_CLASSES / classes)


def fit_gaussians(embeddings_NW: Doubles, labels_N: Labels) -> Gaussians | None:
    """Fit means and the shared covariance, shrunk as Ledoit and Wolf do; None if all images of
    each class are the same."""
    classes = int(labels_N.max()) + 1
    shift_W = _trust(classes) * _means(embeddings_NW, labels_N, classes).mean(axis=0)
    unit_NW = _normalised(embeddings_NW - shift_W)
    means_YW = _means(unit_NW, labels_N, classes)
    centre_W = means_YW.mean(axis=0)
    freedom = max(1, len(labels_N) - classes)
    within_NW = (unit_NW - means_YW[labels_N]) * np.sqrt(len(labels_N) / freedom)
    covariance_WW = shrunk(within_NW)
    if covariance_WW is None:
        return None
    # Any matrix will do that makes the covariance the identity, and this one is found soonest.
    whiten_WW = np.linalg.inv(np.linalg.cholesky(covariance_WW)).T
    return Gaussians(
        shift_W=shift_W,
        centre_W=centre_W,
        whiten_WW=whiten_WW,
        means_YW=(means_YW - centre_W) @ whiten_WW,
    )


def leave_out(embeddings_NW: Doubles, labels_N: Labels) -> _LeftOutSigns | None:
    """Leave out one part of the classes and one of the images after the other. Images of a class
    that was left out whole are unknown, those of the other classes known."""
    classes = int(labels_N.max()) + 1
    folds = min(FOLDS, classes)
    image_part_N = _rank_in_class(labels_N) % folds
    signs: list[tuple[Doubles, Doubles]] = []
    known: list[NDArray[np.bool_]] = []
    for fold in range(folds):
        stays_Y = np.arange(classes) % folds != fold
        stays_N, scored_N = stays_Y[labels_N], image_part_N == fold
        seen_N = stays_N & ~scored_N
        places_Y = np.cumsum(stays_Y) - 1
        gaussians = fit_gaussians(embeddings_NW[seen_N], places_Y[labels_N[seen_N]])
        if gaussians is None:
            return None
        signs.append(gaussians.signs(embeddings_NW[scored_N]))
        known.append(stays_N[scored_N])
    discriminants, squares = zip(*signs, strict=True)
    return _LeftOutSigns(
        discriminant_F=np.concatenate(discriminants),
        square_F=np.concatenate(squares),
        known_F=np.concatenate(known),
    )


def discriminant_weight(left_out: _LeftOutSigns) -> float:
    """Weigh the discriminant so that it counts as much as the distance.

    The squared distance to the nearest mean is |z|² - 2 discriminant.
    """
    discriminant_F = left_out.discriminant_F[left_out.known_F]
    distance_F = left_out.square_F[left_out.known_F] - 2 * discriminant_F
    return 1 + float(distance_F.std() / (2 * max(TINY, discriminant_F.std())))


def fit_log_odds(score_F: Doubles, known_F: NDArray[np.bool_]) -> tuple[float, float]:
    """Fit slope and intercept of the log-odds by logistic regression, as if half of the images
    were unknown. Platt's targets keep the slope finite where a score parts all images."""
    known, unknown = int(known_F.sum()), int((~known_F).sum())
    target_F = np.where(known_F, (known + 1) / (known + 2), 1 / (unknown + 2))
    share_F = np.where(known_F, 0.5 / known, 0.5 / unknown)
    middle, spread = float(score_F.mean()), float(score_F.std()) + TINY
    design_F2 = np.stack([(score_F - middle) / spread, np.ones_like(score_F)], axis=1)
    found_2 = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        odds_F = np.clip(design_F2 @ found_2, -30, 30)
        share_known_F = 1 / (1 + np.exp(-odds_F))
        gradient_2 = design_F2.T @ (share_F * (share_known_F - target_F))
        weight_F = share_F * share_known_F * (1 - share_known_F)
        hessian_22 = (design_F2 * weight_F[:, None]).T @ design_F2 + TINY * np.eye(2)
        step_2 = np.linalg.solve(hessian_22, gradient_2)
        found_2 -= np.clip(step_2, -2, 2)  # far from the solution a full step may overshoot
        if np.abs(step_2).max() < 1e-9:
            break
    slope = float(found_2[0]) / spread
    return slope, float(found_2[1]) - slope * middle


def _folded(
    gaussians: Gaussians, *, weight: float, slope: float, intercept: float
) -> dict[str, Doubles]:
    """Fold weight, slope and intercept into the tensors, so that they give log-odds."""
    scale = np.sqrt(slope)
    project_WW = gaussians.whiten_WW * scale
    halves_Y = np.square(gaussians.means_YW).sum(axis=1) / 2
    return {
        "doubt.shift": gaussians.shift_W,
        "doubt.project": project_WW,
        "doubt.bias": -gaussians.centre_W @ project_WW,
        "doubt.prototypes": weight * scale * gaussians.means_YW,
        "doubt.offsets": intercept - weight * slope * halves_Y,
    }


def _among_all(folded: dict[str, Doubles], *, classes: int, answered: Sequence[int]) -> Tensors:
    """Make a row for every class. The rows of retired classes are zeros that nobody reads."""
    tensors = {name: tensor.astype(np.float32) for name, tensor in folded.items()}
    for name in ("doubt.prototypes", "doubt.offsets"):
        rows = np.zeros((classes, *tensors[name].shape[1:]), dtype=np.float32)
        rows[list(answered)] = tensors[name]
        tensors[name] = rows
    return tensors


def _places(labels_N: Labels, among: Sequence[int] | NDArray[np.intp]) -> Labels:
    """Number labels by their places in `among`, which rises."""
    return np.searchsorted(np.asarray(among), labels_N).astype(np.int64)


def _normalised(embeddings_NW: Doubles) -> Doubles:
    length_N1 = np.linalg.norm(embeddings_NW, axis=1, keepdims=True)
    return np.asarray(embeddings_NW / np.maximum(length_N1, LEAST_NORM))


def _means(embeddings_NW: Doubles, labels_N: Labels, classes: int) -> Doubles:
    return np.stack([embeddings_NW[labels_N == place].mean(axis=0) for place in range(classes)])


def shrunk(centred_NW: Doubles) -> Doubles | None:
    """Estimate a covariance, shrunk towards a multiple of the identity."""
    images, width = centred_NW.shape
    sample_WW = centred_NW.T @ centred_NW / images
    level = float(np.trace(sample_WW)) / width
    if level < TINY:
        return None
    target_WW = level * np.eye(width)
    away = float(np.square(sample_WW - target_WW).sum())
    squared_NW = np.square(centred_NW)
    noise = float((squared_NW.T @ squared_NW / images - np.square(sample_WW)).sum()) / images
    share = min(1.0, max(_LEAST_SHARE, noise / max(away, TINY * level**2)))
    return np.asarray((1 - share) * sample_WW + share * target_WW)


def _rank_in_class(labels_N: Labels) -> Labels:
    rank_N = np.empty_like(labels_N)
    for place in range(int(labels_N.max()) + 1):
        rows = np.flatnonzero(labels_N == place)
        rank_N[rows] = np.arange(len(rows))
    return rank_N
