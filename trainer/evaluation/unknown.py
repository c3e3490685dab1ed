"""Tell images of no known class by their score, and measure how well that works."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.inference.doubt import Doubt
from model_store.records.quality import Histogram, ScoreName, Unknown

Floats = NDArray[np.float32]
Scores = NDArray[np.float64]
MOST_SCORE_BINS = 24


def scores_of(logits_NC: Floats, token_NW: Floats, *, doubt: Doubt | None) -> Scores:
    """Score each image as the server does: by its token, or else by its largest logit."""
    scores = logits_NC.max(axis=1) if doubt is None else doubt.log_odds(token_NW)
    return np.asarray(scores, dtype=np.float64)


def fit_threshold(scores_N: Scores, *, score: ScoreName, rate: float) -> Unknown | None:
    """Find the score that about `rate` of known images fall below; None without images.

    With n images the share of the next ones below the k-th smallest score is k / (n + 1) on
    average. Fewer than 1 / rate - 1 images allow no k: then the smallest score is the threshold.
    """
    if not len(scores_N):
        return None
    scores = np.sort(scores_N)
    refused = math.floor(rate * (len(scores) + 1) + 1e-9)
    # Lies between two scores, so that another machine's rounding does not decide about an image.
    threshold = float(scores[refused - 1 : refused + 1].mean()) if refused else float(scores[0])
    return Unknown(
        score=score, threshold=threshold, rate=rate, images=len(scores), scores=_histogram(scores)
    )


def _histogram(scores_N: Scores) -> Histogram:
    bins = min(MOST_SCORE_BINS, math.ceil(2 * len(scores_N) ** (1 / 3)))  # Rice's rule
    counts, edges = np.histogram(scores_N, bins=bins)
    return Histogram(low=float(edges[0]), high=float(edges[-1]), counts=tuple(counts.tolist()))


def tell_apart(
    known: Scores, unknown: Scores | None, *, detector: Unknown | None
) -> dict[str, Any]:
    """Measure how known and unknown images are told apart, as `dne-train evaluate` reports it.

    Refused means called unknown; accepted means not. A figure is null where there is no threshold
    or no unknown image.
    """
    threshold = detector.threshold if detector else None
    return {
        "score": detector.score if detector else None,
        "threshold": threshold,
        "rate": detector.rate if detector else None,
        "refused_known": None if threshold is None else float((known < threshold).mean()),
        "auroc": None if unknown is None else auroc(known, unknown),
        "false_accept_rate": None
        if unknown is None or threshold is None
        else float((unknown >= threshold).mean()),
        "images": 0 if unknown is None else len(unknown),
    }


def auroc(known: Scores, unknown: Scores) -> float:
    """Return how often a known image scores higher than an unknown one; ties count half."""
    ordered = np.sort(unknown)
    below = np.searchsorted(ordered, known, side="left")
    not_above = np.searchsorted(ordered, known, side="right")
    return float((below + not_above).mean() / 2 / len(unknown))
