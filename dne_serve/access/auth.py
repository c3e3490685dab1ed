"""Judge the Authorization header of a request, and hold each token to its rate."""

from __future__ import annotations

import ipaddress
import logging
import math
import secrets
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dne_serve.access.permission import (
    ANY_MODEL,
    MIN_TOKEN,
    Permission,
    Token,
    digest_of,
    find,
    is_loopback,
)
from dne_serve.errors import RateExceeded, TokenMissing, TokenRefused, no_model
from dne_serve.settings import Settings
from model_store.errors import WrongUsage

MOST = 20
WINDOW_S = 60.0
MAX_ADDRESSES = 4096
MAX_KNOWN = 16
_SESSION = "this-machine"
"""The name of the person who opened the link that the server printed."""
_SESSION_BYTES = 24


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """Tokens that an address has presented."""

    left: float
    at: float
    known: list[bytes] = field(default_factory=list)
    """Digests of the last tokens that were right."""


class FailedAuthThrottle:
    """Wrong tokens of all addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, _Attempts] = OrderedDict()

    def check(self, address: str, digest: bytes) -> None:
        """Raise RateExceeded for a token that is not to be judged."""
        attempts = self._by_address.get(_network(address))
        if attempts is None or digest in attempts.known:
            return
        left = self._left(attempts)
        if left < 1:
            raise RateExceeded(
                "too many wrong tokens came from this address",
                retry_after_s=math.ceil((1 - left) * WINDOW_S / MOST),
            )

    def was_wrong(self, address: str) -> None:
        attempts = self._of(address)
        attempts.left, attempts.at = self._left(attempts) - 1, self._clock()

    def was_right(self, address: str, digest: bytes) -> None:
        attempts = self._of(address)
        if digest not in attempts.known:
            attempts.known = [*attempts.known[1 - MAX_KNOWN :], digest]

    def _left(self, attempts: _Attempts) -> float:
        return min(float(MOST), attempts.left + (self._clock() - attempts.at) * MOST / WINDOW_S)

    def _of(self, address: str) -> _Attempts:
        """Find or make the entry of an address. The entry not used for longest goes."""
        network = _network(address)
        attempts = self._by_address.get(network)
        if attempts is None:
            attempts = self._by_address[network] = _Attempts(left=float(MOST), at=self._clock())
            if len(self._by_address) > MAX_ADDRESSES:
                self._by_address.popitem(last=False)
        self._by_address.move_to_end(network)
        return attempts


def _network(address: str) -> str:
    """Return the /64 network of an IPv6 address, as one host has all of it, or an IPv4 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped else str(int(parsed) >> 64)


class Authorizer:
    """Lets a request in or refuses it. Used on the event loop only."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[Token]],
        *,
        is_local: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_local`: the server listens for programs of this machine. `label` is then open to
        requests that come directly from them, until there is a token."""
        self._tokens = tokens
        self._clock = clock
        self._failures = FailedAuthThrottle(clock)
        self._spent: dict[bytes, Rate] = {}
        self._session: Token | None = None
        self._closed = {Permission.ADMIN}
        if not is_local:
            self._closed.add(Permission.LABEL)

    def begin_session(self) -> str:
        """Make a token that opens every route to programs of this machine until the server ends.
        It closes none."""
        secret = secrets.token_urlsafe(_SESSION_BYTES)
        permissions = frozenset({Permission.ADMIN})
        self._session = Token(name=_SESSION, permissions=permissions, digest=digest_of(secret))
        return secret

    def _known(self, *, is_direct: bool) -> Sequence[Token]:
        """List the tokens that are let in: that of the session not through a proxy."""
        own = (self._session,) if self._session is not None and is_direct else ()
        return (*self._tokens(), *own)

    def is_closed(self, needed: Permission, *, is_direct: bool = True) -> bool:
        """Return whether a token is needed. Requests through a proxy need one for `label`.

        A permission that needed a token once needs one while the server runs: a token file is empty
        for a moment while it is rewritten, which must not open the route.
        """
        tokens = self._tokens()
        if needed is Permission.LABEL and tokens:  # who may only predict sees no pictures
            self._closed.add(needed)
        if any(token.names(needed) for token in tokens):
            self._closed.add(needed)
        return needed in self._closed or (needed is Permission.LABEL and not is_direct)

    def why_closed(
        self, needed: Permission, *, is_direct: bool = True, model: str | None = None
    ) -> str | None:
        """Return why no client is permitted, whatever it sends; None where a client can be. With a
        `model`, tokens for other models do not count."""
        is_closed = self.is_closed(needed, is_direct=is_direct)
        known = self._known(is_direct=is_direct)
        asked = ANY_MODEL if model is None else model
        if not is_closed or any(token.opens(needed, model=asked) for token in known):
            return None
        return f"this server has no token with the scope {needed.value!r}"

    def judge(
        self,
        authorization: str | None,
        *,
        needs: Permission,
        address: str = "",
        is_direct: bool = True,
        model: str | None = None,
    ) -> Token | None:
        """Return the token that permits the request, or None where no token is needed. Raise
        NotOffered for a `model` that the token may not see, whether it is there or not."""
        if not self.is_closed(needs, is_direct=is_direct):
            return None
        hopeless = self.why_closed(needs, is_direct=is_direct)
        if hopeless is not None:
            raise TokenRefused(hopeless)
        tokens = self._known(is_direct=is_direct)
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise TokenMissing("an Authorization header with a Bearer token is needed")
        token = self._find(tokens, digest_of(given.strip()), address=address)
        if model is not None and not token.sees(model):
            raise no_model(model)
        if not token.opens(needs, model=model):
            raise TokenRefused(f"that token does not have the scope {needs.value!r}")
        self._spend(token)
        return token

    def _find(self, tokens: Sequence[Token], digest: bytes, *, address: str) -> Token:
        self._failures.check(address, digest)
        token = find(tokens, digest)
        if token is None:
            self._failures.was_wrong(address)
            raise TokenRefused("that token is not known here")
        self._failures.was_right(address, digest)
        return token

    def _spend(self, token: Token) -> None:
        if token.rate is None:
            return
        before = self._spent.get(token.digest)
        if before is None or before.rate != token.rate:
            before = Rate(token.rate, whose="this token may ask", clock=self._clock)
            self._spent[token.digest] = before
        before.spend()


