"""How the application meets the network: uvicorn, with limits on what a connection may do.

uvicorn's parser takes headers of any size, and waits for ever for a request that does not come.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dne_serve.patience import ARRIVED
from dne_serve.problems import MEDIA_TYPE, document, new_instance
from dne_serve.settings import Settings

OTHER_FILES = 256  # that a server has open besides its connections
YOUNG_S = 1.0  # a connection of that age is not taken for a slow one
LINGER_S = 2.0

log = logging.getLogger("dne_serve.wire")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connections: int
    header_bytes: int
    header_s: float
    """From the first byte of a request, or from connecting, to the end of its headers."""
    body_s: float
    """From there to the end of the body."""
    send_s: float
    """How long a client may leave an answer unread."""


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    limits = Limits(
        connections=settings.max_connections,
        header_bytes=settings.max_header_bytes,
        header_s=settings.header_seconds,
        body_s=settings.body_seconds,
        send_s=settings.send_seconds,
    )
    _allow_files(settings.max_connections + OTHER_FILES)
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.grace_seconds,
    )


def _allow_files(wanted: int) -> None:
    """A connection is an open file, and the usual limit on these is lower than it need be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return
    reached = wanted if hard == unlimited else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < wanted:
        log.warning("only %s files may be open: fewer than --max-connections needs", reached)


class Connection(HttpToolsProtocol):
    """One client. What it has not finished sending is timed; an answer it does not take, too."""

    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._received = 0
        self._refused = False
        self._await_request()
        if len(self.connections) > self.limits.connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_headers and not self._refused:
            # A header that never ends reaches no callback: only its bytes can be counted.
            self._received += len(data)
            if self._received > self.limits.header_bytes:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._received = True, 0
        self._await_request()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._refused or size > self.limits.header_bytes:
            self._refuse_headers()
            raise ConnectionAbortedError  # so that the parser goes no further
        self._in_headers = False
        super().on_headers_complete()
        self._since = self.loop.time()
        self._time(self.limits.body_s)

    def on_message_complete(self) -> None:
        self._rest()
        cast(dict[str, Any], self.scope)[ARRIVED] = self.loop.time()
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # Answered before all of it had come: uvicorn has stopped its clock meanwhile.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        if self.transport.get_write_buffer_size():
            self._watch_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, detail="that is not HTTP", kind="malformed")

    @property
    def owes(self) -> float | None:
        """Since when this client has owed us the rest of a request; None while it does not."""
        waiting = self._deadline is not None or self.timeout_keep_alive_task is not None
        return self._since if waiting and not self._refused else None

    def _await_request(self) -> None:
        self._since = self.loop.time()
        self._time(self.limits.header_s)

    def _time(self, seconds: float) -> None:
        self._rest()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        begun = self._received > 0 or not self._in_headers
        if begun:
            self._refuse(408, detail="the request took too long to arrive", kind="too-slow")
        else:
            self._end()

    def _make_room(self) -> None:
        """Lets go of whoever has owed us a request for longest; if nobody does, of the newcomer."""
        slow = [(one.owes, one) for one in self.connections if isinstance(one, Connection)]
        owing = [(since, one) for since, one in slow if since is not None and one is not self]
        since, slowest = min(owing, key=lambda pair: pair[0], default=(self.loop.time(), self))
        if self.loop.time() - since < YOUNG_S:
            self._refuse(503, detail="there are too many connections", kind="too-many-connections")
        else:
            slowest._end()

    def _refuse_headers(self) -> None:
        most = self.limits.header_bytes
        self._refuse(
            431, detail=f"the headers have more than {most} bytes", kind="headers-too-large"
        )

    def _refuse(self, status: int, *, detail: str, kind: str) -> None:
        """Says why, where no answer has begun, and ends the connection."""
        if self._refused:
            return
        if not self._is_unanswered():
            self._end()
            return
        answer = document(status, detail=detail, kind=kind, instance=new_instance())
        self.transport.write(_as_bytes(answer))
        who = self.client[0] if self.client else "someone"
        log.info("%s %s %s %s", who, status, answer["instance"], detail)
        if self.transport.can_write_eof():
            # A connection that is closed with bytes unread is reset, and the answer lost: read
            # on for a moment, and keep nothing.
            self.transport.write_eof()
            self._stop_listening()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self._end()

    def _is_unanswered(self) -> bool:
        """Whether the next bytes that the client expects are the head of an answer."""
        if self._in_headers:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline

    def _end(self) -> None:
        self._stop_listening()
        self.transport.close()
        self._watch_sending()

    def _stop_listening(self) -> None:
        self._refused = True
        self._rest()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch_sending(self) -> None:
        """Closing waits until everything was sent, which may be never."""
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.limits.send_s, self._on_stuck)

    def _on_stuck(self) -> None:
        self._stuck = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def _as_bytes(problem: dict[str, Any]) -> bytes:
    """A problem document as it travels, for clients that no application has seen."""
    status = problem["status"]
    headers = {"Connection": "close", **({"Retry-After": "1"} if status == 503 else {})}
    answer = JSONResponse(problem, status, media_type=MEDIA_TYPE, headers=headers)
    lines = [name + b": " + value + b"\r\n" for name, value in answer.raw_headers]
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(answer.body)])
