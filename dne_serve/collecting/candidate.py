"""Define a candidate: a picture that was answered, and might be kept."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dne_serve.engines.base import Floats, Resident
from dne_serve.inference.answers import Listed, Scored, best_of
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
    token: Floats | None = None
    """The token as the engine gave it. Most candidates are never kept, so the writer packs it."""

    @classmethod
    def of(
        cls,
        resident: Resident,
        scored: Scored,
        scores: NDArray[np.float64],
        *,
        listed: Sequence[Listed],
    ) -> Given:
        """Note the likeliest classes. `scores` are the probabilities of all classes, and `listed`
        the classes that the answer names, which are enough as a rule."""
        if len(listed) >= min(KEPT_TOP, len(resident.labels)):
            top = tuple((one["label"], one["score"]) for one in listed[:KEPT_TOP])
        else:
            order = best_of(scores, KEPT_TOP)
            labels = [resident.labels[index] for index in order.tolist()]
            top = tuple(zip(labels, scores[order].tolist(), strict=True))
        return cls(
            version=resident.version,
            top=top,
            margin=top[0][1] - top[1][1] if len(top) > 1 else top[0][1],
            is_unknown=scored.is_unknown,
            unknown_score=scored.unknown_score,
            # A copy: a view would keep the tokens of its whole batch in memory.
            token=None if scored.token is None else scored.token.copy(),
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
    def nbytes(self) -> int:
        """The memory that it takes, but for a few hundred bytes."""
        token = self.given.token
        return len(self.data) + (0 if token is None else token.nbytes)

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