class Rate:
    """Requests that may be made in a second: at most those of one second at once."""

    def __init__(
        self, rate: float, *, whose: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self._whose = whose
        self._clock = clock
        self._left, self._at = max(rate, 1.0), clock()

    def spend(self) -> None:
        """Count a request, or raise RateExceeded."""
        now = self._clock()
        left = min(max(self.rate, 1.0), self._left + self.rate * (now - self._at))
        if left < 1:
            raise RateExceeded(
                f"{self._whose} {self.rate:g} times a second",
                retry_after_s=math.ceil((1 - left) / self.rate),
            )
        self._left, self._at = left - 1, now


log = logging.getLogger("dne_serve")


def check_exposure(settings: Settings, *, tokens: Sequence[Token]) -> None:
    """Raise WrongUsage if other machines reach the server, there is no token, and --allow-open is
    not given. Warn of routes that stay open."""
    _warn_of_length(settings)
    if settings.collect and not tokens:
        log.warning(
            "pictures are collected and there is no token: programs of this machine, and clients "
            "of a proxy that adds no header, see them; make a token (--new-token)"
        )
    if is_loopback(settings.host):
        return
    if not tokens and not settings.allow_open:
        raise WrongUsage(
            f"everyone who reaches {settings.host or 'this machine'} could use this server: make a "
            "token (--new-token), or allow it with --allow-open"
        )
    still_open = [
        named.value
        for named in (Permission.PREDICT, Permission.READ)
        if not any(token.names(named) for token in tokens)
    ]
    if still_open:
        log.warning(
            "the %s routes are open to everyone who reaches %s",
            " and ".join(still_open),
            settings.host,
        )
    if settings.tls_cert is None:
        log.warning("tokens and images travel unencrypted: give --tls-cert, or a proxy with TLS")


def is_for_this_machine(settings: Settings) -> bool:
    """Return whether only programs of this machine are meant to reach the server. Names and origins
    of others mean that there is a proxy."""
    return is_loopback(settings.host) and not settings.allowed_hosts


def may_print_link(settings: Settings, *, tokens: Sequence[Token]) -> bool:
    """Return whether the server makes a token for the person who starts it: nobody else has one."""
    has_files = settings.token_file is not None or settings.admin_token_file is not None
    return is_for_this_machine(settings) and not tokens and not has_files


def _warn_of_length(settings: Settings) -> None:
    """Warn of a short admin token, which is good enough for programs of this machine only."""
    token = settings.read_admin_token()
    if token is not None and len(token) < MIN_TOKEN:
        log.warning(
            "the admin token has fewer than %s characters: it is accepted because the server "
            "listens on %s only, and must be longer behind a proxy",
            MIN_TOKEN,
            settings.host,
        )


def check_tls(settings: Settings) -> None:
    """Raise WrongUsage for a certificate or key that cannot be used."""
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise WrongUsage(
            f"the certificate {settings.tls_cert} and its key cannot be used: "
            f"{error.strerror or error}"
        ) from error
