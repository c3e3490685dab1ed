"""Send requests to a Label Studio server, within limits on time, bytes and tries.

Responses are untrusted bytes. Redirects are not followed, so the token goes to one server only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

import httpx

from model_store.errors import DneError, WrongUsage
from model_store.received import (
    LEADS_NOWHERE,
    AnswerRefused,
    ExchangeDeadline,
    Received,
    parse_json,
)

_CONNECT_S = 5.0
ANSWER_S = 120.0
"""Time for one request and its whole response. Label Studio imports before it responds."""
WHOLE_S = 3600.0
"""Time for one push or pull, over all its requests and pages."""
MAX_ANSWER_BYTES = 64 << 20
MAX_MEMORY = 1 << 29
"""Bytes of memory for one response. A page of tasks has every point of every outline."""
TRIES = 4
_FIRST_WAIT_S = 0.5
AWAY = frozenset({429, 502, 503, 504})
MAX_DETAIL = 300

Json = Any


def _split(url: str) -> SplitResult:
    """Split an address into its parts, which are empty if httpx refuses the address."""
    try:
        httpx.URL(url)
        return urlsplit(url)
    except (httpx.InvalidURL, ValueError):
        return urlsplit("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The server, and the token of a person who works there."""

    url: str
    token: str

    def __post_init__(self) -> None:
        parts = _split(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise WrongUsage(
                f"`url={self.url!r}` is not the address of a server: "
                "give one such as http://127.0.0.1:8080"
            )
        if parts.username or parts.password:
            raise WrongUsage("`url` holds a name or password: give the token with `token` alone")
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise WrongUsage(
                "`token` is not a token: copy it from Account & Settings in Label Studio"
            )


class LabelStudioFailed(DneError):
    """Label Studio does not respond, or refuses a request."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LabelStudio:
    """A connection to one server. Not thread-safe."""

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
        self._ends = time.monotonic() + WHOLE_S
        self._access: str | None = None
        self._http = httpx.Client(
            base_url=account.url,
            timeout=httpx.Timeout(ANSWER_S, connect=_CONNECT_S),
            transport=transport,
            follow_redirects=False,
            headers={"Accept-Encoding": "gzip"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str, **query: str | int) -> Json:
        return self._ask("GET", path, params=query)

    def post(self, path: str, body: Json, **query: str | int) -> Json:
        return self._ask("POST", path, params=query, json=body)

    def patch(self, path: str, body: Json) -> Json:
        return self._ask("PATCH", path, json=body)

    def upload(self, path: str, files: Mapping[str, tuple[str, bytes, str]], **query: str) -> Json:
        return self._ask("POST", path, params=query, files=files)

    def left_s(self) -> float:
        """Return the time that is left for all requests. Raise LabelStudioFailed if none is."""
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            raise LabelStudioFailed(
                f"Label Studio at {self.url} took more than {WHOLE_S:g} s over all requests: what "
                "was written stays, and running the command again goes on"
            )
        return left_s

    def _ask(self, method: str, path: str, **how: Any) -> Json:
        """Send a request, and repeat it with a new access token if the old one has expired."""
        answer = self._try(method, path, headers=self._authorization(), **how)
        if answer.status_code == 401 and self._access is not None:
            self._access = None
            answer = self._try(method, path, headers=self._authorization(), **how)
        return self._json(answer, method, path)

    def _authorization(self) -> dict[str, str]:
        """Build the header. A personal access token is a JWT that is exchanged for an access token
        of some minutes; a legacy token is sent as it is."""
        if self._token.count(".") != 2:
            return {"Authorization": f"Token {self._token}"}
        if self._access is None:
            path = "/api/token/refresh/"
            answer = self._try("POST", path, json={"refresh": self._token})
            refreshed = self._json(answer, "POST", path)
            is_object = isinstance(refreshed, dict)
            access = str(refreshed.get("access", "")) if is_object else ""
            if not access.isascii() or not access.isprintable():
                raise LabelStudioFailed(
                    f"Label Studio at {self.url} answers with an access token that is not "
                    "printable ASCII: is it Label Studio?"
                )
            self._access = access
        return {"Authorization": f"Bearer {self._access}"}

    def _try(self, method: str, path: str, **how: Any) -> httpx.Response:
        """Send a request, and repeat it if it did not arrive or is safe to repeat."""
        wait_s = _FIRST_WAIT_S
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
        deadline = ExchangeDeadline(min(ANSWER_S, self.left_s()))
        waits = {"connect": _CONNECT_S, "read": deadline, "write": deadline, "pool": _CONNECT_S}
        try:
            with self._http.stream(method, path, **how, extensions={"timeout": waits}) as answer:
                return httpx.Response(answer.status_code, content=_body(answer, deadline))
        except AnswerRefused as error:
            raise LabelStudioFailed(f"Label Studio at {self.url}: {error}") from error
        except TimeoutError as error:
            raise self._away(httpx.ReadTimeout("its answer does not end")) from error
        except httpx.InvalidURL as error:
            raise LabelStudioFailed(f"Label Studio at {self.url}: {LEADS_NOWHERE}") from error

    def _away(self, error: Exception) -> LabelStudioFailed:
        self.left_s()  # names the deadline of the whole if this one has passed
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
            return parse_json(answer.content, most_memory=MAX_MEMORY) if answer.content else None
        except ValueError as error:
            raise LabelStudioFailed(
                f"{self.url} answers {method} {path} with something that is not readable "
                f"JSON ({error}): is it Label Studio?"
            ) from error


def _body(answer: httpx.Response, deadline: ExchangeDeadline) -> bytes:
    """Read the body, unless the transport has read it already."""
    read = answer.is_stream_consumed
    encoding = "" if read else answer.headers.get("content-encoding", "")
    received = Received(encoding, most_bytes=MAX_ANSWER_BYTES)
    for piece in [answer.content] if read else answer.iter_raw():
        deadline.check()
        received.add(piece)
    return received.whole()


def _detail(answer: httpx.Response) -> str:
    """Extract the reason from a response of Django's REST framework, on one line."""
    try:
        detail = parse_json(answer.content, most_memory=MAX_MEMORY)
        if isinstance(detail, dict):
            detail = detail.get("validation_errors") or detail.get("detail") or detail
        text = detail if isinstance(detail, str) else json.dumps(detail, ensure_ascii=True)
    except ValueError:
        return ""
    shown = "".join(char if char.isprintable() else " " for char in text[:MAX_DETAIL])
    return f" ({shown})"
