"""Check Host and Origin, limit bodies, compress long answers, count and log all requests.

A page whose name is pointed at this machine (DNS rebinding) still sends its own name as Host. A
page of another site that posts here sends its Origin. Both are refused. There is no CORS.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.errors import HostUnknown, Malformed, OriginRefused, Refused
from dne_serve.http.bodies import (
    PIECE_BYTES,
    RESERVATION,
    MemoryBudget,
    Reservation,
    declared_bytes,
)
from dne_serve.http.problems import NOTE, Note, problem_of
from dne_serve.log_lines import FACTS
from dne_serve.models import SERVING
from dne_serve.observe.events import CURRENT, RequestTrace
from dne_serve.observe.metrics import ServerMetrics
from dne_serve.observe.tracing import Tracer
from dne_serve.server import Serving

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds by machines
_DRAIN_SECONDS = 10.0
_DRAIN_IDLE_SECONDS = 2.0
_MAX_CAUSE = 500
_STREAM = "text/event-stream"
_UNMATCHED = "unmatched"
CLIENT_GONE = 499  # as others log a client that left before its answer

_REQUEST_ID = b"x-request-id"
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger("dne_serve.requests")


class BodyLimit:
    """Middleware that refuses a body that is longer than its route takes, declared or counted
    while it streams, and any body while all bodies together are too large."""

    def __init__(self, app: ASGIApp, *, budget: MemoryBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reservation = self._budget.reservation(scope["client"][0] if scope.get("client") else "")
        scope[RESERVATION] = reservation
        body = _Body(scope, receive, reservation=reservation)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and reservation.is_refused:
                MutableHeaders(scope=message)["Connection"] = "close"
            if message["type"] == "http.response.body" and body.is_unwanted:
                # The client may read its answer now, and close; we close when it has stopped.
                await send({**message, "more_body": True})
                reservation.let_go()
                await body.drain()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(scope, body.receive, answer)
        finally:
            reservation.let_go()


class _Body:
    """Body of one request, counted as it arrives."""

    def __init__(self, scope: Scope, receive: Receive, *, reservation: Reservation) -> None:
        headers = Headers(scope=scope)
        reservation.declared = declared_bytes(scope)
        self._closes = scope["http_version"] == "1.0" or "close" in headers.get("connection", "")
        self._waits = "expect" in headers
        self._receive = receive
        self._reservation = reservation
        self._counted = 0
        self._ended = reservation.declared == 0 and "transfer-encoding" not in headers

    @property
    def is_unwanted(self) -> bool:
        """Return whether the connection ends after the answer, with bytes still to come.

        A server that closes with bytes unread resets the connection, and the answer is lost.
        """
        return (
            not self._ended and not self._waits and (self._closes or self._reservation.is_refused)
        )

    async def receive(self) -> Message:
        self._reservation.is_refused = True  # until it is known to be in order
        self._reservation.check_size(self._reservation.declared)
        message = await self._next_unless_evicted()
        arrived = len(message.get("body", b""))
        self._counted += arrived
        self._reservation.check_size(self._counted)
        self._reservation.is_finished = self._ended
        if message["type"] == "http.request":
            self._reservation.take(arrived + PIECE_BYTES)
        self._reservation.is_refused = False
        return message

    async def drain(self) -> None:
        """Read on until the client stops, and keep nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._ended:
                    async with asyncio.timeout(_DRAIN_IDLE_SECONDS):
                        await self._next()

    async def _next_unless_evicted(self) -> Message:
        try:
            async with asyncio.timeout(None) as clock:
                self._reservation.on_evicted = lambda: clock.reschedule(0)
                return await self._next()
        except TimeoutError:
            self._reservation.check()
            raise
        finally:
            self._reservation.on_evicted = None

    async def _next(self) -> Message:
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message


