"""`traceparent` comes from strangers: a valid one is honoured, and every other one is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dne_serve.observe.tracing import Parent, parent_of, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01".encode()
PARENT = Parent(trace_id=bytes.fromhex(TRACE), span_id=bytes.fromhex(SPAN), is_sampled=True)


def test_a_valid_header_names_trace_span_and_whether_it_is_sampled() -> None:
    assert parse_traceparent(VALID) == PARENT
    unsampled = parse_traceparent(f"00-{TRACE}-{SPAN}-00".encode())
    assert unsampled is not None
    assert not unsampled.is_sampled


@pytest.mark.parametrize("rest", ["", "-what-comes-later"])
def test_a_later_version_may_have_more_behind_the_flags(rest: str) -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01{rest}".encode()) == PARENT


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01more",
        f" 00-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_header_that_is_not_valid_is_ignored(value: str) -> None:
    assert parse_traceparent(value.encode()) is None


def test_two_headers_name_no_parent() -> None:
    one = (b"traceparent", VALID)
    assert parent_of([(b"host", b"x"), one]) == PARENT
    assert parent_of([one, one]) is None
    assert parent_of([]) is None


@given(some.binary(max_size=300))
def test_no_bytes_are_too_strange(value: bytes) -> None:
    found = parse_traceparent(value)
    assert found is None or (len(found.trace_id), len(found.span_id)) == (16, 8)
