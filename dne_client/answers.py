"""Define the answers of a server as typed records. Fields of newer servers are passed over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dne_client.errors import ClientError, NotUnderstood

Json = Mapping[str, Any]
T = TypeVar("T")
LARGEST = 1 << 63
ROUNDED = 1e-6


def text(found: Json, name: str) -> str:
    value = found[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not text")
    return value


def flag(found: Json, name: str) -> bool:
    value = found[name]
    if not isinstance(value, bool):
        raise TypeError(f"{name} is neither true nor false")
    return value


def whole(found: Json, name: str) -> int:
    value = found[name]
    if not isinstance(value, int) or isinstance(value, bool) or not -LARGEST < value < LARGEST:
        raise TypeError(f"{name} is not a whole number")
    return value


def number(found: Json, name: str) -> float:
    value = found[name]
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        return whole(found, name)
    except TypeError as error:
        raise TypeError(f"{name} is not a number") from error


def share(found: Json, name: str) -> float:
    """Read a probability. Sums of rounded numbers may be a little above 1."""
    value = number(found, name)
    if not 0.0 <= value <= 1.0 + ROUNDED:
        raise TypeError(f"{name} is not from 0 to 1")
    return value


def rows(found: Json, name: str) -> list[Any]:
    value = found[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is not a list")
    return value


def texts(found: Json, name: str) -> tuple[str, ...]:
    return tuple(text({name: one}, name) for one in rows(found, name))


def optional(read: Callable[[Json, str], T], found: Json, name: str) -> T | None:
    """Read a field that may be null, or that older servers do not send."""
    return None if found.get(name) is None else read(found, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    label: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The answer to one image. Where `unknown` is true, `label` is only the nearest class."""

    filename: str | None
    label: str
    score: float
    """The calibrated probability over the version's classes."""
    task: str
    unknown: bool
    unknown_score: float | None
    """The probability of none of the classes; None where the version has no such score."""
    level: int
    """0 for a class; else `label` is a group, so many steps above its likeliest class."""
    top: tuple[Score, ...]
    version: int
    """The version that answered."""
    id: str | None
    """The name of the image in the server's inbox, while the server collects images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answers to all images of a request, in the order sent, by one version."""

    version: int
    canary: bool
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One image of many: its prediction, or the error that it met."""

    place: int
    """The place of the image among those given, from 0 on."""
    name: str
    prediction: Prediction | None = None
    error: ClientError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One row of the list of versions."""

    version: int
    parent: int | None
    created: str | None
    change: str
    """The change that the version made, such as "learnt vehicles"."""
    tasks: int
    classes: int
    new_classes: tuple[str, ...]
    gate: str | None
    """passed, refused, overruled or not judged."""
    reasons: tuple[str, ...]
    delta_bytes: int
    total_bytes: int
    error: str | None
    raw: Json = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """A page of versions in ascending order. `next_before` asks for the page of older ones."""

    served: int | None
    channel: str
    mode: str | None
    versions: tuple[VersionRow, ...]
    total: int
    next_before: int | None
    raw: Json = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDetails:
    version: int
    parent: int | None
    created: str
    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    verdict: str
    delta_bytes: int
    total_bytes: int
    raw: Json = field(repr=False)
    """The whole answer: shards, metrics, calibration, preprocessing and the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassName:
    label: str
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The version that the server serves after a move, and the number of the channel's record."""

    version: int
    channel: str
    record: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    version: int
    channel: str
    mode: str | None
    head: int | None
    engine: str
    error: str | None


def understood(read: Callable[[Any], T], found: Any) -> T:
    """Read an answer. Refuse one that lacks what a dne-serve server sends."""
    try:
        return read(found)
    except (AttributeError, KeyError, TypeError) as error:
        raise NotUnderstood(f"the answer is none of a dne-serve server: {error!r}") from error


def read_answer(found: Any, *, images: int) -> Answer:
    """Read the answer to so many images."""
    version, count = whole(found, "version"), len(rows(found, "predictions"))
    if count != images:
        raise NotUnderstood(f"{count} answers came for {images} images")
    return Answer(
        version=version,
        canary=flag(found, "canary"),
        predictions=tuple(_prediction(one, version) for one in rows(found, "predictions")),
    )


def _prediction(found: Json, version: int) -> Prediction:
    return Prediction(
        filename=optional(text, found, "filename"),
        label=text(found, "label"),
        score=share(found, "score"),
        task=text(found, "task"),
        unknown=flag(found, "unknown"),
        unknown_score=optional(share, found, "unknown_score"),
        level=optional(whole, found, "level") or 0,
        top=tuple(
            Score(label=text(one, "label"), score=share(one, "score")) for one in rows(found, "top")
        ),
        version=version,
        id=optional(text, found, "id"),
    )


def read_versions(found: Any) -> Versions:
    return Versions(
        served=optional(whole, found, "served"),
        channel=text(found, "channel"),
        mode=optional(text, found, "mode"),
        versions=tuple(_row(one) for one in rows(found, "versions")),
        total=whole(found, "total"),
        next_before=optional(whole, found, "next_before"),
        raw=found,
    )


def _row(found: Json) -> VersionRow:
    return VersionRow(
        version=whole(found, "version"),
        parent=optional(whole, found, "parent"),
        created=optional(text, found, "created"),
        change=text(found, "change"),
        tasks=whole(found, "tasks"),
        classes=whole(found, "classes"),
        new_classes=texts(found, "new_classes"),
        gate=optional(text, found, "gate"),
        reasons=texts(found, "reasons"),
        delta_bytes=whole(found, "delta_bytes"),
        total_bytes=whole(found, "total_bytes"),
        error=optional(text, found, "error"),
        raw=found,
    )


def read_version(found: Any) -> VersionDetails:
    return VersionDetails(
        version=whole(found, "version"),
        parent=optional(whole, found, "parent"),
        created=text(found, "created"),
        classes=texts(found, "classes"),
        tasks=tuple(text(one, "name") for one in rows(found, "tasks")),
        verdict=text(found, "verdict"),
        delta_bytes=whole(found, "delta_bytes"),
        total_bytes=whole(found, "total_bytes"),
        raw=found,
    )


def read_classes(found: Any) -> tuple[ClassName, ...]:
    return tuple(
        ClassName(label=text(one, "label"), task=text(one, "task"))
        for one in rows(found, "classes")
    )


def read_moved(found: Any) -> Moved:
    return Moved(
        version=whole(found, "version"),
        channel=text(found, "channel"),
        record=whole(found["record"], "number"),
    )


def read_ready(found: Any) -> Ready:
    return Ready(
        version=whole(found, "version"),
        channel=text(found, "channel"),
        mode=optional(text, found, "mode"),
        head=optional(whole, found, "head"),
        engine=text(found, "engine"),
        error=optional(text, found, "error"),
    )