class Packed(GZipMiddleware):
    """Middleware that compresses long answers for clients that accept gzip."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # No cache keeps the answer to a POST, so that it needs no Vary header.
        if (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and "gzip" not in Headers(scope=scope).get("accept-encoding", "")
        ):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class Observed:
    """Middleware that counts and logs every request, and answers unexpected errors with 500.

    While the server `drains`, each answer is the last one of its connection: a client that goes on
    with a connection would lose a request when the server stops.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: ServerMetrics,
        tracer: Tracer | None = None,
        drains: Callable[[], bool] = lambda: False,
        only: Serving | None = None,
    ) -> None:
        """`only` is the model of a server that has one, for which all requests count."""
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._drains = drains
        self._only = only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status, note, request_id = 0, Note(), _request_id(scope)
        is_stream = False
        NOTE.set(note)
        trace = self._begin_trace(scope, request_id)

        async def watched(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                is_stream = headers.get("content-type", "").startswith(_STREAM)
                if is_stream:  # it has its answer, although the answer goes on
                    self._end(scope, status, began, trace)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Request-Id"] = request_id
                if self._drains():
                    headers["Connection"] = "close"
                # Before anybody asks for it.
                ids = _ids(request_id, trace)
                _tell(scope, status, time.perf_counter() - began, note, ids=ids)
                note.cause = None  # whose traceback holds the body while the connection is open
            await send(message)

        self._metrics.under_way.inc()
        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            if status:
                raise  # the answer has begun: all that is left is to break the connection
            await problem_of(error)(scope, receive, watched)
        finally:
            if not is_stream:
                self._end(scope, status, began, trace)

    def _begin_trace(self, scope: Scope, request_id: str) -> RequestTrace | None:
        if self._tracer is None:
            return None
        trace = self._tracer.begin(scope["headers"], request_id=request_id)
        CURRENT.set(trace if trace.is_recorded else None)
        return trace

    def _end(self, scope: Scope, status: int, began: float, trace: RequestTrace | None) -> None:
        """Count a request that has its answer, and send its trace."""
        ended = time.perf_counter()
        self._metrics.under_way.dec()
        method, route = _request(scope)
        self._metrics.requested(method, route, status=status, seconds=ended - began)
        serving: Serving | None = scope.get(SERVING, self._only)
        if serving is not None:
            serving.counts.requested(route, status=status, seconds=ended - began)
        if self._tracer is not None and trace is not None:
            known = None if route == _UNMATCHED else route
            self._tracer.end(
                trace, method=method, route=known, status=status, began_s=began, ended_s=ended
            )


def _request(scope: Scope) -> tuple[str, str]:
    """Return method and route template: a client cannot make up new ones."""
    method = scope["method"] if scope["method"] in METHODS else "OTHER"
    return method, getattr(scope.get("route"), "path", "") or _UNMATCHED


def _request_id(scope: Scope) -> str:
    """Take the id that a client or proxy gave the request, if it is harmless, or make one."""
    given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
    return given.decode() if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex


def _ids(request_id: str, trace: RequestTrace | None) -> dict[str, object]:
    """Name a request in the log: by its id, and by that of its trace."""
    ids: dict[str, object] = {"request_id": request_id}
    return ids if trace is None else {**ids, "trace_id": trace.trace_id.hex()}


def _tell(
    scope: Scope, status: int, seconds: float, note: Note, *, ids: Mapping[str, object]
) -> None:
    """Log a line for the request, with the reason of a refusal, and a stack trace for a fault of
    the server."""
    method, route = _request(scope)
    said = ""
    if note.instance:
        # JSON is on one line, whatever the client has put into it.
        said = f" {note.instance} {json.dumps(note.said)}"
    if note.cause and not note.is_fault:
        said += f" because of {note.cause!r:.{_MAX_CAUSE}}"
    level = logging.DEBUG if status < 400 or route in QUIET else logging.INFO
    named = _model(scope).get("model")
    log.log(
        logging.ERROR if note.is_fault else level,
        "%s %s %s %.1f ms%s",
        method,
        route if named is None else f"{route} of model {named}",
        status,
        1000 * seconds,
        said,
        exc_info=note.cause if note.is_fault else None,
        extra={FACTS: _facts(method, route, status, seconds, note, {**ids, **_model(scope)})},
    )


def _model(scope: Scope) -> dict[str, object]:
    """Name the model that was asked, where there are many. A name without a model is not one."""
    serving: Serving | None = scope.get(SERVING)
    return {} if serving is None or serving.name is None else {"model": serving.name}


def _facts(
    method: str, route: str, status: int, seconds: float, note: Note, ids: Mapping[str, object]
) -> dict[str, object]:
    """List the fields of a request's line where the log is JSON."""
    facts: dict[str, object] = {
        **ids,
        "method": method,
        "route": route,
        "status": status,
        "milliseconds": round(1000 * seconds, 1),
    }
    return {**facts, "instance": note.instance} if note.instance else facts


ANY = "*"
_MAX_HOST = 300
# No user, no percent-encoding, no zone of an IPv6 address, no empty port, at most one last dot.
HOST = re.compile(
    r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?))"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


class KnownHosts:
    """Middleware that lets a request through if its Host names this server and its Origin, where it
    has one, is this server's page. Addresses are always known: no name can be pointed at them."""

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str] = ()
    ) -> None:
        self._app = app
        own = {"localhost", "*.localhost", socket.gethostname()}
        self._names = frozenset(name.lower() for name in own | set(hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._knows = lru_cache(maxsize=256)(self._is_known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), http_version=scope["http_version"])
            except Refused as error:
                await problem_of(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, *, http_version: str) -> None:
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not any(hosts) and http_version != "1.0"):
            raise Malformed("a request has one Host header")
        host = hosts[0].lower() if hosts else ""
        if host and not self._knows(host):
            raise HostUnknown(
                f"this server does not answer for {host[:100]!r}; its --allowed-hosts name others"
            )
        origin = headers.get("origin", "").lower()
        is_own = host != "" and origin.partition("://")[2] == host
        if origin and origin not in self._origins and not is_own:
            raise OriginRefused(
                f"pages of {origin[:100]!r} may not ask here; --allowed-hosts https://NAME lets "
                "others ask"
            )

    def _is_known(self, host: str) -> bool:
        name = _name_in(host)
        if name is None:
            return False
        if ANY in self._names or _is_address(name):
            return True
        name = name.removesuffix(".")
        if _is_address(name):
            return False  # with a dot after it, which no client writes
        if name in self._names:
            return True
        return any(known.startswith("*.") and name.endswith(known[1:]) for known in self._names)


def _name_in(host: str) -> str | None:
    """Take the name out of a Host: `::1` of `[::1]:8000`. Return None for any other form."""
    parts = HOST.fullmatch(host) if len(host) <= _MAX_HOST else None
    if parts is None or int(parts["port"] or 0) > 65535:
        return None
    if parts["ipv6"] is not None:
        return parts["ipv6"] if _is_address(parts["ipv6"]) else None
    return parts["name"]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
