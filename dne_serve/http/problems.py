"""Errors as RFC 9457 problem documents: one table from error to status.

Refused (DneError)
├── Malformed            400
├── TokenMissing         401
├── TokenRefused         403
├── OriginRefused        403
├── NotOffered           404
├── NotInMemory          404
├── NotAcceptable        406
├── TooLarge             413
├── TypeNotAccepted      415
├── HostUnknown          421
├── RateExceeded         429
├── WaitedTooLong        503
├── StoreBusy            503
├── NotReady             503
├── NotMoved             503
└── NotServed            503
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from dne_serve.engines.base import ModelUnusable
from dne_serve.engines.batcher import QueueFull, Stopped
from dne_serve.inference.decode_process import DecoderUnavailable
from dne_serve.rollout.followed_store import ChannelWentBack, StoreChanged
from dne_serve.rollout.memory import NotEnoughMemory
from dne_serve.rollout.residents import NoRoom
from model_store import errors

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
MAX_DETAIL = 1000  # a client may send names of any length


class Refused(errors.DneError):
    """A request that the server turns down by its own rules."""


class Malformed(Refused):
    pass


class TokenMissing(Refused):
    pass


class TokenRefused(Refused):
    pass


class OriginRefused(Refused):
    """A page of another site asks through the browser of somebody here."""


class NotOffered(Refused):
    """A name that means nothing to this server."""


class NotInMemory(Refused):
    """A version that is not ready: the Open Inference Protocol says so with a 4xx."""


class NotAcceptable(Refused):
    pass


class HostUnknown(Refused):
    """A Host header that does not name this server."""


class RateExceeded(Refused):
    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLarge(Refused):
    pass


class TypeNotAccepted(Refused):
    pass


class WaitedTooLong(Refused):
    pass


class StoreBusy(Refused):
    """More wait for the store than may."""


class NotReady(Refused):
    pass


class NotMoved(Refused):
    """The channel stays where it is, because this server cannot load what it was to name."""


class NotServed(Refused):
    """The channel was moved, and this server could not follow."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an error is told. `detail` replaces messages that name files of this machine."""

    status: int
    detail: str | None = None
    retry: bool = False
    logged: bool = False


# The nearest base class counts, so a new error has the status of its family until it is listed.
ANSWERS: dict[type[errors.DneError], Answer] = {
    Malformed: Answer(400),
    TokenMissing: Answer(401),
    TokenRefused: Answer(403),
    OriginRefused: Answer(403),
    NotOffered: Answer(404),
    NotInMemory: Answer(404),
    NotAcceptable: Answer(406),
    HostUnknown: Answer(421),
    RateExceeded: Answer(429, retry=True),
    TooLarge: Answer(413),
    TypeNotAccepted: Answer(415),
    WaitedTooLong: Answer(503, retry=True),
    StoreBusy: Answer(503, retry=True),
    NotReady: Answer(503, retry=True),
    NotMoved: Answer(503, logged=True),
    NotServed: Answer(503, logged=True),
    NoRoom: Answer(503),
    QueueFull: Answer(503, retry=True),
    Stopped: Answer(503, retry=True),
    DecoderUnavailable: Answer(503, retry=True),
    StoreChanged: Answer(503, retry=True),
    ChannelWentBack: Answer(503, retry=True),
    errors.WrongUsage: Answer(400),
    errors.ImageRejected: Answer(422),
    errors.ImageTooLarge: Answer(413),
    errors.VersionNotFound: Answer(404),
    errors.ChannelNotFound: Answer(404),
    errors.ChannelMoved: Answer(409),
    errors.NothingToRollBack: Answer(409),
    errors.StoreNotFound: Answer(503, "there is no store yet", retry=True),
    errors.WriteFailed: Answer(
        503, "the store refused the write; the server's log says why", logged=True
    ),
    errors.RecordInvalid: Answer(503, logged=True),
    errors.ShardMissing: Answer(503, logged=True),
    errors.ShardCorrupt: Answer(503, logged=True),
    errors.StoreUnsupported: Answer(503, logged=True),
    ModelUnusable: Answer(503, logged=True),
    NotEnoughMemory: Answer(503, retry=True, logged=True),
    # Any other says where the store is.
    errors.StoreError: Answer(
        503, "the store cannot be read; the server's log says why", logged=True
    ),
}
UNEXPECTED = Answer(500, "the server failed; its log says why", logged=True)


def answer_to(error: Exception) -> Answer:
    return next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), UNEXPECTED)


def tell(error: Exception) -> str:
    """The error as one sentence that may leave this machine."""
    return answer_to(error).detail or str(error)


@dataclass(slots=True)
class Note:
    """What the log will say of a request: under its id, all that its answer leaves out."""

    instance: str = ""
    said: str = ""
    cause: BaseException | None = None
    is_fault: bool = False
    """Whether it is the server that failed, so that the log has the whole of it."""


NOTE: ContextVar[Note] = ContextVar("note")
"""Of the request that is being answered; set by `edge.Observed`, which also writes it down."""


def problem(
    status: int,
    *,
    detail: str,
    kind: str,
    headers: dict[str, str] | None = None,
    cause: BaseException | None = None,
    is_fault: bool = False,
) -> JSONResponse:
    """`instance` names this one answer; the log has what the server knows of it under that name."""
    note = NOTE.get(Note())
    note.instance = new_instance()
    note.said = detail if len(detail) <= MAX_DETAIL else f"{detail[:MAX_DETAIL]} …"
    note.cause, note.is_fault = cause, is_fault
    body = document(status, detail=note.said, kind=kind, instance=note.instance)
    return JSONResponse(body, status, media_type=MEDIA_TYPE, headers=headers)


def new_instance() -> str:
    return f"urn:uuid:{uuid.uuid4()}"


def document(status: int, *, detail: str, kind: str, instance: str) -> dict[str, Any]:
    return {
        "type": f"urn:dne-serve:problem:{kind}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
    }


def problem_of(error: Exception) -> JSONResponse:
    answer = answer_to(error)
    headers = {}
    if answer.retry:
        headers["Retry-After"] = str(getattr(error, "retry_after_s", RETRY_AFTER_S))
    if answer.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="dne-serve"'
    return problem(
        answer.status,
        detail=tell(error),
        kind=_kind(error),
        headers=headers,
        cause=error if answer.logged else error.__cause__,
        is_fault=answer.logged,
    )


def install(app: FastAPI) -> None:
    app.add_exception_handler(errors.DneError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return problem_of(error)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        return problem_of(error)
    phrase = HTTPStatus(error.status_code).phrase
    unsaid = f"{request.method} {request.url.path} is not offered here"
    return problem(
        error.status_code,
        detail=error.detail if error.detail != phrase else unsaid,
        kind=phrase.lower().replace(" ", "-"),
        headers=dict(error.headers or {}),
    )


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        return problem_of(error)
    return problem(400, detail="; ".join(map(_reason, error.errors()[:3])), kind="malformed")


def _reason(invalid: dict[str, Any]) -> str:
    where = ".".join(str(part)[:100] for part in invalid["loc"])
    return f"{where}: {invalid['msg']}"


def _kind(error: Exception) -> str:
    if answer_to(error) is UNEXPECTED:
        return "unexpected"
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()
