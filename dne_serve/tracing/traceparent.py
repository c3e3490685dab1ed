"""Read the W3C header `traceparent`. It comes from strangers: whatever is not valid is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEADER = b"traceparent"
# A version above 00 may have more behind the flags, and ff is no version.
FORM = re.compile(
    rb"(?:00|(?!00|ff)[0-9a-f]{2}(?=.{53}(?:-|\Z)))-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
)
LONGEST = 256
SAMPLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The span of a client that a request belongs to."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the parent that the headers name. Two of the header name none."""
    given = [value for name, value in headers if name == HEADER]
    return parse_traceparent(given[0]) if len(given) == 1 else None


def parse_traceparent(value: bytes) -> Parent | None:
    if len(value) > LONGEST:
        return None
    found = FORM.match(value)
    if found is None or (value.startswith(b"00") and found.end() != len(value)):
        return None
    trace_id, span_id = (bytes.fromhex(found[place].decode()) for place in (1, 2))
    if not any(trace_id) or not any(span_id):
        return None
    is_sampled = bool(int(found[3], 16) & SAMPLED)
    return Parent(trace_id=trace_id, span_id=span_id, is_sampled=is_sampled)
