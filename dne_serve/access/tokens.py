"""Read tokens from a file, the environment, and the setting of the one admin token.

A line is `NAME SCOPES sha256:HEX [rate=N]`, for example

    grafana  read          sha256:60303ae22b…
    shop     predict,read  sha256:fd61a03af4…  rate=50

Empty lines and those that begin with # are skipped. One holder may have several lines, so that a
new token is known before the old one goes.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dne_serve.access.permission import Permission, Token, digest_of
from dne_serve.access.startup_checks import check_length
from dne_serve.settings import Settings
from model_store.errors import WrongUsage

UNNAMED = ""
"""Name of the token of DNE_ADMIN_TOKEN or --admin-token-file."""
GRANTED = (Permission.PREDICT, Permission.READ, Permission.LABEL, Permission.ADMIN)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
RATE = re.compile(r"rate=([0-9]{1,6}(?:\.[0-9]{1,3})?)")
LOOK_EVERY_S = 1.0

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
    found = DIGEST.fullmatch(digest)
    if found is None:
        raise WrongUsage("the token itself is not written down: sha256: and 64 hex digits are")
    return Token(
        name=name,
        permissions=_permissions(scopes),
        digest=bytes.fromhex(found[1]),
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


def _permissions(text: str) -> frozenset[Permission]:
    granted = {one.value: one for one in GRANTED}
    names = text.split(",")
    if unknown := [name for name in names if name not in granted]:
        raise WrongUsage(f"{unknown[0]!r} is not one of the scopes {', '.join(granted)}")
    return frozenset(granted[name] for name in names)


def _rate(word: str) -> float:
    found = RATE.fullmatch(word)
    if found is None or float(found[1]) <= 0:
        raise WrongUsage("a rate is written as rate=N, in requests a second")
    return float(found[1])


def read_tokens(settings: Settings) -> list[Token]:
    """Read all tokens of the settings, and of the files that they name."""
    tokens: list[Token] = []
    admin = settings.read_admin_token()
    if admin is not None:
        check_length(admin, settings)
        permissions = frozenset({Permission.ADMIN})
        tokens.append(Token(name=UNNAMED, permissions=permissions, digest=digest_of(admin)))
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
        self._look_at = clock() + LOOK_EVERY_S

    def __call__(self) -> Sequence[Token]:
        if self._files and self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_EVERY_S
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
            found = path.stat()
            stamps.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return stamps
