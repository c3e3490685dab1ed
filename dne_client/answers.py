"""Define the answers of a server as typed records, and read them. Skip fields of newer servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from dne_client.errors import ClientError, NotUnderstood

Json = Mapping[str, Any]
T = TypeVar("T")
LARGEST = 1 << 63
_ROUNDED = 1e-6
Share = Annotated[float, "from 0 to 1"]
"""A probability. Sums of rounded numbers may be a little above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    label: str
    score: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The answer to one image. Where `unknown` is true, `label` is only the nearest class."""

    filename: str | None
    label: str
    score: Share
    """The calibrated probability over the version's classes."""
    task: str
    unknown: bool
    unknown_score: Share | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model of a server with many. `version` and `classes` are of the served version, and None if
    the model was not loaded since the server began."""

    name: str
    loaded: bool
    version: int | None
    classes: int | None
    last_use: str | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPage:
    """A page of models in alphabetical order."""

    models: tuple[ListedModel, ...]
    total: int
    next_after: str | None


def understood(read: Callable[[Any], T], answer: Any) -> T:
    """Read an answer. Refuse one that lacks what a dne-serve server sends."""
    try:
        return read(answer)
    except (AttributeError, KeyError, TypeError) as error:
        raise NotUnderstood(f"not a dne-serve response: {error!r}") from error


def read_answer(answer: Any, *, images: int) -> Answer:
    """Read the answer to so many images."""
    version, rows = _value(int, answer["version"], "version"), _list(answer, "predictions")
    if len(rows) != images:
        raise NotUnderstood(f"{len(rows)} answers came for {images} images")
    predictions = tuple(
        _record(
            Prediction,
            row,
            version=version,
            level=_value(int | None, row.get("level"), "level") or 0,
        )
        for row in rows
    )
    return _record(Answer, answer, predictions=predictions)


def read_versions(answer: Any) -> Versions:
    rows = tuple(_record(VersionRow, row, raw=row) for row in _list(answer, "versions"))
    return _record(Versions, answer, versions=rows, raw=answer)


def read_version(answer: Any) -> VersionDetails:
    tasks = tuple(_value(str, task["name"], "name") for task in _list(answer, "tasks"))
    return _record(VersionDetails, answer, tasks=tasks, raw=answer)


def read_classes(answer: Any) -> tuple[ClassName, ...]:
    return tuple(_record(ClassName, row) for row in _list(answer, "classes"))


def read_moved(answer: Any) -> Moved:
    return _record(Moved, answer, record=_value(int, answer["record"]["number"], "number"))


def read_ready(answer: Any) -> Ready:
    return _record(Ready, answer)


def read_models(answer: Any) -> ModelsPage:
    return _record(ModelsPage, answer)


def _record(kind: type[T], sent: Any, **given: Any) -> T:
    """Read the fields of a record from a JSON object, except those that are `given`."""
    fields = {
        name: _value(form, sent.get(name) if _is_optional(form) else sent[name], name)
        for name, form in _forms(kind).items()  # type: ignore[arg-type]
        if name not in given
    }
    return kind(**fields, **given)


def _list(sent: Any, name: str) -> list[Any]:
    rows = sent[name]
    if not isinstance(rows, list):
        raise TypeError(f"{name} is not a list")
    return rows


@lru_cache
def _forms(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _is_optional(form: Any) -> bool:
    """Return whether a field may be null, or missing in answers of older servers."""
    return NoneType in get_args(form)


def _value(form: Any, sent: Any, name: str) -> Any:
    """Check a value against the type of its field."""
    if _is_optional(form):
        return None if sent is None else _value(get_args(form)[0], sent, name)
    if get_origin(form) is tuple:
        inner = get_args(form)[0]
        rows = _list({name: sent}, name)
        if is_dataclass(inner):
            return tuple(_record(cast(type, inner), row) for row in rows)
        return tuple(_value(inner, row, name) for row in rows)
    if form is Share or form is float:
        is_number = isinstance(sent, float) and math.isfinite(sent)
        value = sent if is_number else _value(int, sent, name)
        if form is Share and not 0.0 <= value <= 1.0 + _ROUNDED:
            raise TypeError(f"{name} is not from 0 to 1")
        return value
    if type(sent) is not form or (form is int and not -LARGEST < sent < LARGEST):
        raise TypeError(f"{name} is not a value of type {form.__name__}")
    return sent
