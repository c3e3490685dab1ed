"""Define candidates for the inbox: pictures that were answered and may be kept.

The direction of a token is kept as one signed byte a channel, in base64. Groups need only
directions, and the cosine of two tokens changes by less than a hundredth.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dne_serve.engines.base import Floats, Resident
from dne_serve.engines.scored import Scored
from dne_serve.inference.answers import Listed, best_of
from dne_serve.setting_values import CollectRule

KEPT_TOP = 5
MOST = 127
MAX_CHANNELS = 4096
"""Only the first channels of a wider token are kept: the record of an item has a limit."""
KEEP, FEEDBACK = "keep", "feedback"
"""The rules of pictures that a client asked to keep, or sent feedback to."""
KEEP_SHARE, RULES_SHARE = 0.5, 0.9
"""The share of the room for each kind. Half is reserved for rules and feedback, and a tenth for
feedback alone: every client that may predict can ask to keep pictures, or send pictures that the
rules choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """The answer to a picture, without a reference to the version, which may be unloaded."""

    version: int
    top: tuple[tuple[str, float], ...]
    margin: float
    is_unknown: bool
    unknown_score: float | None
    token: Floats | None = None
    """The token from the engine. Only the writer packs it, because few candidates are kept."""

    @classmethod
    def of(
        cls,
        resident: Resident,
        scored: Scored,
        *,
        listed: Sequence[Listed],
    ) -> GivenAnswer:
        """Note the likeliest classes. `listed` are the classes in the answer, which are usually
        enough."""
        if len(listed) >= min(KEPT_TOP, len(resident.labels)):
            top = tuple((entry["label"], entry["score"]) for entry in listed[:KEPT_TOP])
        else:
            scores = scored.probabilities
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
class KeepCandidate:
    """A picture as it was sent, with its answer and the rules that keep it."""

    id: str
    data: bytes
    given: GivenAnswer
    rules: tuple[str, ...] = ()
    other: tuple[int, str] | None = None
    """Number and label of another version that disagrees."""
    kept: Future[None] | None = None
    """Set when the picture is kept, for a client that waits for it."""

    @property
    def nbytes(self) -> int:
        """The memory that the candidate takes, less a few hundred bytes."""
        token = self.given.token
        return len(self.data) + (0 if token is None else token.nbytes)

    @property
    def is_feedback(self) -> bool:
        """Return whether a client sent feedback, which skips the hourly cap and the check for
        duplicates."""
        return FEEDBACK in self.rules

    @property
    def share(self) -> float:
        """The share of queue and inbox that candidates of this kind may fill."""
        if self.is_feedback:
            return 1.0
        return KEEP_SHARE if set(self.rules) == {KEEP} else RULES_SHARE

    def kept_by(self, rule: str, kept: Future[None]) -> KeepCandidate:
        return replace(self, rules=(*self.rules, rule), kept=kept)


def broken_rules(
    rules: tuple[CollectRule, ...], given: GivenAnswer, *, draw: float
) -> tuple[str, ...]:
    """List the rules that keep a picture. `draw` is a random number from 0 to 1."""
    broken = []
    for rule in rules:
        if (
            (rule.what == "unknown" and given.is_unknown)
            or (rule.what == "score" and given.top[0][1] < rule.bound)
            or (rule.what == "margin" and given.margin < rule.bound)
            or (rule.what == "sample" and draw < rule.bound)
        ):
            broken.append(rule.text)
    return tuple(broken)


def pack_direction(token: NDArray[np.floating]) -> str | None:
    """Encode the direction of a token; None if the token is zero or not finite."""
    kept = np.asarray(token[:MAX_CHANNELS], dtype=np.float64)
    largest = float(np.abs(kept).max(initial=0.0))
    if not 0 < largest < np.inf:
        return None
    whole = np.rint(kept * (MOST / largest)).astype(np.int8)
    return base64.b64encode(whole.tobytes()).decode()


def unpack_direction(text: str) -> NDArray[np.float32]:
    """Decode a direction. Records are checked for base64 when they are read."""
    return np.frombuffer(base64.b64decode(text), dtype=np.int8).astype(np.float32)
