"""What is neither headers nor body. A short form is in tests/dne_serve/wire/test_connection.py."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.abuse.victim import Client, Victim
from tests.campaigns import AddRow
from tests.live_server import png

HEAD = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
TOTAL = 64 << 20
PIECE = 1 << 20
SLACK_BYTES = 64 << 20
SENT: dict[str, tuple[bytes, bytes]] = {
    "trailers of six bytes": (HEAD + b"1\r\nx\r\n0\r\n", b"X: 1\r\n"),
    "trailers after 8 MiB": (HEAD + b"800000\r\n" + bytes(8 << 20) + b"\r\n0\r\n", b"X: 1\r\n"),
    "one trailer without end": (HEAD + b"1\r\nx\r\n0\r\nX: ", b"x"),
    "a chunk extension without end": (HEAD + b"1;", b"x"),
    "extensions of a kilobyte": (HEAD, b"1;" + b"x" * 1000 + b"\r\nx\r\n"),
    "chunks of a byte": (HEAD, b"1\r\nx\r\n"),
    "a header without end": (b"GET / HTTP/1.1\r\nX: ", b"x"),
    "line breaks before a request": (b"", b"\r\n"),
    "requests sent ahead": (b"", GET),
}


def flood(victim: Victim, beginning: bytes, unit: bytes) -> int:
    """Send 64 MiB, or until the server has had enough; the number of bytes that went out."""
    piece = unit * (PIECE // len(unit))
    sent = 0
    with victim.connect(beginning) as connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(40)
        while sent < TOTAL:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def assert_flat(victim: Victim, act: Callable[[], object]) -> int:
    before = victim.resident_bytes()
    victim.forget_peak()
    act()
    with Client(victim) as client:
        assert client.predict(png()).status == 200
    grown = victim.peak_bytes() - before
    assert grown < SLACK_BYTES
    return grown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_floods_of_what_is_no_body_leave_the_memory_flat(victim: Victim, abuse_row: AddRow) -> None:
    sent = 0

    def act() -> None:
        nonlocal sent
        for beginning, unit in SENT.values():
            sent += flood(victim, beginning, unit)

    grown = assert_flat(victim, act)
    abuse_row(
        "trailers and framing",
        f"up to 64 MiB each: {'; '.join(SENT)}",
        f"{sent / 2**20:.0f} MiB went out before the server ended it; memory at most "
        f"+{grown / 2**20:.0f} MiB",
    )
