"""Choose how a classifier is fitted, by images that are left out of the fit.

Images that belong together, such as frames of one film, are left out together: an image that is
judged beside its twin tells nothing. N tokens, W channels, C classes, M images that are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.evaluation.judged import Judged, fit_temperature, negative_log_likelihood
from trainer.fitting.logistic import solve
from trainer.fitting.problem import Discriminant, Linear, Problem, Rotation, variance_of

Method = Literal["logistic", "lda"]

L2_PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""The penalties to choose from, for tokens of variance 1; the largest first."""
SHRINKAGES = (0.98, 0.95, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
"""The shares of the identity in a covariance to choose from; the largest first."""
UNSEEN_L2_PENALTY = 0.03
"""The penalty where no class has two images, and none can be left out to choose by."""
LEAST_GAIN = 0.001
"""The gain in an image's log-likelihood that makes the next smaller strength worth a try."""
PATIENCE: dict[Method, int] = {"logistic": 1, "lda": 4}
"""The strengths without a gain that end the search. Where a few directions drown all others, much
of the identity makes every answer a guess, and a little less makes nothing better."""
FOLDS = 5
IMAGES_TO_CHOOSE_BY = 4000
NUMBERS_TO_CHOOSE_BY = 8_000_000
"""Numbers in all tokens to choose by: a choice on wide tokens takes fewer images."""
UNITS = (1e-3, 1e4, 71)
"""The least and the largest unit of discriminants, and the steps between them, a quarter each."""
TOLERANCE_TO_CHOOSE = 1e-4
ITERATIONS_TO_CHOOSE = 20
"""A quarter of the time of a full fit, and the same choice (ADR 51)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choices of cross-validation."""

    method: Method = "logistic"
    strength: float
    """The L2 penalty for tokens of variance 1, or the share of the identity in the covariance."""
    temperature: float
    by_sample: bool = False
    """True if a part of the tokens gave the temperature: a fit to all of them is surer."""
    accuracy: float | None = None
    """The share of the left-out images that were answered right; None: none were left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """A choice, and what it made of the images that were left out."""

    choice: Choice
    losses_M: NDArray[np.float64]
    """The negative log-likelihood of each left-out image; empty if there was none."""
    left_out: Judged | None
    """The left-out images, by the logits that the fit gives them."""
    likelihood: float
    """The sum of the losses and of the temperature's, the less the better."""


Solutions = Sequence[Linear]
Attempts = Iterator[tuple[float, Solutions]]
"""Strengths, the largest first, each with a classifier for each fold."""


def choose(
    problem: Problem,
    *,
    judged_N: Tensor | None = None,
    groups_N: Tensor | None = None,
    methods: Sequence[Method] = ("logistic", "lda"),
) -> Tried:
    """Choose the fit under which left-out images are likeliest, each fit at its temperature.

    Only those that are `judged_N` are left out; None: all are. Images of one of the `groups_N` are
    left out together; None: each is left out alone.
    """
    sample, folds_N = _folded(problem, judged_N=judged_N, groups_N=groups_N)
    if not (folds_N >= 0).any():
        unseen = Choice(strength=UNSEEN_L2_PENALTY, temperature=1.0)
        return Tried(choice=unseen, losses_M=np.zeros(0), left_out=None, likelihood=0.0)
    whole = len(problem.labels_N)
    tried = [
        _best(ATTEMPTS[method](sample, folds_N), sample, folds_N, method=method, whole=whole)
        for method in methods
    ]
    return min(tried, key=lambda one: one.likelihood)


def leave_out(
    problem: Problem, choice: Choice, *, judged_N: Tensor, groups_N: Tensor | None
) -> Judged | None:
    """Judge images by fits without them, as it was chosen; None where none can be left out."""
    sample, folds_N = _folded(problem, judged_N=judged_N, groups_N=groups_N)
    if not (folds_N >= 0).any():
        return None
    kept = [sample.take(folds_N != fold) for fold in range(FOLDS)]
    if choice.method == "lda":
        solutions = [Discriminant(one).solve(shrinkage=choice.strength) for one in kept]
    else:
        penalty = choice.strength * len(problem.labels_N) / len(folds_N) * variance_of(sample)
        solutions = [solve(one, l2_penalty=penalty) for one in kept]
    return _left_out(sample, folds_N, solutions)


def _folded(
    problem: Problem, *, judged_N: Tensor | None, groups_N: Tensor | None
) -> tuple[Problem, Tensor]:
    """Take a sample in the span of its tokens, and say in which fold each image is left out; -1:
    in none."""
    rows_N = _sample(problem)
    sample = problem.take(rows_N).in_single_precision()
    folds_N = spread(sample, None if groups_N is None else groups_N[rows_N])
    if judged_N is not None:
        folds_N = torch.where(judged_N[rows_N], folds_N, -1)
    return Rotation.of(sample.tokens_NW).turned(sample), folds_N


def fit(problem: Problem, choice: Choice, *, variance: float) -> Linear:
    """Fit all tokens as it was chosen. `variance`: that of a channel of the tokens chosen by."""
    rotation = Rotation.of(problem.tokens_NW)
    turned = rotation.turned(problem)
    if choice.method == "lda":
        return rotation.back(Discriminant(turned).solve(shrinkage=choice.strength))
    return rotation.back(solve(turned, l2_penalty=choice.strength * variance))


def _best(
    attempts: Attempts, sample: Problem, folds_N: Tensor, *, method: Method, whole: int
) -> Tried:
    """Try smaller strengths until left-out images are not likelier any more."""
    best: Tried | None = None
    in_vain = 0
    for strength, solutions in attempts:
        # More images need a smaller penalty. A covariance of more images is not so much surer.
        share = len(sample.labels_N) / whole if method == "logistic" else 1.0
        judged = _left_out(sample, folds_N, solutions)
        tried = _tried(judged, method=method, strength=strength * share)
        if best is None or tried.likelihood <= best.likelihood - LEAST_GAIN * len(judged.labels_N):
            best, in_vain = tried, 0
            continue
        in_vain += 1
        if in_vain == PATIENCE[method]:
            break
    assert best is not None
    by_sample = len(sample.labels_N) < whole
    return replace(best, choice=replace(best.choice, by_sample=by_sample))


def _tried(judged: Judged, *, method: Method, strength: float) -> Tried:
    # Discriminants have any scale: the prior on temperatures is for logits of about 1.
    unit = unit_of(judged) if method == "lda" else 1.0
    judged = replace(judged, logits_NC=judged.logits_NC / unit)
    temperature = fit_temperature(judged)
    return Tried(
        choice=Choice(
            method=method,
            strength=strength,
            temperature=unit * temperature,
            accuracy=float(judged.right_N.mean()),
        ),
        losses_M=_losses(judged, temperature),
        left_out=judged,
        likelihood=negative_log_likelihood(judged, float(np.log(temperature))),
    )


def _logistic(sample: Problem, folds_N: Tensor) -> Attempts:
    solutions: list[Linear] = []
    variance = variance_of(sample)
    for penalty in L2_PENALTIES:
        before: Sequence[Linear | None] = solutions or [None] * FOLDS
        solutions = [
            solve(
                sample.take(folds_N != fold),
                l2_penalty=penalty * variance,
                near=near,
                tolerance=TOLERANCE_TO_CHOOSE,
                iterations=ITERATIONS_TO_CHOOSE,
            )
            for fold, near in enumerate(before)
        ]
        yield penalty, solutions


def _discriminant(sample: Problem, folds_N: Tensor) -> Attempts:
    by_fold = [Discriminant(sample.take(folds_N != fold)) for fold in range(FOLDS)]
    for shrinkage in SHRINKAGES:
        yield shrinkage, [one.solve(shrinkage=shrinkage) for one in by_fold]


ATTEMPTS: dict[Method, Callable[[Problem, Tensor], Attempts]] = {
    "logistic": _logistic,
    "lda": _discriminant,
}


def _left_out(problem: Problem, folds_N: Tensor, solutions: Solutions) -> Judged:
    """Judge each classifier by the images that it was not fitted to."""
    logits_NC = torch.zeros(len(folds_N), problem.count, dtype=problem.tokens_NW.dtype)
    for fold, (weight_CW, bias_C) in enumerate(solutions):
        unseen = folds_N == fold
        logits_NC[unseen] = problem.tokens_NW[unseen] @ weight_CW.T + bias_C
    judged = folds_N >= 0
    return Judged(
        classes=tuple(map(str, range(problem.count))),
        labels_N=problem.labels_N[judged].numpy(),
        logits_NC=logits_NC[judged].float().numpy(),
    )


def unit_of(judged: Judged) -> float:
    """Find the unit of logits in which labels are likeliest, if one image in all were wrong.

    Without that image, logits that part all images would have no bound.
    """
    images = len(judged.labels_N)
    smoothing = 1 / (images + 1)
    units = np.geomspace(*UNITS)
    found = []
    for unit in units:
        scaled = judged.logits_NC.astype(np.float64) / unit
        scaled -= scaled.max(axis=1, keepdims=True)
        log_shares = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        of_label = log_shares[np.arange(images), judged.labels_N].mean()
        found.append((1 - smoothing) * of_label + smoothing * log_shares.mean())
    return float(units[int(np.argmax(found))])


def _losses(judged: Judged, temperature: float) -> NDArray[np.float64]:
    scaled = judged.logits_NC.astype(np.float64) / temperature
    top_M = scaled.max(axis=1)
    log_sum_M = top_M + np.log(np.exp(scaled - top_M[:, None]).sum(axis=1))
    return np.asarray(log_sum_M - scaled[np.arange(len(scaled)), judged.labels_N])


def spread(problem: Problem, groups_N: Tensor | None = None) -> Tensor:
    """Spread the groups of each class evenly over the folds; the only group of a class is in none:
    -1. Without groups every image is one."""
    labels_N = problem.labels_N.numpy()
    groups = np.arange(len(labels_N)) if groups_N is None else groups_N.numpy()
    folds_N, turn = np.full(len(labels_N), -1), 0
    for place in range(problem.count):
        rows = np.flatnonzero(labels_N == place)
        named, of_row, sizes = np.unique(groups[rows], return_inverse=True, return_counts=True)
        if len(named) < 2:
            continue
        order = np.argsort(-sizes, kind="stable")
        folds_N[rows] = _evenly(sizes[order], turn=turn)[np.argsort(order)[of_row]]
        turn += len(rows)
    return torch.from_numpy(folds_N)


def _evenly(sizes: NDArray[np.int64], *, turn: int) -> NDArray[np.int64]:
    """Give each group, the largest first, to the fold with the fewest images. `turn` tells which
    of equal folds comes first."""
    images, found = np.zeros(FOLDS, dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    for place, size in enumerate(sizes):
        fold = (int(np.roll(images, -turn % FOLDS).argmin()) + turn % FOLDS) % FOLDS
        found[place], images[fold] = fold, images[fold] + size
    return found


def _sample(problem: Problem) -> Tensor:
    """Take rows of equally many images of each class, and no more than the choice needs."""
    images = min(IMAGES_TO_CHOOSE_BY, NUMBERS_TO_CHOOSE_BY // problem.tokens_NW.shape[1])
    most = max(FOLDS, images // problem.count)
    rows = [
        torch.nonzero(problem.labels_N == place).squeeze(1)[:most] for place in range(problem.count)
    ]
    return torch.cat(rows)
