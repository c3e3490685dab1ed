"""A proxy before an S3 server that does what networks and gateways do: it loses requests and
replies, answers in the server's place, cuts bodies short, and forgets headers."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "none",
    "lose request",  # the server never sees it, the client gets no answer
    "lose reply",  # the server has done it, the client gets no answer
    "cut reply",  # half of the body, then silence
    "409",  # the server never sees it, and the client is told of a conflict
    "409 late",  # the server has done it, and the client is told of a conflict
    "503",
    "503 late",
    "forget condition",  # as gateways do that do not know If-None-Match
]


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    method: str
    path: str

    @property
    def writes(self) -> bool:
        return self.method == "PUT"


Plan = Callable[[Request], Fault]


@dataclass(slots=True)
class Proxy:
    endpoint: str
    plan: Plan = lambda request: "none"
    seen: list[tuple[Request, Fault]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, method: str, path: str) -> Fault:
        with self.lock:
            request = Request(len(self.seen), method, path)
            fault = self.plan(request)
            self.seen.append((request, fault))
            return fault

    def faults(self) -> list[Fault]:
        return [fault for _, fault in self.seen if fault != "none"]


@contextmanager
def proxy_before(endpoint: str) -> Iterator[Proxy]:
    """A proxy on a free port. Its `plan` may be changed at any time."""
    upstream = urlsplit(endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or every answer would take 40 ms

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.decide(self.command, self.path)
            if fault in ("409", "503"):
                return self._answer_in_its_place(int(fault))
            if fault == "lose request":
                return self._hang_up()
            headers = dict(self.headers)
            if fault == "forget condition":
                headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
            try:
                status, found, data = _ask(upstream, self.command, self.path, headers, body)
            except OSError:
                return self._hang_up()
            if fault == "lose reply":
                return self._hang_up()
            if fault in ("409 late", "503 late"):
                return self._answer_in_its_place(int(fault[:3]))
            return self._pass_on(status, found, data, cut=fault == "cut reply")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def _answer_in_its_place(self, status: int) -> None:
            code = {409: "ConditionalRequestConflict", 503: "SlowDown"}[status]
            self._pass_on(status, {}, f"<Error><Code>{code}</Code></Error>".encode())

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def _pass_on(
            self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            size = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", size or str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self._hang_up()

        def log_message(self, format: str, *args: object) -> None:
            """The tests look at `seen`."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that has gone, which is what proxies live with."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _ask(
    upstream: str, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """The Host header is passed on as it came: it is part of what the client has signed."""
    connection = http.client.HTTPConnection(upstream, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
