"""Define a candidate: a picture that was answered, and might be kept."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dne_serve.collecting.tokens import packed
from dne_serve.engines.base import Resident
from dne_serve.inference.answers import Scored, best_of
from dne_serve.rules.collect import CollectRule

KEPT_TOP = 5
KEEP, FEEDBACK = "keep", "feedback"
"""The rules of pictures that a client asked to keep, or sent feedback to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The answer to a picture. Holds no reference to the version, which may leave the memory."""

    version: int
    top: tuple[tuple[str, float], ...]
    margin: float
    is_unknown: bool
    unknown_score: float | None
    token: str | None = None
    """The direction of the token, as an item keeps it."""

    @classmethod
    def of(cls, resident: Resident, scored: Scored, scores: NDArray[np.float64]) -> Given:
        """Note the likeliest classes. `scores` are the probabilities of all classes."""
        order = best_of(scores, KEPT_TOP)
        values: list[float] = scores[order].tolist()
        return cls(
            version=resident.version,
            top=tuple(
                (resident.labels[index], min(1.0, max(0.0, value)))
                for index, value in zip(order.tolist(), values, strict=True)
            ),
            margin=values[0] - values[1] if len(values) > 1 else values[0],
            is_unknown=scored.is_unknown,
            unknown_score=scored.unknown_score,
            token=None if scored.token is None else packed(scored.token),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A picture as it was sent, with its answer and the rules that it is kept by."""

    id: str
    data: bytes
    given: Given
    rules: tuple[str, ...] = ()
    other: tuple[int, str] | None = None
    """Number and answer of another version that gives another label."""
    kept: Future[None] | None = None
    """Told to a client that waits until the picture is kept."""

    @property
    def is_asked_for(self) -> bool:
        """Tell whether a client wants it kept, whatever the rules and the hourly cap say."""
        return KEEP in self.rules or FEEDBACK in self.rules

    def kept_by(self, rule: str, kept: Future[None]) -> Candidate:
        return replace(self, rules=(*self.rules, rule), kept=kept)


def broken_rules(rules: tuple[CollectRule, ...], given: Given, *, draw: float) -> tuple[str, ...]:
    """List the rules that a picture is kept by. `draw` is a random number from 0 to 1."""
    found = []
    for rule in rules:
        if (
            (rule.what == "unknown" and given.is_unknown)
            or (rule.what == "score" and given.top[0][1] < rule.bound)
            or (rule.what == "margin" and given.margin < rule.bound)
            or (rule.what == "sample" and draw < rule.bound)
        ):
            found.append(rule.text)
    return tuple(found)
