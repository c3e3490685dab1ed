"""Rewrite the head of a request: its target, and the wish for another protocol."""

from __future__ import annotations

import re
from collections.abc import Iterable

ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)

RawHeaders = Iterable[tuple[bytes, bytes]]


def origin_form(target: bytes, *, host: bytes) -> bytes | None:
    """Return path and query of a target, or None if it names another host than the Host header.

    `http://localhost:8000/healthz` becomes `/healthz`. The name in such a target equals the Host
    header, so that the check of that header holds for both.
    """
    if target.startswith(b"/") or target == b"*":
        return target
    found = ABSOLUTE.fullmatch(target.partition(b"#")[0])
    if found is None or found[1].lower() != host.lower():
        return None
    return found[2] if found[2].startswith(b"/") else b"/" + found[2]


def head_without_upgrade(
    method: bytes, target: bytes, *, version: str, headers: RawHeaders
) -> bytes:
    """Write the head of a request again, without its wish for another protocol."""
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            words = [word.strip() for word in value.split(b",")]
            value = b", ".join(word for word in words if word.lower() != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
