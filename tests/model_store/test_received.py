"""Answers and JSON of strangers are taken within limits."""

from __future__ import annotations

import gzip
import socket
import time

import pytest

from model_store.received import (
    MAX_DEPTH,
    AnswerRefused,
    ExchangeDeadline,
    Received,
    memory_for_json,
    parse_json,
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "Infinity is not a number"),
        (b"9" * 5000, "digit"),
        (b"[" * 9_000, "nested"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested"),
        (b'"\xff"', "not UTF-8"),
        (b"", "Expecting value"),
        (b"[" + b"[]," * 30_000 + b"0]", "1 MiB of memory"),
    ],
)
def test_json_that_does_harm_is_a_value_error(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(data, most_memory=1 << 20)


def test_harmless_json_is_read() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, "\xc3\xa9"]}') == {"a": [1, 2.5, "é"]}
    assert parse_json(deep)


def test_the_estimate_counts_values_and_not_bytes_alone() -> None:
    assert memory_for_json(b"[]," * 1000) > 100 * 1000
    assert memory_for_json(b'"' + b"a" * 3000 + b'"') < 4 * 3002


def test_a_body_is_counted_while_it_arrives() -> None:
    plain = Received("", most_bytes=100)
    plain.add(b"x" * 100)
    with pytest.raises(AnswerRefused, match="more than"):
        plain.add(b"x")
    bomb = gzip.compress(bytes(10 << 20))
    packed = Received("gzip", most_bytes=1 << 20)
    with pytest.raises(AnswerRefused, match="more than 1 MiB"):
        packed.add(bomb)
    assert len(packed.body) == (1 << 20) + 1


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "deflate", "zstd", "gzip,identity"])
def test_more_than_one_layer_and_other_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(AnswerRefused, match="gzip alone is accepted"):
        Received(encoding, most_bytes=100)


def test_a_gzip_that_is_cut_or_goes_on_is_refused() -> None:
    data = gzip.compress(b"{}")
    cut = Received("gzip", most_bytes=100)
    cut.add(data[:-4])
    with pytest.raises(AnswerRefused, match="too early"):
        cut.whole()
    with pytest.raises(AnswerRefused, match="goes on"):
        Received("gzip", most_bytes=100).add(data + data)
    with pytest.raises(AnswerRefused, match="not the gzip"):
        Received("gzip", most_bytes=100).add(b"{}")


def test_a_deadline_is_a_timeout_that_a_socket_takes() -> None:
    left, right = socket.socketpair()
    with left, right:
        deadline = ExchangeDeadline(0.2, longest_s=60)
        left.settimeout(deadline)  # type: ignore[arg-type]
        assert left.gettimeout() == 1
        time.sleep(0.25)
        with pytest.raises(TimeoutError):
            left.settimeout(deadline)  # type: ignore[arg-type]
