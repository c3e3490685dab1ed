"""Judge one image by the logits of one version: its probabilities, and whether it is unknown."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dne_serve.engines.base import Answer, Floats, Resident
from model_store.inference.doubt import none_of_these

Probabilities = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class Scored:
    """The logits of one image, and whether it is like none of the version's classes."""

    logits: Floats
    temperature: float
    is_unknown: bool
    unknown_score: float | None
    """The probability that the image is of none of the classes; None if the version has no
    shard of OOD scores."""
    token: Floats | None = None
    """The slice of the oldest expert, while the server collects images."""
    _probabilities: Probabilities | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, resident: Resident, answer: Answer) -> Scored:
        """Judge the image by the rule of the version."""
        odds = answer.log_odds
        unknown_score = None if odds is None else none_of_these(odds)
        return cls(
            logits=answer.logits,
            temperature=resident.manifest.calibration.temperature,
            is_unknown=_is_unknown(resident, answer, unknown_score),
            unknown_score=unknown_score,
            token=answer.token,
        )

    @property
    def probabilities(self) -> Probabilities:
        """Return the calibrated probability of each class. They are computed once, by the first
        reader."""
        if self._probabilities is None:
            self._probabilities = softmax(self.logits, temperature=self.temperature)
        return self._probabilities


def _is_unknown(resident: Resident, answer: Answer, unknown_score: float | None) -> bool:
    """Judge by the threshold of the likeliest class, or else by the one that was fitted."""
    detector = resident.manifest.unknown
    if detector is None:
        return False
    if detector.by_class and unknown_score is not None:
        own = detector.by_class.get(resident.labels[answer.logits.argmax()])
        if own is not None:
            return unknown_score > own.above
    score = float(answer.logits.max()) if answer.log_odds is None else answer.log_odds
    return score < detector.threshold


def softmax(logits: Floats, *, temperature: float) -> Probabilities:
    """Compute probabilities from logits. The maximum is subtracted before the division by the
    temperature, so that every result is finite."""
    below = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):  # minus infinity, and e to its power is 0
        weights = np.exp(below / temperature)
    return np.asarray(weights / weights.sum(), dtype=np.float64)
