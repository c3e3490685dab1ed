"""Define the answers of a server as typed records. Fields of newer servers are passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dne_client.errors import ClientError, NotUnderstood

Json = Mapping[str, Any]
T = TypeVar("T")


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


def read_answer(found: Any) -> Answer:
    version = found["version"]
    return Answer(
        version=version,
        canary=found["canary"],
        predictions=tuple(_prediction(one, version) for one in found["predictions"]),
    )


def _prediction(found: Json, version: int) -> Prediction:
    return Prediction(
        filename=found["filename"],
        label=found["label"],
        score=found["score"],
        task=found["task"],
        unknown=found["unknown"],
        unknown_score=found.get("unknown_score"),
        level=found.get("level", 0),
        top=tuple(Score(label=one["label"], score=one["score"]) for one in found["top"]),
        version=version,
        id=found.get("id"),
    )


def read_versions(found: Any) -> Versions:
    return Versions(
        served=found["served"],
        channel=found["channel"],
        mode=found["mode"],
        versions=tuple(_row(one) for one in found["versions"]),
        total=found["total"],
        next_before=found["next_before"],
        raw=found,
    )


def _row(found: Json) -> VersionRow:
    return VersionRow(
        version=found["version"],
        parent=found["parent"],
        created=found["created"],
        change=found["change"],
        tasks=found["tasks"],
        classes=found["classes"],
        new_classes=tuple(found["new_classes"]),
        gate=found["gate"],
        reasons=tuple(found["reasons"]),
        delta_bytes=found["delta_bytes"],
        total_bytes=found["total_bytes"],
        error=found["error"],
        raw=found,
    )


def read_version(found: Any) -> VersionDetails:
    return VersionDetails(
        version=found["version"],
        parent=found["parent"],
        created=found["created"],
        classes=tuple(found["classes"]),
        tasks=tuple(one["name"] for one in found["tasks"]),
        verdict=found["verdict"],
        delta_bytes=found["delta_bytes"],
        total_bytes=found["total_bytes"],
        raw=found,
    )


def read_classes(found: Any) -> tuple[ClassName, ...]:
    return tuple(ClassName(label=one["label"], task=one["task"]) for one in found["classes"])


def read_moved(found: Any) -> Moved:
    return Moved(
        version=found["version"], channel=found["channel"], record=found["record"]["number"]
    )


def read_ready(found: Any) -> Ready:
    return Ready(
        version=found["version"],
        channel=found["channel"],
        mode=found["mode"],
        head=found["head"],
        engine=found["engine"],
        error=found["error"],
    )
