"""Hold each client's connection to limits of time and size.

uvicorn's own protocol takes headers and trailers of any size, and waits for ever for a request that
does not come.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import httptools
from starlette.responses import JSONResponse
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dne_serve.http.bodies import DECLARED
from dne_serve.http.problems import MEDIA_TYPE, document, new_instance
from dne_serve.inference.store_threads import ARRIVED, IS_GONE
from dne_serve.settings import FixedLimits

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)

_RawHeaders = Iterable[tuple[bytes, bytes]]


def _origin_form(target: bytes, *, host: bytes) -> bytes | None:
    """Return path and query of a target, or None if it names another host than the Host header.

    `http://localhost:8000/healthz` becomes `/healthz`. The name in such a target equals the Host
    header, so that the check of that header holds for both.
    """
    if target.startswith(b"/") or target == b"*":
        return target
    absolute = _ABSOLUTE.fullmatch(target.partition(b"#")[0])
    if absolute is None or absolute[1].lower() != host.lower():
        return None
    return absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]


def _head_without_upgrade(
    method: bytes, target: bytes, *, version: str, headers: _RawHeaders
) -> bytes:
    """Write the head of a request again, without its wish for another protocol."""
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            words = [word.strip() for word in value.split(b",")]
            value = b", ".join(word for word in words if word.lower() != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


@dataclass(slots=True)
class Tally:
    """Count of one request at a time. `limit` holds for its headers and trailers; the sizes and
    extensions of chunks may take as many bytes as the body besides."""

    limit: int
    _body: int = 0
    _other: int = 0
    _without_body: int = 0
    """Bytes in a row of which none was of the body: an extension or a trailer of any length."""
    _body_here: int = 0
    _is_shared: bool = False

    def begin_request(self, *, is_shared: bool) -> None:
        """Begin to count a request. A piece that also ends an earlier request (`is_shared`) does
        not count: the parser does not tell which part of it belongs to this one."""
        self._body = self._other = self._without_body = self._body_here = 0
        self._is_shared = is_shared

    def add_body(self, count: int) -> None:
        self._body += count
        self._body_here += count

    def add_piece(self, count: int) -> None:
        """Count a piece after it was parsed, so that `add_body` has been told of its body."""
        other = 0 if self._is_shared else count - self._body_here
        self._other += other
        self._without_body = 0 if self._body_here else self._without_body + other
        self._body_here, self._is_shared = 0, False

    @property
    def is_over(self) -> bool:
        return self._other > self.limit + self._body or self._without_body > self.limit


class _HeldFlow(FlowControl):
    """Flow control that reads no more while it is held, even if uvicorn resumes it."""

    _is_held = False

    def hold(self, held: bool) -> None:
        if held:
            self.pause_reading()
        is_over, self._is_held = self._is_held and not held, held
        if is_over:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()


def _as_bytes(problem: dict[str, Any]) -> bytes:
    status = problem["status"]
    headers = {"Connection": "close", **({"Retry-After": "1"} if status == 503 else {})}
    answer = JSONResponse(problem, status, media_type=MEDIA_TYPE, headers=headers)
    lines = [name + b": " + value + b"\r\n" for name, value in answer.raw_headers]
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(answer.body)])


YOUNG_S = 1.0  # a connection that has owed a request for less is not a slow one
LINGER_S = 2.0
PIECE_BYTES = 4096
"""Bytes for the parser at a time, besides the rest of a body of known length. The shortest request
has 18 bytes, so that one piece makes no more than 228 requests that wait for their turn."""
_MOST_DIGITS = 100
"""The parser takes a length with any number of zeros before it, and Python makes no number of more
than 4,300 digits."""

log = logging.getLogger("dne_serve.wire")


class Connection(HttpToolsProtocol):
    """Connection of one client. A request that is not complete has a deadline, and so has an answer
    that the client does not take."""

    limits: ClassVar[FixedLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _HeldFlow(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._tally = Tally(self.limits.max_header_bytes)
        self._unparsed = b""
        self._in_request = False
        self._in_headers = True
        self._ended_here = False
        self._body_left = 0
        self._refused = False
        self._refusal: dict[str, Any] | None = None
        self._await_request()
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._refused = True  # nothing that is still here is parsed
        self._rest()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unparsed += data
        self._parse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._tally.begin_request(is_shared=self._ended_here)
        self._in_request = self._in_headers = True
        self._body_left = 0
        self._await_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header and drop a trailer: the headers were judged without it. The bytes of
        trailers count with those of the headers."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if size > self.limits.max_header_bytes:
            self._refuse_headers()
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(501, detail="this server is not a proxy", kind="not-implemented")
        elif len(length) > _MOST_DIGITS:
            self._refuse(400, detail="the Content-Length has too many digits", kind="malformed")
        elif self.parser.should_upgrade():
            return  # `_read_without_upgrade` calls this again for the same request
        else:
            self._check_request_line()
        if self._refused:
            raise ConnectionAbortedError  # so that the parser goes no further
        self._body_left = int(length)  # of digits only, or the parser would have refused it
        scope = cast(dict[str, Any], self.scope)
        scope[IS_GONE], scope[DECLARED] = self.transport.is_closing, self._body_left
        super().on_headers_complete()
        self._in_headers = False
        self._since = self.loop.time()
        self._time(self.limits.body_seconds)

    def on_body(self, body: bytes) -> None:
        self._tally.add_body(len(body))
        self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_headers:
            return  # the parser skips the body of a request with an upgrade
        self._in_request, self._ended_here = False, True
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
        if self._unparsed:
            self.loop.call_soon(self._parse)
        if self._refusal is not None and self.cycle.response_complete:
            self._send_refusal(self._refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    @property
    def owes(self) -> float | None:
        """Return the time since which the client has owed the rest of a request, or None."""
        waiting = self._deadline is not None or self.timeout_keep_alive_task is not None
        return self._since if waiting and not self._refused else None

    def _parse(self) -> None:
        """Parse the bytes that have come, until a request has to wait for the answer before it.

        uvicorn would go on, and make a task of every few bytes that a client sends ahead.
        """
        data, at = self._unparsed, 0
        if data:
            self._unset_keepalive_if_required()
        while at < len(data) and not self.pipeline and not self._refused:
            at += self._parse_piece(data[at : at + max(PIECE_BYTES, self._body_left)])
        self._unparsed = b"" if self._refused else data[at:]
        if not self.transport.is_closing():
            self._flow.hold(bool(self._unparsed))
        self._time_the_rest()

    def _parse_piece(self, piece: bytes) -> int:
        """Return the number of bytes that were used."""
        self._ended_here = False
        used = len(piece)
        try:
            used = self._feed(piece)
        except httptools.HttpParserError:
            self._refuse(400, detail="that is not HTTP", kind="malformed")
        self._tally.add_piece(used)
        if self._in_request and self._tally.is_over:
            self._refuse_headers()
        return used

    def _feed(self, piece: bytes) -> int:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade()  # which may find the request at fault
            return int(upgrade.args[0])
        return len(piece)

    def _read_without_upgrade(self) -> None:
        """Read the head again without its wish for another protocol, which no server has to grant.
        With that wish, the parser would skip the body."""
        head = _head_without_upgrade(
            self.parser.get_method(),
            self.url,
            version=self.parser.get_http_version(),
            headers=self.headers,
        )
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)

    def _check_request_line(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            detail, kind = "this server speaks HTTP/1.1", "http-version-not-supported"
            self._refuse(505, detail=detail, kind=kind)
            return
        host = next((value for name, value in self.headers if name == b"host"), b"")
        target = _origin_form(self.url, host=host)
        if target is None:
            detail = "the request line names another host than the Host header, or no path"
            self._refuse(400, detail=detail, kind="malformed")
            return
        self.url = target

    def _time_the_rest(self) -> None:
        """Stop the clock while nothing of the client is read because it sends ahead. Start it for a
        client that sends line breaks between two requests: these have ended uvicorn's clock."""
        if self._refused or self.timeout_keep_alive_task is not None:
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if self.pipeline:
            self._rest()
        elif self._deadline is None and (self._in_request or is_idle):
            self._since = self.loop.time()
            self._time(self.limits.body_seconds if self._in_body else self.limits.header_seconds)

    def _await_request(self) -> None:
        self._since = self.loop.time()
        self._time(self.limits.header_seconds)

    def _time(self, seconds: float) -> None:
        self._rest()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._in_request:
            self._refuse(408, detail="the request took too long to arrive", kind="too-slow")
        else:
            self._end()

    def _make_room(self) -> None:
        """End the connection that has owed a request for longest, or this one if none does."""
        others = [other for other in self.connections if isinstance(other, Connection)]
        owing = [(other.owes, other) for other in others if other.owes and other is not self]
        since, slowest = min(owing, key=lambda pair: pair[0], default=(self.loop.time(), self))
        if self.loop.time() - since < YOUNG_S:
            self._refuse(503, detail="there are too many connections", kind="too-many-connections")
        else:
            slowest._end()

    def _refuse_headers(self) -> None:
        which = "headers" if self._in_headers else "headers, chunk sizes and trailers"
        detail = f"the {which} have more than {self.limits.max_header_bytes} bytes"
        self._refuse(431, detail=detail, kind="headers-too-large")

    def _refuse(self, status: int, *, detail: str, kind: str) -> None:
        """Say why and end the connection. A refusal waits for the answers to earlier requests. In
        the middle of an answer nothing can be said."""
        if self._refused:
            return
        refusal = document(status, detail=detail, kind=kind, instance=new_instance())
        if self._in_body and (self.cycle.response_started or self.pipeline):
            self._end()
        elif self._in_body or self.cycle is None or self.cycle.response_complete:
            self._send_refusal(refusal)
        else:
            self._refusal = refusal
            self._stop_parsing()

    def _send_refusal(self, refusal: dict[str, Any]) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(_as_bytes(refusal))
        who = self.client[0] if self.client else "someone"
        log.info("%s %s %s %s", who, refusal["status"], refusal["instance"], refusal["detail"])
        if self.transport.can_write_eof():
            # A connection that is closed with bytes unread is reset, and the answer lost: read
            # on for a moment, and keep nothing.
            self.transport.write_eof()
            self._stop_listening()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self._end()

    @property
    def _in_body(self) -> bool:
        return self._in_request and not self._in_headers

    def _end(self) -> None:
        self._stop_listening()
        self.transport.close()
        self._watch_sending()

    def _stop_parsing(self) -> None:
        self._refused = True
        self._unparsed = b""
        self._rest()

    def _stop_listening(self) -> None:
        self._stop_parsing()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch_sending(self) -> None:
        """Limit the time to send what is left: closing waits for it, perhaps for ever."""
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.limits.send_seconds, self._on_stuck)

    def _on_stuck(self) -> None:
        self._stuck = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()
