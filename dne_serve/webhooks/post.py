"""Post a body to a URL: one connection, one deadline, no redirects. Only the status is read."""

from __future__ import annotations

import base64
import binascii
import hmac
import http.client
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence

from dne_serve.setting_values import WebhookUrl, parse_webhook
from dne_serve.settings import Settings
from model_store.errors import DneError, WrongUsage

PREFIX = "whsec_"
FEWEST_BYTES, MOST_BYTES = 24, 64
MOST_SECRETS = 4


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
    if not 1 <= len(words) <= MOST_SECRETS:
        raise WrongUsage(f"there are {len(words)} webhook secrets, not 1 to {MOST_SECRETS}")
    return tuple(_parse(word) for word in words)


def sign(secrets: Sequence[bytes], *, id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: a signature by each secret."""
    signed = f"{id}.{timestamp}.".encode() + body
    made = (base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets)
    return " ".join(f"v1,{one}" for one in made)


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
