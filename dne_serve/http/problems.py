"""Map errors to RFC 9457 problem documents: one table from error to status."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from dne_serve import errors
from model_store import errors as store_errors
from model_store.errors import DneError

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER_S = 1
MAX_DETAIL = 1000  # a client may send names of any length


@dataclass(frozen=True, slots=True)
class Handling:
    """Status of an error, whether the client may try again, and whether the server is at fault."""

    status: int
    retry: bool = False
    logged: bool = False


# The nearest base class counts, so a new error has the status of its family until it is listed.
ANSWERS: dict[type[DneError], Handling] = {
    errors.Malformed: Handling(400),
    errors.TokenMissing: Handling(401),
    errors.TokenRefused: Handling(403),
    errors.OriginRefused: Handling(403),
    errors.NotOffered: Handling(404),
    errors.NotInMemory: Handling(404),
    errors.NotAcceptable: Handling(406),
    errors.TooLarge: Handling(413),
    errors.TypeNotAccepted: Handling(415),
    errors.HostUnknown: Handling(421),
    errors.RateExceeded: Handling(429, retry=True),
    errors.WaitedTooLong: Handling(503, retry=True),
    errors.QueueFull: Handling(503, retry=True),
    errors.TooManyListeners: Handling(503, retry=True),
    errors.StoreBusy: Handling(503, retry=True),
    errors.Stopped: Handling(503, retry=True),
    errors.DecoderUnavailable: Handling(503, retry=True),
    errors.NotReady: Handling(503, retry=True),
    errors.TooOld: Handling(503, retry=True),
    errors.NotKept: Handling(503, retry=True),
    errors.ModelsUnread: Handling(503, retry=True, logged=True),
    errors.NotMoved: Handling(503, logged=True),
    errors.NotServed: Handling(503, logged=True),
    errors.NoRoom: Handling(503),
    errors.NotEnoughMemory: Handling(503, retry=True, logged=True),
    errors.StoreChanged: Handling(503, retry=True),
    errors.ChannelWentBack: Handling(503, retry=True),
    store_errors.WrongUsage: Handling(400),
    store_errors.ImageRejected: Handling(422),
    store_errors.ImageTooLarge: Handling(413),
    store_errors.VersionNotFound: Handling(404),
    store_errors.LabelInvalid: Handling(422),
    store_errors.ItemNotFound: Handling(404),
    store_errors.KeptTooLarge: Handling(404),
    store_errors.CorrectionRefused: Handling(409),
    store_errors.LabelConflict: Handling(409),
    store_errors.LabelsFull: Handling(409),
    store_errors.JobNotFound: Handling(404),
    store_errors.JobUnderWay: Handling(409),
    store_errors.NothingToLearn: Handling(409),
    store_errors.ChannelNotFound: Handling(404),
    store_errors.ChannelMoved: Handling(409),
    store_errors.NothingToRollBack: Handling(409),
    store_errors.KeyMissing: Handling(409),
    store_errors.StoreNotFound: Handling(503, retry=True),
    store_errors.StoreError: Handling(503, logged=True),
}
UNEXPECTED = Handling(500, logged=True)


def answer_to(error: Exception) -> Handling:
    return next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), UNEXPECTED)


@dataclass(slots=True)
class Note:
    """Facts of a refusal for the log, under the id of the answer."""

    instance: str = ""
    said: str = ""
    cause: BaseException | None = None
    is_fault: bool = False
    """True if the server failed: the log then has a stack trace."""


NOTE: ContextVar[Note] = ContextVar("note")
"""Note of the current request. `middleware.Observed` sets it, and logs it."""


def problem(
    status: int,
    *,
    detail: str,
    kind: str,
    headers: dict[str, str] | None = None,
    cause: BaseException | None = None,
    is_fault: bool = False,
    members: Mapping[str, Any] | None = None,
) -> JSONResponse:
    """Make an answer. Its `instance` is unique, and the log has the cause under that name.
    `members` are further ones of the document."""
    note = NOTE.get(Note())
    note.instance = new_instance()
    note.said = detail if len(detail) <= MAX_DETAIL else f"{detail[:MAX_DETAIL]} …"
    note.cause, note.is_fault = cause, is_fault
    body = document(status, detail=note.said, kind=kind, instance=note.instance)
    return JSONResponse({**body, **(members or {})}, status, media_type=MEDIA_TYPE, headers=headers)


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
        headers["Retry-After"] = str(getattr(error, "retry_after_s", _RETRY_AFTER_S))
    if answer.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="dne-serve"'
    return problem(
        answer.status,
        detail=errors.public_message(error),
        kind=_kind(error),
        headers=headers,
        cause=error if answer.logged else error.__cause__,
        is_fault=answer.logged,
        members=_members(error),
    )


def _members(error: Exception) -> dict[str, Any]:
    """Tell a client that was overtaken what the newest record says."""
    if isinstance(error, store_errors.LabelConflict):
        return {"number": error.number, "said": error.said, "actor": error.actor}
    return {}


def install(app: FastAPI) -> None:
    app.add_exception_handler(DneError, _on_error)
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
