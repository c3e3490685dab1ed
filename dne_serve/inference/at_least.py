"""Read the header by which a client of several servers never sees time go back."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from dne_serve.errors import Malformed
from model_store.records.fields import MAX_VERSION

HEADER = "Dne-At-Least"
AT_LEAST_PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_VERSION},
    "description": "The oldest version that may answer. A server that serves an older one answers "
    "503, and the client asks again or asks another server.",
}


def at_least_of(request: Request) -> int | None:
    """Return the oldest version that may answer a request; None: any."""
    text = request.headers.get(HEADER)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_VERSION))
    if not is_number or not 1 <= int(text) <= MAX_VERSION:
        raise Malformed(f"{HEADER} is the number of a version, not {text[:100]!r}")
    return int(text)
