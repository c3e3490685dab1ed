"""Take a token from Basic authentication, the only one that Label Studio has for ML backends."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from starlette.types import Scope

from dne_serve.access.permission import Permission
from dne_serve.http.openapi import BASIC
from dne_serve.http.scoped_route import SECURITY, ScopedRoute


class BackendRoute(ScopedRoute):
    """A route that needs the scope `label`. The token is the password of Basic authentication, or a
    Bearer token. No other route takes Basic: a browser would send it along by itself."""

    needs = Permission.LABEL

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        security = [*SECURITY[self.needs], {BASIC: []}]
        options["openapi_extra"] = {"security": security, **(options.get("openapi_extra") or {})}
        super().__init__(path, endpoint, **options)

    def _authorization(self, scope: Scope) -> str | None:
        return as_bearer(super()._authorization(scope))


def as_bearer(authorization: str | None) -> str | None:
    """Turn Basic authentication into a Bearer token; the name of the user does not matter. Any
    other header stays as it is."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(given.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return f"Bearer {decoded.partition(':')[2]}"
