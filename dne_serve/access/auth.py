"""Tokens and what they open. Of a token only its SHA-256 is kept.

A route needs one of four scopes. `predict` and `read` are open until some token names them;
`admin` is closed until one does. A token with `admin` opens the other doors too, and closes none.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fastapi import Request

from dne_serve.access.guesses import Guesses
from dne_serve.errors import RateExceeded, TokenMissing, TokenRefused

TOKEN = "dne.token"
"""Where a request keeps the token that opened the door to it."""


class Scope(StrEnum):
    OPEN = "open"
    """Pages and health: for everybody, whatever tokens there are."""
    PREDICT = "predict"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """`name` is what the log calls its holder; several tokens may share one while they change."""

    name: str
    scopes: frozenset[Scope]
    digest: bytes
    rate: float | None = None
    """Requests a second; None: what the server allows any token."""

    def opens(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


def digest_of(token: str) -> bytes:
    """Plain SHA-256: tokens are long and random, so there is nothing that guessing could find."""
    return hashlib.sha256(token.encode()).digest()


class Door:
    """Judges the Authorization header of a request. Used on the event loop only."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[Token]],
        *,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._rate = rate
        self._clock = clock
        self._guesses = Guesses(clock)
        self._spent: dict[bytes, Allowance] = {}
        self._closed = {Scope.ADMIN}

    def is_closed(self, scope: Scope) -> bool:
        """Whether a token is needed. A door that was closed once stays so while the server runs:
        a token file that is empty for a moment, as it is written anew, must not open it."""
        if any(scope in token.scopes for token in self._tokens()):
            self._closed.add(scope)
        return scope in self._closed

    def judge(self, authorization: str | None, *, needs: Scope, address: str = "") -> Token | None:
        """The token that opened the door; None where it stands open."""
        if not self.is_closed(needs):
            return None
        tokens = self._tokens()
        if not any(token.opens(needs) for token in tokens):
            raise TokenRefused(f"this server has no token with the scope {needs.value!r}")
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise TokenMissing("an Authorization header with a Bearer token is needed")
        token = self._find(tokens, digest_of(given.strip()), address=address)
        if not token.opens(needs):
            raise TokenRefused(f"that token does not have the scope {needs.value!r}")
        self._spend(token)
        return token

    def _find(self, tokens: Sequence[Token], digest: bytes, *, address: str) -> Token:
        self._guesses.check(address, digest)
        token = find(tokens, digest)
        if token is None:
            self._guesses.was_wrong(address)
            raise TokenRefused("that token is not known here")
        self._guesses.was_right(address, digest)
        return token

    def _spend(self, token: Token) -> None:
        rate = token.rate if token.rate is not None else self._rate
        if rate is None:
            return
        before = self._spent.get(token.digest) or Allowance(left=max(rate, 1.0), at=self._clock())
        now = self._clock()
        left = min(max(rate, 1.0), before.left + rate * (now - before.at))
        if left < 1:
            raise RateExceeded(
                f"this token may ask {rate:g} times a second",
                retry_after_s=math.ceil((1 - left) / rate),
            )
        self._spent[token.digest] = Allowance(left=left - 1, at=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How many requests a token had left at a moment: at most those of one second."""

    left: float
    at: float


def find(tokens: Sequence[Token], digest: bytes) -> Token | None:
    """Compares with every token, so that the time it takes says nothing about any of them."""
    found = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def actor_of(request: Request) -> str:
    """How a channel record names who asked over HTTP."""
    address = request.client.host if request.client else "unknown"
    token: Token | None = request.scope.get(TOKEN)
    return f"http:{token.name}@{address}" if token and token.name else f"http:{address}"
