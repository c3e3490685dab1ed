"""Keep the events for one URL, and post them in order on a thread of its own.

A URL that is dead, slow or wrong costs its own events only. Each post has one connection and one
deadline, follows no redirect, and reads only the status.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import http.client
import logging
import random
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dne_serve.setting_values import WebhookUrl, parse_webhook
from dne_serve.settings import Settings
from dne_serve.webhooks.events import MEDIA_TYPE, Event
from model_store import __version__
from model_store.errors import DneError, WrongUsage

PREFIX = "whsec_"
FEWEST_BYTES, MOST_BYTES = 24, 64
_MOST_SECRETS = 4


def read_secrets(settings: Settings) -> tuple[bytes, ...]:
    """Read the secrets of the settings; none for posts that are not signed."""
    path = parse_webhook(settings.webhook).secret_file if settings.webhook is not None else None
    if path is not None:
        try:
            return parse_secrets(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(f"the webhook secret file {path} cannot be read") from error
    if settings.webhook_secret is None:
        return ()
    return parse_secrets(settings.webhook_secret.get_secret_value())


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """Parse secrets that are separated by white space: during a change there are two of them.
    WrongUsage does not repeat them."""
    words = text.split()
    if not 1 <= len(words) <= _MOST_SECRETS:
        raise WrongUsage(f"there are {len(words)} webhook secrets, not 1 to {_MOST_SECRETS}")
    return tuple(_parse(word) for word in words)


def sign(secrets: Sequence[bytes], *, id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: a signature by each secret."""
    signed = f"{id}.{timestamp}.".encode() + body
    made = (base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets)
    return " ".join(f"v1,{signature}" for signature in made)


def _parse(word: str) -> bytes:
    try:
        secret = base64.b64decode(word.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not word.startswith(PREFIX) or not FEWEST_BYTES <= len(secret) <= MOST_BYTES:
        raise WrongUsage(
            f"a webhook secret is {PREFIX} and {FEWEST_BYTES} to {MOST_BYTES} bytes in base64; "
            f'make one with: echo "{PREFIX}$(openssl rand -base64 32)"'
        )
    return secret


MAX_ANSWER_BYTES = 4096
"""Bytes of an answer that are read at most. The status is in the first of them."""
INTERIM = re.compile(rb"(?:HTTP/1\.[01] 1[0-9]{2}.*?\r\n\r\n)*", re.DOTALL)
_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2})[ \r\n]")


class NotPosted(DneError):
    """A post that was not answered. The message names nothing of the URL."""


class Poster:
    """Posts to one URL. Certificates are checked. Proxies of the environment are not used."""

    def __init__(self, url: WebhookUrl) -> None:
        self._url = url
        self._context = ssl.create_default_context() if url.scheme == "https" else None

    def post(self, body: bytes, *, headers: Mapping[str, str], within_s: float) -> int:
        """Post the body and return the status of the answer, or raise NotPosted."""
        ends = time.monotonic() + within_s
        connection = self._connection(within_s / 2)  # to connect, and again to agree on TLS
        try:
            connection.connect()
            connection.sock.settimeout(_left(ends))
            given = {**headers, "Connection": "close"}
            if self._url.authorization is not None:
                given["Authorization"] = self._url.authorization
            connection.request("POST", self._url.target, body=body, headers=given)
            return _read_status(connection.sock, ends=ends)
        except (OSError, http.client.HTTPException) as error:
            raise NotPosted(_reason(error)) from error
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        # Always with a port: the library would look for one in an IPv6 address.
        host, port = self._url.host, self._url.port
        if self._context is None:
            return http.client.HTTPConnection(host, port or 80, timeout=timeout_s)
        return http.client.HTTPSConnection(
            host, port or 443, timeout=timeout_s, context=self._context
        )


def _read_status(connection: socket.socket, *, ends: float) -> int:
    """Read the status line by hand: a library would wait for each header line anew, and a receiver
    that sends a byte at a time could hold the thread for days."""
    answer = b""
    while len(answer) < MAX_ANSWER_BYTES:
        connection.settimeout(_left(ends))
        piece = connection.recv(MAX_ANSWER_BYTES - len(answer))
        if not piece:
            break
        answer += piece
        interim = INTERIM.match(answer)
        status = _STATUS.match(answer, interim.end() if interim else 0)
        if status is not None:
            return int(status[1])
    raise NotPosted(
        "the answer is not HTTP" if answer else "the connection ended without an answer"
    )


def _left(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reason(error: Exception) -> str:
    """Name the fault in words that hold nothing of the URL."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


MOST_WAITING = 256
LEAST_WAIT = 0.5
"""The least share of a wait before the next try: a fleet must not try in step."""
GONE = 410

log = logging.getLogger("dne_serve.webhooks")


PostOutcome = Literal["delivered", "retried", "failed", "dropped"]
"""The label of `dne_webhook_total`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPlan:
    """Limits of a delivery. An event takes at most ten tries and six minutes."""

    try_s: float = 10.0
    waits_s: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60, 60, 60)
    """Waits between tries."""


