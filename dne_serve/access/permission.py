"""Define permissions and the tokens that grant them. Only the SHA-256 of a token is kept.

A route needs one of five permissions. `predict` and `read` are open until some token names them;
`label` is open to programs of the same machine until there is any token, and closed otherwise;
`admin` is closed. A token with `admin` opens the other routes too, and closes none but those of
`label`. A permission may name a model, or models by the beginning of their names: `predict@acme`,
`admin@acme-*`. Its token does not see other models.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from dne_serve.settings import Settings
from model_store.errors import WrongUsage

MIN_TOKEN = 16
"""Characters of an admin token, if other machines reach the server."""


class Permission(StrEnum):
    """Permission that a route needs. Token files and documents for users call it a scope."""

    OPEN = "open"
    """Pages and health: for everybody, whatever tokens there are."""
    PREDICT = "predict"
    READ = "read"
    LABEL = "label"
    """The inbox: pictures that others have sent, and their labels."""
    ADMIN = "admin"


ANY_MODEL = "*"
"""In place of a model's name: a route that is about the models that a token sees."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A permission for some models: one by its name, or those whose names begin so."""

    permission: Permission
    models: str

    def covers(self, model: str) -> bool:
        if model == ANY_MODEL or self.models == model:
            return True
        return self.models.endswith("*") and model.startswith(self.models[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Digest of a token and what it permits. The log calls its holder by `name`; several tokens
    may share a name while one replaces the other."""

    name: str
    permissions: frozenset[Permission]
    digest: bytes
    rate: float | None = None
    """Requests a second; None for any number."""
    grants: tuple[Grant, ...] = ()
    """Permissions for some models only. `permissions` are for the whole server."""

    def opens(self, needed: Permission, *, model: str | None = None) -> bool:
        """Return whether the token has a permission for a model; without one, for the server."""
        if needed in self.permissions or Permission.ADMIN in self.permissions:
            return True
        return model is not None and any(
            grant.permission in (needed, Permission.ADMIN) and grant.covers(model)
            for grant in self.grants
        )

    def sees(self, model: str) -> bool:
        """Return whether the token may know of a model; ANY_MODEL: of one."""
        return bool(self.permissions) or any(grant.covers(model) for grant in self.grants)

    def names(self, permission: Permission) -> bool:
        """Return whether the token has this very permission, for whatever model."""
        return permission in self.permissions or any(
            grant.permission is permission for grant in self.grants
        )


def digest_of(token: str) -> bytes:
    """Return the plain SHA-256: tokens are long and random, so guessing finds none."""
    return hashlib.sha256(token.encode()).digest()


def find(tokens: Sequence[Token], digest: bytes) -> Token | None:
    """Compare with every token, so that the time it takes says nothing about any of them."""
    holder = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            holder = token
    return holder


_ADDED_BY_PROXIES = re.compile(
    r"via|cdn-loop|max-forwards|surrogate-capability|front-end-https|proxy-.*|.*forwarded.*"
    r"|.*(client|cluster|connecting|external|real|remote|source|user)[-_]?(ip|addr|address)"
    r"|x-(original|envoy|azure|amzn|nginx|varnish|ssl|cloud-trace)(-.*)?|(x-)?(url-)?scheme|x-host"
    r"|(cf|fastly|l5d|tailscale)-.*"
)
"""Names of headers: those of the standards, of proxies (nginx, Envoy, Varnish, Linkerd), and of
networks that deliver for others."""


def is_direct(scope: Scope) -> bool:
    """Return whether peer and Host are of this machine, and no proxy has left a trace. HTTP/1.0 is
    a trace: nginx speaks it to servers unless told otherwise."""
    headers = Headers(scope=scope)
    if any(_ADDED_BY_PROXIES.fullmatch(name) for name in headers):
        return False
    if scope["http_version"] == "1.0":
        return False
    peer = scope["client"][0] if scope.get("client") else ""
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(peer) and is_loopback(name)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_UNNAMED = ""
"""Name of the token of DNE_ADMIN_TOKEN or --admin-token-file."""
_GRANTED = (Permission.PREDICT, Permission.READ, Permission.LABEL, Permission.ADMIN)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODELS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,98}(?:[A-Za-z0-9._-]|\*)?")
RATE = re.compile(r"rate=([0-9]{1,6}(?:\.[0-9]{1,3})?)")
_LOOK_EVERY_S = 1.0

log = logging.getLogger("dne_serve.tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A new token. `secret` is for its holder and is kept nowhere; `line` is for the server."""

    secret: str
    line: str


def new_token(wanted: str) -> NewToken:
    """Make a token of 256 random bits from `NAME=SCOPES`, and its line for the token file."""
    name, _, scopes = wanted.partition("=")
    secret = f"dne_{secrets.token_urlsafe(32)}"
    line = f"{name} {scopes} sha256:{digest_of(secret).hex()}"
    parse_line(line)
    return NewToken(secret=secret, line=line)


def parse_line(line: str) -> Token:
    """Parse a line. WrongUsage does not repeat the line, which may hold a token by mistake."""
    words = line.split()
    if len(words) not in (3, 4):
        raise WrongUsage("a token is written as NAME SCOPES sha256:HEX, then perhaps rate=N")
    name, scopes, digest = words[:3]
    if not NAME.fullmatch(name):
        raise WrongUsage("the name of a token is made of letters, digits, '.', '_' and '-'")
    parsed = DIGEST.fullmatch(digest)
    if parsed is None:
        raise WrongUsage("a token file holds the digest of a token: sha256: and 64 hex digits")
    permissions, grants = _permissions(scopes)
    return Token(
        name=name,
        permissions=permissions,
        grants=grants,
        digest=bytes.fromhex(parsed[1]),
        rate=_rate(words[3]) if len(words) == 4 else None,
    )


def parse_lines(text: str, *, source: str) -> list[Token]:
    tokens = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                tokens.append(parse_line(line))
            except WrongUsage as error:
                raise WrongUsage(f"line {number} of {source}: {error}") from error
    return tokens


def _permissions(text: str) -> tuple[frozenset[Permission], tuple[Grant, ...]]:
    """Parse scopes such as `read,predict@acme,admin@acme-*`."""
    granted = {permission.value: permission for permission in _GRANTED}
    parts = [entry.partition("@") for entry in text.split(",")]
    if unknown := [name for name, _, _ in parts if name not in granted]:
        raise WrongUsage(f"{unknown[0]!r} is not one of the scopes {', '.join(granted)}")
    for _, at, models in parts:
        if at and not _MODELS.fullmatch(models):
            raise WrongUsage(f"{models[:100]!r} is not a model: write predict@acme or admin@acme-*")
    whole = frozenset(granted[name] for name, at, _ in parts if not at)
    return whole, tuple(Grant(granted[name], models) for name, at, models in parts if at)


def _rate(word: str) -> float:
    rate = RATE.fullmatch(word)
    if rate is None or float(rate[1]) <= 0:
        raise WrongUsage("a rate is written as rate=N, in requests a second")
    return float(rate[1])


def read_tokens(settings: Settings) -> list[Token]:
    """Read all tokens of the settings, and of the files that they name."""
    tokens: list[Token] = []
    admin = settings.read_admin_token()
    if admin is not None:
        _check_length(admin, settings)
        permissions = frozenset({Permission.ADMIN})
        tokens.append(Token(name=_UNNAMED, permissions=permissions, digest=digest_of(admin)))
    if settings.token_file is not None:
        try:
            text = settings.token_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(f"the token file {settings.token_file} cannot be read") from error
        tokens += parse_lines(text, source=f"the token file {settings.token_file}")
    return tokens


class TokenSource:
    """The tokens of the settings. A changed file is read within a second or two. While it cannot be
    read or parsed, the tokens stay, and the log says so."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._files = [
            path for path in (settings.token_file, settings.admin_token_file) if path is not None
        ]
        self._seen = _stamps(self._files)
        self._tokens = read_tokens(settings)
        self._look_at = clock() + _LOOK_EVERY_S

    def __call__(self) -> Sequence[Token]:
        if self._files and self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_EVERY_S
            self._look()
        return self._tokens

    def _look(self) -> None:
        stamps = _stamps(self._files)
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._tokens = read_tokens(self._settings)
        except WrongUsage as error:
            log.error("the tokens stay as they were: %s", error)
        else:
            log.info("the tokens were read again: there are %s now", len(self._tokens))


def _stamps(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Return values that change with a file, and none for a file that is absent."""
    stamps = []
    for path in files:
        with suppress(OSError):
            status = path.stat()
            stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return stamps


def _check_length(admin_token: str, settings: Settings) -> None:
    """Raise WrongUsage for a short admin token if other machines reach the server."""
    if len(admin_token) < MIN_TOKEN and not is_loopback(settings.host):
        raise WrongUsage(
            f"the admin token has fewer than {MIN_TOKEN} characters, and others reach "
            f"{settings.host or 'this machine'}: take a longer one (openssl rand -hex 16), or "
            "listen on 127.0.0.1"
        )
