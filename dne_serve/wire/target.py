"""The target of a request line, in the one form that the routes know."""

from __future__ import annotations

import re

ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)


def origin_form(target: bytes, *, host: bytes) -> bytes | None:
    """Path and query of a target; None for one that is not for the host that the request names.

    `http://localhost:8000/healthz` is `/healthz`. Whoever sends such a target sends the same name
    as Host, so that the check of that header holds for both.
    """
    if target.startswith(b"/") or target == b"*":
        return target
    found = ABSOLUTE.fullmatch(target.partition(b"#")[0])
    if found is None or found[1].lower() != host.lower():
        return None
    return found[2] if found[2].startswith(b"/") else b"/" + found[2]


def without_upgrade(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a request that does not ask for another protocol."""
    kept = []
    for name, value in headers:
        if name == b"connection":
            words = [word.strip() for word in value.split(b",")]
            value = b", ".join(word for word in words if word.lower() != b"upgrade")
        if name != b"upgrade":
            kept.append((name, value))
    return kept
