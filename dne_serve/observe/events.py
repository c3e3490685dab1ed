"""Describe what the server has done, and hand each description to everyone who subscribed.

`Predictor` emits one `Answered` for each request, and one `Compared` where another version was
asked too. Metrics, statistics, counts of answers, the guard and traces read the same event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the command line reads this room before it imports torch
    from dne_serve.engines.base import Resident
    from dne_serve.engines.scored import Scored

By = Literal["served", "canary", "asked"]
"""The reason why a version answers: it is served, it is the canary, or the request names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Beginning and end of a piece of work, by `time.perf_counter_ns`."""

    began_ns: int
    ended_ns: int

    @property
    def ns(self) -> int:
        return self.ended_ns - self.began_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """One request that a version has answered, or failed to answer."""

    resident: Resident
    by: By
    images: int
    times: Times
    """From the choice of the version to the logits, or to the error."""
    decoding: Times | None = None
    """Decoding of all images; None if an image could not be decoded."""
    scored: tuple[Scored, ...] = ()
    """One for each image; empty after an error."""
    error: Exception | None = None
    is_traffic: bool = True
    """False for pictures that were chosen because they are doubtful."""

    @property
    def version(self) -> int:
        return self.resident.version

    @property
    def unknown(self) -> int:
        """Count the images that are like no class of the version."""
        return sum(image.is_unknown for image in self.scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The images of one request on which two versions gave the same label, or different ones."""

    by: By
    """The reason why the first of the two answered."""
    same: int
    other: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The subscribers of one server. They are called on the event loop, so each must be quick."""

    on_answered: tuple[Callable[[Answered], None], ...] = ()
    on_compared: tuple[Callable[[Compared], None], ...] = ()

    def answered(self, event: Answered) -> None:
        for note in self.on_answered:
            note(event)

    def compared(self, event: Compared) -> None:
        for note in self.on_compared:
            note(event)
