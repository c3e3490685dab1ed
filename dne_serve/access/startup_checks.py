"""Check tokens, address and certificate before the server listens."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Sequence

from dne_serve.access.permission import Permission, Token
from dne_serve.settings import Settings
from model_store.errors import WrongUsage

MIN_TOKEN = 16

log = logging.getLogger("dne_serve")


def check_exposure(settings: Settings, *, tokens: Sequence[Token]) -> None:
    """Raise WrongUsage if other machines reach the server, there is no token, and --allow-open is
    not given. Warn of routes that stay open."""
    warn_of_length(settings)
    if is_loopback(settings.host):
        return
    if not tokens and not settings.allow_open:
        raise WrongUsage(
            f"whoever reaches {settings.host or 'this machine'} could use this server: make a "
            "token (--new-token), or say that it is meant (--allow-open)"
        )
    closed = {one for token in tokens for one in token.permissions}
    still_open = [one.value for one in (Permission.PREDICT, Permission.READ) if one not in closed]
    if still_open:
        log.warning(
            "the %s routes are open to whoever reaches %s", " and ".join(still_open), settings.host
        )
    if settings.tls_cert is None:
        log.warning("tokens and images travel unencrypted: give --tls-cert, or a proxy with TLS")


def check_length(admin_token: str, settings: Settings) -> None:
    """Raise WrongUsage for a short admin token if other machines reach the server."""
    if len(admin_token) < MIN_TOKEN and not is_loopback(settings.host):
        raise WrongUsage(
            f"the admin token has fewer than {MIN_TOKEN} characters, and others reach "
            f"{settings.host or 'this machine'}: take a longer one (openssl rand -hex 16), or "
            "listen on 127.0.0.1"
        )


def warn_of_length(settings: Settings) -> None:
    """Warn of a short admin token, which is good enough for programs of this machine only."""
    token = settings.read_admin_token()
    if token is not None and len(token) < MIN_TOKEN:
        log.warning(
            "the admin token has fewer than %s characters: it is accepted because the server "
            "listens on %s only, and must be longer behind a proxy",
            MIN_TOKEN,
            settings.host,
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
