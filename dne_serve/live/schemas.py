"""Define the JSON of `GET /live`, as the OpenAPI document shows it."""

from __future__ import annotations

from pydantic import BaseModel


class RecentClass(BaseModel):
    """Images that were answered with a class. A long name is cut."""

    label: str
    images: int


class RecentClasses(BaseModel):
    """The last answers of the served version, at most 2,000 images."""

    images: int
    unknown: int
    """Images that were like no class."""
    classes: list[RecentClass]
    """The most frequent classes, the most frequent first."""
    others: int
    """Images of all other classes."""
    drift_classes: float | None
    """Population stability index of the mix of classes against the held-out images."""
    drift_scores: float | None
    """The same of scores."""


class Swap(BaseModel):
    """The last change of the served version, by the clock of the server."""

    version: int
    time: float
    count: int


class Beside(BaseModel):
    """A version beside the served one, and on how many images both have the same label. An image
    counts where both were asked."""

    version: int
    same: int
    other: int
    answered: int
    """Images that it answered; 0 for a shadow."""


class ActivityAnswer(BaseModel):
    """The state of the server now. Rates and times are those of predictions."""

    version: int | None
    channel: str
    requests_per_second: float
    p50_ms: float | None
    p99_ms: float | None
    failed: float | None
    """Share of the requests of the last minute that were answered with 5xx."""
    queue: int
    queue_limit: int
    answers: RecentClasses | None
    swap: Swap | None
    canary: Beside | None
    shadow: Beside | None
