"""Describe each operation of a server: what to send, and how to read the answer. Sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from dne_client.answers import (
    Answer,
    ClassName,
    ModelsPage,
    Moved,
    Ready,
    VersionDetails,
    Versions,
    read_answer,
    read_classes,
    read_models,
    read_moved,
    read_ready,
    read_version,
    read_versions,
)
from dne_client.errors import BadInput
from dne_client.images import ImageFile

T_co = TypeVar("T_co", covariant=True)
AT_LEAST = "Dne-At-Least"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall(Generic[T_co]):
    """One request. `resend` tells whether sending it twice does no harm: a move of the channel is
    sent again only where it cannot have arrived."""

    method: str
    path: str
    read: Callable[[Any], T_co]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[ImageFile] = ()
    body: Mapping[str, Any] | None = None
    resend: bool = True


def predict(
    uploads: Sequence[ImageFile], *, top_k: int | None, version: int | None, at_least: int | None
) -> ApiCall[Answer]:
    if not uploads:
        raise BadInput("there is no image to send")
    return ApiCall(
        method="POST",
        path="predict",
        read=partial(read_answer, images=len(uploads)),
        params=_given(top_k=top_k, version=version),
        headers={} if at_least is None else {AT_LEAST: str(at_least)},
        files=uploads,
    )


def versions(*, before: int | None, limit: int | None) -> ApiCall[Versions]:
    return ApiCall(
        method="GET",
        path="versions",
        read=read_versions,
        params=_given(before=before, limit=limit),
    )


def version(number: int) -> ApiCall[VersionDetails]:
    return ApiCall(method="GET", path=f"versions/{int(number)}", read=read_version)


def classes(number: int | None) -> ApiCall[tuple[ClassName, ...]]:
    return ApiCall(method="GET", path="classes", read=read_classes, params=_given(version=number))


def ready() -> ApiCall[Ready]:
    return ApiCall(method="GET", path="readyz", read=read_ready, resend=False)


def models(*, search: str, after: str) -> ApiCall[ModelsPage]:
    return ApiCall(
        method="GET", path="models", read=read_models, params={"search": search, "after": after}
    )


def move(name: str, *, to: int | None, reason: str) -> ApiCall[Moved]:
    body: dict[str, Any] = {"reason": reason}
    if to is not None:
        body["to"] = to
    return ApiCall(method="POST", path=name, read=read_moved, body=body, resend=False)


def _given(**values: int | None) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}
