"""Who may move the channel: whoever holds the admin token. Closed while there is none."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request

from dne_serve.problems import TokenMissing, TokenRefused


class AdminDoor:
    """Keeps the token's digest, not the token. Comparing takes the same time whatever is wrong."""

    def __init__(self, token: str | None) -> None:
        self._digest = _digest(token) if token else None

    def check(self, authorization: str | None) -> None:
        if self._digest is None:
            raise TokenRefused(
                "this server has no admin token, so the channel cannot be moved through it"
            )
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise TokenMissing("an Authorization header with a Bearer token is needed")
        if not hmac.compare_digest(_digest(given.strip()), self._digest):
            raise TokenRefused("that is not the admin token")


def actor_of(request: Request) -> str:
    """How a channel record names who asked over HTTP."""
    return f"http:{request.client.host if request.client else 'unknown'}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
