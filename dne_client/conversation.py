"""Decide what to do next with a call: send it, wait, send it again, read the answer or give up.

Knows neither threads nor asyncio: a conversation yields what it wants done and is told what came of
it. So the clients with and without `await` behave alike.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import httpx

from dne_client.answers import Outcome, understood
from dne_client.calls import ApiCall, predict
from dne_client.errors import (
    BadImage,
    ClientError,
    NotUnderstood,
    Refused,
    TooLarge,
    Unreachable,
    error_for,
)
from dne_client.images import Placed
from model_store.received import AnswerRefused, parse_json

T = TypeVar("T")
PROBLEM = "application/problem+json"
BUSY = frozenset({429, 503})
MAX_DETAIL = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    seconds: float


Step: TypeAlias = ApiCall[Any] | Wait
Came: TypeAlias = httpx.Response | httpx.TransportError | AnswerRefused | None
Conversation: TypeAlias = Generator[Step, Came, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Limits on sending a request again. `attempts=1` sends everything once."""

    attempts: int = 6
    first_wait_s: float = 0.2
    """The wait where the server names none; it doubles each time."""
    longest_wait_s: float = 30.0
    """A server that asks for a longer wait is not asked again."""

    def wait_s(self, attempt: int, *, asked_s: float | None) -> float | None:
        """Choose the wait after an attempt, or None to give up. Clients must not come back in step,
        so up to a quarter is added at random."""
        if attempt >= self.attempts:
            return None
        least = self.first_wait_s * 2.0 ** (attempt - 1)
        if asked_s is None:
            return min(least, self.longest_wait_s) * random.uniform(1.0, 1.25)
        return asked_s * random.uniform(1.0, 1.25) if asked_s <= self.longest_wait_s else None


def converse(call: ApiCall[T], *, retries: Retries) -> Conversation[T]:
    """Carry one call to its answer, or raise the error that remains."""
    attempt = 0
    while True:
        attempt += 1
        came = yield call
        if isinstance(came, httpx.Response) and came.is_success:
            return understood(call.read, _json(came))
        error = _error(came)
        wait_s = _wait_s(call, came, error, retries=retries, attempt=attempt)
        if wait_s is None:
            raise error
        yield Wait(seconds=wait_s)


def converse_group(
    group: Sequence[Placed], *, top_k: int | None, version: int | None, retries: Retries
) -> Conversation[list[Outcome]]:
    """Carry a group of images to an outcome for each. A group that fails for one bad image is sent
    again image by image, so that the good ones are answered."""
    sent = [placed for placed in group if placed.upload is not None]
    unread = [
        Outcome(place=placed.place, name=placed.name, error=placed.error)
        for placed in group
        if placed.error
    ]
    if not sent:
        return unread
    uploads = [placed.upload for placed in sent if placed.upload is not None]
    try:
        call = predict(uploads, top_k=top_k, version=version, at_least=None)
        answer = yield from converse(call, retries=retries)
        outcomes = [
            Outcome(place=placed.place, name=placed.name, prediction=prediction)
            for placed, prediction in zip(sent, answer.predictions, strict=True)
        ]
    except (BadImage, TooLarge) as error:
        if len(sent) == 1:
            outcomes = [Outcome(place=sent[0].place, name=sent[0].name, error=error)]
        else:
            outcomes = []
            for placed in sent:
                outcomes += yield from converse_group(
                    [placed], top_k=top_k, version=version, retries=retries
                )
    except ClientError as error:
        outcomes = [Outcome(place=placed.place, name=placed.name, error=error) for placed in sent]
    return sorted([*unread, *outcomes], key=lambda item: item.place)


def _wait_s(
    call: ApiCall[Any], came: Came, error: ClientError, *, retries: Retries, attempt: int
) -> float | None:
    """Choose how long to wait before the call is sent again, or None where it must not be."""
    if isinstance(came, httpx.Response):
        asked_s = error.retry_after_s if isinstance(error, Refused) else None
        again = call.resend and came.status_code in BUSY
        return retries.wait_s(attempt, asked_s=asked_s) if again else None
    if isinstance(came, AnswerRefused):
        return None
    never_arrived = isinstance(came, httpx.ConnectError | httpx.ConnectTimeout)
    return retries.wait_s(attempt, asked_s=None) if call.resend or never_arrived else None


def _error(came: Came) -> ClientError:
    if isinstance(came, AnswerRefused):
        return NotUnderstood(str(came))
    if not isinstance(came, httpx.Response):
        return Unreachable(f"no answer came: {str(came) or type(came).__name__}")
    problem = _json(came) if came.headers.get("content-type", "").startswith(PROBLEM) else {}
    detail, instance = (
        problem.get(name) if isinstance(problem, dict) else None for name in ("detail", "instance")
    )
    status = came.status_code
    return error_for(status)(
        status,
        detail=_cut(detail) or _cut(came.reason_phrase) or "no reason was given",
        instance=_cut(instance),
        retry_after_s=_seconds(came.headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    """Read Retry-After in seconds, as this server writes it; a date of a proxy is skipped."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _cut(text: Any) -> str:
    """Shorten a text of a problem document to what people read."""
    return text[:MAX_DETAIL] if isinstance(text, str) else ""


def _json(response: httpx.Response) -> Any:
    try:
        return parse_json(response.content)
    except ValueError as error:
        raise NotUnderstood(
            f"the server answered {response.status_code} without JSON that can be read: {error}"
        ) from error
