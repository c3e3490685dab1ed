"""Define permissions and the tokens that grant them. Of a token only its SHA-256 is kept.

A route needs one of five permissions. `predict` and `read` are open until some token names them;
`label` is open on a loopback address until there is any token, and closed otherwise; `admin` is
closed. A token with `admin` opens the other routes too, and closes none but those of `label`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Permission(StrEnum):
    """Permission that a route needs. Token files and documents for users call it a scope."""

    OPEN = "open"
    """Pages and health: for everybody, whatever tokens there are."""
    PREDICT = "predict"
    READ = "read"
    LABEL = "label"
    """The inbox: pictures that others have sent, and their labels."""
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Digest of a token and what it permits. The log calls its holder by `name`; several tokens
    may share a name while one replaces the other."""

    name: str
    permissions: frozenset[Permission]
    digest: bytes
    rate: float | None = None
    """Requests a second; None leaves the server's own limit."""

    def opens(self, needed: Permission) -> bool:
        return needed in self.permissions or Permission.ADMIN in self.permissions


def digest_of(token: str) -> bytes:
    """Return the plain SHA-256: tokens are long and random, so guessing finds none."""
    return hashlib.sha256(token.encode()).digest()


def find(tokens: Sequence[Token], digest: bytes) -> Token | None:
    """Compare with every token, so that the time it takes says nothing about any of them."""
    found = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found
