"""Find likely label errors and confusions among left-out images, by confident learning.

An image is suspected if another class is likelier than its own, and as likely as that class is for
its own images on average (Northcutt and others, 2021). The least likely labels come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.advice.left_out import Doubles, Flags, Labels, LeftOut

FEWEST_CONFUSED = 2
"""One image that is taken for another class is no confusion yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """The probabilities of left-out images, and what follows from them."""

    rows_M: Labels
    """The images in the order of doubt: the likeliest label errors first."""
    suspected_M: Flags
    answers_M: Labels
    score_M: Doubles
    """The probability of the image's own label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Images of a class that were taken for another, the surest mistakes first."""

    label: int
    taken_for: int
    rows: NDArray[np.int64]


def doubt_labels(left_out: LeftOut, labels_N: Labels) -> Doubted:
    """Rank all images that were left out by the probability of their labels."""
    rows = np.flatnonzero(left_out.judged_N)
    labels_M, chances_MC = labels_N[rows], _softmax(left_out.logits_NC[rows])
    own_M = chances_MC[np.arange(len(rows)), labels_M]
    thresholds_C = _thresholds(chances_MC, labels_M)
    answers_M = chances_MC.argmax(axis=1)
    sure_M = chances_MC[np.arange(len(rows)), answers_M] >= thresholds_C[answers_M]
    order = np.argsort(_margins(left_out.logits_NC[rows], labels_M), kind="stable")
    return Doubted(
        rows_M=rows[order].astype(np.int64),
        suspected_M=((answers_M != labels_M) & sure_M)[order],
        answers_M=answers_M[order].astype(np.int64),
        score_M=own_M[order],
    )


def confusions(left_out: LeftOut, labels_N: Labels) -> list[Pair]:
    """List pairs of classes that are confused, the most frequent first."""
    rows = np.flatnonzero(left_out.judged_N)
    labels_M, logits_MC = labels_N[rows], left_out.logits_NC[rows]
    answers_M = logits_MC.argmax(axis=1)
    pairs = []
    for label, answer in {*zip(labels_M.tolist(), answers_M.tolist(), strict=True)}:
        these = np.flatnonzero((labels_M == label) & (answers_M == answer))
        if label != answer and len(these) >= FEWEST_CONFUSED:
            margin = logits_MC[these, label] - logits_MC[these, answer]
            ordered = rows[these[np.argsort(margin, kind="stable")]].astype(np.int64)
            pairs.append(Pair(label=label, taken_for=answer, rows=ordered))
    return sorted(pairs, key=lambda pair: (-len(pair.rows), pair.label, pair.taken_for))


def _thresholds(chances_MC: Doubles, labels_M: Labels) -> Doubles:
    """Average the probability of each class over the images that bear its label."""
    found_C = np.ones(chances_MC.shape[1])
    for place in np.unique(labels_M):
        found_C[place] = chances_MC[labels_M == place, place].mean()
    return found_C


def _margins(logits_MC: Doubles, labels_M: Labels) -> Doubles:
    """Return how far a label is above its best rival. Unlike a probability it does not round off
    to zero for the surest mistakes, so it orders them."""
    own_M = logits_MC[np.arange(len(labels_M)), labels_M]
    others_MC = logits_MC.copy()
    others_MC[np.arange(len(labels_M)), labels_M] = -np.inf
    return np.asarray(own_M - others_MC.max(axis=1))


def _softmax(logits_MC: Doubles) -> Doubles:
    weights = np.exp(logits_MC - logits_MC.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
