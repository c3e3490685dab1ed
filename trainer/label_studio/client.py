"""Ask a Label Studio server over HTTP, within limits on time, bytes and tries.

Answers are strangers' bytes. Redirects are not followed, so the token goes to one server only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from model_store.errors import DneError
from trainer.label_studio.request import Account

CONNECT_S = 5.0
ANSWER_S = 120.0
"""Time for one answer. Label Studio imports before it answers."""
MAX_ANSWER_BYTES = 64 << 20
TRIES = 4
FIRST_WAIT_S = 0.5
AWAY = frozenset({429, 502, 503, 504})
MAX_DETAIL = 300

Json = Any


class LabelStudioFailed(DneError):
    """Label Studio does not answer, or refuses."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LabelStudio:
    """A connection to one server. Used by one thread."""

    def __init__(
        self,
        account: Account,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = account.url
        self._token = account.token
        self._sleep = sleep
        self._access: str | None = None
        self._http = httpx.Client(
            base_url=account.url,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            transport=transport,
            follow_redirects=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: str | int) -> Json:
        return self._ask("GET", path, params=query)

    def post(self, path: str, body: Json, **query: str | int) -> Json:
        return self._ask("POST", path, params=query, json=body)

    def patch(self, path: str, body: Json) -> Json:
        return self._ask("PATCH", path, json=body)

    def upload(self, path: str, files: Mapping[str, tuple[str, bytes, str]], **query: str) -> Json:
        return self._ask("POST", path, params=query, files=files)

    def _ask(self, method: str, path: str, **how: Any) -> Json:
        """Ask, and once more with a new access token where the old one has run out."""
        answer = self._try(method, path, headers=self._authorization(), **how)
        if answer.status_code == 401 and self._access is not None:
            self._access = None
            answer = self._try(method, path, headers=self._authorization(), **how)
        return self._json(answer, method, path)

    def _authorization(self) -> dict[str, str]:
        """Write the header. A personal access token is a JWT that buys tokens of some minutes; a
        legacy token is sent as it is."""
        if self._token.count(".") != 2:
            return {"Authorization": f"Token {self._token}"}
        if self._access is None:
            path = "/api/token/refresh/"
            answer = self._try("POST", path, json={"refresh": self._token})
            found = self._json(answer, "POST", path)
            self._access = str(found.get("access", "")) if isinstance(found, dict) else ""
        return {"Authorization": f"Bearer {self._access}"}

    def _try(self, method: str, path: str, **how: Any) -> httpx.Response:
        """Try again where the request has not arrived, or can be repeated."""
        wait_s = FIRST_WAIT_S
        for left in range(TRIES - 1, -1, -1):
            try:
                answer = self._send(method, path, **how)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure: Exception = error
            except httpx.TransportError as error:
                if method == "POST":
                    raise self._away(error) from error
                failure = error
            else:
                if answer.status_code not in AWAY or method == "POST" or not left:
                    return answer
                failure = LabelStudioFailed(f"status {answer.status_code}")
            if left:
                self._sleep(wait_s)
                wait_s *= 2
        raise self._away(failure) from failure

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        with self._http.stream(method, path, **how) as answer:
            data = bytearray()
            for piece in answer.iter_bytes():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise LabelStudioFailed(
                        f"Label Studio at {self.url} answers with more than "
                        f"{MAX_ANSWER_BYTES >> 20} MiB"
                    )
            headers = {"content-type": answer.headers.get("content-type", "")}
            return httpx.Response(answer.status_code, headers=headers, content=bytes(data))

    def _away(self, error: Exception) -> LabelStudioFailed:
        why = str(error) or type(error).__name__
        return LabelStudioFailed(f"Label Studio at {self.url} does not answer: {why}")

    def _json(self, answer: httpx.Response, method: str, path: str) -> Json:
        status = answer.status_code
        if status in (401, 403):
            raise LabelStudioFailed(
                f"Label Studio at {self.url} refuses the token{_detail(answer)}: copy a new one "
                "from Account & Settings there",
                status=status,
            )
        if not 200 <= status < 300:
            raise LabelStudioFailed(
                f"Label Studio answers {method} {path} with {status}{_detail(answer)}",
                status=status,
            )
        try:
            return json.loads(answer.content) if answer.content else None
        except ValueError as error:
            raise LabelStudioFailed(
                f"{self.url} answers {method} {path} with something else than JSON: "
                "is it Label Studio?"
            ) from error


def _detail(answer: httpx.Response) -> str:
    """Take the reason out of an answer of Django's REST framework, on one line."""
    try:
        found = json.loads(answer.content)
    except ValueError:
        return ""
    if isinstance(found, dict):
        found = found.get("validation_errors") or found.get("detail") or found
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=True)
    shown = "".join(char if char.isprintable() else " " for char in text)
    return f" ({shown[:MAX_DETAIL]})"
