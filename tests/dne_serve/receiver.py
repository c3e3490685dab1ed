"""A receiver of webhooks on this machine that answers as a test tells it to."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.live_server import wait_for

HANG, DRIP, ENDLESS, GARBAGE, CLOSE, INTERIM = -1, -2, -3, -4, -5, -6
"""Answers that are not a status: none at all, a byte at a time, without an end, not HTTP, none
before the connection ends, and a final one behind one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class Receiver:
    url: str
    answers: list[int]
    """Taken in turn; 200 once they are used up."""
    posts: list[Post] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """Ends what hangs."""

    def wait_for(self, posts: int) -> list[Post]:
        wait_for(lambda: len(self.posts) >= posts)
        return self.posts

    def types(self) -> list[str]:
        return [post.event["type"] for post in self.posts]


class Handler(BaseHTTPRequestHandler):
    receiver: Receiver

    def do_POST(self) -> None:
        receiver = self.receiver
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = receiver.answers.pop(0) if receiver.answers else 200
        receiver.posts.append(Post(method=self.command, path=self.path, headers=headers, body=body))
        with suppress(OSError):  # the sender may have left
            self._answer(answer)

    do_GET = do_POST

    def _answer(self, answer: int) -> None:
        released = self.receiver.released
        if answer == HANG:
            released.wait(20)
        elif answer == DRIP:
            while not released.wait(0.01):
                self.wfile.write(b"H")
        elif answer == ENDLESS:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not released.is_set():
                self.wfile.write(b"x" * 65536)
        elif answer == GARBAGE:
            self.wfile.write(b"\x16\x03\x01" * 2000)
        elif answer == INTERIM:
            self.wfile.write(
                b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 204 No\r\n\r\n"
            )
        elif answer != CLOSE:
            self.send_response(answer)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: senders may leave at any moment."""


@contextmanager
def receiving(*answers: int, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    receiver = Receiver(url=url, answers=list(answers))
    server.RequestHandlerClass = type("One", (Handler,), {"receiver": receiver})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
