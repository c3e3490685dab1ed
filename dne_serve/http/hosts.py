"""Refuse web pages that reach this server through a visitor's browser.

A page whose name is pointed at this machine (DNS rebinding) still sends its own name as Host. A
page of another site that posts here sends its Origin. Both are refused. There is no CORS.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dne_serve.errors import HostUnknown, Malformed, OriginRefused, Refused
from dne_serve.http.problems import problem_of

ANY = "*"
MAX_HOST = 300
# No user, no percent-encoding, no zone of an IPv6 address, no empty port, at most one last dot.
HOST = re.compile(
    r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?))"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


class KnownHosts:
    """Middleware that lets a request through if its Host names this server and its Origin, where it
    has one, is this server's page. Addresses are always known: no name can be pointed at them."""

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str] = ()
    ) -> None:
        self._app = app
        own = {"localhost", "*.localhost", socket.gethostname()}
        self._names = frozenset(name.lower() for name in own | set(hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._knows = lru_cache(maxsize=256)(self._is_known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), http_version=scope["http_version"])
            except Refused as error:
                await problem_of(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, *, http_version: str) -> None:
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not any(hosts) and http_version != "1.0"):
            raise Malformed("a request has one Host header")
        host = hosts[0].lower() if hosts else ""
        if host and not self._knows(host):
            raise HostUnknown(
                f"this server does not answer for {host[:100]!r}; its --allowed-hosts name others"
            )
        origin = headers.get("origin", "").lower()
        is_own = host != "" and origin.partition("://")[2] == host
        if origin and origin not in self._origins and not is_own:
            raise OriginRefused(
                f"pages of {origin[:100]!r} may not ask here; --allowed-hosts https://NAME lets "
                "others ask"
            )

    def _is_known(self, host: str) -> bool:
        name = _name_in(host)
        if name is None:
            return False
        if ANY in self._names or _is_address(name):
            return True
        name = name.removesuffix(".")
        if _is_address(name):
            return False  # with a dot after it, which no client writes
        if name in self._names:
            return True
        return any(known.startswith("*.") and name.endswith(known[1:]) for known in self._names)


def _name_in(host: str) -> str | None:
    """Take the name out of a Host: `::1` of `[::1]:8000`. Return None for any other form."""
    found = HOST.fullmatch(host) if len(host) <= MAX_HOST else None
    if found is None or int(found["port"] or 0) > 65535:
        return None
    if found["ipv6"] is not None:
        return found["ipv6"] if _is_address(found["ipv6"]) else None
    return found["name"]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
