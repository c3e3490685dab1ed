"""Judge the Authorization header of a request, and hold each token to its rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dne_serve.access.guesses import Guesses
from dne_serve.access.permission import Permission, Token, digest_of, find
from dne_serve.errors import RateExceeded, TokenMissing, TokenRefused


class Door:
    """Lets a request in or refuses it. Used on the event loop only."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[Token]],
        *,
        rate: float | None = None,
        is_local: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_local`: only programs of this machine reach the server."""
        self._tokens = tokens
        self._rate = rate
        self._clock = clock
        self._guesses = Guesses(clock)
        self._spent: dict[bytes, Allowance] = {}
        self._closed = {Permission.ADMIN}
        if not is_local:
            self._closed.add(Permission.LABEL)

    def is_closed(self, needed: Permission) -> bool:
        """Say whether a token is needed. A door that was closed once stays closed while the server
        runs: a token file is empty for a moment while it is rewritten, and must not open it."""
        tokens = self._tokens()
        if needed is Permission.LABEL and tokens:  # who may only predict sees no pictures
            self._closed.add(needed)
        if any(needed in token.permissions for token in tokens):
            self._closed.add(needed)
        return needed in self._closed

    def why_closed(self, needed: Permission) -> str | None:
        """Say why no client gets through the door, whatever it sends; None where one can."""
        if not self.is_closed(needed) or any(token.opens(needed) for token in self._tokens()):
            return None
        return f"this server has no token with the scope {needed.value!r}"

    def judge(
        self, authorization: str | None, *, needs: Permission, address: str = ""
    ) -> Token | None:
        """Return the token that opens the door, or None if it stands open."""
        if not self.is_closed(needs):
            return None
        hopeless = self.why_closed(needs)
        if hopeless is not None:
            raise TokenRefused(hopeless)
        tokens = self._tokens()
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
        now = self._clock()
        before = self._spent.get(token.digest) or Allowance(left=max(rate, 1.0), at=now)
        left = min(max(rate, 1.0), before.left + rate * (now - before.at))
        if left < 1:
            raise RateExceeded(
                f"this token may ask {rate:g} times a second",
                retry_after_s=math.ceil((1 - left) / rate),
            )
        self._spent[token.digest] = Allowance(left=left - 1, at=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Requests that a token had left at a moment: at most those of one second."""

    left: float
    at: float
