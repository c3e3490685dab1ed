"""What surrounds every request: the limit on its body, its count and log line, the last resort."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.metrics import Metrics
from dne_serve.problems import problem_of

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds by machines
DRAIN_SECONDS = 2.0
CLIENT_GONE = 499  # as others log a client that left before its answer

log = logging.getLogger("dne_serve.requests")


class BodyLimit:
    """Refuses a body that says it is too large, and one that turns out to be while it streams."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, max_bytes=self._max_bytes)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                await body.drain()
            await send(message)

        await self._app(scope, body.receive, answer)


class _Body:
    """The body of one request, as it comes in."""

    def __init__(self, scope: Scope, receive: Receive, *, max_bytes: int) -> None:
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        self._declared = int(declared) if declared.isascii() and declared.isdigit() else 0
        self._closes = scope["http_version"] == "1.0" or "close" in headers.get("connection", "")
        self._waits = "expect" in headers
        self._receive = receive
        self._max_bytes = max_bytes
        self._counted = 0
        self._ended = False

    async def receive(self) -> Message:
        if self._declared > self._max_bytes:
            raise self._refusal()
        message = await self._next()
        if self._counted > self._max_bytes:
            raise self._refusal()
        return message

    async def drain(self) -> None:
        """Reads on, within limits, what a client sends that closes the connection after the answer.

        A server that closes with bytes unread resets the connection, and the answer is lost.
        """
        if self._ended or self._waits or not self._closes:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._ended and self._counted < 2 * self._max_bytes:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._counted += len(message.get("body", b""))
        self._ended = not message.get("more_body", False)
        return message

    def _refusal(self) -> HTTPException:
        # Not a DneError: while it reads a JSON body, FastAPI lets only its own kind through.
        return HTTPException(413, f"the body has more than {self._max_bytes} bytes")


class Observed:
    """Counts and logs every request, and answers for what nobody foresaw."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
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
            self._metrics.under_way.dec()
            self._note(scope, status, time.perf_counter() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "") or "unmatched"
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        level = logging.DEBUG if status < 400 or route in QUIET else logging.INFO
        log.log(level, "%s %s %s %.1f ms", method, route, status, 1000 * seconds)
