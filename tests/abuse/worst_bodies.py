"""The worst bodies that a limit allows: of most values, deepest, longest, and compressed most."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass

from model_store.loop.label_studio import LABEL_CONFIG, MAX_CHARACTERS

JSON = "application/json"
FORM = "multipart/form-data; boundary=b"
DEEPEST = 190
"""Deeper JSON is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    name: str
    data: bytes
    kind: str = JSON
    coding: str = "identity"


def worst_bodies(most_bytes: int) -> Iterator[Body]:
    """Make bodies of up to so many bytes that any route may get."""
    for name, unit in UNITS.items():
        yield Body(name=name, data=b"[" + unit * ((most_bytes - 3) // len(unit)) + b"1]")
    half = most_bytes // 2
    yield Body(name="brackets", data=b"[" * half + b"]" * half)
    deep = b"[" * DEEPEST + b"]" * DEEPEST + b","
    yield Body(name="deep lists", data=b"[" + deep * ((most_bytes - 3) // len(deep)) + b"1]")
    yield Body(name="keys", data=_keys(most_bytes))
    yield Body(name="a number", data=b"9" * most_bytes)
    yield Body(name="a string", data=b'"' + b"x" * (most_bytes - 2) + b'"')
    yield Body(name="escapes", data=b'"' + b"\\u0001" * ((most_bytes - 2) // 6) + b'"')
    yield Body(name="spaces", data=b" " * most_bytes)
    lists = b"[" + b"[]," * ((most_bytes - 3) // 3) + b"1]"
    yield Body(name="a bomb of lists", data=gzip.compress(lists), coding="gzip")
    over = gzip.compress(bytes(8 * most_bytes), 9)
    yield Body(name="a bomb over the limit", data=over, coding="gzip")
    yield Body(name="a bomb in a bomb", data=gzip.compress(over), coding="gzip")
    yield Body(name="headers of a part", data=_headers(most_bytes), kind=FORM)
    yield Body(name="one long header", data=b"--b\r\nX: " + b"x" * (most_bytes - 8), kind=FORM)
    yield Body(name="an image of zeros", data=bytes(most_bytes), kind="image/png")


UNITS = {
    "lists": b"[],",
    "objects": b"{},",
    "numbers": b"1,",
    "long numbers": b"9" * 4000 + b",",
    "floats": b"1e300,",
    "texts": b'"",',
}


def _keys(most_bytes: int) -> bytes:
    made = b",".join(b'"%x":1' % n for n in range(most_bytes // 12))
    return b"{" + made + b"}"


def _headers(most_bytes: int) -> bytes:
    one = b"A: b\r\n"
    return b"--b\r\n" + one * ((most_bytes - 5) // len(one))


def worst_of_label_studio(path: str, *, most_bytes: int, most_values: int) -> Iterator[Body]:
    """Make bodies that get through parsing, and whose content is as much as it may be."""
    if path == "/label-studio/setup":
        for name, config in _configs():
            yield Body(name=f"config: {name}", data=json.dumps({"schema": config}).encode())
    if path == "/label-studio/predict":
        task = {"data": {"image": "x" * 100}}
        told = {"tasks": [task] * 10_000, "label_config": LABEL_CONFIG}
        yield Body(name="tasks", data=json.dumps(told).encode())
    if path == "/label-studio/webhook":
        filled = {"a": [[1]] * (most_values // 2 - 100)}
        events: dict[str, dict[str, object]] = {
            "values": {"action": "x", "project": filled},
            "wrong annotations": {"action": "x", "annotations": [1] * (most_values - 100)},
            "keys": {"action": "x", "project": {str(n): 1 for n in range(most_values - 100)}},
        }
        for name, event in events.items():
            yield Body(name=f"event: {name}", data=json.dumps(event).encode()[:most_bytes])


def _configs() -> Iterator[tuple[str, str]]:
    yield "tags", "<View>" + "<Choices/>" * 19_000 + "</View>"
    yield "open tags", "<a>" * 19_000
    yield "attributes", "<a " + " ".join(f'b{n}=""' for n in range(90_000)) + "/>"
    yield "targets", f'<Choices name="a" toName="{"," * (MAX_CHARACTERS - 100)}"/>'
    yield "text", "<a>" + "&lt;" * (MAX_CHARACTERS // 4 - 10) + "</a>"
