"""Post a body to a URL: one connection, one deadline, no redirects. Only the status is read."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from collections.abc import Mapping

from dne_serve.rules.webhooks import WebhookUrl
from model_store.errors import DneError

MAX_ANSWER_BYTES = 4096
"""Bytes of an answer that are read at most. The status is in the first of them."""
INTERIM = re.compile(rb"(?:HTTP/1\.[01] 1[0-9]{2}.*?\r\n\r\n)*", re.DOTALL)
STATUS = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2})[ \r\n]")


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
            connection.request("POST", self._url.target, body=body, headers=self._with_own(headers))
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

    def _with_own(self, headers: Mapping[str, str]) -> dict[str, str]:
        own = {"Connection": "close"}
        if self._url.authorization is not None:
            own["Authorization"] = self._url.authorization
        return {**headers, **own}


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
        found = STATUS.match(answer, interim.end() if interim else 0)
        if found is not None:
            return int(found[1])
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