class _Outbox:
    """A bounded queue of events, and the thread that posts them. If it is full, the oldest event
    makes room."""

    def __init__(
        self,
        url: WebhookUrl,
        *,
        secrets: Sequence[bytes],
        on_outcome: Callable[[PostOutcome], None],
        plan: RetryPlan,
    ) -> None:
        self._url = url
        self._poster = Poster(url)
        self._secrets = secrets
        self._on_outcome = on_outcome
        self._plan = plan
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._ends = float("inf")
        self._thread = threading.Thread(target=self._loop, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event) -> None:
        """Add an event. This waits for nothing."""
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._drop(self._waiting.popleft())
            self._waiting.append(event)
            self._changed.notify()

    def close(self, *, ends: float) -> None:
        """Give each event that waits one more try, and none after `ends`."""
        with self._changed:
            self._ends = ends
            self._stopping.set()
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended, and not longer than `close` said. A post under way is
        left alone then; it ends with the process."""
        self._thread.join(max(0.0, self._ends - time.monotonic()))

    def _loop(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._deliver(event)
            except Exception as error:  # the thread must not end: later events need it
                log.error("webhook %s: %s failed", self._url, event.type, exc_info=error)
                self._on_outcome("failed")

    def _next(self) -> Event | None:
        """Wait for the next event. Return None when there is none and the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping.is_set())
            while self._waiting and self._left() <= 0:
                self._drop(self._waiting.popleft())
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self, event: Event) -> None:
        told = f"{event.type} ({event.id})"
        for tried, wait_s in enumerate((*self._plan.waits_s, None), start=1):
            stopping, fault = self._stopping.is_set(), self._try(event)
            if fault is None:
                log.info("webhook %s: %s is delivered", self._url, told)
                self._on_outcome("delivered")
                return
            if fault.is_final or wait_s is None or stopping or self._left() <= 0:
                log.error("webhook %s: %s is given up: %s", self._url, told, fault.reason)
                self._on_outcome("failed")
                return
            level = logging.WARNING if tried == 1 else logging.DEBUG
            log.log(level, "webhook %s: %s is tried again: %s", self._url, told, fault.reason)
            self._on_outcome("retried")
            self._stopping.wait(wait_s * random.uniform(LEAST_WAIT, 1))

    def _try(self, event: Event) -> _Fault | None:
        """Post once. Return None if the receiver has the event, else the fault."""
        body = event.body()
        within_s = max(0.001, min(self._plan.try_s, self._left()))
        try:
            status = self._poster.post(body, headers=self._headers(event, body), within_s=within_s)
        except NotPosted as error:
            return _Fault(reason=str(error))
        if 200 <= status < 300:
            return None
        if 300 <= status < 400:
            return _Fault(reason=f"{status}, and redirects are not followed", is_final=True)
        return _Fault(reason=f"the answer was {status}", is_final=status == GONE)

    def _headers(self, event: Event, body: bytes) -> dict[str, str]:
        now = int(time.time())  # of this try: receivers refuse old ones
        headers = {
            "Content-Type": MEDIA_TYPE,
            "User-Agent": f"dne-serve/{__version__}",
            "webhook-id": event.id,
            "webhook-timestamp": str(now),
        }
        if self._secrets:
            headers["webhook-signature"] = sign(
                self._secrets, id=event.id, timestamp=now, body=body
            )
        return headers

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _drop(self, event: Event) -> None:
        log.warning("webhook %s: %s (%s) is dropped", self._url, event.type, event.id)
        self._on_outcome("dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """The reason why a try failed. After a final one there is no other try."""

    reason: str
    is_final: bool = False


_RETRY_PLAN = RetryPlan()
FLUSH_S = 2.0
"""Time that events get at the end of the server, or the grace time if this is shorter."""


class Announcer:
    """The webhooks of one server. Without a URL it has no thread, and drops what it is told."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_outcome: Callable[[PostOutcome], None] = lambda outcome: None,
        plan: RetryPlan = _RETRY_PLAN,
    ) -> None:
        urls = parse_webhook(settings.webhook).urls if settings.webhook is not None else ()
        secrets = read_secrets(settings) if urls else ()
        self._flush_s = min(FLUSH_S, settings.grace_seconds)
        self._outboxes = [
            _Outbox(url, secrets=secrets, on_outcome=on_outcome, plan=plan) for url in urls
        ]
        if urls and not secrets:
            log.warning(
                "webhooks are not signed, so receivers cannot tell who posts: give --webhook "
                "secret-file=PATH or DNE_WEBHOOK_SECRET"
            )

    @property
    def is_heard(self) -> bool:
        """Return whether there is any URL."""
        return bool(self._outboxes)

    def announce(self, event: Event) -> None:
        """Post an event to every URL. Return at once; any thread may call this."""
        for outbox in self._outboxes:
            outbox.put(event)

    def start(self) -> None:
        for outbox in self._outboxes:
            outbox.start()

    def stop(self) -> None:
        """Post the waiting events, within the time for it."""
        ends = time.monotonic() + self._flush_s
        for outbox in self._outboxes:
            outbox.close(ends=ends)
        for outbox in self._outboxes:
            outbox.join()
